"""The store, or a relay to it, in a process beside a rank that no launcher of meshrun has started.

    ports = serve(0, "10.11.0.1", secret)            # on rank 0: ports["loopback"], ports["network"]
    ports = relay("10.11.0.1", 40123, secret)        # on a rank of another node: ports["loopback"]
    end()

A process of its own, since torch's clients may hold Python's interpreter lock while they wait for the store. It ends
with the rank, and not with signals that ask ranks to stop: they need the store to keep their state.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from typing import Any

from meshrun.errors import RunFailed
from meshrun.store.relay import Relay
from meshrun.store.server import Server
from meshrun.world.environment import python_for

Ports = dict[str, int]

_children: list[subprocess.Popen[bytes]] = []
"""Processes that end when their standard input does, so when this process does or `end` is called."""


def serve(port: int = 0, address: str | None = None, secret: bytes = b"") -> Ports:
    """Serve a store from a process of its own: `loopback` is its port here, `network` the one at an address."""
    return _start({"port": port, "address": address, "secret": secret.hex()})


def relay(address: str, port: int, secret: bytes) -> Ports:
    """Relay to the store at an address of another node from a process of its own: `loopback` is its port here."""
    return _start({"store": [address, port], "secret": secret.hex()})


def end() -> None:
    """End the processes that were started here."""
    while _children:
        child = _children.pop()
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


def _start(request: dict[str, Any]) -> Ports:
    # The secret goes through a pipe: all users of a machine can read command lines.
    child = subprocess.Popen(python_for(["-m", "meshrun.store.process"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    _children.append(child)
    with contextlib.suppress(OSError):
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
    answer = child.stdout.readline()
    child.stdout.close()
    if not answer:
        raise RunFailed("the process that serves the store beside this rank has ended at its start")
    ports: Ports = json.loads(answer)
    if "error" in ports:
        raise OSError(str(ports["error"]))
    return ports


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(sys.stdin.readline())
    secret = bytes.fromhex(request["secret"])
    answer: dict[str, Any]
    try:
        if "store" in request:
            address, port = request["store"]
            answer = {"loopback": Relay(address, port, secret).port}
        else:
            server = Server(request["port"])
            answer = {"loopback": server.port}
            if request["address"] is not None:
                answer["network"] = server.port_at(request["address"], secret)
    except OSError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main()
