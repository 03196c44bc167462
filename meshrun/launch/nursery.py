"""The warm process of a node, whose forks are its ranks: torch is imported once, and a rank starts in milliseconds.

    words = serve(fd)                    # in the nursery this never returns; in each rank, with the rank's words

The launcher asks over a socket for ranks and is told how each of them ended. The nursery does no computing and touches
no GPU, since forks of a process that did are broken; where an import did so, it starts ranks as fresh processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading

from meshrun.launch.job import PARENT
from meshrun.launch.wire import Wire, readable
from meshrun.world.environment import python_for, take_over

FORKABLE = ["-m", "meshrun"]
"""How the command line of a rank begins that this process can become."""


def serve(fd: int) -> list[str]:
    """Start ranks as asked until the launcher is gone."""
    wire = Wire(socket.socket(fileno=fd))
    warm = _is_warm()
    gc.collect()
    gc.freeze()  # else the first collection of each rank would copy all of its memory
    ranks: dict[int, int] = {}
    """The file descriptor that tells of a rank's end -> its process."""
    fresh: dict[int, subprocess.Popen[bytes]] = {}
    """Those that are no forks: one that is let go is buried by whoever starts the next, who tells nobody."""
    while not wire.closed:
        ready = readable([wire.fileno(), *ranks])
        for pidfd in ranks.keys() & ready:
            pid = ranks.pop(pidfd)
            os.close(pidfd)
            wire.send({"ended": pid, "code": _buried(pid, fresh.pop(pid, None))})
        if wire.fileno() not in ready:
            continue
        for asked in wire.receive():
            argv = [word if word != PARENT else str(os.getpid()) for word in asked["argv"]]
            started = {}
            for rank, own in asked["ranks"].items():
                environment = {**asked["environment"], **own}
                if warm and argv[:2] == FORKABLE:
                    pid = os.fork()
                    if pid == 0:
                        _become_a_rank(environment, argv, [wire.fileno(), *ranks])
                        return argv[2:]
                else:
                    process = subprocess.Popen(python_for(argv), env=environment, start_new_session=True)
                    pid = process.pid
                    fresh[pid] = process
                ranks[os.pidfd_open(pid)] = pid
                started[rank] = pid
            wire.send({"started": started})
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _is_warm() -> bool:
    """Whether forks of this process are sound: no GPU in use, and no thread whose locks they would inherit."""
    torch = sys.modules.get("torch")
    return torch is not None and not torch.cuda.is_initialized() and threading.active_count() == 1


def _buried(pid: int, fresh: subprocess.Popen[bytes] | None) -> int:
    """How a rank ended; what it leaves of its process group, such as readers, ends too."""
    code = fresh.wait() if fresh is not None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return code


def _become_a_rank(environment: dict[str, str], argv: list[str], inherited: list[int]) -> None:
    os.setsid()
    for fd in inherited:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    take_over(environment)
    sys.argv[1:] = argv[2:]
    # As in processes that import it themselves, no two draw the same numbers unless seeded; random does it by itself.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
