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
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from meshrun.config import RunConfig
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch import secret
from meshrun.launch.nodes import LINE, Hub, nodes_of
from meshrun.launch.post import CONNECTED, Post, secret_of
from meshrun.launch.wire import Wire
from meshrun.world import World
from meshrun.world.rendezvous import FOLDER, lookup, publish, withdraw
from meshrun.world.slurm import gpus_on_node

BEGUN = 10.0
"""Seconds in which the first node listens, or has said that it will not."""
OLD = 3600.0
"""Seconds after which nobody reads any more that a first node has given up."""
UNSEEN = 3.0
"""Seconds after which a node that has read no address tries the port that it can guess."""
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
    hub = Hub(port, run) if port else _on_likely_port(world, run)
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
            with contextlib.suppress(OSError, UserError):
                connection = socket.create_connection(where, timeout=CONNECTED)
                with contextlib.closing(Wire(connection, LINE)) as wire:
                    for said in wire.receive():
                        match said:
                            case {"run": str(run), "nonce": str(nonce)}:
                                proof = secret.proof(secret_of(Path(run), wire), nonce)
                                wire.send({"unfit": socket.gethostname(), "why": why, "proof": proof})
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
            with contextlib.suppress(OSError, RunFailed):
                wire = Wire(socket.create_connection(where, timeout=CONNECTED), LINE)
                return Post.welcomed(wire, f"{where[0]}:{where[1]}", ranks, began + patience)
        time.sleep(0.05)
    raise RunFailed(
        f"{world.host} waited {patience:.0f} s for the run's first node to write its address into "
        f"{runs / FOLDER}, which all nodes must see (--runs, --timeout)"
    )


def refuse_blindness(world: World) -> None:
    """Ask the first node at the port that can be guessed, if it is there, whether this one sees its run's directory.

    One that does not is refused here, and the first node learns that it would wait in vain.
    """
    if not world.hosts:
        return
    with contextlib.suppress(OSError):
        connection = socket.create_connection((world.hosts[0], likely_port(world.job)), timeout=CONNECTED)
        with contextlib.closing(Wire(connection, LINE)) as wire:
            for said in wire.receive():
                if isinstance(said.get("run"), str):
                    secret_of(Path(said["run"]), wire)


def likely_port(job: str) -> int:
    """The same for all nodes of a job, and seldom that of another."""
    return PORTS[int.from_bytes(hashlib.sha256(job.encode()).digest()[:8]) % len(PORTS)]


def _on_likely_port(world: World, run: Path) -> Hub:
    try:
        return Hub(likely_port(world.job), run)
    except UserError:
        return Hub(0, run)


def _sweep(runs: Path) -> None:
    """Remove what launches that gave up long ago have left for nodes that may never have come."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        folder = runs / FOLDER
        now = folder.stat().st_mtime  # a file was written into it just now, by the clock of the file system
        for file in folder.glob("*.json"):
            if now - file.stat().st_mtime > OLD and json.loads(file.read_text()).get("port") == 0:
                file.unlink(missing_ok=True)


def _refuse_unwritable(runs: Path) -> None:
    """The first node says the same of the disk that they share."""
    folder = runs / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise SharedError(f"cannot make a run directory in {runs}: {error.strerror} (--runs)") from None
