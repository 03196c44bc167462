"""`meshrun resume`: what is read from a run, what may be changed, what is kept, and what is refused in a sentence."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli import resume
from meshrun.cli.command import Asked, parse_resume
from meshrun.cli.resume import _refuse_complete, refuse_unseen, resume_command
from meshrun.config import FORMAT, RunConfig, RunDirectory, write_json
from meshrun.errors import SharedError, UserError
from meshrun.launch.lock import lock
from tests.launch.command import SCRIPT, TINY, events, meshrun


def config_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run as it was asked for, of which nothing has happened yet."""
    asked = RunConfig(f"{TINY}:experiment", {"pause": 0.5}, procs=2, layout="fsdp=2", steps=8, port=1234, runs=tmp_path)
    return RunDirectory.create(asked)


def parsed(run: RunDirectory, *words: str) -> Asked:
    asked = parse_resume([str(run.path), *words])
    assert asked is not None
    return asked


def test_without_options_all_is_as_it_was_but_the_port(run: RunDirectory):
    asked = parsed(run)
    assert asked.run == run
    assert asked.config == RunConfig(
        f"{TINY}:experiment", {"pause": 0.5}, procs=2, layout="fsdp=2", steps=8, runs=run.path.parent
    )


def test_options_of_the_run_and_of_the_experiment_can_be_changed(run: RunDirectory):
    config = parsed(run, "--procs", "4", "--layout", "dp=*", "--rank", "7", "--device", "cpu").config
    assert (config.procs, config.layout, config.device, config.steps) == (4, "dp=*", "cpu", 8)
    assert config.options == {"pause": 0.5, "rank": 7}


def test_a_length_in_epochs_replaces_one_in_steps(run: RunDirectory):
    config = parsed(run, "--epochs", "3").config
    assert (config.epochs, config.steps) == (3, None)


@pytest.mark.parametrize("word", ["--name", "--runs"])
def test_where_the_run_is_cannot_be_changed(run: RunDirectory, word: str):
    with pytest.raises(Exception, match="No such option"):
        parsed(run, word, "x")


def refusal(path: Path | str, *words: str) -> str:
    with pytest.raises(UserError) as refused:
        asked = parse_resume([str(path), *words])
        assert asked is not None
        resume_command(asked)
    return str(refused.value)


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path):
    assert refusal(tmp_path / "none").startswith(f"there is no run '{tmp_path}/none'; give the directory of one")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    assert refusal(tmp_path) == f"'{tmp_path}' is no run: it has no config.json"


def test_half_a_config_is_refused(run: RunDirectory):
    (run.path / "config.json").write_text('{"format": 1, "conf')
    assert refusal(run.path).startswith(f"{run.path}/config.json cannot be read: ")


def test_a_config_of_a_newer_format_is_refused(run: RunDirectory):
    write_json(run.path / "config.json", {**run.document(), "format": FORMAT + 1})
    assert f"of format {FORMAT + 1}, but this meshrun knows formats up to {FORMAT}" in refusal(run.path)


def test_a_config_with_options_that_this_version_does_not_know_is_refused(run: RunDirectory):
    document = run.document()
    document["config"]["colour"] = "red"
    write_json(run.path / "config.json", document)
    assert refusal(run.path) == (
        f"{run.path}/config.json cannot be used: its config has 'colour', which this version of meshrun does not know"
    )


def test_a_run_of_a_plain_script_is_refused(tmp_path: Path):
    script = RunDirectory.create(RunConfig(SCRIPT, runs=tmp_path))
    assert (
        refusal(script.path)
        == f"{script.path} is a run of the plain script script.py, which keeps no state that meshrun knows"
    )


@pytest.mark.parametrize("words", [(), ("--steps", "8"), ("--steps", "5")])
def test_a_run_that_has_reached_its_end_is_refused(run: RunDirectory, words: tuple[str, ...]):
    write_json(run.path / "result.json", {"steps": 8})
    expected = f"{run.path} has reached its 8 steps; to go on, give more of them (--steps, --epochs)"
    assert refusal(run.path, *words) == expected


def test_a_run_without_a_checkpoint_is_refused(run: RunDirectory):
    write_json(run.path / "result.json", {"steps": 8})
    expected = (
        f"{run.path} has no checkpoint to go on from; to begin it again at step 0, and replace what it has reached, "
        f"give --from-start"
    )
    killed = json.dumps({"host": socket.gethostname(), "pid": 1 << 30, "started": "a while ago"})
    (run.path / ".lock").write_text(killed)
    assert refusal(run.path, "--steps", "9") == expected
    assert run.config().steps == 8 and (run.path / ".lock").read_text() == killed


def test_a_run_that_trains_and_has_no_checkpoint_yet_is_said_to_be_in_use(run: RunDirectory):
    with lock(run):
        assert "is in use by process" in refusal(run.path, "--steps", "9")


