"""What a program costs in terms of another one, measured by turns: slow and busy machines give the same answer.

assert cost(["-m", "meshrun", "--help"], beside=SMALL_HELP, at_most=1.7) < 1.7     # times as much
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL_HELP = [
    "-c",
    """
import typer

def main(target: str, steps: int = 3, rate: float = 0.1, name: str = "x", quiet: bool = False) -> None:
    "The help of a program of one command, which is all that it does."

typer.run(main)
""",
    "--help",
]
"""Typer alone: 0.18 s on an idle machine on which `meshrun --help`, too, takes less than 0.2 s."""


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
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # of this child only: others of this process may end meanwhile
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return used.ru_utime + used.ru_stime
