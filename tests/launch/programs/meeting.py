"""A script that forms its own group, as scripts for torchrun do, and adds numbers until the file `stop` is there.

meeting.py FOLDER RANKS
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
alone = sys.argv[2] == "1"
if not alone:
    dist.init_process_group("gloo")
(folder / f"met-{0 if alone else dist.get_rank()}").touch()
while True:
    stop = torch.tensor([float((folder / "stop").exists())])
    if not alone:
        dist.all_reduce(stop)
    if stop:
        break
    time.sleep(0.05)
if not alone:
    dist.destroy_process_group()
