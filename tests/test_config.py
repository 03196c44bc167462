"""A run's configuration is data: written, read again, and in a directory of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshrun.config import RunConfig, RunDirectory, option_fields, read_file, write_json
from meshrun.errors import UserError

FULL = RunConfig(
    target="/home/me/digits.py:small",
    options={"width": 256, "lr": 3e-4, "sizes": [1, 2], "mode": "slow", "bias": False},
    arguments=("--fast", "two words"),
    procs=3,
    layout="dp=3",
    steps=7,
    epochs=1.5,
    batch=12,
    scale_lr=True,
    micro=2,
    seed=5,
    clip=0.5,
    precision="bf16",
    recompute="every-2",
    graphs=True,
    states="8bit",
    update_in_backward=True,
    compile=True,
    offload=True,
    sync_batchnorm=True,
    compress="fp16",
    allow_tp_across_nodes=True,
    eval_every=4,
    workers=0,
    eval_first=7,
    shuffle="window:4096",
    cache="tmp",
    skip_bad_samples=True,
    prefetch=3,
    checkpoint="10min",
    keep=5,
    mtbf=1000.0,
    spare=False,
    restarts=9,
    on_hang="end",
    hang_after=30.0,
    on_nan="skip",
    on_spike="rollback",
    spike=8.0,
    record_ids=True,
    nodes="1:4",
    join="node1:4000",
    device="cpu",
    backend="gloo",
    threads=2,
    port=4000,
    timeout=12.5,
    deadline="90s",
    site="juwels-booster",
    name="mine",
    runs=Path("some/where"),
    data=Path("some/where/else"),
    tensorboard=False,
)


def test_every_field_comes_back_from_config_json(tmp_path: Path):
    defaults = RunConfig(target="digits")
    for field in dataclasses.fields(RunConfig):
        assert getattr(FULL, field.name) != getattr(defaults, field.name), "the test must give every field"
    for config in (FULL, defaults):
        run = RunDirectory.create(dataclasses.replace(config, runs=tmp_path))
        assert RunDirectory(run.path).config() == dataclasses.replace(config, runs=tmp_path)


def test_a_config_json_from_before_there_was_an_option_is_read_with_its_default():
    values = FULL.to_json()
    del values["deadline"], values["site"], values["data"]
    assert RunConfig.from_json(values) == dataclasses.replace(FULL, deadline="auto", site=None, data=Path("data"))


@pytest.mark.parametrize("text", ["", "soon", "10", "0s", "-5min", "1.5 parsecs"])
def test_a_deadline_that_is_no_time_is_refused(text: str):
    with pytest.raises(UserError, match=r"deadline is .*such as 90s, 10min or 2h \(--deadline\)"):
        RunConfig(target="digits", deadline=text)


def test_config_json_holds_what_was_asked_for_and_what_it_came_to(tmp_path: Path):
    config = RunConfig(target="digits", runs=tmp_path)
    run = RunDirectory.create(config)
    run.save_config(config, {"batch": 64})
    document = json.loads((run.path / "config.json").read_text())
    assert document["format"] == 1
    assert (document["config"]["target"], document["config"]["batch"]) == ("digits", None)
    assert document["resolved"] == {"batch": 64}
    assert run.config() == config


def test_every_option_has_help_and_a_default():
    for field in option_fields():
        assert field.metadata["help"].endswith(".")
        assert field.default is not dataclasses.MISSING


@pytest.mark.parametrize(
    ("target", "name", "expected"),
    [
        ("digits", None, "digits"),
        ("/a/b/train.py", None, "train"),
        ("/a/b/train.py:experiment", None, "train"),
        ("/a/b/train.py:small", None, "train-small"),
        ("digits", "mine", "mine"),
    ],
)
def test_run_is_named_after_its_target(target: str, name: str | None, expected: str):
    assert RunConfig(target=target, name=name).run_name == expected


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", ".."])
def test_name_that_is_no_file_name_is_refused(name: str):
    with pytest.raises(UserError, match=r"\(--name\)"):
        RunConfig(target="digits", name=name)


def test_run_directory_has_its_folders_and_the_next_number(tmp_path: Path):
    config = RunConfig(target="digits", runs=tmp_path / "deep" / "runs")
    first, second = RunDirectory.create(config), RunDirectory.create(config)
    assert (first.path.name, second.path.name) == ("digits-1", "digits-2")
    assert {path.name for path in first.path.iterdir()} == {"config.json", "events", "logs", "weights"}
    assert first.events_of(12).name == "rank-00012.jsonl"
    assert first.log_of(12).name == "rank-00012.log"


def test_numbers_go_on_after_the_highest_and_do_not_mind_other_names(tmp_path: Path):
    for name in ("digits-7", "digits-x", "digits-small-90", "images-99"):
        (tmp_path / name).mkdir()
    assert RunDirectory.create(RunConfig(target="digits", runs=tmp_path)).path.name == "digits-8"


def test_directory_that_another_run_made_in_the_meantime_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = RunConfig(target="digits", runs=tmp_path)
    RunDirectory.create(config)
    RunDirectory.create(config)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # a look around from before the other two were made
    assert RunDirectory.create(config).path.name == "digits-3"


CREATOR = """
import sys
from pathlib import Path
from meshrun.config import RunConfig, RunDirectory
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    print(RunDirectory.create(RunConfig(target="digits", runs=Path(sys.argv[1]))).path.name)
"""


def test_two_creators_at_once_never_get_the_same_directory(tmp_path: Path):
    creators = [
        subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for creator in creators:
        assert creator.stdout is not None and creator.stdout.readline() == "ready\n"
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("go\n")
        creator.stdin.flush()
    names = [name for creator in creators for name in creator.communicate()[0].split()]
    assert [creator.returncode for creator in creators] == [0, 0]
    assert sorted(names, key=lambda name: int(name.split("-")[1])) == [f"digits-{number}" for number in range(1, 81)]


def test_folder_that_cannot_hold_runs_is_refused(tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot make a run directory in .*runs: .* \(--runs\)"):
        RunDirectory.create(RunConfig(target="digits", runs=tmp_path / "runs"))


def test_file_of_options_may_have_dashes_or_underscores(tmp_path: Path):
    toml, of_json = tmp_path / "o.toml", tmp_path / "o.json"
    toml.write_text('eval-every = 3\nscale_lr = true\nlayout = "dp=2"\n')
    of_json.write_text('{"eval-every": 3, "scale_lr": true, "layout": "dp=2"}')
    assert read_file(toml) == read_file(of_json) == {"eval_every": 3, "scale_lr": True, "layout": "dp=2"}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("o.toml", b"a = ", "is not valid TOML"),
        ("o.toml", b"\xff\xfe", "is not valid TOML"),
        ("o.json", b"{", "is not valid JSON"),
        ("o.json", b"3", "holds int; it must be a table of options"),
        ("o.toml", None, "cannot read .*No such file"),
    ],
)
def test_file_that_holds_no_options_is_refused(tmp_path: Path, name: str, content: bytes | None, sentence: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{sentence}.*\(--config\)"):
        read_file(tmp_path / name)


def test_reader_of_a_document_that_is_written_again_and_again_never_sees_half(tmp_path: Path):
    path, over = tmp_path / "result.json", threading.Event()
    write_json(path, {"values": []})

    def write() -> None:
        for length in range(100):
            write_json(path, {"values": [length] * length * 20})
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        values = json.loads(path.read_text())["values"]
        assert len(set(values)) <= 1
    writer.join()
    assert os.listdir(tmp_path) == ["result.json"]  # noqa: PTH208
