"""A rank lets go of others that are gone: who vanished with a machine or a network never hangs up.

    let_go_when_told(memory, generation)     # once, in the rank

gloo waits in C++ for as long as connections are open, where no signal is heard, and those to a machine without power
stay open for minutes. The launcher knows sooner, and writes who is gone. A thread of the rank then closes gloo's
connections: what waits on them raises at once, and there is time left to write down the state.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

from meshrun import strict_json
from meshrun.store.owners import sockets_of_gloo

LOOK_EVERY = 0.1


def dead_file(memory: Path, generation: int) -> Path:
    """Where the launcher of a node says which ranks are gone."""
    return memory / f"dead-{generation}.json"


def let_go_when_told(memory: Path, generation: int) -> None:
    """From now on, close all connections to other ranks as soon as some of them are gone."""
    threading.Thread(target=_wait, args=(dead_file(memory, generation),), name="parting", daemon=True).start()


def _wait(path: Path) -> None:
    while True:
        time.sleep(LOOK_EVERY)
        if is_anybody_gone(path):
            let_go()  # again and again: one that was being made is found the next time


def is_anybody_gone(path: Path) -> bool:
    """Whether the launcher has named ranks; one that only asks all to stop names none."""
    try:
        return bool(strict_json.read(path).get("ranks"))
    except (OSError, ValueError):
        return False


def let_go() -> int:
    """Shut down the connections of gloo in this process; returns how many there were."""
    shut = 0
    for _, connections in sockets_of_gloo():
        for each in connections:
            with contextlib.suppress(OSError):  # it may be shut already
                each.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut
