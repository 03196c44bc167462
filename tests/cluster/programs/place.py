"""A process under any launcher: says where it is, and meets the others as ranks do, without torch to be quick.

srun -n4 python place.py FOLDER
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from meshrun.world import detect
from meshrun.world.rendezvous import lookup, own_address, publish

folder = Path(sys.argv[1])
world = detect(os.environ)
met = []
if world.rank == 0:
    with socket.create_server((own_address(world), 0)) as server:
        publish(folder, world.job, world.attempt, *server.getsockname())
        server.settimeout(20)
        while len(met) < world.size - 1:
            peer, _ = server.accept()
            met.append(int(peer.makefile().readline()))
else:
    while (where := lookup(folder, world.job, world.attempt)) is None:
        time.sleep(0.01)
    with socket.create_connection(where, timeout=20) as peer:
        peer.sendall(f"{world.rank}\n".encode())
about = {**asdict(world), "met": sorted(met), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
(folder / f"place-{world.rank}.json").write_text(json.dumps(about))
