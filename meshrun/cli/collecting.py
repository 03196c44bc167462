"""When Python looks for objects that only hold each other: seldom while modules are imported, and not at the end.

    with importing():
        import torch._dynamo
    …
    end()                                # the last thing before the process ends

Half a million objects come with torch, and all of them stay. To look through them again and again takes a fifth of the
time of their import, and once more as long when the process ends, whose memory goes back to the system anyway.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

SELDOM = (100_000, 50, 50)
"""New objects after which the young ones are looked through, and how often that is until the older ones are."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports: what was there at their end is not looked through any more, and later objects as ever."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        if gc.get_threshold() == SELDOM:  # else what was imported has chosen for itself
            gc.set_threshold(*before)
        gc.freeze()


def end() -> None:
    """Let the process end as ever, with all that was registered for its end, but without looking for such objects.

    Where torch's compiler was used they are looked for now: its locks of files complain of being let go later.
    """
    if "filelock" in sys.modules:
        gc.unfreeze()
        gc.collect()
    gc.freeze()
