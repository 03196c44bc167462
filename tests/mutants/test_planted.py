"""The list of planted mistakes fits the tree, so that `make mutants` can plant each of them."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.planted import Mutant, Stale, planted

ROOT = Path(__file__).parents[2]
MUTANTS = planted()
REVIEWED = 79
"""Mistakes of the audit that began the list; it is to hold twice as many of its own beside them."""


@functools.cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@functools.cache
def functions_in(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source(file))) if isinstance(node, ast.FunctionDef)}


def test_every_entry_matches_its_file_once_and_makes_python_of_it():
    stale: list[str] = []
    for mutant in MUTANTS:
        try:
            compile(mutant.applied(source(mutant.file)), mutant.id, "exec")
        except (Stale, SyntaxError) as error:
            stale.append(str(error))
    assert stale == [], "change these entries of tests/mutants/*.toml with the code that they are planted in"


def test_every_entry_has_a_name_of_its_own_and_tests_that_are_there():
    assert [name for name, count in Counter(each.id for each in MUTANTS).items() if count > 1] == []
    named = {test for each in MUTANTS for test in each.tests}
    for file, _, name in (test.partition("::") for test in named):
        assert (ROOT / file).is_file(), file
        assert not name or name.partition("[")[0] in functions_in(file), f"{file}::{name}"


def test_the_list_covers_every_room_of_the_product():
    assert len(MUTANTS) >= 3 * REVIEWED
    rooms = Counter(Path(each.file).parts[1] for each in MUTANTS)
    assert {"check", "cli", "data", "kernels", "launch", "observe", "parallel", "state", "train", "world"} <= set(rooms)


@pytest.mark.parametrize(
    ("old", "new", "said"), [("gone", "x", "0 times"), ("a", "x", "2 times"), ("b", "b", "is the old one")]
)
def test_an_entry_that_does_not_fit_is_refused(old: str, new: str, said: str):
    with pytest.raises(Stale, match=said):
        Mutant("m", "room", "file.py", old, new, "nothing", ("tests/test_x.py",)).applied("a b a")


def test_what_is_changed_is_shown():
    mutant = Mutant("m", "room", "file.py", "x = 1", "x = 2", "a wrong number", ("tests/test_x.py",))
    assert mutant.difference("y = 0\nx = 1\n").splitlines()[-2:] == ["-x = 1", "+x = 2"]
