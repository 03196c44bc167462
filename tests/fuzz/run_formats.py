"""Documents of a run: its configuration, result, events and report, what its processes leave for each other."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from meshrun import strict_json
from meshrun.check.doctor import exchange
from meshrun.cli import following, listing
from meshrun.cli.command import _from_file
from meshrun.cli.model_record import ModelRecord
from meshrun.cli.options import options_of, run_options
from meshrun.cli.target import find
from meshrun.config import RunConfig, RunDirectory, read_file
from meshrun.data.convert.parts import _difference
from meshrun.launch import anew, lock
from meshrun.launch.chain import Record, decide, seen_of
from meshrun.launch.nodes import nodes_of
from meshrun.launch.parting import is_anybody_gone
from meshrun.launch.submission import Line, Resources, Rules, Submission
from meshrun.launch.words import word_of_the_launcher
from meshrun.layout import parse
from meshrun.observe import flight, history, testimony
from meshrun.observe.events import Follower, read_events
from meshrun.observe.failures import first_failure
from meshrun.observe.legs import legs_of
from meshrun.observe.report import write_report
from meshrun.observe.story import Story
from meshrun.train.bad_samples import left_out, read_bad
from meshrun.world import rendezvous
from tests.fuzz.data_formats import put
from tests.fuzz.engine import Format, WrongValue
from tests.fuzz.mutations import of_json, of_text

Document = dict[str, Any]


def _documents(*documents: Any) -> Callable[[Path], Sequence[bytes]]:
    return lambda _: [strict_json.dumps(each).encode() for each in documents]


CONFIG = {
    "format": 1,
    "config": {**RunConfig(target="digits", options={"width": 8}, steps=6, procs=1, clip=1.0).to_json()},
    "resolved": {"steps": 6, "layout": "dp=1", "batch": 64, "world": 1},
    "history": [],
}
RESULT = {
    "run": "runs/digits-1",
    "world": 1,
    "layout": "dp=1",
    "steps": 6,
    "losses": [2.5, float("nan"), 1.5],
    "grad_norms": [1.0, 2.0, 3.0],
    "eval": {"val": {"loss": 0.5, "count": 3, "accuracy": 0.9}},
    "seconds": 3.5,
    "samples_per_s": 1000.0,
    "data_wait": 0.01,
    "chosen": {"compile": False},
    "legs": [],
}
STOPPED = {"step": 4, "why": "CTRL-C", "time": 1.5e9, "of": 6, "saved": True, "by": "user", "result": {"steps": 4}}
EVENTS = [
    {"time": 1794700000.0, "kind": "start", "world": 2, "rank": 0, "host": "n1", "layout": "dp=2", "total_steps": 6},
    {"time": 1794700001.0, "kind": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0, "seconds": 0.1, "samples": 64},
    {"time": 1794700001.5, "kind": "note", "text": "something to know"},
    {"time": 1794700002.0, "kind": "step", "step": 2, "loss": float("inf"), "grad_norm": None, "data_wait": 0.01},
    {"time": 1794700002.2, "kind": "checkpoint", "step": 2, "bytes": 1000, "seconds": 0.2},
    {"time": 1794700002.4, "kind": "resumed", "step": 2, "layout": "dp=2"},
    {"time": 1794700003.0, "kind": "eval", "step": 2, "scores": {"val": {"loss": 0.5, "count": 3, "accuracy": 0.9}}},
    {"time": 1794700003.5, "kind": "after", "text": "sample"},
    {
        "time": 1794700004.0,
        "kind": "failure",
        "sentence": "ValueError: x",
        "rank": 0,
        "step": 2,
        "lines": ["a", "b"],
    },
    {"time": 1794700005.0, "kind": "end", "steps": 2, "seconds": 4.0},
]
EVENT_LINES = b"".join(strict_json.dumps(each).encode() + b"\n" for each in EVENTS)


def _run(folder: Path) -> RunDirectory:
    """A run directory with valid documents, of which the reader's own is replaced."""
    run = RunDirectory(folder / "runs" / "digits-1")
    if not run.path.exists():
        for each in (run.events, run.logs, run.checkpoints):
            each.mkdir(parents=True)
    for name, document in (("config.json", CONFIG), ("result.json", RESULT)):
        (run.path / name).write_text(strict_json.dumps(document))
    run.events_of(0).write_bytes(EVENT_LINES)
    return run


