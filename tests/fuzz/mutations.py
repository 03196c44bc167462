"""Damages to valid examples of a format, drawn from a seed so that each can be made again.

    rng = random.Random("tokens 1 17")
    of_bytes(rng, examples)              # flipped bits, lost and doubled parts, lengths beyond reason, …
    of_json(rng, examples)               # the same, or values of other types, lost and doubled keys, deep nesting
    of_text(rng, examples)               # for what people and launchers write: digits, brackets, control characters
    in_gzip(of_json)(rng, examples)      # the damage is inside, under the right checksum

A mutator is a function of a random generator and of the format's examples.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

Mutator = Callable[[random.Random, Sequence[bytes]], bytes]

INTEGERS = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 1023, 1024, 32767, 65535, 65536, 99_999_999, 10**9, 10**12)
EDGES = (2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**59, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)
DEEP = 100_000
"""Levels of nesting that no recursive reader survives by itself."""
MARK = "\ue000deep\ue000"
"""Stands in a document where deep nesting goes, which json.dumps could not write."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\0", "\x1b[31m", "\ud800", "../../etc/passwd", "NaN", "-1", "1" * 5000, "²", "٣"),
    *([], [[]], {}, {"": None}, [None], [1, "x"], 1.5, -0.0, 1e300, float("nan"), float("inf"), float("-inf")),
    *(*INTEGERS, *EDGES, 10**30, MARK, "x" * 300, "a/b", ".", "..", "\n", "é" * 130),
)
KEYS = ("x", "", "\0", "__float__", "\ud800", "a/b", "model/x", "buffer/x@0", "é" * 130)
WORDS = (
    *("", " ", ",", ",,", ";", ":", "-", "--", "=", "*", "[", "]", "[[", "(", ")", "(x", "\0", "\n", "\r\n", "\t", "²"),
    *(
        "٣",
        "\uff10",
        "é",
        "\ud800",
        "\u2028",
        "\x1b[2J",
        "nan",
        "inf",
        "-1",
        "+2",
        "0x2",
        "1e3",
        "1_000",
        "None",
        "true",
    ),
    *("999999999", "99999999999999999999", "[0-999999]", "[1-99999999999]", "(x999999999)", "..", "../", "/", "$(id)"),
)


def of_bytes(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """One to four damages to one of the examples, of which short ones also stand for a whole file."""
    data = bytearray(rng.choice(examples))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(_DAMAGES)(rng, data, examples)
    return bytes(data)


def of_json(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """Damage to the values of a document, to its text, or to both; examples of several lines are damaged in one."""
    if rng.random() < 0.3:
        return of_bytes(rng, examples)
    lines = rng.choice(examples).split(b"\n")
    number = rng.choice([number for number, line in enumerate(lines) if line.strip()] or [0])
    whole = not _is_json(lines[number])
    document = json.loads(b"\n".join(lines) if whole else lines[number] or b"null")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = changed(rng, document)
    text = written(rng, document)
    result = text if whole else b"\n".join([*lines[:number], text, *lines[number + 1 :]])
    return of_bytes(rng, [result]) if rng.random() < 0.1 else result


def of_text(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """Damage to a text of words and numbers."""
    if rng.random() < 0.2:
        return of_bytes(rng, examples)
    text = rng.choice(examples).decode(errors="surrogateescape")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 0, 1, 1, 2, 5, 20)))
        part = text[at:end]
        match rng.randrange(6):
            case 0:
                text = text[:at] + rng.choice(WORDS) + text[end:]
            case 1:
                text = text[:at] + text[end:]
            case 2:
                text = text[:at] + (part or rng.choice(WORDS)) * rng.choice((2, 3, 50, 2000)) + text[end:]
            case 3:
                text = with_another_number(rng, text)
            case 4:
                other = rng.choice(examples).decode(errors="surrogateescape")
                text = text[:at] + other[rng.randrange(len(other) + 1) :]
            case _:
                bracket = rng.choice(("[", "(", "{", "[0-9]"))
                text = text[:at] + bracket * rng.choice((2, 30, DEEP)) + text[end:]
    return text.encode(errors="surrogatepass")


def in_gzip(mutate: Mutator) -> Mutator:
    """Damage to what a packed file holds, packed again, or to the packed file itself."""

    def damaged(rng: random.Random, examples: Sequence[bytes]) -> bytes:
        if rng.random() < 0.5:
            return of_bytes(rng, examples)
        return gzip.compress(mutate(rng, [gzip.decompress(each) for each in examples]), 1, mtime=0)

    return damaged


