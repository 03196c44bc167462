"""Runs that are broken on purpose: they must come to the same end, and one that does not must be found out."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshrun.check.armed import Control
from meshrun.check.chaos import TRIES, Chaos, Outcome, Place, Record, _Run
from meshrun.check.disk import can_mount
from meshrun.check.faults import Fault
from meshrun.check.reached import TOLD, Reached, alike, differences, tensors_of, used_ids
from meshrun.check.reached import _same_weights as same_weights
from meshrun.check.scene import Life, NotSurvived, Scene
from meshrun.cli.chaos import armed_text
from meshrun.cli.main import main
from meshrun.cli.target import find
from meshrun.config import RunDirectory
from meshrun.observe.events import EventFile
from tests import warm

PROGRAMS = Path(__file__).parent / "programs"
OF_ALL_SORTS = (
    *("kill-computing", "kill-collective", "kill-evaluating", "kill-two", "kill-update", "kill-write", "kill-rename"),
    *("stop", "oom", "disk-full", "checkpoint-flipped", "clock-back"),
)


def chaos(*words: object) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "meshrun", "chaos", *map(str, words), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = warm.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout), ran.stderr


@pytest.mark.timeout(300)
def test_faults_of_all_sorts_are_survived_without_a_trace():
    status, found, said = chaos(
        PROGRAMS / "restless.py", "--faults", len(OF_ALL_SORTS), "--kinds", ",".join(OF_ALL_SORTS), "--seed", 11
    )
    assert found["failures"] == [], said
    assert status == 0
    assert found["faults"] == found["survived"] == len(OF_ALL_SORTS)
    assert (found["ids_lost"], found["ids_repeated"], found["weights_equal"]) == (0, 0, True)
    assert set(found["by_kind"]) == set(OF_ALL_SORTS)
    assert found["by_kind"]["kill-computing"]["seconds"] < 20
    assert found["by_kind"]["kill-update"]["how"] == "armed"
    assert found["by_kind"]["disk-full"]["how"] == ("real" if can_mount() else "armed")


def test_a_run_that_comes_to_other_weights_after_a_fault_is_a_failure_and_is_kept(tmp_path: Path):
    status, found, _ = chaos(
        PROGRAMS / "forgetful.py", "--faults", 1, "--kinds", "kill-computing", "--steps", 60, "--keep", tmp_path
    )
    assert status == 1
    assert (found["faults"], found["survived"], found["weights_equal"]) == (1, 0, False)
    (failure,) = found["failures"]
    assert failure.startswith(
        "the run came to other last.safetensors, losses of result.json, grad_norms of result.json"
    )
    assert failure.endswith(f"than the one without faults (after kill-computing; {tmp_path}/run-0001/runs/chaos-1)")
    assert (tmp_path / "run-0001/runs/chaos-1/result.json").is_file()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--faults", 0), "faults is 0; it must be at least 1 and at most 1,000,000 (--faults)"),
        (("--procs", 1), "procs is 1; chaos needs ranks that a launcher starts, at least 2 (--procs)"),
        (
            ("--kinds", "node-off"),
            "node-off needs several nodes under Slurm, which can be virtual ones on this machine (--cluster)",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    words: tuple[object, ...], error: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["chaos", "digits", *map(str, words), "--json"])
    assert (ended.value.code, json.loads(capsys.readouterr().out)["error"]) == (2, error)


class _Slow(Scene):
    """A run of one rank that makes so many marks, one a tenth of a second, and ends after them or never."""

    patience = 0.3

    def __init__(self, marks: int, ends: bool) -> None:
        self.ranks, self.began, self.marks, self.ends = 1, time.monotonic(), marks, ends

    @property
    def status(self) -> int | None:
        return 0 if self.ends and time.monotonic() > self.began + self.marks / 10 else None

    def reading(self, rank: int) -> Any:
        marks = min(self.marks, int((time.monotonic() - self.began) * 10))
        return SimpleNamespace(pid=1, marks=marks, rank=rank, generation=0, phase="computing", step=marks, what="")


def test_a_long_run_is_waited_for_as_long_as_its_ranks_make_progress():
    _Slow(10, ends=True).completes()
    stuck = "the run did not come to its end: rank 0 of generation 0 is computing at step 2"
    with pytest.raises(NotSurvived, match=stuck):
        _Slow(2, ends=False).completes()


@pytest.mark.parametrize("target", [str(PROGRAMS / "restless.py"), "digits"])
def test_what_is_struck_is_the_same_experiment_with_the_same_options(tmp_path: Path, target: str):
    file = tmp_path / "armed_target.py"
    file.write_text(armed_text(find(target)))
    assert find(str(file)).function() is find(target).function()


def test_samples_that_were_lost_or_used_twice_are_counted():
    wanted = {1: Counter([5, 6, 7]), 2: Counter([8, 9])}
    assert differences(wanted, wanted) == (0, 0)
    assert differences({1: Counter([5, 6, 6]), 2: Counter([8, 9])}, wanted) == (1, 1)
    assert differences({1: Counter([5, 6, 7])}, wanted) == (2, 0)
    assert differences({**wanted, 3: Counter([1])}, wanted) == (0, 1)


def test_a_step_counts_as_the_ranks_computed_it_that_the_run_had_last(tmp_path: Path):
    """The world shrinks from two ranks to one after step 1: what the second one said of step 2 is void."""
    run = RunDirectory(tmp_path)
    run.events.mkdir()
    first, second = (EventFile(run.events_of(rank)) for rank in (0, 1))
    for file, ids in ((first, ([5], [7])), (second, ([6], [8]))):
        file.write("start", world=2)
        file.write("ids", step=1, ids=ids[0])
        file.write("ids", step=2, ids=ids[1])
    first.write("start", world=1)
    first.write("ids", step=2, ids=[7, 8])
    assert used_ids(run) == {1: Counter([5, 6]), 2: Counter([7, 8])}


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({}, True),
        ({"w": torch.tensor([1.0, 2.0 + 1e-5])}, True),
        ({"w": torch.tensor([1.0, 2.1])}, False),
        ({"w": torch.tensor([1.0, math.nan])}, False),
        ({"w": torch.tensor([1.0, math.inf])}, False),
        ({"w": torch.tensor([[1.0, 2.0]])}, False),
        ({"mask": torch.tensor([2.0 + 1e-5, -math.inf])}, True),
        ({"mask": torch.tensor([2.1, -math.inf])}, False),
        ({"mask": torch.tensor([2.0, math.inf])}, False),
        ({"seen": torch.tensor([(1 << 60) + 1])}, False),
        ({"used": torch.tensor([False])}, False),
        ({"none": torch.ones(0, 3)}, True),
        ({"none": torch.ones(1)}, False),
    ],
)
def test_weights_are_near_within_a_tolerance_and_what_is_no_fraction_is_the_same(
    tmp_path: Path, changes: dict[str, torch.Tensor], near: bool
):
    weights = {
        "w": torch.tensor([1.0, 2.0]),
        "mask": torch.tensor([2.0, -math.inf]),
        "seen": torch.tensor([1 << 60]),
        "used": torch.tensor([True]),
        "none": torch.ones(0, 3),
        "close": torch.tensor([1.0]),
    }
    save_file(weights, tmp_path / "one")
    save_file({**weights, "close": torch.tensor([1.00001]), **changes}, tmp_path / "other")
    assert same_weights(tmp_path / "other", tmp_path / "one", 1e-4) == near
    assert not same_weights(tmp_path / "other", tmp_path / "one", 0.0)


def test_documents_are_alike_within_a_tolerance_but_for_counts_and_words():
    wanted = {"losses": [1.0, 2.0], "count": 3, "sha": "a"}
    assert alike({"losses": [1.0, 2.0], "count": 3, "sha": "a"}, wanted, 0.0)
    assert not alike({"losses": [1.0, 2.0000001], "count": 3, "sha": "a"}, wanted, 0.0)
    assert alike({"losses": [1.0, 2.0000001], "count": 3, "sha": "a"}, wanted, 1e-6)
    for other in ({"losses": [1.0]}, {"losses": [1.0, 2.1]}, {"count": 4}, {"sha": "b"}, {"more": 1}):
        assert not alike({**wanted, **other}, wanted, 1e-2)


@pytest.mark.parametrize("other", [torch.tensor([1.0, 2.0000002]), torch.tensor([1.0, 2.0]).double()])
def test_weights_are_compared_bit_by_bit_and_what_is_written_about_them_is_not(tmp_path: Path, other: torch.Tensor):
    for name, tensor, about in (("a", torch.tensor([1.0, 2.0]), "x"), ("b", torch.tensor([1.0, 2.0]), "longer")):
        save_file({"w": tensor}, tmp_path / name, {"about": about})
    save_file({"w": other}, tmp_path / "c")
    assert tensors_of(tmp_path / "a") == tensors_of(tmp_path / "b")
    assert tensors_of(tmp_path / "a") != tensors_of(tmp_path / "c")
    save_file({"v": torch.tensor([1.0, 2.0])}, tmp_path / "d")
    assert tensors_of(tmp_path / "a") != tensors_of(tmp_path / "d"), "of another name"


def test_a_fault_whose_moment_never_comes_is_tried_in_some_runs_and_then_told(tmp_path: Path):
    chaos, fault = Chaos("digits", "", {}, tmp_path, Place(2), keep=True), Fault(1, "segv", 0, 0, 0)
    scene: Any = SimpleNamespace(run=RunDirectory(tmp_path))
    outcome, queue, missed = Outcome(), deque([fault]), Counter[int]()
    while queue:
        assert outcome.failures == [] and missed[1] < TRIES
        chaos._account(_Run([], missed=[queue.popleft()]), scene, outcome, queue, missed)
    assert outcome.failures == [f"segv: its moment did not come in {TRIES} runs"]


def test_faults_before_the_one_that_a_run_fell_with_strike_again(tmp_path: Path):
    chaos, before, fell = (
        Chaos("digits", "", {}, tmp_path, Place(2)),
        Fault(1, "segv", 0, 0, 0),
        Fault(2, "stop", 0, 0, 0),
    )
    scene: Any = SimpleNamespace(run=RunDirectory(tmp_path))
    outcome, queue = Outcome(), deque[Fault]()
    one = _Run([], [Record(before, 0.1, "real")], last=fell, failure="no step was finished")
    chaos._account(one, scene, outcome, queue, Counter())
    assert [each.fault for each in outcome.records] == [fell] and list(queue) == [before]


@pytest.mark.parametrize(
    ("used", "left", "failure"),
    [
        ([5, 6], "", ""),
        ([5], "", "1 samples were lost and 0 used twice"),
        ([5, 6, 6], "", "0 samples were lost and 1 used twice"),
        ([5, 6], ".partial-1-step-00000003", ".partial-1-step-00000003 was left in "),
    ],
)
def test_a_run_that_reaches_the_same_is_looked_at_for_samples_and_left_overs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[int], left: str, failure: str
):
    result = dict.fromkeys(TOLD)
    chaos, one = Chaos("digits", "", {}, tmp_path, Place(2)), _Run([])
    chaos._reference = Reached({}, result, {1: Counter([5, 6])})
    monkeypatch.setattr(Reached, "read", lambda _: Reached({}, result, {1: Counter(used)}))
    scene: Any = SimpleNamespace(run=RunDirectory(tmp_path))
    (scene.run.checkpoints / left).mkdir(parents=True)
    chaos._judge(scene, one, Outcome())
    assert one.failure == (f"{failure}{scene.run.checkpoints}" if left else failure)


@pytest.mark.parametrize(("new_life", "looks"), [(True, 3), (False, 2)])
def test_after_the_loss_of_ranks_only_steps_of_new_ones_are_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_life: bool, looks: int
):
    lives = [None, Life(1, 0, 6), Life(1, 1, 2)]
    shown = iter(lives)
    monkeypatch.setattr(Scene, "status", None)
    monkeypatch.setattr(Scene, "life", lambda _: next(shown))
    with Scene(tmp_path, Control(tmp_path), {}, 2) as scene:
        assert scene.goes_on(Life(1, 0, 5), new_life) is not None
    assert list(shown) == lives[looks:]


def test_what_a_run_leaves_in_memory_is_found(tmp_path: Path):
    with Scene(tmp_path, Control(tmp_path), {}, 2) as scene:
        assert scene.left_behind(0.0) == ""
        scene.run.memories.mkdir(parents=True)
        try:
            assert scene.left_behind(0.0) == f"{scene.run.memories} was left"
        finally:
            scene.run.memories.rmdir()


def test_a_document_says_how_soon_runs_went_on_after_each_kind():
    outcome = Outcome([Record(Fault(n, "segv", 0, 0, 0), seconds, "real") for n, seconds in enumerate((0.1, 0.3, 0.2))])
    outcome.records.append(Record(Fault(3, "segv", 0, 0, 0), None, "real", "no step was finished"))
    document = outcome.document()
    assert (document["faults"], document["survived"]) == (4, 3)
    assert document["by_kind"] == {"segv": {"faults": 4, "survived": 3, "seconds": 0.2, "longest": 0.3, "how": "real"}}
