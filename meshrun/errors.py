"""The ways in which meshrun gives up, as sentences and not as tracebacks.

The ground floor of the house: every room may import it, it imports nothing.

    raise UserError("batch is 0; it must be at least 1 (--batch)")
"""

from __future__ import annotations

import errno
import os

_OF_MACHINE = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENODEV, errno.ENXIO),
        *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
    }
)
"""What is wrong with a disk, with the way to a server, or with what a process may have."""


LONGEST = 1000
"""Characters of a sentence that are shown, from its beginning and from its end."""


class UserError(Exception):
    """What the user gave cannot work: one sentence, exit status 2."""


class SharedError(UserError):
    """A UserError that all ranks of a job meet alike: rank 0 says it for all."""


class BadSample(UserError):
    """One sample cannot be used: a sentence with its number and its file. `--skip-bad-samples` goes on without it."""


class WrongTarget(UserError):
    """A target that a loss cannot take: what it is, and its row in the batch, for whoever knows whose that is."""

    def __init__(self, what: str, row: int, name: str = "") -> None:
        super().__init__(f"the target of {name or f'row {row} of a batch'} {what}")
        self.what, self.row = what, row


class RunFailed(Exception):
    """The run itself failed (an error of the program, a loss that is not a number): one sentence, exit status 1."""


class CutOff(RunFailed):
    """The run lost what it needs (ranks, nodes, its time), and may go well another time: exit status 75."""


class StoppedByHand(RunFailed):
    """The user has pressed CTRL-C, and a sentence says how it goes on: exit status 130."""


def described(error: BaseException) -> str:
    """The class and the message of an exception, also of one whose class cannot say its message."""
    try:
        message = str(error).strip()
    except Exception as failure:  # the program's own class has a wrong __str__
        message = f"its message cannot be read, since __str__ raises {type(failure).__name__}"
    return f"{type(error).__name__}: {message or 'no message'}{cure_of(error)}"


def cure_of(error: BaseException) -> str:
    """What helps against an error of the system whose own words do not say it."""
    too_many = isinstance(error, OSError) and error.errno == errno.EMFILE
    return " (ulimit -n shows and sets how many files a process may have open)" if too_many else ""


def brief(text: str) -> str:
    """A sentence of bounded length: what a user gave may be megabytes long, and sentences quote it."""
    return text if len(text) <= 2 * LONGEST else f"{text[:LONGEST]} […] {text[-LONGEST:]}"


def printable(text: str) -> str:
    """A text that cannot do anything to a terminal but be read there: control characters are written out."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


def is_of_machine(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says nothing of the data: another machine may read it well."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_MACHINE:
            return True
        error = error.__cause__ or error.__context__
    return False


def unreadable_here(file: object, why: str) -> RunFailed:
    """Where a machine cannot read a file; not a bad sample, which would be left out by this machine alone."""
    return RunFailed(f"{file} cannot be read on {os.uname().nodename}: {why}; try again, or on other machines")
