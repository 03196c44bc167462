"""The same program under srun, torchrun, mpirun and mpiexec on two real nodes of Slurm: one job, the same losses.

Who a process is and how it meets the others is tried under every launcher, from a shell and inside of sbatch; a whole
training, which has to import torch in every process, once a launcher and with few of them.
"""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.cluster import Cluster
from tests.cluster.jobs import PYTHON, sbatch, wait
from tests.launch.command import Ended, events
from tests.launch.command import meshrun as locally

PROGRAMS = Path(__file__).parent / "programs"
TWO_BY_TWO = ("-N2", "-n4", "--ntasks-per-node=2")
SRUN = ("srun", *TWO_BY_TWO)
ONE_A_NODE = ("srun", "-N2", "-n2", "--ntasks-per-node=1")
OPENMPI_ONE_A_NODE = ("mpirun.openmpi", "--allow-run-as-root", "-n", "2", "--map-by", "ppr:1:node")
HYDRA_ONE_A_NODE = ("mpiexec.hydra", "-n", "2", "-ppn", "1")
OPENMPI = ("mpirun.openmpi", "--allow-run-as-root", "-n", "4")
HYDRA = ("mpiexec.hydra", "-n", "4")
TORCHRUN = (
    *ONE_A_NODE,
    *(PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", "--rdzv-id=together"),
)
PLACES = [
    pytest.param(SRUN, "slurm", id="srun"),
    pytest.param((*SRUN, "--mpi=pmi2"), "slurm", id="srun-pmi2"),
    pytest.param(OPENMPI, "openmpi", id="mpirun"),
    pytest.param(HYDRA, "pmi", id="mpiexec"),
]
every = functools.partial(pytest.param, marks=pytest.mark.every)
TRAINING = ("run", "digits", "--steps", 20, "--width", 16, "--eval-first", 501, "--no-tensorboard", "--json")


def skip_if_missing(launcher: tuple[str, ...]) -> None:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")


def from_a_shell(cluster: Cluster, command: tuple[str, ...], cwd: Path, *options: str) -> str:
    """As typed on a login node: srun asks for its nodes itself, others are given them by salloc."""
    first = command[0]
    words = (
        (first, *options, *command[1:]) if first == "srun" else ("salloc", "--quiet", *TWO_BY_TWO, *options, *command)
    )
    # A login node hides no GPUs, as this suite does.
    return cluster.run("ctl", ("env", "-u", "CUDA_VISIBLE_DEVICES", *words), cwd=cwd, check=True, timeout=110).stdout


def in_sbatch(cluster: Cluster, command: tuple[str, ...], cwd: Path, *options: str) -> str:
    job = sbatch(cluster, f"{shlex.join(command)} >out", cwd, *TWO_BY_TWO, *options)
    ended = wait(cluster, job, seconds=110)
    assert ended.state == "COMPLETED", ended.log
    return (cwd / "out").read_text()


def places(cwd: Path) -> list[dict[str, Any]]:
    found = [json.loads((cwd / f"place-{rank}.json").read_text()) for rank in range(4)]
    assert len(list(cwd.glob("place-*.json"))) == 4
    return found


@pytest.mark.parametrize("begin", [from_a_shell, in_sbatch])
@pytest.mark.parametrize(("launcher", "source"), PLACES)
def test_four_processes_on_two_nodes_know_their_places_and_meet(
    cluster: Cluster, tmp_path: Path, launcher: tuple[str, ...], source: str, begin: Any
):
    skip_if_missing(launcher)
    command = (*launcher, PYTHON, str(PROGRAMS / "place.py"), str(tmp_path))
    begin(cluster, command, tmp_path, "--gres=gpu:2")
    found = places(tmp_path)
    assert {each["source"] for each in found} == {source}
    keys = ("rank", "size", "local_rank", "local_size", "node", "nodes", "host")
    assert [tuple(each[key] for key in keys) for each in found] == [
        (0, 4, 0, 2, 0, 2, "n1"),
        (1, 4, 1, 2, 0, 2, "n1"),
        (2, 4, 0, 2, 1, 2, "n2"),
        (3, 4, 1, 2, 1, 2, "n2"),
    ]
    assert len({each["job"] for each in found}) == 1 and found[0]["job"]
    assert found[0]["met"] == [1, 2, 3]
    assert {each["gpus"] for each in found} == {"0,1"}, "all GPUs that the node was granted are visible"


def test_nodes_may_hold_different_numbers_of_ranks(cluster: Cluster, tmp_path: Path):
    command = ("srun", "-N2", "-n4", "-m", "plane=3", PYTHON, str(PROGRAMS / "place.py"), str(tmp_path))
    from_a_shell(cluster, command, tmp_path)
    assert [(each["local_rank"], each["local_size"], each["host"]) for each in places(tmp_path)] == [
        (0, 3, "n1"),
        (1, 3, "n1"),
        (2, 3, "n1"),
        (0, 1, "n2"),
    ]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = locally(tmp_path_factory.mktemp("one"), *TRAINING)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.parametrize(
    ("launcher", "words", "begin", "options", "world"),
    [
        pytest.param(ONE_A_NODE, (), from_a_shell, ("--gpus-per-task=1",), 2, id="srun-one-gpu-visible"),
        pytest.param(
            ONE_A_NODE,
            ("--procs", "2"),
            in_sbatch,
            ("--gres=gpu:2",),
            4,
            id="agents-in-sbatch",
            marks=pytest.mark.every,
        ),
        pytest.param(TORCHRUN, (), in_sbatch, ("--gres=gpu:2",), 2, id="torchrun-in-sbatch", marks=pytest.mark.every),
        pytest.param(OPENMPI_ONE_A_NODE, (), in_sbatch, (), 2, id="mpirun-in-sbatch"),
        pytest.param(HYDRA_ONE_A_NODE, (), from_a_shell, (), 2, id="mpiexec"),
    ],
)
def test_ranks_on_two_nodes_train_to_the_losses_of_one_process(
    cluster: Cluster, tmp_path: Path, launcher: tuple[str, ...], words: tuple[str, ...], begin: Any,
    options: tuple[str, ...], world: int, of_one_process: Ended,
):  # fmt: skip
    skip_if_missing(launcher)
    python = () if launcher is TORCHRUN else (PYTHON,)
    command = (*launcher, *python, "-m", "meshrun", *map(str, TRAINING), *words)
    found, expected = json.loads(begin(cluster, command, tmp_path, *options)), of_one_process.document
    assert (found["world"], found["layout"], found["steps"]) == (world, f"dp={world}", 20)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["sample_ids_sha256"] == expected["sample_ids_sha256"]
    for name, scores in expected["eval"].items():
        assert found["eval"][name]["count"] == scores["count"]
        assert found["eval"][name]["loss"] == pytest.approx(scores["loss"], rel=1e-5)
    runs = [run for run in (tmp_path / "runs").iterdir() if not run.name.startswith(".")]
    assert [run.name for run in runs] == ["digits-1"], "several processes, one run"
    starts = [events(runs[0], rank, "start")[0] for rank in range(world)]
    assert [each["host"] for each in starts] == [host for host in ("n1", "n2") for _ in range(world // 2)]


TASK = """
name=$SLURM_JOB_ID-$SLURM_PROCID
env -0 >.$name && mv .$name $name.env
until [ -e $name.done ]; do sleep 0.05; done
exit $(cat $name.done)
"""


def test_ten_jobs_that_start_at_once_on_one_node_each_find_their_own(cluster: Cluster, tmp_path: Path):
    """Each job is two Slurm tasks; once all are there, ranks are forked in their environments from one warm process."""
    jobs, ranks = 10, 20
    warm = cluster.start("n1", [sys.executable, PROGRAMS / "warm.py", tmp_path, ranks])
    while not (tmp_path / "warm").exists():
        assert warm.poll() is None, warm.stderr.read()
        time.sleep(0.05)
    line = f"srun bash -c {shlex.quote(TASK)}"
    started = [sbatch(cluster, line, tmp_path, "-p", "crowded", "-w", "n1", "-n2") for _ in range(jobs)]
    assert {wait(cluster, job).state for job in started} == {"COMPLETED"}
    said = sorted(path.read_text() for path in tmp_path.glob("*.said"))
    assert said == ["0 of 2: True\n"] * jobs + ["1 of 2: True\n"] * jobs
