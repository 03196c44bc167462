"""Token files: texts that were turned into tokens once, and are read as if they were in memory.

    train = TokenFile("news.tokens", context=1024, documents=slice(None, -12), vocabulary=32_000)
    inputs, targets = train[0]                 # {"tokens": (1024), "documents": (1024)}, (1024)
    train = TokenFile("news.tokens", context=1024, cross=True)
    tokens, targets = train.batch_of([5, 2])   # (2, 1024), (2, 1024)

The chosen documents lie one after the other and are cut into windows, so that every token is read once and predicted
once. `documents` counts, inside the window, which document each token is of: attention that looks across from one to
another would learn from text that has nothing to do with it. No token is asked to predict the first of the next
document (its target is -100, which losses leave out). With `cross` windows are plain text, and documents run together.

Tokens are not read before a window of them is asked for: a file of 10^12 tokens starts as fast as one of 10^3. The
starts of the chosen documents, 8 bytes each, are checked when the file is opened, since windows are cut by them:
10^7 documents take about 0.02 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from meshrun.data.sources.mapped import Mapped
from meshrun.data.sources.source import changed, inside
from meshrun.data.sources.token_format import TokenLayout, read_layout, tokenizer_beside
from meshrun.errors import BadSample, RunFailed, UserError
from meshrun.files import read_plain

IGNORED = -100
"""The target where there is nothing to predict, as torch's losses have it."""
_READ_TOGETHER = 1 << 20
"""Bytes of neighbouring windows that are best read one after the other."""
_CHECKED_TOGETHER = 1 << 16
"""Starts of documents that are compared at a time: half a megabyte, which stays in a processor's cache."""

Inputs = Tensor | dict[str, Tensor]


