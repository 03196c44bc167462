"""A few seconds of fuzzing: every format with its corpus of past findings, its examples and some damaged inputs."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.errors import CutOff, UserError
from tests.fuzz import engine
from tests.fuzz.engine import CORPUS, Format, fuzz
from tests.fuzz.mutations import DEEP, of_bytes, of_json, of_text

ROOT = Path(__file__).parents[2]
INPUTS = 25


@pytest.fixture(scope="module")
def tallies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of each format, in a process that has no threads and can fork."""
    out = tmp_path_factory.mktemp("fuzz")
    words = [sys.executable, "-m", "tests.fuzz", "--inputs", str(INPUTS), "--out", str(out / "found"), "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return {each["format"]: each for each in json.loads(ended.stdout)}


def test_no_input_of_any_format_breaks_the_rule(tallies: dict[str, dict[str, Any]]):
    found = [finding for tally in tallies.values() for finding in tally["findings"]]
    assert not found, json.dumps(found, indent=1)


def test_every_format_is_read_and_refused(tallies: dict[str, dict[str, Any]]):
    assert all(tally["inputs"] >= INPUTS + 1 and tally["read"] >= 1 for tally in tallies.values())
    assert sum(tally["refused"] for tally in tallies.values()) > INPUTS


def test_each_folder_of_the_corpus_is_that_of_a_format(tallies: dict[str, dict[str, Any]]):
    assert {path.name for path in CORPUS.iterdir()} <= tallies.keys()


def raises(error: Exception) -> Any:
    def read(data: bytes, folder: Path) -> None:
        del folder
        if data != b"good":
            raise error

    return read


def hang(data: bytes, folder: Path) -> None:
    del folder
    if data != b"good":
        time.sleep(60)


def crash(data: bytes, folder: Path) -> None:
    del folder
    if data != b"good":
        faulthandler.disable()  # pytest's: its stacks would look like a failure of the suite
        os.kill(os.getpid(), signal.SIGSEGV)


def take_memory(data: bytes, folder: Path) -> None:
    del folder
    if data != b"good":
        bytearray(b"x") * (110 << 20)


def take_too_much(data: bytes, folder: Path) -> None:
    del folder
    if data != b"good":
        bytearray(1 << 34)


def hide_that_it_took_too_much(data: bytes, folder: Path) -> None:
    del folder
    try:
        if data != b"good":
            bytearray(1 << 34)
    except MemoryError:
        raise UserError("there is no room for it") from None


def always_bad(rng: random.Random, examples: Any) -> bytes:
    del rng, examples
    return b"bad"


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (raises(KeyError("x")), "KeyError"),
        (raises(CutOff("later")), "says that it may go well another time"),
        (raises(UserError("")), "is no sentence"),
        (hang, "hangs"),
        (crash, "is ended by SIGSEGV"),
        (take_memory, "took 1[0-9]{2} MB"),
        (take_too_much, "MemoryError"),
        (hide_that_it_took_too_much, "asked for more than 100 MB of memory: MemoryError"),
        (raises(UserError("a sentence")), None),
    ],
)
def test_a_reader_that_breaks_the_rule_is_found_and_its_input_kept(
    read: Any, what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine, "SECONDS", 1.0)
    format = Format("made-up", lambda _: [b"good"], read, always_bad)
    (tally,) = fuzz([format], inputs=2, seed=1, jobs=1, out=tmp_path, tell=lambda _: None)
    assert tally.inputs == 3 and tally.read >= 1
    if what is None:
        assert not tally.findings and tally.refused == 2
        return
    assert tally.findings, tally
    assert all(Path(each.path).read_bytes() == b"bad" for each in tally.findings)
    assert re.match(what, tally.findings[0].what)


@pytest.mark.parametrize("mutate", [of_bytes, of_json, of_text])
def test_the_same_seed_draws_the_same_inputs(mutate: Any):
    examples = [b'{"a": [1, 2, {"b": "text"}], "c": 7}']
    first, second = ([mutate(random.Random(f"x {number}"), examples) for number in range(50)] for _ in range(2))
    assert first == second and len(set(first)) > 30
    assert any(b"[" * DEEP in each or b'{"a":' * DEEP in each for each in map(_deep, range(400)))


def _deep(number: int) -> bytes:
    return of_json(random.Random(number), [b'{"a": 1, "b": [2]}'])
