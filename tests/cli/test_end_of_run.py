"""What a run says of its data at its end: samples that were left out, and how long it has waited for the others."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from meshrun.cli import main, rank, training
from meshrun.cli.recorder import last_lines
from meshrun.cli.training import Trained, afterwards
from meshrun.config import RunConfig, RunDirectory
from meshrun.data.readers import ReaderLost
from meshrun.errors import StoppedByHand
from meshrun.mesh import PeerLost
from meshrun.observe.events import Event
from meshrun.train import data_wait
from meshrun.train.loop import Stopped
from meshrun.world.walltime import parse
from tests.cli import in_process
from tests.launch.command import meshrun

PROGRAM = str(Path(__file__).parent / "programs" / "with_bad.py")


def trained(folder: Path) -> tuple[dict[str, Any], list[Event]]:
    return in_process.trained(PROGRAM, folder, {}, workers=0, skip_bad_samples=True)


@pytest.mark.ranks(2)
def test_samples_that_were_left_out_and_time_that_was_waited_are_told_at_the_end(tmp_path: Path):
    with mock.patch.multiple(data_wait, LEAST_STEPS=5, LEAST_WAITED=0.01):  # it is short
        result, told = trained(tmp_path)
    if not told:
        return
    # Two of them in each of two epochs, and again in the two evaluations.
    bad = result["bad_samples"]
    assert bad["count"] == 8
    assert [(each["set"], each["id"]) for each in bad["samples"]] == [(s, i) for s in ("train", "val") for i in (3, 17)]
    run = Path(result["run"])
    assert json.loads((run / "result.json").read_text())["bad_samples"] == bad
    assert result["data_wait"] == max(result["data_waits"]) > 0.1
    notes = [event["text"] for event in told if event["kind"] == "note"]
    (left_out,) = [text for text in notes if "left out" in text]
    assert left_out.startswith(
        "8 times a sample was left out, since it cannot be read (--skip-bad-samples): train 3, train 17, val 3, "
    )
    assert "3 is rotten" in left_out and left_out.endswith(f"; all are in {run}/bad-samples")
    (waited,) = [text for text in notes if "waited for data" in text]
    assert " % of the time waited for data, on rank " in waited and waited.endswith(" at once (--workers 2)")
    report = (run / "report.html").read_text()
    assert "2 samples skipped" in report and "of the time on rank" in report and "waited for data, on rank" in report


def test_an_evaluation_that_is_no_number_is_told_as_such_in_every_document(tmp_path: Path):
    program = Path(__file__).parents[1] / "check" / "programs" / "mistakes.py"
    ended = meshrun(tmp_path, "run", f"{program}:nan_evaluation", "--procs", 2, "--steps", 2, "--json")
    assert ended.status == 0, ended.err
    document = ended.document
    assert document["eval"]["val"] == {"loss": None, "count": 13}
    assert document["not_numbers"]["/eval/val/loss"] == "NaN"
    for file in ("result.json", "config.json"):
        json.loads((tmp_path / document["run"] / file).read_text(), parse_constant=pytest.fail)
    made = json.loads((tmp_path / document["run"] / "config.json").read_text())["resolved"]
    assert made["parameters"] == 147, "each once, though two ranks have them"
    lines = (tmp_path / document["run"] / "events" / "rank-00000.jsonl").read_text().splitlines()
    evaluations = [event for line in lines if (event := json.loads(line, parse_constant=pytest.fail))["kind"] == "eval"]
    assert evaluations[-1]["not_numbers"] == {"/scores/val/loss": "NaN"}
    assert "val  loss nan" in ended.err


ADAMW = """
import torch
from meshrun import Experiment, mean_squared_error