def test_a_resume_that_is_refused_leaves_the_config_of_the_one_that_trains(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    winner, loser = (parsed(run, "--from-start", "--layout", "dp=2", "--steps", steps) for steps in ("80", "90"))
    with lock(run), run.renewed(winner.config, winner.document):
        monkeypatch.setattr(RunDirectory, "renewed", lambda *_: pytest.fail("it was written, if only for a moment"))
        with pytest.raises(UserError, match="is in use by process"):
            resume_command(loser)
        assert run.config().steps == 80 and len(run.document()["history"]) == 1


def test_a_resume_that_another_one_has_overtaken_is_refused(run: RunDirectory):
    winner, loser = (parsed(run, "--from-start", "--layout", "dp=2", "--steps", steps) for steps in ("80", "90"))
    with lock(run), run.renewed(winner.config, winner.document):
        pass
    with pytest.raises(UserError, match="was started by another process in the meantime; give the command again"):
        resume_command(loser)
    assert run.config().steps == 80


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that has come to its end."""
    folder = tmp_path_factory.mktemp("four")
    assert meshrun(folder, "run", TINY, "--procs", 2, "--steps", 4).status == 0
    return folder / "runs/tiny-1"


def test_what_cannot_work_leaves_the_run_as_it_was(four_steps: Path):
    before = config_of(four_steps)
    assert refusal(four_steps, "--steps", "9", "--batch", "0").startswith("batch is 0; it must be ")
    assert config_of(four_steps) == before


def test_a_mistake_that_only_ranks_see_leaves_the_run_as_it_was(four_steps: Path):
    before = (four_steps / "config.json").read_bytes()
    for procs in (1, 2):
        ended = meshrun(four_steps.parents[1], "resume", "runs/tiny-1", "--steps", 9, "--seed", 5, "--procs", procs)
        assert ended.status == 2 and "seed" in ended.sentences[-1], ended.err
        assert (four_steps / "config.json").read_bytes() == before


def test_a_run_that_begins_again_from_its_start_has_all_steps_once_more(tmp_path: Path):
    assert meshrun(tmp_path, "run", TINY, "--procs", 2, "--steps", 4, "--checkpoint", "none").status == 0
    refused = meshrun(tmp_path, "resume", "runs/tiny-1", "--steps", 6)
    assert refused.status == 2 and "has no checkpoint to go on from" in refused.sentences[0]
    assert json.loads((tmp_path / "runs/tiny-1/result.json").read_text())["steps"] == 4
    ended = meshrun(tmp_path, "resume", "runs/tiny-1", "--steps", 6, "--from-start", "--json")
    assert ended.status == 0 and ended.document["steps"] == 6, ended.err


def test_a_run_goes_on_where_it_was_in_other_processes_with_its_old_config_kept(four_steps: Path):
    run, folder = four_steps, four_steps.parents[1]
    first = config_of(run)
    ended = meshrun(folder, "resume", "runs/tiny-1", "--procs", 1, "--steps", 6, "--json")
    assert ended.status == 0, ended.err
    assert (ended.document["world"], ended.document["run"]) == (1, "runs/tiny-1")
    assert [event["step"] for event in events(run, 0, "step")] == [1, 2, 3, 4, 5, 6]
    now = config_of(run)
    assert (now["config"]["steps"], now["config"]["procs"]) == (6, 1)
    assert now["history"] == [first]
    assert [each.name for each in (folder / "runs").iterdir()] == ["tiny-1"]


@pytest.mark.parametrize(
    ("asked", "length", "complete"),
    [
        ({}, 10, True),
        ({"epochs": 2.0}, 10, False),
        ({"batch": 8}, 10, False),
        ({"options": {"samples": 60}}, 10, False),
        ({}, 12, False),  # it was told to go on for longer, and stopped on the way
    ],
)
def test_a_run_that_has_reached_its_end_goes_on_only_where_its_length_was_changed(
    tmp_path: Path, asked: dict[str, Any], length: int, complete: bool
):
    run: Any = SimpleNamespace(path=tmp_path, result=lambda: {"steps": 10})
    before = {"config": RunConfig("digits", epochs=1.0).to_json(), "resolved": {"steps": length}}
    wanted: Any = SimpleNamespace(config=RunConfig("digits", **{"epochs": 1.0, **asked}))
    with pytest.raises(SharedError, match="has reached its 10 steps") if complete else nullcontext():
        _refuse_complete(run, wanted, before)


def test_a_node_that_does_not_see_the_run_asks_the_first_one_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(_world: object) -> None:
        raise UserError("it is on no disk of this node")

    clock = iter([0.0, 1.0, 30.0])
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(resume, "refuse_blindness", refuse)
    monkeypatch.setattr(resume, "detect", lambda _: SimpleNamespace(node=1, nodes=2, size=2))
    with pytest.raises(UserError, match=r"^$"):
        refuse_unseen([str(tmp_path)])
    assert capsys.readouterr().err == "meshrun: it is on no disk of this node\n"
    clock = iter([0.0])
    (tmp_path / "config.json").touch()
    refuse_unseen([str(tmp_path)])


@pytest.mark.parametrize("place", [{"node": 0, "nodes": 2, "size": 2}, {"node": 1, "nodes": 2, "size": 4}])
def test_only_a_further_node_with_one_task_waits_to_see_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, int]
):
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: pytest.fail("it waits")))
    monkeypatch.setattr(resume, "detect", lambda _: SimpleNamespace(**place))
    refuse_unseen([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("foreign", [True, False])
def test_the_program_of_a_run_of_another_user_is_not_even_imported(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, foreign: bool
):
    def refuse(_: Path) -> None:
        if foreign:
            raise UserError("it belongs to another user")

    imported: list[str] = []
    monkeypatch.setattr(resume, "refuse_foreign", refuse)
    monkeypatch.setattr(resume, "nursery_for", lambda _words, target, _before: nullcontext(imported.append(target)))
    with resume.nursery_of_run([str(run.path)]):
        assert imported == ([] if foreign else [f"{TINY}:experiment"])
