"""Texts to a token file, with its tokenizer beside it.

    made = to_tokens(Path("news"), Path("news.tokens"), Texts(vocabulary=4096), Crew(workers=2), Quiet())
    made.samples, made.tokens, made.sha256

The tokenizer is had first, given or trained; then each part is made by whichever process is free; then they are joined.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshrun.data.convert.inputs import Job, files_below
from meshrun.data.convert.parts import Filled, Parts, has_parts, kept_parts, unwritable, write_part
from meshrun.data.convert.result import Converted, finished, free_to_write
from meshrun.data.convert.texts import Reading, documents, good, jobs_of, kind_of
from meshrun.data.convert.tokenizing import Tokens, library, opened, pieces, train
from meshrun.data.convert.work import Bad, Crew, Made, Totals, alone, make_all
from meshrun.data.download import Told
from meshrun.data.sources.token_format import dtype_for, tokenizer_beside, write_many
from meshrun.errors import UserError

LEAST_VOCABULARY = 257
"""Every byte, and the start."""
_LARGEST = 1 << 32
_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 20, 1 << 26, 1024
_AT_ONCE = 1 << 19
"""Characters that are turned into tokens at once: what the library holds of them takes fifty times that."""
_TRAINED_ON = 1 << 28
"""Characters that a tokenizer is trained on if nobody says how many documents: more change next to nothing."""
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Texts:
    """How texts are to be converted."""

    column: str = "text"
    split_lines: bool = False
    tokenizer: Path | None = None
    """One that is there; trained here when absent."""
    start: str | None = None
    """The given tokenizer's name for what a document begins with."""
    vocabulary: int = 4096
    train_on: int | None = None
    """How many documents, from the first on, the tokenizer is trained on."""
    skip_bad: bool = False


def to_tokens(source: Path, dest: Path, texts: Texts, crew: Crew, told: Told, overwrite: bool = False) -> Converted:
    """Have the token file; raises a sentence where that cannot be."""
    if not LEAST_VOCABULARY <= texts.vocabulary < _LARGEST:
        raise UserError(
            f"vocabulary is {texts.vocabulary}; it must be at least {LEAST_VOCABULARY}, for every byte and "
            f"the start of a document (--vocabulary)"
        )
    if texts.train_on is not None and texts.train_on < 1:
        raise UserError(f"train-on is {texts.train_on}; it must be at least 1, or absent (--train-on)")
    given = Tokens(texts.tokenizer, texts.start) if texts.tokenizer is not None else None
    beside = tokenizer_beside(dest)
    # An earlier start may have been killed when only the tokenizer had its name.
    free_to_write([dest] if texts.tokenizer == beside or has_parts(dest) else [dest, beside], overwrite)
    with kept_parts(dest, _options(source, texts), files_below(source), told) as parts:
        reading = Reading(kind_of(source, parts.inputs(), texts.split_lines), texts.column)
        tokenizer = parts.folder / _TOKENIZER
        tokens = given or _trained(source, parts, reading, texts, told)
        if given is not None and texts.tokenizer is not None:
            tokenizer.write_bytes(texts.tokenizer.read_bytes())
        sha256 = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        told.begin(dest.name, 0, parts.bytes)
        jobs = jobs_of(source, parts.inputs(), reading, part_bytes(parts.bytes))
        make = partial(_part, parts.folder, source, reading, (texts.start, sha256), texts.skip_bad)
        totals = make_all(parts, jobs, make, crew, told)
        if not totals.samples:
            parts.remove()
            why = f"; all {totals.bad:,} are bad, the first: {totals.why[0]}" if totals.why else ""
            raise UserError(f"{source} has no document with a text that can be converted{why} (SOURCE)")
        joined = _joined(parts, totals, tokens.vocabulary, sha256)
        return finished(parts, dest, {joined: dest, tokenizer: beside}, "tokens", totals, told)


