"""Two ranks that compute together until one of them is stopped: the other must be let go of what it waits for.

    python parting.py STORE_PORT OWN_PORT FOLDER RANK

The rank that is left also has a connection of its own, which is none of gloo's and must stay.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshrun.launch.parting import let_go_when_told


def main(store_port: int, own_port: int, folder: Path, rank: int) -> None:
    own = socket.create_connection(("127.0.0.1", own_port), timeout=5)
    store = dist.TCPStore("127.0.0.1", store_port, 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    second = dist.new_group([0, 1])
    values = torch.ones(3)
    dist.all_reduce(values, group=second)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    let_go_when_told(folder, 0)
    (folder / "waits").touch()
    began = time.monotonic()
    try:
        dist.all_reduce(values, group=second)
    except RuntimeError as error:
        waited = time.monotonic() - began
        store.set("word", "heard")
        own.sendall(b"here")
        print(f"{waited:.3f} {store.get('word').decode()} {own.recv(4).decode()} {'gloo' in str(error)}", flush=True)
    os._exit(0)


main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