def changed(rng: random.Random, document: Any) -> Any:
    """A document with one of its values, keys or rows changed."""
    if not isinstance(document, dict | list) or not document or rng.random() < 0.1:
        return rng.choice(VALUES)
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = rng.choice(keys)
    if isinstance(document[key], dict | list) and document[key] and rng.random() < 0.8:
        inner = changed(rng, document[key])
        return _with(document, key, inner)
    match rng.randrange(6):
        case 0:
            return _without(document, key)
        case 1 if isinstance(document, dict):
            return {**_without(document, key), rng.choice((*KEYS, key + "s", key + "1" * 5000)): document[key]}
        case 1:
            return [*document, document[key]]
        case 2:
            return _with(document, key, document[rng.choice(keys)])
        case 3 if isinstance(document[key], int | float) and not isinstance(document[key], bool):
            return _with(document, key, document[key] + rng.choice((-1, 1, 8, -8, 0.5)))
        case _:
            return _with(document, key, rng.choice(VALUES))


def written(rng: random.Random, document: Any) -> bytes:
    """A document as JSON, with the nesting that is asked for in it; sometimes with a key that is there twice."""
    text = json.dumps(document)
    if json.dumps(MARK) in text:
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
        end = closing * DEEP if rng.random() < 0.5 else ""
        text = text.replace(json.dumps(MARK), opening * DEEP + "1" * bool(end) + end)
    if rng.random() < 0.05 and text.startswith("{") and isinstance(document, dict) and document:
        key = rng.choice(list(document))
        text = "{" + f"{json.dumps(key)}: {json.dumps(rng.choice(VALUES))}, " + text[1:]
    return text.encode()


def with_another_number(rng: random.Random, text: str) -> str:
    """A text in which one of its numbers is another one."""
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    found = rng.choice(numbers)
    return text[: found.start()] + str(rng.choice((*INTEGERS, *EDGES, 10**30))) + text[found.end() :]


def _with(document: Any, key: Any, value: Any) -> Any:
    if isinstance(document, dict):
        return {**document, key: value}
    return [*document[:key], value, *document[key + 1 :]]


def _without(document: Any, key: Any) -> Any:
    if isinstance(document, dict):
        return {each: value for each, value in document.items() if each != key}
    return [*document[:key], *document[key + 1 :]]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


Damage = Callable[[random.Random, bytearray, Sequence[bytes]], bytearray]


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 3, 10))):
        if data:
            data[_place(rng, data)] ^= 1 << rng.randrange(8)
    return data


def _byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    if data:
        data[_place(rng, data)] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
    return data


def _integer(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    """Another number where a count, a length or an offset may stand, in either byte order."""
    form = rng.choice(("B", "<H", "<I", "<Q", "<q", ">H", ">I", ">Q"))
    width = struct.calcsize(form)
    if len(data) >= width:
        at = min(_place(rng, data), len(data) - width)
        if rng.random() < 0.5:
            at -= at % width
        value = rng.choice((*INTEGERS, *EDGES, len(data), len(data) + 1, len(data) // 2))
        data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little" if form[0] == "<" else "big")
    return data


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    return data[: rng.choice((0, 1, 7, 8, len(data) // 2, len(data) - 1, rng.randrange(len(data) + 1)))]


def _lose(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64, 512)) :]


def _double(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    part = data[at : at + rng.choice((1, 8, 64, 512))]
    return data[:at] + part * rng.choice((2, 2, 3, 40)) + data[at + len(part) :]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    more = rng.choice((b"\0", b"\xff", b"\n", b'"', b"{", b"[", b"\0" * 4096, b"\xff\xfe", rng.randbytes(16)))
    return data[:at] + more + data[at:]


def _splice(rng: random.Random, data: bytearray, examples: Sequence[bytes]) -> bytearray:
    other = rng.choice(examples)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _swap(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    width, places = rng.choice((4, 8, 64)), max(1, len(data) - 64)
    one, other = sorted((rng.randrange(places), rng.randrange(places)))
    if one + width <= other:
        data[one : one + width], data[other : other + width] = data[other : other + width], data[one : one + width]
    return data


def _digits(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    """Another number in the part of a file that is text."""
    text = bytes(data[:65536]).decode("latin-1")
    return bytearray(with_another_number(rng, text).encode("latin-1")) + data[65536:]


def _whole(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    """Something else altogether; seldom, as there is little to be found."""
    if rng.random() < 0.8:
        return data
    return bytearray(
        rng.choice((b"", b"\0" * 4096, b"[" * DEEP, b'{"a":' * DEEP, b"\xff" * 100, b"null", b"[]", b"7", b"hello\n"))
    )


def _place(rng: random.Random, data: bytearray) -> int:
    """Mostly at the beginning or at the end, where headers and tables of contents stand."""
    return rng.choice(
        (
            rng.randrange(len(data)),
            rng.randrange(min(len(data), 512)),
            len(data) - 1 - rng.randrange(min(len(data), 512)),
        )
    )


_DAMAGES: tuple[Damage, ...] = (
    *(_flip, _flip, _byte, _integer, _integer, _cut, _lose, _double, _insert, _splice, _swap, _digits, _whole),
)
