"""Under torchrun and MPI, `meshrun run` is a rank of one job; and a script of one's own needs no experiment."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrun import mesh
from meshrun.train.loop import Trainer
from tests.launch.command import MODULE, PROGRAMS, SCRIPT, TINY, events, meshrun
from tests.launch.programs import tiny

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
OPENMPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
HYDRA = ("mpiexec.hydra", "-n", "2")

LAUNCHERS = [
    pytest.param((*TORCHRUN, "-m", "meshrun"), "torchrun", id="torchrun"),
    pytest.param((*OPENMPI, *MODULE), "openmpi", id="mpirun"),
    pytest.param((*HYDRA, *MODULE), "pmi", id="mpiexec"),
]


def skip_if_missing(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    mesh.use(mesh.Meeting(device="cpu"))
    try:
        return Trainer(tiny.experiment()).train()
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.every  # tests/train/test_ending.py has the same losses, and tests/cluster/test_launchers.py on two nodes
@pytest.mark.parametrize(("launcher", "source"), LAUNCHERS)
def test_two_ranks_train_as_one_job_to_the_losses_of_one_process(
    tmp_path: Path, launcher: tuple[str, ...], source: str, of_one_process: dict[str, Any]
):
    skip_if_missing(launcher[0])
    ended = meshrun(tmp_path, "run", TINY, "--json", launcher=launcher)
    assert ended.status == 0, ended.err
    result, expected = ended.document, of_one_process
    assert (result["world"], result["layout"], result["run"]) == (2, "dp=2", "runs/tiny-1")
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert result["sample_ids_sha256"] == expected["sample_ids_sha256"]
    assert [run.name for run in (tmp_path / "runs").iterdir() if not run.name.startswith(".")] == ["tiny-1"]
    starts = [events(tmp_path / "runs/tiny-1", rank, "start")[0] for rank in (0, 1)]
    assert [(each["rank"], each["world"], each["source"]) for each in starts] == [(0, 2, source), (1, 2, source)]


def test_a_wrong_word_is_refused_once_and_not_by_every_rank(tmp_path: Path):
    skip_if_missing(OPENMPI[0])
    ended = meshrun(tmp_path, "run", TINY, "--fault", "flood", launcher=(*OPENMPI, *MODULE))
    assert ended.status == 2
    assert ended.sentences == ["fault is 'flood'; it must be one of none, kill, raise (--fault)"]


def test_a_layout_of_another_size_is_refused_once_and_not_by_every_rank(tmp_path: Path):
    skip_if_missing(OPENMPI[0])
    ended = meshrun(tmp_path, "run", TINY, "--layout", "dp=3", launcher=(*OPENMPI, *MODULE))
    assert ended.status == 2
    assert len(ended.sentences) == 1
    assert ended.sentences[0].startswith("layout 'dp=3' needs 3 ranks but this run has 2")
    assert ended.sentences[0].endswith("(--layout)")


def test_a_failing_rank_of_another_launcher_is_named_and_its_peer_says_nothing(tmp_path: Path):
    skip_if_missing(HYDRA[0])
    ended = meshrun(tmp_path, "run", TINY, "--fault", "raise", "--rank", 1, launcher=(*HYDRA, *MODULE))
    assert ended.status != 0
    assert ended.sentences == [f"rank 1 on {socket.gethostname()} failed at step 3: ValueError: bad luck"]
    assert ended.err.rstrip().endswith("log: runs/tiny-1/logs/rank-00001.log")


def test_ranks_that_torchrun_starts_again_go_on_in_their_run_directory(tmp_path: Path):
    """What torchrun itself needs for gloo: a store of its own for each start."""
    losing = str(PROGRAMS / "losing.py")
    again = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN, "--max-restarts=1", "-m", "meshrun")
    words = ("--diary", tmp_path / "diary", "--step", 8, "--steps", 10, "--checkpoint", 2)
    ended = meshrun(tmp_path, "run", losing, *words, "--json", launcher=again)
    assert ended.status == 0, ended.err
    assert ended.document["run"] == "runs/losing-1" and len(ended.document["losses"]) == 10
    assert [run.name for run in (tmp_path / "runs").iterdir() if not run.name.startswith(".")] == ["losing-1"]
    starts = [events(tmp_path / "runs/losing-1", rank, "start")[-1] for rank in (0, 1)]
    assert [(each["rank"], each["world"], each["source"]) for each in starts] == [
        (0, 2, "torchrun"),
        (1, 2, "torchrun"),
    ]
    (resumed,) = events(tmp_path / "runs/losing-1", 0, "resumed")
    assert resumed["source"] == "a checkpoint" and resumed["step"] in (4, 6)


OWN_GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
print([os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")], os.environ["LOCAL_RANK"], total.item())
dist.destroy_process_group()
import meshrun
print("met", meshrun.start().size, meshrun.gather(meshrun.start().rank))
"""


def test_a_script_with_a_group_of_its_own_finds_the_variables_of_torchrun_under_another_launcher(tmp_path: Path):
    skip_if_missing(OPENMPI[0])
    (tmp_path / "mine.py").write_text(OWN_GROUP)
    ended = meshrun(tmp_path, "run", "mine.py", "--device", "cpu", launcher=(*OPENMPI, *MODULE))
    assert ended.status == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"['2', '2'] {rank} 3.0" for rank in "01"] + ["met 2 [0, 1]"] * 2
    assert not list((tmp_path / "runs" / ".rendezvous").iterdir())


def test_a_plain_script_is_started_on_two_ranks_with_its_own_words(tmp_path: Path):
    ended = meshrun(tmp_path, "run", SCRIPT, "--procs", 2, "--steps", 7, "--", "--values", 1, 4)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["rank 0 of 2 has started", "mean 2.5 over 2 after 7 steps"]
    log = tmp_path / "runs/script-1/logs/rank-00001.log"
    assert log.read_text() == "rank 1 of 2 has started\n"


def test_the_same_script_runs_alone_under_python(tmp_path: Path):
    ended = meshrun(tmp_path, SCRIPT, "--values", "3", launcher=(sys.executable,))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["rank 0 of 1 has started", "mean 3 over 1 after 1 steps"]
