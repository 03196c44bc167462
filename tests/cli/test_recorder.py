"""What a rank writes down when it fails: at which step, whether it is a consequence, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshrun.cli.recorder import Recorder, last_lines
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed
from meshrun.mesh import PeerLost
from meshrun.observe.events import read_events
from meshrun.observe.failures import notes_in


def failure_of(tmp_path: Path, error: Exception) -> list[dict[str, object]]:
    """The event in the run directory and the one in the node's memory, of a rank that fails after step 4."""
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    recorder = Recorder(run, 1, None, tmp_path)
    recorder("step", step=4)
    recorder("note", text="evaluating")
    recorder.failure(error, 1)
    recorder.close()
    return [read_events(path)[-1] for path in (run.events_of(1), notes_in(tmp_path, 1))]


def test_a_failure_names_its_step_and_is_in_the_nodes_memory_too(tmp_path: Path):
    for event in failure_of(tmp_path, ValueError("bad")):
        assert "failed at step 5: ValueError: bad" in str(event["sentence"])
        assert (event["secondary"], event["by_user"]) == (False, False)


def test_a_stop_of_an_iterator_in_the_program_is_told_as_the_program_has_raised_it(tmp_path: Path):
    """Python makes another error of one that goes through our generators."""
    error = RuntimeError("generator raised StopIteration")
    error.__cause__ = StopIteration("no more samples")
    for event in failure_of(tmp_path, error):
        assert str(event["sentence"]).endswith("failed at step 5: StopIteration: no more samples")


def test_the_loss_of_another_rank_is_a_consequence(tmp_path: Path):
    for error, secondary in ((PeerLost("rank 1 lost another rank"), True), (RunFailed("the loss is NaN"), False)):
        assert [event["secondary"] for event in failure_of(tmp_path, error)] == [secondary] * 2


def test_an_error_that_the_program_itself_has_made_of_a_stop_of_an_iterator_is_told(tmp_path: Path):
    error = KeyError("sample")
    error.__cause__ = StopIteration("no more samples")
    for event in failure_of(tmp_path, error):
        assert "failed at step 5: KeyError: 'sample'" in str(event["sentence"])


def test_of_many_lines_the_innermost_are_shown():
    def inner(deep: int) -> None:
        if not deep:
            raise ValueError("here")
        inner(deep - 1)

    with pytest.raises(ValueError) as raised:
        inner(9)
    lines = last_lines(raised.value)
    assert len(lines) == 4 and lines[-1].endswith('raise ValueError("here")')


def test_batch_norm_of_one_sample_names_the_flags_that_give_it_more(tmp_path: Path):
    with pytest.raises(ValueError) as refused:
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    for event in failure_of(tmp_path, refused.value):
        assert "(--micro 2)" in str(event["sentence"]) and "(--sync-batchnorm)" in str(event["sentence"])


def test_a_disk_that_takes_no_events_is_named_in_the_nodes_memory_once_each_time(tmp_path: Path):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    run.events.rmdir()
    run.events.write_text("in the place of the folder")
    recorder = Recorder(run, 0, None, tmp_path)
    for step in (1, 2):
        recorder("step", step=step)
    (note,) = read_events(notes_in(tmp_path, 0))
    assert note["text"].startswith(f"cannot write {run.events_of(0)}: File exists; the run goes on")
    run.events.unlink()
    recorder("step", step=3)
    assert [event["step"] for event in read_events(run.events_of(0))] == [1, 2, 3]
    assert len(read_events(notes_in(tmp_path, 0))) == 1
