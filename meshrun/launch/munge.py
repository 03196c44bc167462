"""Messages that this user's processes on other nodes of a cluster can believe, though they share no file: by MUNGE.

    sent = credential("blind", "n2")         # None where the machine has no MUNGE, by which Slurm knows users
    is_own(sent, "blind", "n2")              # on another node: True if a process of the same user has made it

A credential can be checked once, and only for some minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess

PATIENCE = 5.0
"""Seconds that the service may take for one credential."""
LONGEST = 16 << 10
"""The most bytes of a credential that are read."""


def credential(*words: str) -> str | None:
    """These words, signed for this user; None where the machine has no service that signs them."""
    return _answer(["munge", f"--restrict-uid={os.getuid()}"], json.dumps(words))


def is_own(said: str, *words: str) -> bool:
    """Whether a text is a credential that a process of this user has made for these words."""
    answer = _answer(["unmunge", "--keys=STATUS,UID"], said) if len(said) <= LONGEST else None
    if answer is None:
        return False
    head, _, payload = answer.partition("\n\n")
    return re.search(rf"^UID:.*\b{os.getuid()}\)?$", head, re.MULTILINE) is not None and payload == json.dumps(words)


def _answer(command: list[str], text: str) -> str | None:
    try:
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeEncodeError):
        return None
    return ended.stdout
