"""Events are complete lines, and a reader of a file that is still written sees each of them once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrun.observe.events import EventFile, Follower, read_events

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
