"""The ways in which meshrun gives up, as sentences and not as tracebacks.

The ground floor of the house: every room may import it, it imports nothing.

    raise UserError("batch is 0; it must be at least 1 (--batch)")
"""

from __future__ import annotations


class UserError(Exception):
    """What the user gave cannot work: one sentence, exit status 2."""


class SharedError(UserError):
    """A UserError that all ranks of a job meet alike: rank 0 says it for all."""


class BadSample(UserError):
    """One sample cannot be used: a sentence with its number and its file. `--skip-bad-samples` goes on without it."""


class RunFailed(Exception):
    """The run itself failed (an error of the program, a loss that is not a number): one sentence, exit status 1."""


class CutOff(RunFailed):
    """The run lost what it needs (ranks, nodes, its time), and may go well another time: exit status 75."""
