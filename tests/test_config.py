"""A run's configuration is data: written, read again, and in a directory of its own."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrun import config as config_module
from meshrun.config import RunConfig, RunDirectory, made_private, option_fields, read_file, seconds_in, write_json
from meshrun.errors import SharedError, UserError

FULL = RunConfig(
    target="/home/me/digits.py:small",
    options={"width": 256, "lr": 3e-4, "sizes": [1, 2], "mode": "slow", "bias": False},
    arguments=("--fast", "two words"),
    command=("meshrun", "run", "two words"),
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


def test_users_outside_of_the_group_cannot_enter_a_run_directory(tmp_path: Path):
    before = os.umask(0o002)
    try:
        run = RunDirectory.create(RunConfig(target="digits", runs=tmp_path / "runs"))
    finally:
        os.umask(before)
    assert run.path.stat().st_mode & 0o777 == 0o770


def test_other_users_cannot_rename_runs_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        RunDirectory.create(RunConfig(target="digits", runs=tmp_path / "runs"))
    finally:
        os.umask(before)
    assert not (tmp_path / "runs").stat().st_mode & 0o002


@pytest.mark.parametrize("planted", ["open", "in /tmp", "link", "not sticky"])
def test_no_run_is_made_where_another_user_can_put_his_own_in_its_place(tmp_path: Path, planted: str):
    """Its config.json decides what ranks execute, also those that are started later."""
    if os.getuid() != 0 and planted != "not sticky":
        pytest.skip("only root can make files of others")
    runs, theirs = tmp_path / "shared" / "runs", tmp_path / "theirs"
    theirs.mkdir()
    runs.parent.mkdir()
    runs.parent.chmod(0o755 if planted == "open" else 0o1777)
    if planted == "link":
        runs.symlink_to(theirs)
    else:
        runs.mkdir()
        runs.chmod({"open": 0o1777, "in /tmp": 0o755, "not sticky": 0o777}[planted])
    if planted != "not sticky":
        os.chown(runs, 65534, 65534, follow_symlinks=False)
    with pytest.raises(UserError, match=r"other users can put runs of theirs in the place of those in .*\(--runs\)"):
        RunDirectory.create(RunConfig("digits", runs=runs))
    assert list(theirs.iterdir()) == []
    RunDirectory.create(RunConfig("digits", runs=runs.parent))


def test_a_run_is_made_in_a_folder_of_another_user_of_the_group(tmp_path: Path):
    """The folder of a project, which one of its members has made for all."""
    if os.getuid() != 0:
        pytest.skip("only root can make files of others")
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o2775)
    os.chown(runs, 65534, os.getgid())
    tmp_path.chmod(0o1777)
    RunDirectory.create(RunConfig("digits", runs=runs))


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
        ("o.toml", b"a = " + b"[" * 100_000, "is not valid TOML: nested too deep"),
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


NO_DOCUMENTS = {
    "nothing": b"",
    "zeros": b"\0" * 100,
    "a list": b"[1]",
    "a number": b"7",
    "null": b"null",
    "nested too deep": b"[" * 200_000,
    "no UTF-8": b"\xff\xfe",
    "a number of 5,000 digits": b'{"format":' + b"9" * 5000 + b"}",
    "a format that is a text": b'{"format":"x","config":{}}',
    "a format that is a list": b'{"format":[],"config":{}}',
    "no config": b'{"format":1}',
    "a config that is a list": b'{"format":1,"config":[]}',
    "resolved that is a list": b'{"format":1,"config":{},"resolved":[]}',
    "resolved that is null": b'{"format":1,"config":{},"resolved":null}',
    "history that is a text": b'{"format":1,"config":{},"history":"x"}',
    "history of numbers": b'{"format":1,"config":{},"history":[1]}',
}


@pytest.mark.parametrize("case", NO_DOCUMENTS)
def test_a_config_json_that_is_none_is_refused_in_a_sentence_that_names_it(tmp_path: Path, case: str):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    path = run.path / "config.json"
    path.write_bytes(NO_DOCUMENTS[case])
    for read in (run.document, run.config):
        with pytest.raises(UserError, match=f"^{path} ") as refused:
            read()
        assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


WRONG: list[object] = ["two", -1, [1], {"a": 1}, None, True, 1.5, 10**30, float("nan")]


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(RunConfig)])
def test_every_value_of_a_config_is_of_its_type_or_refused_by_its_name(name: str):
    good = RunConfig("digits").to_json()
    hint = RunConfig.__annotations__[name]
    for value in WRONG:
        try:
            config = RunConfig.from_json({**good, name: value})
        except UserError as error:
            assert name in str(error)
        else:
            found = getattr(config, name)
            assert type(found).__name__.removeprefix("Posix").replace("NoneType", "None") in hint or (
                "float" in hint and isinstance(found, int | float)
            ), (name, value)


def test_a_config_without_a_target_is_refused():
    with pytest.raises(UserError, match="its config has target = None, where a text must be"):
        RunConfig.from_json({})


@pytest.mark.parametrize(
    "text", [*NO_DOCUMENTS.values(), b'{"steps":"x"}', b'{"steps":null}', b'{"steps":-1}', b'{"steps":true}', b"{}"]
)
def test_a_result_or_a_stop_that_is_none_counts_as_not_written(tmp_path: Path, text: bytes):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    (run.path / "result.json").write_bytes(text)
    run.stopped_file.write_bytes(text)
    assert run.result() is None and run.stopped() is None


@pytest.mark.parametrize("change", [{"step": "x"}, {"of": None}, {"why": 1}, {"result": 5}])
def test_a_stop_of_other_types_counts_as_not_written(tmp_path: Path, change: dict[str, object]):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    good = {"step": 3, "of": 9, "why": "its time is up", "result": {}}
    write_json(run.stopped_file, good)
    assert run.stopped() == good
    write_json(run.stopped_file, {**good, **change})
    assert run.stopped() is None


def test_config_json_with_a_secret_is_for_its_owner_alone(tmp_path: Path):
    modes = [
        (RunDirectory.create(RunConfig("digits", runs=tmp_path, **given)).path / "config.json").stat().st_mode & 0o777
        for given in (
            {"options": {"api_key": "x"}},
            {"arguments": ("--password", "x")},
            {"options": {"source": "s3://me:x@host/data"}},
            {"options": {"lr": 1}},
        )
    ]
    assert modes[:3] == [0o600] * 3 and modes[3] != 0o600


def test_room_that_is_kept_for_root_is_not_free(monkeypatch: pytest.MonkeyPatch):
    about = SimpleNamespace(f_bavail=3, f_bfree=9, f_frsize=512, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: about)
    assert config_module.free_bytes(Path("/")) == 3 * 512


def test_what_a_run_was_before_stays_in_its_history(tmp_path: Path):
    first = RunConfig("digits", runs=tmp_path, steps=5)
    run = RunDirectory.create(first)
    with run.renewed(dataclasses.replace(first, steps=9), run.document()):
        run.save_config(dataclasses.replace(first, steps=9), {"layout": "dp=1"})
    assert [each["config"]["steps"] for each in run.document()["history"]] == [5]
    assert run.config().steps == 9
    with run.renewed(first, run.document()):
        pass
    assert [each["config"]["steps"] for each in run.document()["history"]] == [5, 9]


def test_a_secret_of_an_earlier_start_stays_its_owners(tmp_path: Path):
    run = RunDirectory.create(RunConfig("digits", {"api_key": "x"}, runs=tmp_path))
    with run.renewed(RunConfig("digits", runs=tmp_path), run.document()):
        assert (run.path / "config.json").stat().st_mode & 0o077 == 0


def test_a_run_that_another_process_has_started_since_it_was_read_is_refused(tmp_path: Path):
    config = RunConfig("digits", runs=tmp_path)
    run = RunDirectory.create(config)
    read = run.document()
    with run.renewed(dataclasses.replace(config, steps=9), read):
        pass
    with pytest.raises(SharedError, match="started by another process"), run.renewed(config, read):
        pass
    assert run.config().steps == 9
    read = run.document()
    with run.renewed(run.config(), read):
        pass
    with pytest.raises(SharedError, match="started by another process"), run.renewed(run.config(), read):
        pytest.fail("both were given the same options, and only one may go on")
    read = run.document()
    run.save_config(config, {})
    with pytest.raises(SharedError, match="started by another process"), run.renewed(run.config(), read):
        pytest.fail("it is another configuration by now")


def test_a_configuration_that_is_refused_leaves_the_one_before(tmp_path: Path):
    config = RunConfig("digits", runs=tmp_path)
    run = RunDirectory.create(config)
    before = run.document()
    with pytest.raises(UserError, match="no"), run.renewed(dataclasses.replace(config, steps=9), before):
        raise UserError("no")
    assert run.document() == before


def test_a_disk_that_cannot_take_another_configuration_is_named_and_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    before = run.document()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(config_module, "write_json", full)
    with (
        pytest.raises(SharedError, match=r"cannot write .*config.json: No space left"),
        run.renewed(run.config(), before),
    ):
        pytest.fail("it is to begin with what it was given")
    assert run.document() == before


def test_a_configuration_that_has_made_a_checkpoint_stays_when_the_run_fails(tmp_path: Path):
    config = RunConfig("digits", runs=tmp_path)
    run = RunDirectory.create(config)
    with pytest.raises(UserError), run.renewed(dataclasses.replace(config, seed=9), run.document()):
        (run.checkpoints / "step-00000009").mkdir(parents=True)
        raise UserError("sample 7 cannot be read")
    assert run.config().seed == 9, "or resume would go on from that checkpoint with other options"


def test_a_config_json_of_a_newer_version_is_refused(tmp_path: Path):
    for format in (999, config_module.FORMAT + 1):
        (tmp_path / "config.json").write_text(f'{{"format": {format}, "config": {{}}}}')
        with pytest.raises(UserError, match=f"is of format {format}"):
            RunDirectory(tmp_path).document()


def test_a_document_is_not_written_through_a_link_that_another_user_has_put_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a folder that others can write to, one of them may know the name under which it is written."""
    monkeypatch.setattr(secrets, "token_hex", lambda _count: "guessed")
    (tmp_path / "precious").write_text("my thesis")
    (tmp_path / f".new.json.{os.getpid()}.guessed").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "new.json", {"secret": 1})
    assert (tmp_path / "precious").read_text() == "my thesis"


