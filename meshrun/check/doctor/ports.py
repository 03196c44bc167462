"""Ports that ranks would need and somebody else has, and addresses that launches have left behind.

held_ports(world, port=29500)        # on rank 0: what --port or MASTER_PORT names and cannot be listened on
left_over(runs)                      # rendezvous files that lead nowhere
"""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshrun import strict_json
from meshrun.check.doctor.case import Held, Left
from meshrun.world import World
from meshrun.world.grants import PORT_OF_RANK_0
from meshrun.world.rendezvous import FOLDER as RENDEZVOUS

MOST = 64
"""Files that are looked at: each may take a second to try."""


def held_ports(world: World, port: int | None) -> tuple[Held, ...]:
    """Ports that rank 0 would have to listen on, and cannot."""
    asked = [(port, "--port")] if port is not None else []
    if world.port is not None and not world.agent_store:
        asked.append((world.port, PORT_OF_RANK_0))
    return tuple(Held(number, name, _owner(number)) for number, name in asked if not _is_free(number))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as test:
        # As servers do: what is left of a closed connection is no reason to refuse.
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind(("", port))
            test.listen(1)
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    """The process that listens on a port of this machine, where this user may see it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in sockets for fd in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({words[:80]})"
    return ""


def left_over(runs: Path) -> list[Left]:
    """Rendezvous files whose rank 0 is gone: its machine answers, and nobody listens there; the newest are tried."""
    found = sorted((runs / RENDEZVOUS).glob("*.json"), key=_age)[:MOST]
    with ThreadPoolExecutor(16) as pool:
        return sorted((left for left in pool.map(_stale, found) if left is not None), key=lambda left: left.file)


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


def _stale(path: Path) -> Left | None:
    try:
        said = strict_json.read(path)
        address, port = str(said["address"]), int(said["port"])
        socket.create_connection((address, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return Left(str(path), f"{address}:{port}")
    except (OSError, ValueError, KeyError, TypeError):
        return None  # half written, or of a machine that may just not be reachable from here
    return None
