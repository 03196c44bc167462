"""What ranks are given is what they read, and a fork has no other variables than those it was given."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.world import detect, environment
from meshrun.world.environment import (
    choose_interfaces,
    forget_terminals_beyond_reason,
    inherited,
    keep_temporary_files_safe,
    of_foreign_rank,
    of_new_job,
    of_nursery,
    of_python,
    of_rank,
    only,
    python_for,
    take_over,
)


@pytest.fixture
def restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_rank_reads_its_place_as_the_launcher_meant_it():
    world = detect(of_rank(5, 7, (1, 4), (1, 2), ("10.0.0.1", 4711), 3, "abc"), "node7")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 7, 1, 4)
    assert (world.node, world.nodes, world.attempt) == (1, 2, 3)
    assert (world.address, world.port, world.agent_store) == ("10.0.0.1", 4711, True)
    assert "abc" in world.job


def test_a_rank_whose_user_has_said_where_they_meet_serves_the_store_itself():
    world = replace(detect({}), rank=0, size=2, nodes=2)
    there, chosen = (of_foreign_rank(world, meet) for meet in (("10.0.0.1", 4711), None))
    assert (there["MASTER_ADDR"], there["MASTER_PORT"], there["TORCHELASTIC_USE_AGENT_STORE"]) == (
        "10.0.0.1",
        "4711",
        "True",
    )
    assert there.keys() - chosen.keys() == {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}


@pytest.mark.usefixtures("restored")
def test_a_fork_has_the_variables_that_it_was_given_and_no_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OF_THE_NURSERY", "1")
    take_over({"OWN": "2"})
    assert inherited() == {"OWN": "2"}


def test_the_process_that_ranks_are_forked_from_opens_no_gpu():
    assert of_nursery() == {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def test_an_interface_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch):
    def interface(nodes: int) -> str | None:
        return of_rank(0, 2, (0, 2), (0, nodes), ("127.0.0.1", 1), 0, "a").get("GLOO_SOCKET_IFNAME")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert (interface(1), interface(2)) == ("lo", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface(1) == "ib0"
    choose_interfaces("eth0", "eth1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.pop("NCCL_SOCKET_IFNAME")) == ("ib0", "eth1")


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o700])
def test_temporary_files_are_where_no_other_user_can_exchange_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
):
    tmp_path.chmod(mode)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    keep_temporary_files_safe()
    used = Path("/tmp") if mode == 0o777 else tmp_path
    assert (Path(tempfile.gettempdir()), os.environ["TMPDIR"]) == (used, str(used))


@pytest.mark.usefixtures("restored")
def test_temporary_files_are_where_this_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda place, _mode: Path(place) != tmp_path)
    keep_temporary_files_safe()
    assert tempfile.gettempdir() == "/tmp"


@pytest.mark.usefixtures("restored")
def test_variables_are_put_back_after_a_while_with_others():
    before = dict(os.environ)
    with pytest.raises(ValueError, match="of the script"), only({"OWN": "2"}):
        assert inherited() == {"OWN": "2"}
        raise ValueError("of the script")
    assert dict(os.environ) == before


@pytest.mark.usefixtures("restored")
def test_commands_of_slurm_get_nothing_of_the_job_that_they_are_asked_in():
    take_over({"PATH": "/bin", "SLURM_JOB_ID": "1", "SRUN_CPUS_PER_TASK": "4", "SLURM_CONF": "/etc/slurm.conf"})
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}
    assert of_new_job() == {**kept, "SLURM_TIME_FORMAT": "standard"}


@pytest.mark.parametrize("searched", [True, False])
def test_a_process_started_from_here_takes_modules_from_the_working_directory_only_if_this_one_does(
    searched: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(environment, "_IS_WORKING_DIRECTORY_SEARCHED", searched)
    assert python_for(["-m", "meshrun"]) == [sys.executable, *([] if searched else ["-P"]), "-m", "meshrun"]
    assert python_for(["a.py"]) == [sys.executable, "a.py"], "which begins to search in its own folder"
    assert of_python().get("PYTHONSAFEPATH") == (None if searched else "1")


@pytest.mark.parametrize(
    ("text", "kept"), [("80", True), ("9999", True), ("10000", False), ("0", False), ("-1", False), ("", False)]
)
def test_a_width_of_the_terminal_that_is_none_is_forgotten(text: str, kept: bool, monkeypatch: pytest.MonkeyPatch):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, text)
    forget_terminals_beyond_reason()
    assert ("COLUMNS" in os.environ, "LINES" in os.environ) == (kept, kept)
