"""What a program costs in terms of another one, measured by turns: slow and busy machines give the same answer.

assert cost(["-m", "meshrun", "--help"], beside=TYPER, at_most=3) < 3     # times as much
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPER = ["-c", "import typer, rich.console"]
"""What every command of meshrun needs to read its words and to answer: a tenth of a second on an idle machine."""


def cost(words: list[str], beside: list[str], at_most: float, rounds: int = 8) -> float:
    """The least processor time that Python takes for these words, as a multiple of its least for the others.

    No more rounds are made once it is clearly below what is allowed.
    """
    own, other = float("inf"), float("inf")
    for _ in range(rounds):
        own, other = min(own, _seconds(words)), min(other, _seconds(beside))
        if own < 0.9 * at_most * other:
            break
    return own / other


def _seconds(words: list[str]) -> float:
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # of this child only: others of this process may end meanwhile
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return used.ru_utime + used.ru_stime
