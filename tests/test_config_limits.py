"""Options at the edges of what is valid, and what a run directory says of its stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshrun.config import RANGES, RunConfig, RunDirectory
from meshrun.errors import UserError


@pytest.mark.parametrize("name", RANGES)
def test_numbers_are_taken_from_the_least_to_the_most(name: str):
    least, most = RANGES[name]
    for value in (least, most):
        assert getattr(RunConfig("digits", **{name: value}), name) == value
    for value, word in ((least - 1, "at least"), (most + 1, "at most")):
        with pytest.raises(UserError, match=rf"{name} is .*; it must be {word} "):
            RunConfig("digits", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", 0, "between 1 and 65535"),
        ("port", 65536, "between 1 and 65535"),
        ("timeout", 0.0, r"a number above 0 \(seconds\)"),
        ("timeout", math.nan, r"a number above 0 \(seconds\)"),
        ("timeout", 1e300, "a year"),
        ("timeout", 366.0 * 24 * 3600, "a year"),
        ("hang_after", math.inf, "a year"),
        ("mtbf", -1.0, r"a number above 0 \(hours\)"),
        ("spike", 0.0, r"a number above 0 \(times the usual spread\)"),
        ("name", "../elsewhere", "a plain file name"),
        ("name", ".hidden", "a plain file name"),
        ("name", "", "a plain file name"),
        ("name", "two\nlines", "a plain file name"),
        ("cache", " ", "cache is empty"),
        ("recompute", "every-0", "every-K"),
        ("deadline", "soon", "a time from now"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(name: str, value: Any, said: str):
    with pytest.raises(UserError, match=said):
        RunConfig("digits", **{name: value})


def test_ports_at_the_edges_are_taken():
    assert [RunConfig("digits", port=port).port for port in (1, 65535)] == [1, 65535]


def test_a_config_without_clipping_is_json_and_comes_back():
    config = RunConfig("digits", clip=math.inf)
    text = json.dumps(config.to_json(), allow_nan=False)
    assert RunConfig.from_json(json.loads(text)).clip == math.inf


def test_an_option_that_this_version_does_not_know_is_named():
    with pytest.raises(UserError, match="has 'colour', which this version of meshrun does not know"):
        RunConfig.from_json({**RunConfig("digits").to_json(), "colour": "blue"})


@pytest.mark.parametrize(("text", "who"), [("", "user"), ("slurm\n", "slurm"), ("please", "user")])
def test_who_asked_a_run_to_stop_is_in_its_stop_file(tmp_path: Path, text: str, who: str):
    run = RunDirectory(tmp_path)
    assert run.asked_to_stop_by() is None
    run.stop_file.write_text(text)
    assert run.asked_to_stop_by() == who