def test_another_user_cannot_know_under_which_name_a_document_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names: list[str] = []
    monkeypatch.setattr(Path, "replace", lambda path, _target: names.append(path.name))
    for _ in range(2):
        write_json(tmp_path / "new.json", {})
    assert len(set(names)) == 2


def test_a_document_that_cannot_take_its_place_leaves_nothing_beside_it(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "taken", {})
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_a_folder_is_private_that_nobody_else_can_write_to(tmp_path: Path):
    assert made_private(tmp_path / "new") and made_private(tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert not made_private(tmp_path / "link")
    for mode in (0o770, 0o707):
        (tmp_path / "new").chmod(mode)
        assert not made_private(tmp_path / "new")
    if os.getuid() == 0:
        (tmp_path / "new").chmod(0o700)
        os.chown(tmp_path / "new", 12345, -1)
        assert not made_private(tmp_path / "new")


def test_a_folder_in_memory_that_somebody_else_has_taken_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config_module, "MEMORY", tmp_path)
    usual = config_module.memory_of_user()
    usual.mkdir()
    usual.chmod(0o777)
    other = config_module.memory_of_user()
    assert other != usual and made_private(other) and config_module.memory_of_user() == other
    assert made_private(other.with_name(f"{usual.name}.{time.time_ns():020d}-later"))
    assert config_module.memory_of_user() == other, "all processes of a user take the same"


