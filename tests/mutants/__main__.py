"""Plants each mistake of the list in a copy of the tree, and says which ones no test notices.

    python -m tests.mutants                        # all of them; exit status 1 if fewer than 97 % are noticed
    python -m tests.mutants state saver-size …     # of some rooms, or some by their ids

Every worker has a copy of the tree and a warm process that has imported torch and pytest but nothing of meshrun. For
each mutant it writes the file, forks, and the fork runs the mutant's tests up to the first that fails. A test that does
not end in time has noticed, too. Before any mistake is planted, all tests that are named must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.planted import Mutant, Stale, planted
from tests.mutants.worker import Ended

ROOT = Path(__file__).parents[2]
ENOUGH = 0.97
LIMIT_S = 180.0
"""Seconds for the tests of one mutant."""
FIRST_LIMIT_S = 1800.0
"""Seconds for all tests that are named, without a mistake."""


def copy_tree(to: Path) -> None:
    """All files that git knows or would add, with their times, so that compiled modules still fit."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, to / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for compiled in ROOT.glob("meshrun/**/__pycache__"):
        shutil.copytree(compiled, to / compiled.relative_to(ROOT), dirs_exist_ok=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "meshrun"], cwd=to, check=True)


@contextlib.contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """The file with another text. Its compiled form is out of the way meanwhile: Python knows it by size and second."""
    before, times = path.read_bytes(), path.stat()
    compiled = [(each, each.read_bytes()) for each in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")]
    for each, _ in compiled:
        each.unlink()
    try:
        path.write_text(text)
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        for each, content in compiled:
            each.write_bytes(content)


class Worker:
    """A copy of the tree, and the warm process in it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.tree, self.log = folder / f"tree-{number}", folder / f"log-{number}"
        if number == 0:
            copy_tree(self.tree)
        else:
            shutil.copytree(folder / "tree-0", self.tree)
        self.pipe, theirs = multiprocessing.Pipe()
        fd = theirs.fileno()
        words = [sys.executable, "-m", "tests.mutants.worker", str(fd), str(ROOT), str(self.tree), str(self.log)]
        self.process = subprocess.Popen(words, cwd=ROOT, pass_fds=[fd], stdin=subprocess.DEVNULL)
        theirs.close()

    def run(self, tests: Sequence[str], first_only: bool = True, limit: float = LIMIT_S) -> Ended:
        self.pipe.send((list(tests), first_only, limit))
        return Ended(*self.pipe.recv())

    def tried(self, mutant: Mutant) -> Ended:
        path = self.tree / mutant.file
        with changed(path, mutant.applied(path.read_text())):
            return self.run(mutant.tests)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.wait()


def refuse_stale(mutants: Sequence[Mutant]) -> None:
    """Every entry must match its file once, and what it makes of the file must be Python."""
    for mutant in mutants:
        compile(mutant.applied((ROOT / mutant.file).read_text()), mutant.file, "exec")


def without_mistakes(workers: Sequence[Worker], mutants: Sequence[Mutant]) -> None:
    """All tests that are named pass where no mistake is planted; each worker runs its share of the files."""
    named = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.partition("::")[0] for test in named})
    failed: list[str] = []

    def look(number: int) -> None:
        mine = {file for place, file in enumerate(files) if place % len(workers) == number}
        chosen = [test for test in named if test.partition("::")[0] in mine]
        if not chosen:
            return
        # A file that is named stands for all of its tests.
        chosen = [test for test in chosen if "::" not in test or test.partition("::")[0] not in chosen]
        ended = workers[number].run(chosen, first_only=False, limit=FIRST_LIMIT_S)
        failed.extend(ended.failed or (["they did not end"] if ended.hung else []))

    threads = [threading.Thread(target=look, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(f"{len(failed)} tests fail without any mistake planted, so nothing can be said:\n" + "\n".join(failed))


def try_all(workers: Sequence[Worker], mutants: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that no test has noticed."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    survivors: list[Mutant] = []
    done = 0
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        nonlocal done
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            ended = worker.tried(mutant)
            took = time.monotonic() - began
            with lock:
                done += 1
                if not ended.failed and not ended.hung:
                    survivors.append(mutant)
                said = "no end" if ended.hung else ended.failed[0] if ended.failed else "SURVIVED"
                print(f"{done:3}/{len(mutants)} {took:5.1f} s  {mutant.id:32} {said}", flush=True)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return survivors


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make mutants", description="plants mistakes and says which survive the tests"
    )
    parser.add_argument("names", nargs="*", help="rooms or ids; all if none is given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mistake first")
    asked = parser.parse_args()
    try:
        mutants = planted()
        unknown = set(asked.names) - {name for mutant in mutants for name in (mutant.id, mutant.room)}
        if unknown:
            sys.exit(f"there is no room and no mutant {', '.join(sorted(unknown))}")
        mutants = [each for each in mutants if not asked.names or {each.id, each.room} & set(asked.names)]
        refuse_stale(mutants)
    except Stale as stale:
        sys.exit(str(stale))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = [Worker(number, Path(folder)) for number in range(min(asked.workers, len(mutants)))]
        for worker in workers:
            worker.pipe.recv()
        if not asked.unchecked:
            without_mistakes(workers, mutants)
            print(
                f"all tests that are named pass without a mistake, after {time.monotonic() - began:.0f} s", flush=True
            )
        survivors = try_all(workers, mutants)
        for worker in workers:
            worker.close()
    for mutant in survivors:
        print(f"\n{mutant.id} survived {' '.join(mutant.tests)}\n  nobody would notice: {mutant.unnoticed}")
        print(mutant.difference((ROOT / mutant.file).read_text()))
    killed = 1 - len(survivors) / len(mutants)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} killed: {killed:.1%}, {time.monotonic() - began:.0f} s")
    sys.exit(killed < ENOUGH)


if __name__ == "__main__":
    main()
