"""What `--shuffle` says: the kind of an epoch's order, as one small value.

Shuffle.parse("window:65536")            # Shuffle(kind="window", size=65536)
Shuffle.parse("length").settled(batch=64, chunk=1)      # with its numbers filled in
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from meshrun.config import whole_number
from meshrun.errors import UserError

Kind = Literal["full", "window", "length", "none"]

CHUNK = 256
"""Neighbours that are read together where a dataset does not say it."""
_CHUNKS, _LEAST_BATCHES = 32, 8
"""A window that nobody has given a size: so many chunks, and at least so many batches."""
_SORTED_BATCHES = 50
"""Batches whose samples are sorted by length together: few pads, and still other ones in every epoch."""


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is ordered. `size` is in samples for windows and in batches for lengths."""

    kind: Kind = "full"
    size: int = 0
    """0 is what nobody has said."""
    chunk: int = 1
    """Samples that stay neighbours up to a window's shuffle."""

    @classmethod
    def parse(cls, text: str) -> Shuffle:
        """`full`, `window`, `window:SAMPLES`, `length`, `length:BATCHES` or `none`."""
        kind, colon, size = text.partition(":")
        number = whole_number(size) or 0
        sized = kind in ("window", "length")
        if kind not in get_args(Kind) or (colon and not (sized and number)):
            raise UserError(
                f"shuffle is {text!r}; it must be full, window or window:SAMPLES, length or length:BATCHES, or none "
                f"(--shuffle)"
            )
        return cls(kind, number)  # type: ignore[arg-type]

    def settled(self, batch: int, chunk: int) -> Shuffle:
        """With numbers for what was left open. A window is of whole chunks, and holds a batch at least."""
        if self.kind == "length":
            return replace(self, size=self.size or _SORTED_BATCHES)
        if self.kind != "window":
            return self
        wanted = self.size or max(_CHUNKS * chunk, _LEAST_BATCHES * batch)
        chunks = max(round(wanted / chunk), -(-batch // chunk), 1)
        return replace(self, size=chunks * chunk, chunk=chunk)

    def __str__(self) -> str:
        """All that decides the order, beside seed, batch and data."""
        size = f":{self.size}" if self.size else ""
        return f"{self.kind}{size}" + (f" of chunks of {self.chunk}" if self.kind == "window" else "")


FULL, NONE = Shuffle("full"), Shuffle("none")