class TokenFile:
    """Windows of `context` tokens, and the token that follows each of them."""

    light, draws = True, False

    def __init__(
        self,
        path: Path | str,
        context: int,
        *,
        documents: slice | None = None,
        cross: bool = False,
        vocabulary: int | None = None,
        most: int | None = None,
    ) -> None:
        """`documents` picks some, as of a list; `most` keeps so many windows, evenly spread; `vocabulary` is how many
        tokens the model knows."""
        self.path, self.context, self.cross = Path(path), context, cross
        self.layout = read_layout(self.path)
        if not self.layout.tokens:
            raise UserError(f"token file {self.path} is empty: it has no tokens; convert texts that have some")
        self._opened: _Opened | None = None
        if vocabulary is not None and self.layout.vocabulary > vocabulary:
            raise UserError(
                f"{self.path} has a vocabulary of {self.layout.vocabulary:,} but the model knows only {vocabulary:,}; "
                f"give the model a larger one, or convert the texts with a smaller one "
                f"(meshrun convert-data --vocabulary)"
            )
        self.vocabulary = self.layout.vocabulary
        self._documents = first, last = _chosen(self.path, documents, self.layout.documents)
        starts = self._open().starts
        self._first_token, last_token = int(starts[0]), int(starts[-1])
        chosen = last_token - self._first_token
        if not isinstance(context, int) or not 0 < context < chosen:
            raise UserError(
                f"context is {context}; it must be at least 1 and below {chosen:,}, the tokens of the "
                f"{last - first:,} chosen documents of {self.path} (--context)"
            )
        if most is not None and most < 1:
            raise UserError(f"most is {most}; it must be at least 1, or absent for all windows of {self.path}")
        self.windows = (chosen - 1) // context
        self._length = min(most or self.windows, self.windows)
        self.chunk = max(1, _READ_TOGETHER // (context * self.layout.dtype.itemsize))
        meant = (self.layout.sha256, context, first, last, self._length, cross)
        self.fingerprint = hashlib.sha256(repr(meant).encode()).hexdigest()[:16]

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that made the file and lies beside it."""
        path = tokenizer_beside(self.path)
        try:
            found = hashlib.sha256(read_plain(path)).hexdigest()
        except OSError as error:
            raise UserError(f"the tokenizer of {self.path} cannot be read: {path}: {error.strerror}") from None
        if self.layout.tokenizer_sha256 not in (None, found):
            raise UserError(f"{path} is not the tokenizer that made {self.path}; put that one there, or convert again")
        return path

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length} of {self.path}")
        inputs, targets = self.batch_of([index % self._length])
        return ({name: each[0] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[0]), targets[0]

    def batch_of(self, ids: Sequence[int] | NDArray[np.int64]) -> tuple[Inputs, Tensor]:
        """The windows of these numbers, as one batch."""
        opened = self._open()
        opened.mapped.check()
        window = self._windows_of(inside(ids, self._length))
        read = opened.windows(self._first_token, self.windows, self.context)[window]
        if read.max(initial=0) >= self.vocabulary:
            self._refuse(ids, window, read)
        tokens = torch.from_numpy(read[:, :-1].astype(np.int64))
        targets = torch.from_numpy(read[:, 1:].astype(np.int64))
        if self.cross:
            return tokens, targets
        begins = self._beginnings(self._first_token + window * self.context, opened.starts)
        if begins is None:
            return {"tokens": tokens, "documents": torch.zeros_like(tokens)}, targets
        targets.masked_fill_(torch.from_numpy(begins[:, 1:]), IGNORED)
        documents = torch.from_numpy(begins[:, :-1]).cumsum(1)
        return {"tokens": tokens, "documents": documents}, targets

    def _windows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Evenly spread: i * windows // length, of numbers whose product would not fit."""
        whole, rest = divmod(self.windows, self._length)
        return ids * whole + ids * rest // self._length

    def _beginnings(self, at: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Where documents begin inside windows, but for the first token; None where none does.

        Found by bisection, so that only the starts that are needed are read of what may be very many.
        """
        first = np.searchsorted(starts, at, side="right")
        count = np.searchsorted(starts, at + self.context, side="right") - first
        if not count.any():
            return None
        begins = np.zeros((len(at), self.context + 1), np.bool_)
        row = np.repeat(np.arange(len(at)), count)
        within = np.arange(len(row)) - (np.cumsum(count) - count)[row]
        begins[row, starts[first[row] + within] - at[row]] = True
        return begins

    def _refuse(self, ids: Sequence[int] | NDArray[np.int64], window: NDArray[np.int64], read: NDArray[Any]) -> None:
        row, column = (int(each[0]) for each in np.nonzero(read >= self.vocabulary))
        position = self._first_token + int(window[row]) * self.context + column
        raise BadSample(
            f"sample {ids[row]} of {self.path} cannot be used: its token {column} (token {position:,} of the file) is "
            f"{read[row, column]}, beyond the vocabulary of {self.vocabulary:,}; "
            f"copy or convert the file again, or go on without such samples (--skip-bad-samples)"
        )

    def _open(self) -> _Opened:
        """The mapped file; where the dataset was sent to another process, mapped there."""
        if self._opened is None:
            mapped = Mapped(self.path)
            if read_layout(self.path) != self.layout:
                raise RunFailed(changed(self.path, "its header is another one"))
            self._opened = _Opened(mapped, self.layout, self._documents)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def _chosen(path: Path, documents: slice | None, count: int) -> tuple[int, int]:
    """First and behind last of the chosen documents."""
    chosen = documents or slice(None)
    first, last, step = chosen.indices(count)
    if step != 1:
        raise UserError(f"documents of {path} are chosen with step {step}; it must be 1: neighbours stay neighbours")
    if first >= last:
        raise UserError(
            f"documents {_written(chosen.start)}:{_written(chosen.stop)} of {path} are none; it has {count:,} of them"
        )
    return first, last


def _written(end: int | None) -> str:
    return "" if end is None else str(end)


def _checked(path: Path, starts: NDArray[np.int64], first: int, last: int, tokens: int) -> NDArray[np.int64]:
    """The starts of the chosen documents and the end of the last one; a sentence where documents do not follow each
    other within the tokens of the file."""
    cure = "copy or convert it again (meshrun convert-data --check compares it with its checksum)"
    if starts[0] != 0 or starts[-1] != tokens:
        raise UserError(
            f"token file {path} is damaged: its documents span tokens {starts[0]:,} to {starts[-1]:,}, "
            f"but it has {tokens:,} tokens; {cure}"
        )
    # With one neighbour on each side: a wrong end of the choice would take tokens of documents outside of it.
    begin, end = max(0, first - 1), min(len(starts), last + 2)
    for at in range(begin, end - 1, _CHECKED_TOGETHER):
        block = starts[at : min(at + _CHECKED_TOGETHER + 1, end)]
        if (falls := block[1:] < block[:-1]).any() or block[0] < 0 or block[-1] > tokens:
            number = at + int((falls | (block[:-1] < 0) | (block[1:] > tokens)).argmax())
            raise UserError(
                f"token file {path} is damaged: its document {number:,} spans tokens {starts[number]:,} to "
                f"{starts[number + 1]:,} of {tokens:,}; {cure}"
            )
    return starts[first : last + 1]


class _Opened:
    """The numbers of a mapped token file."""

    def __init__(self, mapped: Mapped, layout: TokenLayout, documents: tuple[int, int]) -> None:
        self.mapped = mapped
        self._tokens = np.frombuffer(mapped.whole, layout.dtype, layout.tokens, layout.tokens_at)
        starts = np.frombuffer(mapped.whole, np.dtype("<i8"), layout.documents + 1, layout.starts_at)
        self.starts = _checked(mapped.path, starts, *documents, layout.tokens)
        """Of the chosen documents, with the end of the last one behind them."""
        self._windows: NDArray[Any] | None = None

    def windows(self, first: int, count: int, context: int) -> NDArray[Any]:
        """All windows as rows of one array that shares the file's memory; each has the first token of the next."""
        if self._windows is None:
            if not 0 <= first <= first + count * context < len(self._tokens):  # numpy reads beyond without a word
                raise IndexError(f"{count} windows of {context} tokens from token {first} of {len(self._tokens)}")
            width = self._tokens.itemsize
            shape, strides = (count, context + 1), (context * width, width)
            self._windows = as_strided(self._tokens[first:], shape, strides, writeable=False)
        return self._windows