def part_bytes(total: int) -> int:
    """How much of the inputs a part is made of: enough parts for many processes, and not too many files."""
    return max(_SMALLEST_PART, min(total // _PARTS, _LARGEST_PART))


def _options(source: Path, texts: Texts) -> dict[str, object]:
    """All that decides what the bytes of the result are, beside the inputs."""
    options = asdict(replace(texts, tokenizer=None))
    if texts.tokenizer is not None:
        options |= {"tokenizer": hashlib.sha256(texts.tokenizer.read_bytes()).hexdigest(), "vocabulary": None}
    return {"source": str(source.resolve()), **options, "tokenizers": library().__version__}


def _trained(source: Path, parts: Parts, reading: Reading, texts: Texts, told: Told) -> Tokens:
    path = parts.folder / _TOKENIZER
    if not path.exists():
        if reading.kind != "text" and not texts.skip_bad:
            _refuse_first(source, parts, reading)
        told.line("training the tokenizer")
        new = path.with_suffix(".new")
        try:
            limited = alone(_train, source, parts, reading, texts, new)
            new.replace(path)
        except OSError as error:
            raise unwritable(path, error, parts.folder) from error
        if limited:
            told.line(f"the tokenizer was trained on the first {_TRAINED_ON:,} characters (--train-on for others)")
    tokens = Tokens(path, None)
    if tokens.vocabulary < texts.vocabulary:
        told.line(f"the texts give a vocabulary of {tokens.vocabulary:,} tokens only, not {texts.vocabulary:,}")
    return tokens


def _refuse_first(source: Path, parts: Parts, reading: Reading) -> None:
    """Read the first row: what is wrong with all, such as a column that is not there, is told before any work."""
    jobs = jobs_of(source, parts.inputs(), reading, part_bytes(parts.bytes))
    found = (each for job in jobs for each in documents(source, job.units, reading))
    for _ in good(itertools.islice(found, 1), False, Bad()):
        return


def _train(source: Path, parts: Parts, reading: Reading, texts: Texts, path: Path) -> bool:
    """Returns whether not all documents that were asked for have been used."""
    limited = False

    def learnt() -> Iterator[str]:
        nonlocal limited
        seen = 0
        jobs = jobs_of(source, parts.inputs(), reading, part_bytes(parts.bytes))
        found = (each for job in jobs for each in documents(source, job.units, reading))
        for document in itertools.islice(good(found, texts.skip_bad, Bad()), texts.train_on):
            for piece in pieces(document):
                seen += len(piece)
                yield piece
            if texts.train_on is None and seen >= _TRAINED_ON:
                limited = True
                return

    train(learnt(), texts.vocabulary, path)
    return limited


def _part(folder: Path, source: Path, reading: Reading, which: tuple[str | None, str], skip: bool, job: Job) -> Made:
    """Make one part: the tokens of its documents, and behind them how many each has."""
    tokens = opened(folder / _TOKENIZER, *which)
    bad, empty, lengths = Bad(), 0, array("q")

    def fill(file: BinaryIO) -> Filled:
        nonlocal empty
        batch = _Batch(tokens, lengths, file)
        for document in good(documents(source, job.units, reading), skip, bad):
            whole = tokens.pieces(document)
            first = next(whole, "")
            if not first:
                empty += 1
                continue
            batch.add(first, begins=True)
            for piece in whole:
                batch.add(piece, begins=False)
        batch.flush()
        facts = {"samples": len(lengths), "tokens": sum(lengths), "empty": empty, "bad": bad.count, "why": bad.why}
        return Filled({"lengths": np.array(lengths, np.int64)}, facts)

    return write_part(folder, job.number, fill)


class _Batch:
    """Pieces of documents that are turned into tokens together, and written."""

    def __init__(self, tokens: Tokens, lengths: array[int], file: BinaryIO) -> None:
        self._tokens, self._lengths, self._file = tokens, lengths, file
        self._dtype = dtype_for(tokens.vocabulary)
        self._texts: list[str] = []
        self._begins: list[bool] = []
        self._size = 0

    def add(self, text: str, begins: bool) -> None:
        self._texts.append(text)
        self._begins.append(begins)
        self._size += len(text)
        if self._size >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        ids: list[int] = []
        for begins, found in zip(self._begins, self._tokens.encoded(self._texts), strict=True):
            if begins:
                ids.append(self._tokens.start)
                self._lengths.append(1)
            ids += found
            self._lengths[-1] += len(found)
        self._file.write(np.array(ids, self._dtype).data)
        self._texts, self._begins, self._size = [], [], 0


def _joined(parts: Parts, totals: Totals, vocabulary: int, sha256: str) -> Path:
    """The whole token file, beside its parts."""
    path, dtype = parts.folder / "whole", dtype_for(vocabulary)
    lengths = (parts.part(number).array("lengths") for number in range(totals.parts))
    blocks = (parts.part(number).data(dtype) for number in range(totals.parts))
    try:
        write_many(path, (totals.samples, totals.tokens), lengths, blocks, vocabulary, sha256)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise unwritable(path, error, parts.folder) from error
    return path
