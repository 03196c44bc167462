"""What launchers grant and environments ask for, read without refusing anything."""

from __future__ import annotations

import pytest

from meshrun.world.grants import Granted, granted, matching, settings

STEP = {  # of Slurm 22.05: sbatch -N2 --ntasks-per-node=2 -c2 --gres=gpu:2, srun
    "SLURM_JOB_ID": "3",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_STEP_GPUS": "0,1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def test_a_slurm_step_says_cores_and_gpus():
    assert granted(STEP) == Granted("3", 2, 4, False, None, 2, ("0", "1"))
    assert granted({**STEP, "SRUN_CPUS_PER_TASK": "2"}).srun_told


def test_gpus_hidden_by_hand_are_still_granted():
    found = granted({**STEP, "CUDA_VISIBLE_DEVICES": "0"})
    assert (found.gpus_on_node, found.gpus_per_task, found.gpus_listed) == (2, None, ("0",))


def test_a_task_with_gpus_of_its_own_is_granted_those():
    """As srun --gpus-per-task=1 has it: the step's list is the task's own, and its number may begin at 0 again."""
    found = granted({**STEP, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"})
    assert (found.gpus_on_node, found.gpus_per_task, found.gpus_listed) == (2, 1, ("0",))
    assert granted({**STEP, "SLURM_GPUS_PER_TASK": "a100:1"}).gpus_per_task == 1


@pytest.mark.parametrize(
    ("text", "shown"), [("", ()), ("-1", ()), ("0,-1,1", ("0",)), ("GPU-1a2b", ("GPU-1a2b",)), ("3, 2", ("3", "2"))]
)
def test_gpus_are_listed_as_cuda_reads_them(text: str, shown: tuple[str, ...]):
    assert granted({"CUDA_VISIBLE_DEVICES": text}).gpus_listed == shown


def test_what_cannot_be_read_is_unknown():
    assert granted({}) == Granted()
    assert granted({"SLURM_JOB_ID": "3", "SLURM_CPUS_PER_TASK": "many"}).cpus_per_task is None
    assert granted({"ROCR_VISIBLE_DEVICES": "0"}).gpus_listed_by == "ROCR_VISIBLE_DEVICES"


def test_settings_of_libraries():
    found = settings(
        {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_DISABLE": "1", "HF_HOME": "/data", "HF_HUB_OFFLINE": "true"}
    )
    assert (found.gloo_interface, found.nccl_interface) == ("ib0", None)
    assert found.nccl_without_infiniband and found.offline and found.caches == {"HF_HOME": "/data"}
    assert not settings({"NCCL_IB_DISABLE": "0"}).nccl_without_infiniband


@pytest.mark.parametrize(
    ("asked", "prefixes", "meant"),
    [
        ("ib0", False, ["ib0"]),
        ("ib", False, []),
        ("ib", True, ["ib0", "ib1"]),
        ("=ib", True, []),
        ("=ib1,eth0", True, ["ib1", "eth0"]),
        ("^lo,eth", True, ["ib0", "ib1"]),
    ],
)
def test_interfaces_are_meant_as_gloo_and_nccl_read_them(asked: str, prefixes: bool, meant: list[str]):
    assert matching(asked, ["lo", "ib0", "ib1", "eth0"], prefixes=prefixes) == meant
