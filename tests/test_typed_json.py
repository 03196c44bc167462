"""Values that ranks exchange come back as they were, and whatever could execute code is refused."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest

from meshrun.typed_json import decode, encode

VALUES = [
    None, True, 0, -1, 1 << 80, 0.1, -0.0, 1e-320, math.inf, -math.inf, "", "grüße \udce9 \0 \"", b"\0\xff",
    [], (), [1, (2, [3.0, None])], {"a"}, frozenset({1, 2}), set(), Path("runs/a b"),
    {"a": 1, 2: "b", (1, "x"): {"set": [1]}, None: {"dict": 3}}, {}, {"tuple": [1, 2]}, [{1: 2}, {"1": 2}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value: object):
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value)


def test_nan_comes_back():
    (found,) = decode(encode((math.nan,)))
    assert math.isnan(found)


def test_numbers_of_other_types_come_back_as_python_numbers():
    back = decode(encode([np.float64(0.1), np.int64(3), np.float32(0.5), np.bool_(True), signal.SIGTERM]))
    assert back == [0.1, 3, 0.5, True, 15]
    assert [type(each) for each in back] == [float, int, float, bool, int]


def test_the_order_of_a_dict_stays():
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]


@pytest.mark.parametrize(
    "value",
    [object(), len, np.zeros(2), {"deep": [lambda: 0]}, 1j],
    ids=["object", "function", "array", "inside", "complex"],
)
def test_a_value_that_json_cannot_carry_is_refused_by_its_type(value: object):
    with pytest.raises(TypeError, match=r"object|builtin_function_or_method|ndarray|function|complex"):
        encode(value)


@pytest.mark.parametrize("raw", [{"eval": "1"}, {"tuple": 1}, {"a": 1, "b": 2}, {}])
def test_an_unknown_name_is_an_error_and_executes_nothing(raw: object):
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(json.dumps(raw).encode())
