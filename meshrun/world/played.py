"""The variables of a Slurm job that is played on one machine, named and written as Slurm 22.05 leaves them.

    job = Allocation("1", "digits-1", nodes=2, gpus_per_node=4)
    of_batch(job)                        # for the shell that runs the job's script
    of_task(job, step=0, node=1, local=0, tasks_per_node=1)      # beyond that, for a task that srun starts

Node names are made up; all nodes are this machine.
"""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass

HOST = "rehearsed"
CLUSTER = "meshrun-rehearsal"


@dataclass(frozen=True)
class Allocation:
    """What Slurm has granted a job."""

    id: str
    name: str
    nodes: int
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    partition: str = "rehearsal"
    folder: str = "."
    """Where it was submitted."""
    restarts: int = 0
    array: tuple[int, int] | None = None
    """The number of the first and the last element of a job array; the first one is played."""

    @property
    def hosts(self) -> str:
        """The nodes in the short form of Slurm."""
        return f"{HOST}1" if self.nodes == 1 else f"{HOST}[1-{self.nodes}]"


def inherited_by_jobs() -> dict[str, str]:
    """What a job gets of the shell that submits it: not what belongs to a job that this shell is in itself.

    Functions called `module` would load modules in earnest, and a start-up file might define them again.
    """
    ours = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "BASH_FUNC_module", "BASH_FUNC_ml", "BASH_ENV", "ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours[:-1]) and name != ours[-1]}


def of_batch(job: Allocation) -> dict[str, str]:
    """For the shell of the script, which is no task."""
    each = _on_each(job.tasks_per_node, job.nodes)
    tasks = str(job.nodes * job.tasks_per_node)
    cpus = job.tasks_per_node * (job.cpus_per_task or 1)
    found = {
        "SLURM_JOB_ID": job.id,
        "SLURM_JOBID": job.id,
        "SLURM_JOB_NAME": job.name,
        "SLURM_JOB_USER": getpass.getuser(),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_NODELIST": job.hosts,
        "SLURM_NODELIST": job.hosts,
        "SLURM_JOB_NUM_NODES": str(job.nodes),
        "SLURM_NNODES": str(job.nodes),
        "SLURM_JOB_CPUS_PER_NODE": _on_each(cpus, job.nodes),
        "SLURM_CPUS_ON_NODE": str(cpus),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": str(job.tasks_per_node),
        "SLURM_TASKS_PER_NODE": each,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": f"{HOST}1",
        "SLURM_SUBMIT_DIR": job.folder,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_CLUSTER_NAME": CLUSTER,
    }
    if job.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = str(job.cpus_per_task)
    if job.gpus_per_node:
        found["SLURM_GPUS_ON_NODE"] = str(job.gpus_per_node)
        found["SLURM_JOB_GPUS"] = ",".join(map(str, range(job.gpus_per_node)))
    if job.restarts:
        found["SLURM_RESTART_COUNT"] = str(job.restarts)
    if job.array:
        first, last = map(str, job.array)
        found |= {"SLURM_ARRAY_JOB_ID": job.id, "SLURM_ARRAY_TASK_ID": first, "SLURM_ARRAY_TASK_COUNT": "1"}
        found |= {"SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_MAX": last}
    return found


def of_task(job: Allocation, step: int, node: int, local: int, tasks_per_node: int, nodes: int) -> dict[str, str]:
    """Beyond what it inherits of the shell, for a task of a step on the first `nodes` nodes of the job."""
    tasks = str(nodes * tasks_per_node)
    hosts = Allocation("", "", nodes).hosts
    each = _on_each(tasks_per_node, nodes)
    ranks = range(node * tasks_per_node, (node + 1) * tasks_per_node)
    found = {
        "SLURM_STEP_ID": str(step),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": each,
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_TASKS_PER_NODE": each,
        "SLURM_PROCID": str(ranks[local]),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(map(str, ranks)),
        "SLURMD_NODENAME": f"{HOST}{node + 1}",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_CPU_BIND_TYPE": "none",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    if job.gpus_per_node:
        found["SLURM_STEP_GPUS"] = ",".join(map(str, range(job.gpus_per_node)))
    return found


def without_foreign_interfaces() -> tuple[dict[str, str], list[str]]:
    """This process's variables less those that send gloo to an interface of the site, and what was left away."""
    here = {name for _, name in socket.if_nameindex()}
    mine = dict(os.environ)
    wanted = mine.get("GLOO_SOCKET_IFNAME")
    if wanted and not set(wanted.split(",")) <= here:
        del mine["GLOO_SOCKET_IFNAME"]
        return mine, [f"GLOO_SOCKET_IFNAME={wanted}"]
    return mine, []


def _on_each(count: int, nodes: int) -> str:
    return f"{count}(x{nodes})" if nodes > 1 else str(count)
