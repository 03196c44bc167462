"""A job that is played on one machine sees what the real Slurm tells it."""

from __future__ import annotations

import json
from pathlib import Path

from meshrun.check.cluster import Cluster
from meshrun.world.played import HOST, Allocation, of_batch, of_task
from tests.cluster.jobs import PYTHON, sbatch, wait

OF_THE_CLUSTER = (
    *("SLURM_JOB_PARTITION", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_CLUSTER_NAME"),
    *("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"),
)
DUMP = """import json, os, sys
own = dict(os.environ)
open(f"{sys.argv[1]}-{own['SLURM_PROCID']}", "w").write(json.dumps(own))
"""


def test_variables_of_a_played_job_are_those_of_slurm(cluster: Cluster, tmp_path: Path):
    (tmp_path / "dump.py").write_text(DUMP)
    job = sbatch(
        cluster,
        f"{PYTHON} dump.py batch\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n"
        f"srun --export=ALL --cpu-bind=none true\n"
        f"srun --export=ALL --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none {PYTHON} dump.py step",
        tmp_path,
        *("--job-name=digits-1", "-N2", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=1", "--time=5"),
    )
    assert wait(cluster, job).state == "COMPLETED"
    played = Allocation(str(job.id), "digits-1", nodes=2, cpus_per_task=1, gpus_per_node=2)
    real = json.loads((tmp_path / "batch-0").read_text())
    hosts = real["SLURM_JOB_NODELIST"]
    assert hosts == "n[1-2]"
    check(of_batch(played), real)
    for node in (0, 1):
        task = of_task(played, step=1, node=node, local=0, tasks_per_node=1, nodes=2)
        check({**of_batch(played), **task}, json.loads((tmp_path / f"step-{node}").read_text()))


def check(played: dict[str, str], real: dict[str, str]) -> None:
    found = {name: value.replace(HOST, "n") for name, value in played.items() if name not in OF_THE_CLUSTER}
    assert found == {name: real.get(name) for name in found}
    # What tells ranks their place is all there.
    assert {name for name in real if name.startswith("SLURM_STEP_")} - set(found) <= {"SLURM_STEP_LAUNCHER_PORT"}
