"""What a person sees of a run: a bar on a terminal, lines in a log file, and the program's own words."""

from __future__ import annotations

import io
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshrun.observe import story as module
from meshrun.observe.events import EventFile
from meshrun.observe.failures import write_traceback
from meshrun.observe.story import Follow, Story, stopped_in_time

START = {
    "kind": "start",
    "target": "digits",
    "total_steps": 1030,
    "world": 2,
    "layout": "dp=2",
    "device": "cuda:0",
    "run": "runs/digits-3",
}


def step(number: int, loss: float = 0.5, seconds: float = 0.02) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, "samples": 64, "seconds": seconds}


class Shown(Story):
    """A story whose console and standard output are texts."""

    def __init__(self, terminal: bool, piped: bool = False) -> None:
        self.screen, self.output = io.StringIO(), io.StringIO()
        self.output.isatty = lambda: terminal and not piped  # type: ignore[method-assign]
        console = Console(file=self.screen, force_terminal=terminal, width=100, color_system=None)
        super().__init__(console, self.output)

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()


@pytest.fixture
def in_a_log() -> Iterator[Shown]:
    with Shown(terminal=False) as story:
        yield story


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    monkeypatch.setenv("TERM", "xterm")
    with Shown(terminal=True) as story:
        yield story


@pytest.mark.parametrize("terminal", [False, True])
def test_run_that_never_started_leaves_nothing(terminal: bool):
    with Shown(terminal) as story:
        pass
    assert story.screen.getvalue() == ""


def test_log_begins_with_what_runs_where(in_a_log: Shown):
    in_a_log.tell(START)
    assert in_a_log.lines == ["digits: 1,030 steps on 2 ranks (dp=2, cuda)  ->  runs/digits-3"]


def test_one_step_is_not_called_steps(in_a_log: Shown):
    in_a_log.tell({**START, "total_steps": 1})
    assert in_a_log.lines == ["digits: 1 step on 2 ranks (dp=2, cuda)  ->  runs/digits-3"]


def test_one_rank_is_not_called_ranks(in_a_log: Shown):
    in_a_log.tell({**START, "world": 1, "layout": "dp=1"})
    assert "on 1 rank (dp=1" in in_a_log.lines[0]