def experiment():
    data = torch.utils.data.TensorDataset(torch.ones(8, 64), torch.ones(8, 64))
    model, adamw = (lambda: torch.nn.Linear(64, 64)), (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    return Experiment(model, data, loss=mean_squared_error, optimizer=adamw, batch=4, steps=2, precision="bf16")
"""


@pytest.mark.ranks(1)
def test_what_was_decided_about_a_step_is_told_at_the_end(tmp_path: Path):
    (tmp_path / "program.py").write_text(ADAMW)
    result, _ = in_process.trained(str(tmp_path / "program.py"), tmp_path, {}, states="8bit")
    kept = json.loads((Path(result["run"]) / "config.json").read_text())["resolved"]["chosen"]
    assert result["chosen"] == {"precision": "bf16", **kept}
    expected = {"compile": False, "states": "8bit", "graphs": False, "graphs_why": "the device is cpu"}
    assert {name: kept[name] for name in expected} == expected
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main._summary(result)
    assert "\neach step: in bf16, with its optimizer's state in 8 bits\n" in printed.getvalue()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main._summary({**result, "chosen": {"precision": "fp32", "compile": False, "recompute": "none"}})
    assert "each step" not in printed.getvalue()


def test_a_run_that_was_stopped_is_not_used_as_one_that_has_come_to_its_end(tmp_path: Path):
    experiment: Any = SimpleNamespace(after=lambda *_: pytest.fail("it was asked to stop"))
    trained = Trained({"stopped": {}, "steps": 3}, experiment, SimpleNamespace(rank=0))  # type: ignore[arg-type]
    nobody: Any = None
    assert afterwards(trained, RunDirectory(tmp_path), nobody, None) == trained.result


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (Stopped("asked"), [True]),
        (KeyboardInterrupt(), [True]),
        (ReaderLost("a process that reads data was lost"), [True]),
        (PeerLost("rank 1 never came"), [False]),
        (RuntimeError("in the program"), []),
    ],
)
def test_a_training_that_others_cut_off_leaves_its_state(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, left: list[bool]
):
    def fails(*_: object) -> None:
        raise error

    found = list[bool]()
    monkeypatch.setattr(training, "hear_of_no_reader", lambda: None)
    trainer: Any = SimpleNamespace(train=fails, keeper=SimpleNamespace(leave=found.append))
    ending: Any = SimpleNamespace(begin=lambda _: None, conclude=fails)
    with pytest.raises(type(error)):
        training._trained(trainer, ending, False)
    assert found == left


@pytest.mark.parametrize("spare", [True, False])
def test_state_is_copied_to_memory_unless_that_was_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
):
    monkeypatch.setattr(training, "Trainer", lambda *_, **options: options)
    monkeypatch.setattr(training.mesh, "start", lambda: SimpleNamespace(world=SimpleNamespace(attempt=0)))
    nobody: Any = None
    made: Any = training._trainer(
        RunConfig("x", spare=spare), RunDirectory(tmp_path), nobody, 1.0, nobody, tmp_path / "memory", None
    )
    assert made["keeping"].memory == (tmp_path / "memory" if spare else None)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_names_the_run_and_what_goes_on_with_it_if_its_state_was_kept(tmp_path: Path, kept: bool):
    def pressed(_config: RunConfig, run: RunDirectory, *_: object) -> None:
        if kept:
            (run.checkpoints / "step-00000002").mkdir(parents=True)
            (run.checkpoints / "step-00000002" / "manifest.json").touch()
        raise KeyboardInterrupt

    with mock.patch.object(rank, "train", pressed), pytest.raises(StoppedByHand) as stopped:
        trained(tmp_path)
    run = next(tmp_path.iterdir())
    saved = f"state saved at step 2; continue with: meshrun resume {run}"
    assert str(stopped.value) == f"stopped by CTRL-C; {saved if kept else f'no state was saved; {run} has its logs'}"


def test_what_a_reader_has_met_is_told_with_the_users_lines_and_none_of_ours():
    with pytest.raises(ValueError, match="weeks") as met:
        parse("weeks")
    met.value.__traceback__ = met.tb.tb_next  # without this file, as if the call had been meshrun's own
    ours = last_lines(met.value)
    assert len(ours) == 1 and "meshrun" in ours[0]
    met.value.add_note("mine.py:3 in __getitem__: raise ValueError('rotten')")
    assert last_lines(met.value) == ["mine.py:3 in __getitem__: raise ValueError('rotten')"]
