"""How `run` begins: which process prints, what is refused before anything starts, and whom a script meets."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrun.cli import run as module
from meshrun.cli.command import Asked
from meshrun.cli.run import (
    _as_rank,
    _as_torchrun_would,
    _check_before_start,
    _default_procs,
    _hub_of,
    _kept_for_the_document,
    run_command,
)
from meshrun.cli.target import find
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import UserError
from meshrun.launch.head import Wanted
from meshrun.world import World, detect
from tests.launch.command import SCRIPT, TINY


def asked(target: str = TINY, **config: Any) -> Asked:
    found = find(target)
    return Asked(found, RunConfig(target, **config), as_json=False)


@pytest.mark.parametrize(("device", "gpus", "procs"), [("cpu", 4, 1), ("auto", 4, 4), ("cuda", 2, 2), ("auto", 0, 1)])
def test_a_run_has_a_rank_for_each_gpu_unless_it_is_to_compute_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, procs: int
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _default_procs(RunConfig("digits", device=device)) == procs


@pytest.mark.parametrize("rank", [0, 1])
def test_of_the_ranks_of_another_launcher_the_first_one_has_the_result(monkeypatch: pytest.MonkeyPatch, rank: int):
    shows: list[bool] = []
    monkeypatch.setattr(module, "_alone", lambda _, shown: shows.append(shown) or {"steps": 3})
    found = _as_rank(asked(procs=2), World(rank, 4, rank, 2, 0, 2, "n1", "slurm"))
    assert (found, shows) == (({"steps": 3}, [True]) if rank == 0 else (None, [False]))


@pytest.mark.parametrize(
    ("config", "wanted", "said"),
    [
        ({"layout": "dp=3", "procs": 2}, {}, "3"),
        ({"layout": "dp=2", "procs": 2}, {}, None),
        ({"layout": "dp=4", "procs": 2}, {"least": 1, "most": 2}, None),
        ({"layout": "dp=4", "procs": 2}, {"least": 1, "most": 3, "expected": 3}, "4"),
        ({"layout": "dp=6", "procs": 2}, {"least": 1, "most": 4, "expected": 3}, None),
        ({"device": "cuda", "procs": 2}, {}, "2"),
        ({"device": "cuda", "backend": "gloo", "procs": 2}, {}, None),
        ({"checkpoint": "often", "procs": 2}, {}, "often"),
        ({"shuffle": "wild", "procs": 2}, {}, "wild"),
    ],
)
def test_what_cannot_work_is_refused_while_nothing_has_been_started(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], wanted: dict[str, int], said: str | None
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wants = module.wanted_of(RunConfig(TINY, **config))
    with pytest.raises(UserError, match=said) if said is not None else nullcontext():
        _check_before_start(asked(**config), Wanted(fits=wants.fits, **wanted))


def test_a_run_is_checked_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch):
    started: list[Any] = []
    monkeypatch.setattr(module, "detect", lambda _: detect({}))
    monkeypatch.setattr(module, "lead", lambda *given: started.append(given) or {"steps": 1})
    with pytest.raises(UserError, match="3"):
        run_command(asked(layout="dp=3", procs=2))
    assert started == []
    assert run_command(asked(layout="dp=2", procs=2)) == {"steps": 1} and len(started) == 1


@pytest.mark.parametrize(("target", "told"), [(SCRIPT, True), (TINY, False)])
def test_only_a_script_is_looked_at_for_options_of_its_own(monkeypatch: pytest.MonkeyPatch, target: str, told: bool):
    said: list[Any] = []
    monkeypatch.setattr(module, "detect", lambda _: detect({}))
    monkeypatch.setattr(module, "_tell_of_shared_options", said.append)
    monkeypatch.setattr(module, "_alone", lambda *_: {})
    run_command(asked(target, procs=1))
    assert len(said) == told


@pytest.mark.parametrize(("nodes", "is_open"), [("1", False), ("2", True), ("1:4", True)])
def test_other_nodes_can_join_wherever_there_may_be_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, is_open: bool
):
    told: list[str] = []
    monkeypatch.setattr(module, "Hub", lambda port, run: SimpleNamespace(port=port, run=run))
    hub: Any = _hub_of(RunConfig("digits", nodes=nodes, port=4711))(
        RunDirectory(tmp_path), lambda _, text: told.append(text)
    )
    assert (hub is not None) is is_open and len(told) == is_open
    if is_open:
        assert (hub.port, hub.run) == (4711, tmp_path) and told[0].endswith(":4711")


def test_what_the_program_prints_stays_out_of_the_document(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    streams = [os.fdopen(1, "w", closefd=False) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    print("before")
    with _kept_for_the_document():
        print("of the program")
        sys.stdout = streams[1]
        print("through a stream of its own")
    print("the document")
    for stream in streams:
        stream.close()
    shown = capfd.readouterr()
    assert shown.out == "before\nthe document\n"
    assert sorted(shown.err.splitlines()) == ["of the program", "through a stream of its own"]


def test_a_script_alone_joins_the_store_that_is_served_for_it(monkeypatch: pytest.MonkeyPatch):
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    before = rendezvous._torchelastic_use_agent_store
    with _as_torchrun_would(detect({}), RunConfig(SCRIPT)):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        assert rendezvous._torchelastic_use_agent_store()
        monkeypatch.setitem(os.environ, "MASTER_PORT", "1")
        assert not rendezvous._torchelastic_use_agent_store(), "where the script names a port it serves by itself"
    assert rendezvous._torchelastic_use_agent_store is before
