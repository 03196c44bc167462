"""One launcher a node, all of them started by Slurm or MPI: how those of the other nodes find the first one's.

    hub = open_hub(world, config.runs, run.path, address)      # the first node's, which has made the run
    post = find_hub(world, config.runs, ranks=4, patience=600) # the others'
    close_hub(world, config.runs)                              # the first node's, when the run is over

The first one writes where it listens beside the runs. It also prefers a port that all can guess, so that a node which
does not see that folder finds the run all the same, and both sides learn what is wrong instead of waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from meshrun import strict_json
from meshrun.config import RunConfig
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch import munge, secret
from meshrun.launch.nodes import LINE, Hub, nodes_of
from meshrun.launch.post import CONNECTED, Post, directory_named, lines, prove
from meshrun.launch.wire import Wire
from meshrun.store.server import LOOPBACK
from meshrun.world import World
from meshrun.world.rendezvous import FOLDER, lookup, publish, withdraw
from meshrun.world.slurm import gpus_on_node

BEGUN = 10.0
"""Seconds in which the first node listens, or has said that it will not."""
OLD = 3600.0
"""Seconds after which nobody reads any more that a first node has given up."""
UNSEEN = 3.0
"""Seconds after which a node that has read no address tries the port that it can guess."""
ANSWERED = 10.0
"""Seconds in which a first node has answered, whatever it is asked."""
PORTS = range(20_000, 32_000)
"""Those to guess from: below the ones that systems give away by themselves."""


def ranks_to_start(world: World, config: RunConfig, env: Mapping[str, str]) -> int | None:
    """How many ranks this task starts as the launcher of its node; None if it is a rank itself.

    It is a launcher where there is one task a node and more to do than one rank can. All tasks decide alike, though
    nodes may have different numbers of them.
    """
    if world.source in ("none", "torchrun") or world.size > world.nodes:
        return None
    ranks = config.procs or (gpus_on_node(env) if config.device != "cpu" else None) or 1
    several = ranks > 1 or config.join is not None or nodes_of(config.nodes)[1] > 1
    return ranks if several else None


def open_hub(world: World, runs: Path, run: Path, address: str, port: int | None) -> Hub:
    """The place where other nodes join, written down where they look for it."""
    at = address if address == LOOPBACK else ""
    hub = Hub(port, run, at) if port else _on_likely_port(world, run, at)
    publish(runs, world.job, world.attempt, address, hub.port)
    _sweep(runs)
    return hub


def give_up(world: World, runs: Path) -> None:
    """Nobody will listen: the other nodes need not wait. The first one says why."""
    with contextlib.suppress(UserError):
        publish(runs, world.job, world.attempt, "", 0)
        _sweep(runs)


def begin(world: World, runs: Path) -> None:
    """On the first node: what a launch before has left under the same name is not this one's."""
    if world.job:
        close_hub(world, runs)


def excuse(world: World, runs: Path, why: str) -> None:
    """On another node than the first, which cannot take part: tell the first one, which would wait for it."""
    give_up = time.monotonic() + BEGUN
    while time.monotonic() < give_up:
        where = lookup(runs, world.job, world.attempt)
        if where is not None and where[1] == 0:
            return
        if where is not None:
            with contextlib.suppress(OSError, UserError, RunFailed):
                connection = socket.create_connection(where, timeout=CONNECTED)
                with contextlib.closing(Wire(connection, LINE)) as wire:
                    prove(wire, f"{where[0]}:{where[1]}", give_up)
                    wire.send({"unfit": socket.gethostname(), "why": why})
                    return
        time.sleep(0.2)


def close_hub(world: World, runs: Path) -> None:
    with contextlib.suppress(OSError):
        withdraw(runs, world.job, world.attempt)


def find_hub(world: World, runs: Path, ranks: int, patience: float) -> Post:
    """Join the run of the first node; what a dead one has left does not answer, and is read again."""
    _refuse_unwritable(runs)
    began = time.monotonic()
    while (now := time.monotonic()) < began + patience:
        where = lookup(runs, world.job, world.attempt)
        if where is None:
            if now > began + UNSEEN:
                refuse_blindness(world)
        elif where[1] == 0:
            raise RunFailed("")
        else:
            try:
                wire = Wire(socket.create_connection(where, timeout=CONNECTED), LINE)
                # Not for long: a stranger who says nothing must not keep this node from the true address.
                return Post.welcomed(wire, f"{where[0]}:{where[1]}", ranks, min(began + patience, now + ANSWERED))
            except secret.Unseen:
                _refuse_blindness(where)
            except (OSError, RunFailed, UserError):  # a stranger at the address of a launch that has died
                pass
        time.sleep(0.05)
    raise RunFailed(
        f"{world.host} waited {patience:.0f} s for the run's first node to write its address into "
        f"{runs / FOLDER}, which all nodes must see (--runs, --timeout)"
    )


def refuse_blindness(world: World) -> None:
    """Ask the first node at the port that can be guessed, if it is there, whether this one sees its run's directory.

    A node that does not is refused here, and the first node learns that it would wait in vain.
    """
    if world.hosts:
        _refuse_blindness((world.hosts[0], likely_port(world.job)))


def _refuse_blindness(where: tuple[str, int]) -> None:
    with contextlib.suppress(OSError, RunFailed):
        connection = socket.create_connection(where, timeout=CONNECTED)
        with contextlib.closing(Wire(connection, LINE)) as wire:
            blindness = _proven_blindness(wire)
        if blindness is not None:
            raise blindness


def _proven_blindness(wire: Wire) -> secret.Unseen | None:
    """What is wrong if this node does not see the run directory of whoever has answered, who is of the same user.

    A node that does not see the directory cannot read its secret, so that the two sides know each other by MUNGE.
    Without MUNGE neither believes the other: both wait for as long as they would without a word.
    """
    said = lines(wire, time.monotonic() + ANSWERED)
    match next(said, None):
        case {"run": str(path), "nonce": str(nonce)}:
            try:
                secret.read(directory_named(path))
            except secret.Unseen as unseen:
                host, answer = socket.gethostname(), secret.new_nonce()
                if sent := munge.credential(secret.JOINING, host, path, nonce, answer):
                    wire.send({"blind": host, "nonce": answer, "credential": sent})
                    match next(said, None):
                        case {"credential": str(found)} if munge.is_own(found, secret.FIRST, path, nonce, answer):
                            return unseen
            except UserError:  # a directory of somebody else's: it is no run of this user that has answered
                return None
    return None


def likely_port(job: str) -> int:
    """The same for all nodes of a job, and seldom that of another."""
    return PORTS[int.from_bytes(hashlib.sha256(job.encode(errors="surrogateescape")).digest()[:8]) % len(PORTS)]


def _on_likely_port(world: World, run: Path, at: str) -> Hub:
    try:
        return Hub(likely_port(world.job), run, at)
    except UserError:
        return Hub(0, run, at)


def _sweep(runs: Path) -> None:
    """Remove what launches that gave up long ago have left for nodes that may never have come."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        folder = runs / FOLDER
        now = folder.stat().st_mtime  # a file was written into it just now, by the clock of the file system
        for file in folder.glob("*.json"):
            if now - file.stat().st_mtime > OLD and strict_json.read(file).get("port") == 0:
                file.unlink(missing_ok=True)


def _refuse_unwritable(runs: Path) -> None:
    """The first node says the same of the disk that they share."""
    folder = runs / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise SharedError(f"cannot make a run directory in {runs}: {error.strerror} (--runs)") from None
