"""The warm process of a node: imports what ranks need, then becomes one of them whenever the launcher asks for it.

    meshrun nursery FD PID digits        # FD is its end of a socket; PID, the launcher, takes it along when it ends

Not for people: `run` starts it. Of the training's own file only the imports are read, and only what is installed is
imported: whatever the file itself does, each rank does for itself.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import site
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshrun.cli.collecting import importing
from meshrun.cli.command import own_words
from meshrun.cli.target import find
from meshrun.config import RunConfig, whole_number
from meshrun.errors import UserError
from meshrun.launch.local import die_with_launcher
from meshrun.launch.nursery import serve
from meshrun.launch.ranks import Nursery
from meshrun.world import detect
from meshrun.world.environment import inherited

NEEDED = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes longer than torch's own import
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "meshrun.cli.rank",
)
"""What every rank imports."""


def nursery_for(
    words: list[str], target: str | None, before: RunConfig | None = None
) -> contextlib.AbstractContextManager[Nursery | None]:
    """The process that ranks will be forked from, already importing while this one still reads what is asked for.

    It is a guess from the words, and from what a run was `before`: one that is not needed does no harm.
    """
    if target is None or target.startswith("-") or "--help" in own_words(words):
        return contextlib.nullcontext()
    world = detect(os.environ)
    words = own_words(words)
    given = re.search(r"(?:^|\0)--procs[=\0](\d+)", "\0".join(words))
    procs = whole_number(given[1]) if given else before.procs if before else None
    named = any(word.startswith(("--nodes", "--join")) for word in words)
    if world.source == "none":
        several = (procs or 1) > 1 or named
    else:
        from meshrun.launch.agents import ranks_to_start  # late: `run --help` needs none of what it imports

        guess = replace(before or RunConfig(target), procs=procs)
        guess = replace(guess, nodes="2") if named else guess
        several = ranks_to_start(world, guess, inherited()) is not None
    return Nursery(target) if several else contextlib.nullcontext()


def nursery_command(fd: int, launcher: int, target: str | None) -> list[str]:
    """Returns in a rank only: the words of the command that it is to run."""
    die_with_launcher(launcher)
    # Slurm tells all processes of a job that it will end. This one ends with the launcher, and not before its ranks.
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with importing():
        for name in NEEDED:
            importlib.import_module(name)
        if target is not None:
            with contextlib.suppress(UserError):
                warm_up(find(target).path)
    return serve(fd)


def warm_up(file: Path) -> None:
    """Import the installed modules that a file imports; one that fails is left to the ranks, who will say so."""
    for name in imports_of(file):
        with contextlib.suppress(Exception, SystemExit):
            if is_installed(name):
                importlib.import_module(name)


def imports_of(file: Path) -> Iterator[str]:
    """The modules that a file imports at its top level."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def is_installed(name: str) -> bool:
    """Whether a module lies where packages are installed, and not beside the user's own files."""
    found = importlib.util.find_spec(name.partition(".")[0])
    if found is None or found.origin is None:
        return False
    if found.origin in ("built-in", "frozen"):
        return True
    paths = sysconfig.get_paths()
    homes = [paths["stdlib"], paths["purelib"], paths["platlib"], site.getusersitepackages()]
    return any(Path(found.origin).is_relative_to(home) for home in homes)
