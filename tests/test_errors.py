"""Sentences on errors: what is said of those that cannot say it themselves, and which are the machine's."""

from __future__ import annotations

import errno

import pytest

from meshrun.errors import LONGEST, brief, described, is_of_machine


class Wordless(Exception):
    def __str__(self) -> str:
        raise AttributeError("no such field")


def test_an_error_that_cannot_say_its_message_is_told_by_its_class():
    assert described(Wordless()) == "Wordless: its message cannot be read, since __str__ raises AttributeError"
    assert described(ValueError()) == "ValueError: no message"


def test_a_long_sentence_keeps_its_beginning_and_its_end():
    text = "a" * LONGEST + "b" * LONGEST
    assert brief(text) == text
    shown = brief(f"{text}c")
    assert shown.startswith("a" * LONGEST) and shown.endswith("bc") and len(shown) < len(text) + 10


def raised(cause: str, error: OSError) -> BaseException:
    try:
        try:
            raise error
        except OSError as failed:
            if cause == "said":
                raise ValueError("cannot decode") from failed
            raise ValueError("cannot decode")  # noqa: B904 - as programs do
    except ValueError as found:
        return found


@pytest.mark.parametrize("cause", ["said", "left to Python"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.ECONNRESET])
def test_an_error_that_came_of_the_machine_says_nothing_of_the_data(cause: str, code: int):
    assert is_of_machine(raised(cause, OSError(code, "failed")))
    assert not is_of_machine(raised(cause, OSError(errno.EINVAL, "failed")))
