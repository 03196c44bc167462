"""`meshrun convert-data`: millions of small files to one that is read fast.

meshrun convert-data photos photos.h5                               # folders of classes, or train/ and val/ with such
meshrun convert-data photos photos.h5 --images arrays --size 224    # decoded now and not in every epoch
meshrun convert-data news news.tokens --vocabulary 32000            # texts, with a tokenizer that is trained on them
meshrun convert-data news.jsonl news.tokens --column document --tokenizer gpt2.json
meshrun convert-data --check news.tokens                            # is it as it was made?

Killed or out of space, the same command goes on where it was. The same inputs give the same bytes.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun import strict_json
from meshrun.config import ON_A_NODE
from meshrun.errors import StoppedByHand, UserError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from meshrun.data.convert.result import Converted
    from meshrun.data.convert.work import Crew

HDF5 = (".h5", ".hdf5")
TOKENS = (".tokens",)
EVERY = 5.0
"""Seconds between two lines where nobody sees a bar."""
SHOWN = 5
"""Bad samples that are printed."""


class Form(StrEnum):
    """How images are kept."""

    ENCODED = "encoded"
    ARRAYS = "arrays"


class Compression(StrEnum):
    """How arrays are compressed."""

    GZIP = "gzip"


class Shown:
    """How far a file is: a bar on a terminal, else a line now and then. Starts no thread, since others are forked."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what, self._done, self._total = "", 0, 0
        self._began = self._said = time.monotonic()

    def begin(self, what: str, done: int, total: int | None) -> None:
        self.end()
        self._what, self._done, self._total = what, done, total or 0
        self._began = self._said = time.monotonic()
        if self._terminal:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
            console = Console(stderr=True)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
            self._task = self._bar.add_task(what, completed=done, total=total)
            self._bar.start()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
            if now - self._said > 0.1:
                self._bar.refresh()
                self._said = now
        elif now - self._said > EVERY:
            rate, left = self._done / (now - self._began), max(0, self._total - self._done)
            self.line(
                f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
                f"{left / rate:,.0f} s left"
            )
            self._said = now

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def convert_data_command(
    source: Annotated[Path | None, typer.Argument(metavar="SOURCE", help="Folder of images, or texts.")] = None,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="NAME.h5 for images, NAME.tokens.")] = None,
    images: Annotated[Form | None, typer.Option(help="Files as they are (encoded), or arrays of one size.")] = None,
    size: Annotated[int | None, typer.Option(help="Of arrays: pixels of each side.")] = None,
    compress: Annotated[Compression | None, typer.Option(help="Of arrays: smaller, and slower to read.")] = None,
    column: Annotated[str | None, typer.Option(help="Of JSON lines and Parquet: where the text is; text.")] = None,
    split_lines: Annotated[bool, typer.Option("--split-lines", help="Each line of a text is a document.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; one is trained when absent.")] = None,
    start: Annotated[str | None, typer.Option(help="Its token that a document begins with; found when absent.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the one that is trained; 4096.")] = None,
    train_on: Annotated[int | None, typer.Option(help="Documents, from the first on, that it is trained on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one a core that is granted when absent.")] = None,
    skip_bad_samples: Annotated[bool, typer.Option("--skip-bad-samples", help="Leave out what is bad.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over DEST.")] = False,
    check: Annotated[Path | None, typer.Option(metavar="DEST", help="Convert nothing; verify what was made.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Turn images into HDF5, or texts into tokens, for reading at full speed."""
    del debug  # for `main`
    shown = Shown(sys.stderr.isatty())
    try:
        if check is not None:
            if source is not None:
                raise UserError(f"--check {check} converts nothing; leave {source} out")
            return _check(check, shown, as_json)
        if source is None or dest is None:
            raise UserError("convert-data needs SOURCE and DEST, such as: meshrun convert-data photos photos.h5")
        of_images = {"--images": images, "--size": size, "--compress": compress}
        of_texts: dict[str, Any] = {"--column": column, "--split-lines": split_lines or None, "--tokenizer": tokenizer}
        of_texts |= {"--start": start, "--vocabulary": vocabulary, "--train-on": train_on}
        began = time.monotonic()
        if dest.suffix in HDF5:
            _refuse(of_texts, f"texts (DEST{TOKENS[0]})", dest)
            from meshrun.data.convert.to_hdf5 import Pictures, to_hdf5

            pictures = Pictures(images or Form.ENCODED, size, compress, skip_bad_samples)
            made = to_hdf5(source, dest, pictures, _crew(workers), shown, overwrite)
        elif dest.suffix in TOKENS:
            _refuse(of_images, f"images (DEST{HDF5[0]})", dest)
            if tokenizer is None:
                _refuse({"--start": start}, "a tokenizer that is given (--tokenizer)", dest)
            else:
                _refuse({"--vocabulary": vocabulary, "--train-on": train_on}, "a tokenizer that is trained here", dest)
            from meshrun.data.convert.to_tokens import Texts, to_tokens

            words = 4096 if vocabulary is None else vocabulary
            texts = Texts(column or "text", split_lines, tokenizer, start, words, train_on, skip_bad_samples)
            made = to_tokens(source, dest, texts, _crew(workers), shown, overwrite)
        else:
            raise UserError(f"{dest} says not what to make; it must end in {', '.join((*HDF5, *TOKENS))} (DEST)")
    except KeyboardInterrupt:
        from meshrun.data.convert.parts import has_parts

        goes_on = "; the same command goes on where it was" if dest is not None and has_parts(dest) else ""
        raise StoppedByHand(f"stopped by CTRL-C{goes_on}") from None
    finally:
        shown.end()
    _tell(made, time.monotonic() - began, as_json)
    return 0


def _refuse(given: dict[str, Any], what: str, dest: Path) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name} is for {what} and means nothing for {dest}; leave it out")


def _crew(workers: int | None) -> Crew:
    from meshrun.data.convert.work import Crew
    from meshrun.world.cores import granted, quota
    from meshrun.world.environment import one_thread_for_tokenizers

    if workers is not None and not 1 <= workers <= ON_A_NODE:
        raise UserError(f"workers is {workers}; it must be at least 1 and at most {ON_A_NODE:,}, or absent (--workers)")
    cores = len(granted())
    limit = quota()
    return Crew(workers or max(1, min(cores, int(limit) if limit else cores)), one_thread_for_tokenizers)


def _check(dest: Path, shown: Shown, as_json: bool) -> int:
    from meshrun.data.convert.result import checked

    problems = checked(dest, shown)
    shown.end()
    if as_json:
        print(strict_json.dumps({"destination": str(dest), "ok": not problems, "problems": problems}))
    elif not problems:
        print(f"{dest} is as it was made")
    for problem in problems:
        print(f"meshrun: {problem}; copy or convert it again", file=sys.stderr)
    return 1 if problems else 0


def _tell(made: Converted, seconds: float, as_json: bool) -> None:
    what = "documents" if made.kind == "tokens" else "images"
    if made.bad:
        left = f"{made.bad:,} bad {what} were" if made.bad > 1 else f"1 bad {what[:-1]} was"
        print(f"{left} left out, such as:", file=sys.stderr)
        for why in made.why[:SHOWN]:
            print(f"  {why}", file=sys.stderr)
    if made.empty:
        left = "1 document without a text was" if made.empty == 1 else f"{made.empty:,} documents without a text were"
        print(f"{left} left out", file=sys.stderr)
    if as_json:
        names = ("kind", "samples", "bytes", "tokens", "sha256", "bad", "empty", "resumed")
        document = {"destination": str(made.destination), **{name: getattr(made, name) for name in names}}
        print(strict_json.dumps({**document, "seconds": round(seconds, 3)}))
        return
    tokens = f", {made.tokens:,} tokens" if made.tokens is not None else ""
    print(f"{made.destination}: {made.samples:,} {what}{tokens}, {made.bytes / 1e6:,.1f} MB in {seconds:.1f} s")
