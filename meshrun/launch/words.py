"""What a launcher and its ranks leave for each other in the node's memory while ranks are being ended.

    word_of_the_launcher(memory, generation=0)       # Word(dead={1}, final=False), or None while it has said nothing
    with writing(memory, rank=3):                    # the launcher lets this rank finish
        …

The launcher says who is gone before it signals those that are left, so a signal without a word is somebody else's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshrun import strict_json


@dataclass(frozen=True)
class Word:
    """What a launcher says as it ends the ranks of a generation."""

    dead: frozenset[int]
    """Ranks of this node that are gone."""
    final: bool
    """Whether none will be started again."""


def word_of_the_launcher(memory: Path, generation: int, within: float = 0.0) -> Word | None:
    """Its word on this generation, waited for so many seconds."""
    path, give_up = memory / f"dead-{generation}.json", time.monotonic() + within
    while True:
        try:
            word = strict_json.read(path)
            ranks = strict_json.of_type(list[int], word.get("ranks"), "ranks")
            return Word(frozenset(ranks), bool(word.get("final")))
        except (OSError, ValueError):
            if time.monotonic() >= give_up:
                return None
            time.sleep(0.01)


@contextmanager
def writing(memory: Path, rank: int) -> Iterator[None]:
    """Until the end of the `with` this rank writes down its state, for which it gets more time."""
    busy = memory / f"words-{rank}.busy"
    busy.touch()
    try:
        yield
    finally:
        busy.unlink(missing_ok=True)
