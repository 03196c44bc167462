"""Slurm's short forms, written out: node lists, and tasks per node.

expand_hosts("jwb[0001-0003,0010]i,n5")   # jwb0001i jwb0002i jwb0003i jwb0010i n5
expand_hosts("n[1-2,1[0-1]]")             # n1 n2 n10 n11
expand_tasks("4(x2),3")                   # 4 4 3
"""

from __future__ import annotations

import re

from meshrun.errors import UserError

LIMIT = 200_000
"""More hosts than any machine has: a longer list is a typing error, and is refused before it takes memory."""

_LONGEST = 255
"""Characters of a host's name; DNS allows no more."""
_DEEPEST = 8
_WORD = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """Every host of a node list, in its order; zero padding is kept."""
    hosts, end = _parts(text, 0, depth=0)
    if end < len(text):
        raise _bad_hosts(text, end, "a ']' without its '['")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node, from a form such as `4(x2),3`."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or times == 0:
            raise UserError(
                f"tasks per node {text!r} cannot be read at {part!r}; a part is a number, or one such as 4(x2)"
            )
        if len(tasks) + times > LIMIT:
            raise UserError(f"tasks per node {text!r} names more than {LIMIT} nodes at {part!r}")
        tasks += [int(match[1])] * times
    return tasks


def _parts(text: str, at: int, depth: int) -> tuple[list[str], int]:
    """What stands between commas from `at` on, and where it ends: at a `]` or at the end of the text."""
    names: list[str] = []
    while True:
        found, end = _part(text, at, depth)
        if len(names) + len(found) > LIMIT:
            raise _too_many(text, at)
        names += found
        if end == len(text) or text[end] == "]":
            return names, end
        at = end + 1


def _part(text: str, at: int, depth: int) -> tuple[list[str], int]:
    """One part: words and brackets in a row, each combined with all before it."""
    start, names = at, [""]
    while at < len(text) and text[at] not in ",]":
        begin = at
        if text[at] == "[":
            found, at = _bracket(text, at, depth + 1)
        elif word := _WORD.match(text, at):
            found, at = (_range(text, at, word[0]) if depth else [word[0]]), word.end()
        else:
            raise _bad_hosts(text, at, f"{text[at]!r}, which no host name has")
        if len(names) * len(found) > LIMIT:
            raise _too_many(text, begin)
        if len(names[0]) + len(found[0]) > _LONGEST:
            raise _bad_hosts(text, begin, f"a name of more than {_LONGEST} characters")
        names = [name + more for name in names for more in found]
    if at == start:
        raise _bad_hosts(text, at, "an empty part")
    return names, at


def _bracket(text: str, at: int, depth: int) -> tuple[list[str], int]:
    if depth > _DEEPEST:
        raise _bad_hosts(text, at, f"brackets nested deeper than {_DEEPEST}")
    found, end = _parts(text, at + 1, depth)
    if end == len(text):
        raise _bad_hosts(text, at, "a '[' that is never closed")
    return found, end + 1


def _range(text: str, at: int, word: str) -> list[str]:
    match = _RANGE.fullmatch(word)
    if match is None:
        raise _bad_hosts(text, at, f"{word!r} in brackets, where only numbers and ranges such as 01-16 may stand")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _bad_hosts(text, at, f"the descending range {word!r}")
    if last - first >= LIMIT:
        raise _too_many(text, at)
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]


def _bad_hosts(text: str, at: int, what: str) -> UserError:
    return UserError(f"host list {text!r} has {what}, at character {at + 1}")


def _too_many(text: str, at: int) -> UserError:
    return _bad_hosts(text, at, f"more than {LIMIT} hosts")
