"""How ranks find rank 0 under launchers that do not say where it is: a small file in the run directory.

Rank 0 writes its address, the others look until it answers:

    publish(run, world.job, world.attempt, own_address(world, site), port, secret)   # rank 0
    where = lookup(run, world.job, world.attempt)                        # the others, until it is not None
    store = lookup_store(run, world.job, world.attempt)                  # the same with the secret that the store asks
    withdraw(run, world.job, world.attempt)                              # rank 0, when all have come
    forget(run, "4711")                                                  # who ends the Slurm job

A file left by a launch that died looks like a good one: whoever cannot connect to what it says looks again. Only its
owner can read the file, and a file of another user is refused: that user would decide to whom ranks connect.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshrun import strict_json
from meshrun.config import write_json
from meshrun.errors import UserError
from meshrun.files import open_plain
from meshrun.world.detect import World
from meshrun.world.network import address_of
from meshrun.world.sites import load

FOLDER = ".rendezvous"
FIELDS = ((str, "address"), (int, "port"))


def publish(folder: Path, job: str, attempt: int, address: str, port: int, secret: bytes = b"") -> Path:
    """Write where rank 0 listens, so that a reader sees all of it or nothing."""
    path = _path(folder, job, attempt)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, {"address": address, "port": port, "secret": secret.hex()}, mode=0o600)
    except OSError as error:
        raise UserError(
            f"the rendezvous file {path} cannot be written ({error.strerror}); "
            "the run directory must be writable from every node"
        ) from error
    return path


def lookup(folder: Path, job: str, attempt: int) -> tuple[str, int] | None:
    """What stands there now, or None while nothing complete does."""
    found = lookup_store(folder, job, attempt)
    return found[:2] if found is not None else None


def lookup_store(folder: Path, job: str, attempt: int) -> tuple[str, int, bytes] | None:
    """The same, and the secret that a client of the store there has to know."""
    path = _path(folder, job, attempt)
    try:
        # NFS remembers for up to a minute that a name was absent; listing the folder asks the server again.
        if path.name not in os.listdir(path.parent):  # noqa: PTH208
            return None
        with open_plain(path) as file:  # asked of the open file: another user could put his own in its place meanwhile
            owner = os.fstat(file.fileno()).st_uid
            if owner != os.getuid():
                raise UserError(
                    f"the rendezvous file {path} belongs to another user, whose number is {owner}; runs that several "
                    f"users start need a folder for each of them (--runs)"
                )
            found = strict_json.of_type(dict[str, Any], strict_json.loads(file.readall()), "it")
        address, port = (strict_json.of_type(kind, found.get(name), name) for kind, name in FIELDS)
        secret = bytes.fromhex(strict_json.of_type(str, found.get("secret", ""), "secret"))
    except (OSError, ValueError):
        return None
    return (address, port, secret) if 0 <= port < 65536 else None


def withdraw(folder: Path, job: str, attempt: int) -> None:
    """Take the file away once every rank has come: nobody looks for it any more."""
    _path(folder, job, attempt).unlink(missing_ok=True)


def forget(folder: Path, job: str) -> None:
    """Take away what the steps of a Slurm job have left: ranks that were killed withdraw nothing."""
    for path in (folder / FOLDER).glob(f"slurm-{quote(job, safe='', errors='surrogateescape')}.*"):
        path.unlink(missing_ok=True)


def own_address(world: World, site: str | None = None) -> str:
    """An address of this machine that all ranks of the world can reach, by the rule of the site of that name."""
    return address_of(world, load(site) if site is not None else None)


def _path(folder: Path, job: str, attempt: int) -> Path:
    if not job:
        raise UserError(
            "the launcher gives its ranks nothing to find each other by (mpiexec over several nodes, outside Slurm); "
            "start with torchrun, mpirun of Open MPI, or inside a Slurm job"
        )
    name = quote(job, safe="", errors="surrogateescape")
    if len(name) > 150:
        name = hashlib.sha256(os.fsencode(job)).hexdigest()
    return folder / FOLDER / f"{name}-{attempt}.json"
