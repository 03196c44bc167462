"""Ranks of a node that see the same cores share them, under every launcher; those with cores of their own keep them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
import torch
from pathlib import Path
from meshrun import mesh

runs, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
said = []
for at, scenario in enumerate(scenarios):
    pipes = []
    for rank, cores in enumerate(scenario["cores"]):
        reading, writing = os.pipe()
        pipes.append(reading)
        if os.fork() == 0:
            os.sched_setaffinity(0, cores)
            os.environ.update({key: value.format(rank=rank, job=at) for key, value in scenario["env"].items()})
            torch.set_num_threads(1)
            mesh.use(mesh.Meeting(device="cpu", timeout=30, runs=runs))
            here = mesh.start()
            found = [sorted(os.sched_getaffinity(0)), torch.get_num_threads(), list(here.notes)]
            mesh.finish()
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
    said.append([json.loads(os.read(pipe, 10_000) or "null") for pipe in pipes])
print(json.dumps(said))
"""
SRUN = {
    "SLURM_JOB_ID": "{job}", "SLURM_STEP_ID": "0", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1",
    "SLURM_JOB_CPUS_PER_NODE": "2",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "mpi-{job}",
}  # fmt: skip


def test_what_ranks_see_decides_who_takes_which_cores(tmp_path: Path):
    granted = sorted(os.sched_getaffinity(0))[:2]
    if len(granted) < 2:
        pytest.skip("needs two cores")
    first, second = granted
    scenarios = [
        {"env": SRUN, "cores": [granted, granted]},
        {"env": MPIRUN, "cores": [granted, granted]},
        {"env": SRUN, "cores": [[second], [first]]},
        {"env": SRUN, "cores": [[first], [first]]},
    ]
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(scenarios)]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=env)
    assert ended.returncode == 0, ended.stderr
    by_srun, by_mpirun, bound, starved = json.loads(ended.stdout)
    assert by_srun == by_mpirun == [[[first], 1, []], [[second], 1, []]]
    assert [cores for cores, *_ in bound] == [[second], [first]], "a launcher's own binding is kept"
    assert [cores for cores, *_ in starved] == [[first], [first]], "one core cannot be cut"
    (note,), none = (notes for *_, notes in starved)
    assert "was granted 2 cores, but of its 2 ranks one has 1 core and all have 1" in note and not none