def test_room_that_was_kept_is_freed_when_there_is_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config_module.reserve_room(tmp_path)
    config_module.use_reserve(tmp_path)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= config_module.RESERVE
    monkeypatch.setattr(config_module, "free_bytes", lambda _: config_module.RESERVE - 1)
    config_module.use_reserve(tmp_path)
    assert not (tmp_path / "reserve").exists()


def test_a_run_that_was_stopped_names_the_newest_of_its_checkpoints_and_how_to_continue(tmp_path: Path):
    run = RunDirectory.create(RunConfig(target="digits", runs=tmp_path))
    assert run.what_is_left() == f"no state was saved; {run.path} has its logs"
    for name in (
        "step-99999999",
        "step-100000000",
        "step-100000000.1",
        ".partial-step-200000000",
        "step-200000000-old",
    ):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.what_is_left() == f"state saved at step 100,000,000; continue with: meshrun resume {run.path}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("5m", 300.0),
        ("10min", 600.0),
        ("1.5 h", 5400.0),
        (" 2H ", 7200.0),
        ("0s", None),
        ("5", None),
        ("5 weeks", None),
    ],
)
def test_a_time_is_read_with_its_unit(text: str, seconds: float | None):
    assert seconds_in(text) == seconds


def test_a_run_directory_that_cannot_be_filled_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "save_config", full)
    with pytest.raises(UserError, match="No space left on device"):
        RunDirectory.create(RunConfig(target="digits", runs=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "who"), [(None, None), (b"", "user"), (b"slurm\n", "slurm"), (b"please", "user"), (b"\xff", "user")]
)
def test_who_asks_a_run_to_stop_is_read_from_the_file(tmp_path: Path, text: bytes | None, who: str | None):
    if text is not None:
        (tmp_path / "stop").write_bytes(text)
    assert RunDirectory(tmp_path).asked_to_stop_by() == who