def test_log_has_a_line_now_and_then_and_not_for_every_step(in_a_log: Shown, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    in_a_log.tell(START)
    for number in range(1, 31):
        in_a_log.tell(step(number, loss=1 / number))
        now[0] += 1
    told = in_a_log.lines[1:]
    assert [line.split()[1] for line in told] == ["12/1,030", "23/1,030"]
    assert told[0] == "step 12/1,030  loss 0.0833  3,200 samples/s  20 s left"


def test_evaluations_and_notes_are_lines_on_both(in_a_log: Shown, on_a_terminal: Shown):
    scores = {"val": {"loss": 0.25, "count": 2000.0, "accuracy": 0.97654}}
    for story in (in_a_log, on_a_terminal):
        story.tell(START)
        story.tell({"kind": "eval", "step": 1030, "scores": scores})
        story.tell({"kind": "note", "text": "batch 64 -> [128]"})
        shown = story.screen.getvalue()
        assert "step 1,030  val  loss 0.2500  accuracy 0.9765  (mean over 2,000)" in shown
        assert "batch 64 -> [128]" in shown, "brackets are no markup"


def test_what_is_printed_after_a_training_is_not_broken_into_lines():
    text, screen = "a sentence that the model has made, " * 9, io.StringIO()
    Story(Console(file=screen)).tell({"kind": "after", "text": text})
    assert screen.getvalue() == text + "\n"


@pytest.mark.parametrize("kind", ["restart", "hang", "straggler"])
def test_what_befalls_ranks_is_told_in_its_own_sentence(kind: str, in_a_log: Shown):
    in_a_log.tell({"kind": kind, "sentence": "rank 1 on node7 was killed by SIGKILL [after] step 2"})
    assert in_a_log.lines == ["rank 1 on node7 was killed by SIGKILL [after] step 2"]


def test_of_checkpoints_the_first_is_told_and_each_that_fails(in_a_log: Shown):
    saved = {"kind": "checkpoint", "seconds": 1.25, "stall": 0.031, "bytes": 12_345_678, "error": None}
    for number in (100, 200):
        in_a_log.tell({**saved, "step": number})
    in_a_log.tell({**saved, "step": 300, "error": "No space left on device"})
    assert in_a_log.lines == [
        "step 100: first checkpoint saved: 12.3 MB in 1.2 s (training paused for 31 ms)",
        "step 300: the checkpoint could not be kept: No space left on device",
    ]


def test_batches_left_out_ways_back_and_resuming_are_told(in_a_log: Shown):
    in_a_log.tell({"kind": "skipped", "step": 1200, "why": "the loss is nan"})
    in_a_log.tell({"kind": "rollback", "from_step": 1200, "to_step": 1000, "why": "the loss is nan"})
    in_a_log.tell({"kind": "resumed", "step": 1000, "source": "the nodes' memory", "seconds": 0.24})
    assert in_a_log.lines == [
        "step 1,200: its batch is skipped, as the loss is nan",
        "back from step 1,200 to step 1,000, as the loss is nan",
        "goes on after step 1,000 from the nodes' memory, loaded in 0.2 s",
    ]


def test_terminal_shows_a_bar_with_progress_loss_rate_and_time_left(on_a_terminal: Shown):
    on_a_terminal.tell(START)
    on_a_terminal.tell(step(515, loss=0.125))
    on_a_terminal._progress.refresh()
    bar = on_a_terminal.screen.getvalue().splitlines()[-1]
    for part in ("training", "━", "515/1,030", "loss 0.1250", "3,200 samples/s", "left"):
        assert part in bar


def test_last_step_is_shown_however_soon_it_comes(on_a_terminal: Shown):
    on_a_terminal.tell(START)
    for number in (1028, 1029, 1030):
        on_a_terminal.tell(step(number, loss=number / 1000))
    on_a_terminal._progress.refresh()
    assert "1,030/1,030 loss 1.0300" in on_a_terminal.screen.getvalue()


def test_bar_is_gone_when_the_story_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    with Shown(terminal=True) as story:
        story.tell(START)
        story.tell(step(515))
    assert story.screen.getvalue().endswith("\x1b[2K"), "the bar's line is erased"


def test_words_of_the_program_go_to_standard_output_where_there_is_no_terminal(in_a_log: Shown):
    in_a_log.say("words [bold]as they are[/bold]")
    assert in_a_log.output.getvalue() == "words [bold]as they are[/bold]\n"
    assert in_a_log.screen.getvalue() == ""


def test_words_of_the_program_stand_above_the_bar_on_a_terminal(on_a_terminal: Shown):
    on_a_terminal.tell(START)
    on_a_terminal.say("words [bold]as they are[/bold]")
    assert "words [bold]as they are[/bold]" in on_a_terminal.screen.getvalue()
    assert on_a_terminal.output.getvalue() == ""


def test_words_of_the_program_can_be_piped_while_the_bar_is_on_the_terminal():
    with Shown(terminal=True, piped=True) as story:
        story.tell(START)
        story.say("a result")
    assert story.output.getvalue() == "a result\n"
    assert "a result" not in story.screen.getvalue()


def test_story_is_told_from_files_that_others_write_up_to_the_last_line(tmp_path: Path, in_a_log: Shown):
    events, log = tmp_path / "events.jsonl", tmp_path / "rank.log"
    with Follow(in_a_log, events, log):
        log.write_text("first words\n")
        EventFile(events).write(**START)
        with log.open("a") as file:
            file.write("last words\nhalf a")
    assert in_a_log.output.getvalue() == "first words\nlast words\nhalf a\n"
    assert in_a_log.lines[0].startswith("digits: 1,030 steps")


def test_story_goes_on_after_a_time_without_file_descriptors(tmp_path: Path, in_a_log: Shown):
    events, log = tmp_path / "events.jsonl", tmp_path / "rank.log"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with log.open("w") as file, Follow(in_a_log, events, log):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            print("words", file=file, flush=True)
            time.sleep(0.6)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert in_a_log.output.getvalue() == ""
    assert in_a_log.output.getvalue() == "words\n"


def test_a_traceback_stays_in_the_log_and_so_does_the_noise_of_libraries(tmp_path: Path, in_a_log: Shown):
    events, log = tmp_path / "events.jsonl", tmp_path / "rank.log"
    log.write_text("")
    with Follow(in_a_log, events, log), log.open("a") as file:
        print("of the program", file=file)
        print("[W1115 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3", file=file)
        try:
            raise KeyError("width")
        except KeyError as error:
            write_traceback(error, file)
            print("of the next start? ", end="", file=file)
            write_traceback(error, file)
        print("", file=file)
    assert in_a_log.output.getvalue().splitlines() == ["of the program", "of the next start? ", ""]
    assert "KeyError: 'width'" in log.read_text()


def test_a_run_that_went_on_has_shown_its_first_checkpoint_before(in_a_log: Shown):
    saved = {"kind": "checkpoint", "step": 66, "bytes": 1e6, "seconds": 0.1, "stall": 0.01}
    in_a_log.tell({"kind": "resumed", "step": 36, "source": "a checkpoint", "seconds": 0.1})
    in_a_log.tell(saved)
    assert in_a_log.lines == ["goes on after step 36 from a checkpoint, loaded in 0.1 s"]
    in_a_log.tell({**saved, "error": "No space left on device"})
    assert len(in_a_log.lines) == 2


def test_of_a_run_that_kept_nothing_it_is_not_said_that_resume_goes_on():
    stopped = {"step": 12, "of": 1000, "why": "the job ends", "saved": True}
    assert stopped_in_time(stopped, "runs/a-1").endswith("since the job ends; meshrun resume runs/a-1 goes on")
    assert "resume" not in stopped_in_time({**stopped, "saved": False}, "runs/a-1")


def test_what_a_program_of_somebody_else_has_printed_cannot_do_anything_to_the_terminal(
    tmp_path: Path, in_a_log: Shown
):
    events, log = EventFile(tmp_path / "rank-0.jsonl"), tmp_path / "rank-0.log"
    log.touch()
    with Follow(in_a_log, tmp_path / "rank-0.jsonl", log, is_own=False):
        log.write_text("\x1b]0;owned\x07\n")
        events.write("after", text="\x1b[2Jgone")
    assert "\x1b" not in in_a_log.output.getvalue() and "\\x1b]0;owned" in in_a_log.output.getvalue()
    assert "\\x1b[2Jgone" in in_a_log.output.getvalue()
