"""Documents that every JSON reader accepts, whatever numbers are in them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshrun import strict_json


@dataclass(frozen=True)
class Pair:
    first: int
    second: str


def standard(text: str) -> Any:
    """What a reader that keeps to the standard finds."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_no_number_is_null_with_its_reason():
    document = {
        "eval": {"val": {"loss": math.nan, "count": 20}},
        "losses": [1.5, math.inf, -math.inf],
        "a/b~c": math.nan,
    }
    found = standard(strict_json.dumps(document))
    assert found.pop("not_numbers") == {
        "/eval/val/loss": "NaN",
        "/losses/1": "Infinity",
        "/losses/2": "-Infinity",
        "/a~1b~0c": "NaN",
    }
    assert found == {"eval": {"val": {"loss": None, "count": 20}}, "losses": [1.5, None, None], "a/b~c": None}


def test_a_document_of_numbers_is_plain_json():
    document = {"losses": [1.5, 2], "eval": None, "nested": {"a": [True, "NaN"]}}
    assert strict_json.dumps(document) == json.dumps(document)


def test_numbers_come_back_as_what_they_were():
    document = {"a": [1.0, math.inf], "b": {"c": -math.inf}, "a/b~c": math.nan}
    found = strict_json.loads(strict_json.dumps(document, indent=2))
    assert math.isnan(found.pop("a/b~c"))
    assert found == {"a": [1.0, math.inf], "b": {"c": -math.inf}}


def test_names_that_look_like_what_pointers_are_escaped_with_come_back():
    document = {"~1": math.inf, "/": 0.5, "~01": {"~0": -math.inf}, "pair": (1.0, math.inf)}
    found = strict_json.loads(strict_json.dumps(document))
    assert found == {**document, "pair": [1.0, math.inf]}


def test_a_document_that_is_written_again_keeps_its_reasons():
    once = json.loads(strict_json.dumps({"loss": math.nan}))
    assert standard(strict_json.dumps({**once, "norm": math.inf}))["not_numbers"] == {
        "/loss": "NaN",
        "/norm": "Infinity",
    }


BAD = {
    "nothing": b"",
    "a torn one": b'{"a": ',
    "nested too deep": b"[" * 200_000,
    "objects nested too deep": b'{"a":' * 100_000,
    "no UTF-8": b'{"a": "\xff"}',
    "a number of too many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "a reason for what is not there": b'{"not_numbers": {"/a": "NaN"}}',
    "a reason for a number": b'{"a": 1, "not_numbers": {"/a": "NaN"}}',
    "an unknown reason": b'{"a": null, "not_numbers": {"/a": []}}',
    "a list": b"[1]",
    "a number": b"7",
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_document_is_a_value_error(case: str, tmp_path: Path):
    path = tmp_path / "document.json"
    path.write_bytes(BAD[case])
    with pytest.raises(ValueError):
        strict_json.read(path)


@pytest.mark.parametrize(
    ("hint", "value"),
    [(float, True), (int, True), (int, 1.0), (bool, 1), (str, None), (Path, "a\0b"), (Path, 3), (list[int], [1, True])],
)
def test_a_value_of_another_type_is_refused_by_its_name(hint: Any, value: Any):
    with pytest.raises(ValueError, match=r"^it\S* = "):
        strict_json.of_type(hint, value, "it")


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [(float, 1, 1), (int | None, None, None), (Path, "a/b", Path("a/b")), (tuple[int, ...], [1, 2], (1, 2))],
)
def test_a_value_becomes_what_its_type_says(hint: Any, value: Any, found: Any):
    assert strict_json.of_type(hint, value, "it") == found


def test_a_document_that_lacks_a_field_is_refused_with_those_it_has():
    assert strict_json.of_type(Pair, {"first": 1, "second": "x"}, "it") == Pair(1, "x")
    with pytest.raises(ValueError, match="it is not all there: it has only first"):
        strict_json.of_type(Pair, {"first": 1}, "it")
    with pytest.raises(ValueError, match="it has 'third', which this version of meshrun does not know"):
        strict_json.of_type(Pair, {"first": 1, "second": "x", "third": 1}, "it")
