"""Events are complete lines, and a reader of a file that is still written sees each of them once."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.observe import events as events_module
from meshrun.observe.events import EventFile, Follower, LineFile, read_events
from meshrun.observe.legs import legs_of

WRITER = """
import sys, time
from pathlib import Path
from meshrun.observe.events import EventFile
events = EventFile(Path(sys.argv[1]))
for number in range(300):
    events.write("step", step=number, padding="x" * (number * 37 % 5000))
    if number % 50 == 0:
        time.sleep(0.02)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.jsonl"


def test_event_is_one_line_of_json_with_its_time_and_kind(path: Path):
    before = time.time()
    events = EventFile(path)
    events.write("step", step=1, loss=2.5)
    events.write("note", text="two\nlines")
    events.close()
    assert path.read_bytes().count(b"\n") == 2
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["kind"], first["step"], first["loss"]) == ("step", 1, 2.5)
    assert before - 0.001 <= first["time"] <= second["time"] <= time.time() + 0.001
    assert second["text"] == "two\nlines"


def test_loss_that_is_not_a_number_is_read_back(path: Path):
    EventFile(path).write("step", loss=math.nan, grad_norm=math.inf)
    (event,) = read_events(path)
    assert math.isnan(event["loss"]) and event["grad_norm"] == math.inf


def test_event_is_there_as_soon_as_it_is_written(path: Path):
    events = EventFile(path)
    events.write("start")
    assert [event["kind"] for event in read_events(path)] == ["start"]


def test_file_that_is_opened_again_is_continued(path: Path):
    for step in (1, 2):
        events = EventFile(path)
        events.write("step", step=step)
        events.close()
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_there_are_no_events_while_there_is_no_file(path: Path):
    follower = Follower(path)
    assert follower.new() == [] == read_events(path)
    EventFile(path).write("start")
    assert [event["kind"] for event in follower.new()] == ["start"]


def test_half_a_line_waits_for_its_other_half(path: Path):
    follower = Follower(path)
    whole = b'{"time": 1.0, "kind": "step", "step": 1}\n'
    with path.open("ab", buffering=0) as file:
        file.write(whole + whole[:15])
        assert [event["step"] for event in follower.new()] == [1]
        assert follower.new() == []
        file.write(whole[15:-1])
        assert follower.new() == []
        file.write(whole[-1:])
        assert [event["step"] for event in follower.new()] == [1]
        assert follower.new() == []


def test_half_a_line_that_a_crash_left_is_no_event(path: Path):
    path.write_bytes(b'{"time": 1.0, "kind": "start"}\n{"time": 1.1, "ki')
    assert [event["kind"] for event in read_events(path)] == ["start"]


def test_half_a_line_of_an_earlier_process_is_not_glued_to_the_next_event(path: Path):
    path.write_bytes(b'{"kind": "step", "lo')
    EventFile(path).write("start")
    assert [event["kind"] for event in read_events(path)] == ["start"]


def test_events_that_a_disk_refuses_are_written_when_it_takes_them_again(path: Path):
    folder = path.parent
    events = EventFile(folder / "gone" / "away" / "events.jsonl")
    events.write("step", step=1)
    (folder / "gone").mkdir()
    events.write("step", step=2)
    assert [event["step"] for event in read_events(folder / "gone" / "away" / "events.jsonl")] == [1, 2]


def test_reader_beside_a_writing_process_sees_every_event_once_and_in_order(path: Path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    follower, seen, reads = Follower(path), [], 0
    while writer.poll() is None:
        new = follower.new()
        reads += bool(new)
        seen += [event["step"] for event in new]
    seen += [event["step"] for event in follower.new()]
    assert writer.returncode == 0
    assert seen == list(range(300))
    assert reads > 1, "it was read while it was written"


def test_a_line_that_a_full_disk_has_cut_is_gone_on_with_and_not_written_twice(path: Path):
    """The largest size of a file stands for the room on a disk: at it, the kernel writes a part, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lines = LineFile(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))
        lines.add(b"0123456789")
        lines.add(b"abcdefghijklmnopqrst")
        assert path.stat().st_size == 25 and not lines.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    lines.add(b"later")
    assert path.read_text() == "0123456789\nabcdefghijklmnopqrst\nlater\n"


def test_a_line_that_another_thread_adds_meanwhile_is_written_once_and_loses_none(path: Path):
    lines = LineFile(path)
    others: list[threading.Thread] = []

    class Slow(io.FileIO):
        def write(self, line: Any) -> int:
            if not others:
                others.append(threading.Thread(target=lines.add, args=(b"other",)))
                others[0].start()
                others[0].join(0.05)
            return super().write(line)

    lines._file = Slow(path, "a")
    lines.add(b"first")
    others[0].join()
    lines.close()
    assert path.read_text() == "first\nother\n"


def test_a_pipe_in_the_place_of_events_is_refused_instead_of_waited_for(tmp_path: Path):
    path = tmp_path / "rank-00000.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is no plain file"):
        read_events(path)
    assert legs_of(path) == []


@pytest.mark.parametrize(
    "line", ['{"kind": "step"}', '{"kind": "step", "time": "noon"}', '{"time": 1.0}', '{"kind": 1, "time": 1.0}', "[1]"]
)
def test_a_line_without_a_kind_and_a_time_is_no_event(path: Path, line: str):
    path.write_text(f'{line}\n{{"kind": "step", "time": 1}}\n')
    assert read_events(path) == [{"kind": "step", "time": 1}]


def test_of_too_many_events_that_wait_for_a_disk_the_rest_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "MOST_WAITING", 2)
    folder = path.parent / "away"
    events = EventFile(folder / "deep" / path.name)
    for step in range(5):
        events.write("step", step=step)
    folder.mkdir()
    events.write("end")
    told = [event.get("text") or event.get("step", event["kind"]) for event in read_events(folder / "deep" / path.name)]
    assert told == [0, 1, "3 events before this one could not be written", "end"]
    events.write("end")
    assert len(read_events(folder / "deep" / path.name)) == 5, "those that were lost are told once"
