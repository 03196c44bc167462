"""Which rank is to blame when several have failed, and what the user reads about it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from meshrun.config import RunConfig, RunDirectory
from meshrun.launch.local import Failure
from meshrun.observe.events import EventFile
from meshrun.observe.failures import first_failure, notes_in, of_reader, tail

KILLED = "was killed by SIGKILL"
TERMINATED = "was killed by SIGTERM"
EXITED = "ended with exit status 1"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig(target="digits", runs=tmp_path))


def failed(run: RunDirectory, rank: int, time: float, secondary: bool = False, by_user: bool = False) -> None:
    """Write what a rank writes when it fails."""
    sentence = f"rank {rank} {'lost its peer' if secondary else 'raised'}"
    fields: dict[str, Any] = {"rank": rank, "lines": [f"line of {rank}"], "by_user": by_user, "secondary": secondary}
    EventFile(run.events_of(rank)).write("failure", time=time, sentence=sentence, **fields)


@dataclass(frozen=True)
class Case:
    """Failures that ranks wrote, as (rank, time), how processes ended in the order of their ends, who is blamed."""

    ended: dict[int, str]
    blamed: str
    raised: tuple[tuple[int, float], ...] = ()
    lost: tuple[tuple[int, float], ...] = ()


CASES = {
    "the killed one, not who lost it": Case({1: KILLED, 0: EXITED}, "rank 1 on n7 was killed", lost=((0, 5.0),)),
    "the killed one, though noticed last": Case({0: EXITED, 1: KILLED}, "rank 1 on n7 was killed", lost=((0, 5.0),)),
    "who raised, not who lost it": Case({1: EXITED, 0: EXITED}, "rank 1 raised", ((1, 5.0),), ((0, 5.1),)),
    "who raised, though clocks differ": Case({0: EXITED, 1: EXITED}, "rank 1 raised", ((1, 5.0),), ((0, 4.0),)),
    "who raised, not whom the agent ended": Case({1: EXITED, 0: TERMINATED}, "rank 1 raised", ((1, 5.0),)),
    "who raised, not whom the agent had to kill": Case({1: EXITED, 0: KILLED}, "rank 1 raised", ((1, 5.0),)),
    "the first of two that raised": Case({0: EXITED, 1: EXITED}, "rank 1 raised", ((0, 5.1), (1, 5.0))),
    "the first of two that were killed": Case({2: KILLED, 0: KILLED}, "rank 2 on n7 was killed"),
    "who ended without a word": Case({1: "ended so", 0: EXITED}, "rank 1 on n7 ended so", lost=((0, 5.0),)),
    "who ended without a word, not whom the agent ended": Case({0: TERMINATED, 1: KILLED}, "rank 1 on n7 was killed"),
    "who lost a peer, if nothing else": Case({0: EXITED, 1: TERMINATED}, "rank 0 lost its peer", lost=((0, 5.0),)),
    "the first who lost a peer": Case({0: EXITED, 1: EXITED}, "rank 1 lost its peer", lost=((0, 5.1), (1, 5.0))),
    "anybody, if all were told to end": Case({0: TERMINATED, 1: TERMINATED}, "rank 0 on n7 was killed by SIGTERM"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_first_failure_is(name: str, run: RunDirectory):
    case = CASES[name]
    for rank, time in case.raised:
        failed(run, rank, time)
    for rank, time in case.lost:
        failed(run, rank, time, secondary=True)
    assert first_failure(run, case.ended, "n7").sentence.startswith(case.blamed)


def test_failure_that_was_half_written_is_none(run: RunDirectory):
    run.events_of(1).write_text('{"time": 5.0, "kind": "failure", "sent')
    failed(run, 0, 5.0, secondary=True)
    assert first_failure(run, {0: EXITED, 1: KILLED}, "n7").sentence.startswith("rank 1 on n7 was killed by SIGKILL")


def test_failure_of_an_earlier_start_is_not_that_of_this_one(run: RunDirectory):
    failed(run, 0, 5.0)
    assert first_failure(run, {0: KILLED}, "n7", since=4.0).sentence == "rank 0 raised"
    assert first_failure(run, {0: KILLED}, "n7", since=6.0).sentence.startswith("rank 0 on n7 was killed")


def test_of_several_failures_of_a_rank_the_first_is_told(run: RunDirectory):
    failed(run, 0, time=5.0)
    fields = {"rank": 0, "lines": [], "by_user": False, "secondary": False}
    EventFile(run.events_of(0)).write("failure", time=6.0, sentence="its clean-up raised", **fields)
    assert first_failure(run, {0: KILLED}, "n7").sentence == "rank 0 raised"


def test_failure_that_only_the_memory_of_the_node_could_take_is_found(run: RunDirectory, tmp_path: Path):
    said = {"rank": 1, "lines": [], "by_user": False, "secondary": False}
    EventFile(notes_in(tmp_path, 1)).write("failure", time=5.0, sentence="rank 1 raised", **said)
    assert first_failure(run, {1: EXITED}, "n7", memory=tmp_path).sentence == "rank 1 raised"


@pytest.mark.parametrize("what", ["the run directory", "the events"])
def test_a_rank_of_a_run_that_a_file_or_a_folder_replaces_is_told_of_all_the_same(run: RunDirectory, what: str):
    if what == "the events":  # which cannot be read then
        run.events_of(1).mkdir()
        assert first_failure(run, {1: EXITED}, "n7").sentence.startswith("rank 1 on n7 ended with exit status 1")
        return
    shutil.rmtree(run.path)
    run.path.write_text("a file")
    assert "was deleted, moved or unmounted" in first_failure(run, {1: EXITED}, "n7").sentence


@pytest.mark.parametrize("fields", [{}, {"sentence": 5}, {"lines": "x"}, {"rank": "1"}, {"rank": -1}])
def test_failure_that_lacks_what_is_shown_of_it_is_none(run: RunDirectory, fields: dict[str, Any]):
    whole = {"rank": 1, "sentence": "rank 1 raised", "lines": []}
    EventFile(run.events_of(1)).write("failure", time=5.0, **({**whole, **fields} if fields else {}))
    assert first_failure(run, {1: EXITED}, "n7").sentence.startswith("rank 1 on n7 ended with exit status 1")


@pytest.mark.parametrize(("steps", "where"), [(0, "before its first step"), (2, "after step 2")])
def test_killed_rank_is_told_with_its_step_last_lines_and_log(run: RunDirectory, steps: int, where: str):
    events = EventFile(run.events_of(1))
    for step in range(1, steps + 1):
        events.write("step", step=step)
    run.log_of(1).write_text("".join(f"line {number}\n" for number in range(20)))
    found = first_failure(run, {1: KILLED}, "n7")
    assert found.sentence == f"rank 1 on n7 was killed by SIGKILL {where}"
    assert found.lines == [f"line {number}" for number in range(12, 20)]
    assert not found.by_user
    sentence, *lines, log = found.text.splitlines()
    assert (sentence, log) == (found.sentence, f"    log: {run.log_of(1)}")
    assert lines == [f"    {line}" for line in found.lines]


def test_a_rank_that_gloo_has_ended_is_told_with_what_the_program_did(run: RunDirectory):
    log = "terminate called\n  what(): Received data size doesn't match. Is there a distributed collective mismatch?\n"
    run.log_of(1).write_text(log)
    sentence = first_failure(run, {1: "was killed by SIGABRT"}, "n7").sentence
    assert "was killed by SIGABRT before its first step: it got another tensor than it waited for" in sentence
    assert sentence.endswith("and use unwrap(model) where one rank computes alone")


def test_rank_that_raised_is_told_with_its_own_last_lines(run: RunDirectory):
    failed(run, 1, 5.0)
    run.log_of(1).write_text("a traceback\n")
    assert first_failure(run, {1: EXITED}, "n7").text == f"rank 1 raised\n    line of 1\n    log: {run.log_of(1)}"


def test_what_the_user_gave_is_the_sentence_alone(run: RunDirectory):
    failed(run, 1, 5.0, by_user=True)
    found = first_failure(run, {1: "ended with exit status 2"}, "n7")
    assert found.by_user
    assert found.text == "rank 1 raised"


def test_log_that_was_never_written_is_not_named(run: RunDirectory):
    found = first_failure(run, {1: KILLED}, "n7")
    assert found.text == "rank 1 on n7 was killed by SIGKILL before its first step"
    assert tail(run.log_of(1)) == []


def test_a_run_that_lacks_its_config_json_alone_is_not_said_to_be_deleted(run: RunDirectory):
    (run.path / "config.json").unlink()
    sentence = first_failure(run, {1: EXITED}, "n7").sentence
    assert sentence == f"{run.path}/config.json, which every start of the run reads, was deleted while the run trained"


def test_a_run_directory_that_is_gone_is_the_failure_of_a_rank_that_can_say_nothing(run: RunDirectory):
    shutil.rmtree(run.path)
    sentence = first_failure(run, {1: EXITED}, "n7").text
    assert (
        sentence
        == f"{run.path} was deleted, moved or unmounted while the run trained, so that nothing of it can be kept"
    )


def test_log_that_is_no_text_can_still_be_shown(run: RunDirectory):
    run.log_of(1).write_bytes(b"good\n\xff\xfe bytes\n")
    assert tail(run.log_of(1))[0] == "good" and tail(run.log_of(1))[1].endswith(" bytes")


@pytest.mark.parametrize(
    ("code", "how"),
    [(3, "ended with exit status 3"), (-9, KILLED), (-15, TERMINATED), (-11, "was killed by SIGSEGV")],
)
def test_end_of_a_process_in_words(code: int, how: str):
    assert Failure(0, code, 0.0).how == how


class Rotten(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        error = ValueError(f"{number} is rotten")
        error.add_note(f"while reading sample {number}")
        raise error

    def __len__(self) -> int:
        return 1


def test_an_error_in_a_reader_is_told_in_its_own_words_and_with_the_users_line():
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker") as raised:
        list(DataLoader(Rotten(), num_workers=1))
    told = of_reader(str(raised.value), [str(Path(torch.__file__).parent)])
    assert told is not None
    sentence, (line,) = told
    assert sentence == "ValueError: 0 is rotten (while reading sample 0)"
    assert line.startswith(f"{__file__}:") and line.endswith(" in __getitem__: raise error")


def test_other_errors_are_not_a_readers():
    assert of_reader("it broke") is None