def _read_config(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    put(run.path, "config.json", data)
    listing._progress(run)
    write_report(run.path)  # shows what it can
    config = run.config()
    parse(config.layout)
    nodes_of(config.nodes)
    if RunConfig.from_json(json.loads(json.dumps(config.to_json()))) != config:
        raise WrongValue("the configuration is another one when it is written and read again")
    return config


def _read_result(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    put(run.path, "result.json", data)
    write_report(run.path)
    found = run.result()
    if found is not None:
        following._completed(run.path, found)
    return found


def _read_stopped(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    put(run.path, "stopped.json", data)
    seen = seen_of(run, 1, False, False, False)
    return decide(Record(strict_json.of_type(Submission, json.loads(json.dumps(SUBMISSION["submission"])), "it")), seen)


def _read_events(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    path = put(run.events, "rank-00000.jsonl", data)
    events = read_events(path)
    if Follower(path).new() != events and "NaN" not in repr(events) and "nan" not in repr(events):
        raise WrongValue("a second reading gives other events")
    for event in events:
        if not isinstance(event, dict):
            raise WrongValue(f"an event is {type(event).__name__}")
    found = history.read(run.path)
    legs_of(path)
    write_report(run.path)
    listing._progress(run)
    first_failure(run, {0: "ended with exit status 1"}, "n1")
    _tell(run)
    return found.steps, found.seconds, found.scores


def _tell(run: RunDirectory) -> None:
    """What a launcher prints of the events of its ranks."""
    with Path("/dev/null").open("w") as nowhere, Story(Console(file=nowhere), nowhere) as story:
        for event in read_events(run.events_of(0)):
            story.tell(event)


SUBMISSION: Document = {
    "format": 1,
    "submission": Submission(
        *("digits", Path("/runs/digits-1"), ("meshrun", "run", "digits"), "/usr/bin/python3"),
        resources=Resources(nodes=2, gpus_per_node=4, procs=4, seconds=3600, account="me"),
        rules=Rules(sbatch=(Line("--x=1", "so"),), modules=("module load x",), environment={"A": Line("b", "c")}),
        links=3,
    ).to_json(),
    "jobs": ["17", "18"],
    "index": None,
    "links": [{"job": "17", "status": 75, "step": 3, "what": "next", "sentence": "goes on"}],
    "cancelled": False,
    "ended": "",
}


def _read_submission(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    put(run.path, "submission.json", data)
    record = Record.load(run.path)
    seen = seen_of(run, 75, False, False, False)
    decide(record, seen)
    listing._row(run.path, record, None)
    following.ended(run.path, record, None)
    return record.used, str(record.submission.script_path), record.submission.job_name


def _read_lock(data: bytes, folder: Path) -> Any:
    run = _run(folder)
    path = put(run.path, lock.NAME, data)
    holder = lock._holder(path)
    lock._is_of_another_host(holder)
    lock._has_died_here({**holder, "host": socket.gethostname()})
    lock.is_left(run)
    return lock._refusal(run, path)


def _read_model(data: bytes, folder: Path) -> Any:
    put(folder, "model.json", data)
    record = ModelRecord.read(folder)
    return record and (record.hf_name("weight"), record.tied.get("x"))


def _read_bad_samples(data: bytes, folder: Path) -> Any:
    put(folder, "bad-samples/rank-00000.jsonl", data)
    found = read_bad(folder / "bad-samples")
    return found and left_out(found, folder)


def _read_rendezvous(data: bytes, folder: Path) -> Any:
    put(folder, f"{rendezvous.FOLDER}/job-0.json", data)
    found = rendezvous.lookup(folder, "job", 0)
    if found is not None and not 0 <= found[1] < 65536:  # 0 says that nobody will listen
        raise WrongValue(f"{found[1]} is no port")
    return found


def _read_note(data: bytes, folder: Path) -> Any:
    _run(folder)
    return anew._noted(put(folder, "note", data), 3)


def _read_word(data: bytes, folder: Path) -> Any:
    path = put(folder, "dead-0.json", data)
    word = word_of_the_launcher(folder, 0)
    return word, is_anybody_gone(path)


CALL = {field.name: 1 for field in dataclasses.fields(flight.Call)}
GROUP = {"name": "0", "ranks": [0, 1], "calls": [CALL]}
WITNESS = {
    "pulse": {field.name: 1 for field in dataclasses.fields(testimony.Reading)},
    "host": "n1",
    "state": "S",
    "readers": [{"pid": 3, "state": "S", "frames": []}],
    "groups": [GROUP],
    "frames": [{field.name: "x" for field in dataclasses.fields(testimony.Frame)}],
}


def _read_witnesses(data: bytes, folder: Path) -> Any:
    own = put(folder, "hang/witnesses-0-00000.json", b"{}")
    put(folder, "hang/witnesses-0-00001.json", data)
    return [each.rank for each in testimony._others(folder / "hang", 0, own)]


def _read_flight(data: bytes, folder: Path) -> Any:
    path = flight.path_of(folder, 0)
    put(path.parent, path.name, data)
    return flight.read(folder, 0, 7)


def _read_doctor(data: bytes, folder: Path) -> Any:
    return exchange._read(put(folder, "letter.json", data))


def _read_parts(data: bytes, folder: Path) -> Any:
    put(folder, "parts/manifest.json", data)
    put(folder, "parts/inputs.jsonl", b'["a.txt", 3]\n')
    return _difference(folder / "parts", {"vocabulary": 100}, put(folder, "new", b'["a.txt", 3]\n'))


TOML = [
    b'steps = 6\nlayout = "dp=2"\nclip = 1.0\nwidth = 64\nname = "x"\nruns = "out"\ncompile = true\n',
    b"batch = 3\nepochs = 1.5\nlr = 1e-3\ntimeout = 30\nkeep = 3\nnodes = '1:2'\n",
]


def _options() -> dict[str, Any]:
    return {option.name: option for option in (*options_of(find("digits").function()), *run_options())}


def _read_options(name: str) -> Callable[[bytes, Path], Any]:
    def read(data: bytes, folder: Path) -> Any:
        path = put(folder, name, data)
        read_file(path)
        values = _from_file(path, OPTIONS or OPTIONS.update(_options()) or OPTIONS)
        fields = {field.name for field in dataclasses.fields(RunConfig)}
        return RunConfig(target="digits", **{each: value for each, value in values.items() if each in fields})

    return read


OPTIONS: dict[str, Any] = {}

FORMATS = [
    Format("config.json", _documents(CONFIG), _read_config, of_json),
    Format("result.json", _documents(RESULT), _read_result, of_json),
    Format("stopped.json", _documents(STOPPED), _read_stopped, of_json),
    Format("events", lambda _: [EVENT_LINES], _read_events, of_json),
    Format("submission.json", _documents(SUBMISSION), _read_submission, of_json),
    Format("lock", _documents({}, {"host": "n1", "pid": 17, "started": "2026-01-01"}), _read_lock, of_json),
    Format(
        "model.json",
        _documents({"model": "Net", "tied": {"a": "b"}, "hf_config": {"x": 1}, "hf_names": {"weight": "w"}}),
        _read_model,
        of_json,
    ),
    Format(
        "bad-samples", lambda _: [b'{"set": "t", "step": 1, "id": 3, "why": "x"}\n' * 2], _read_bad_samples, of_json
    ),
    Format("rendezvous", _documents({"address": "10.0.0.1", "port": 29500}), _read_rendezvous, of_json),
    Format("note-of-start", _documents({"run": "runs/digits-1", "start": 1}), _read_note, of_json),
    Format("word-of-launcher", _documents({"ranks": [1, 2], "final": False}), _read_word, of_json),
    Format("witnesses", _documents({"witnesses": [WITNESS]}), _read_witnesses, of_json),
    Format("flight-record", _documents({"question": 7, "groups": [GROUP]}), _read_flight, of_json),
    Format("doctor-letter", _documents({"rank": 1, "facts": [1, 2]}), _read_doctor, of_json),
    Format("convert-parts", _documents({"format": 2, "options": {"vocabulary": 100}}), _read_parts, of_json),
    Format("options-toml", lambda _: TOML, _read_options("options.toml"), of_text),
    Format("options-json", _documents({"steps": 6, "layout": "dp=2", "clip": 1.0}), _read_options("o.json"), of_json),
]
