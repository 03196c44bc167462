"""Folders that this user may not read or write: each command says which, in a sentence, with exit status 2."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from meshrun.cli.command import parse_resume
from meshrun.config import RunConfig, RunDirectory, write_whole
from meshrun.errors import UserError
from tests.launch.command import MODULE, TINY, meshrun

RIGHTS = "-dac_override,-dac_read_search"
AS_OTHERS = ("setpriv", f"--bounding-set={RIGHTS}", f"--inh-caps={RIGHTS}", *MODULE) if os.getuid() == 0 else MODULE
"""Root obeys the modes of files too, without these rights."""


@pytest.fixture
def locked(tmp_path: Path):
    """A folder with a run in it, which nobody may enter."""
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    folder = tmp_path / "locked"
    RunDirectory.create(RunConfig(TINY, runs=folder))
    folder.chmod(0)
    yield folder
    folder.chmod(0o755)


CASES = {
    "use": ("use", "locked/tiny-1"),
    "resume": ("resume", "locked/tiny-1"),
    "submit": ("submit", TINY, "--runs", "locked/in", "--gpus-per-node", 0, "--dry-run"),
    "convert-data": ("convert-data", "texts.jsonl", "locked/out.tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_entered_is_named(tmp_path: Path, locked: Path, case: str):
    ended = meshrun(tmp_path, *CASES[case], launcher=AS_OTHERS)
    assert ended.status == 2 and "Traceback" not in ended.err, ended.err
    assert locked.name in ended.sentences[-1] and "ermission denied" in ended.sentences[-1]


@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_that_cannot_be_written_to_is_named(tmp_path: Path, procs: int):
    run = RunDirectory.create(RunConfig(TINY, runs=tmp_path / "runs"))
    run.path.chmod(0o555)
    ended = meshrun(tmp_path, "resume", run.path, "--from-start", "--procs", procs, launcher=AS_OTHERS)
    run.path.chmod(0o755)
    assert ended.status == 2 and "Traceback" not in ended.err, ended.err
    assert ended.sentences[-1].startswith(f"cannot write {run.path}/.lock: Permission denied; ")


def test_a_disk_without_room_for_a_run_directory_keeps_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "save_config", full)
    with pytest.raises(Exception, match=r"cannot make a run directory in .*: No space left on device \(--runs\)"):
        RunDirectory.create(RunConfig("digits", runs=tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_name_that_is_no_unicode_is_written_as_it_is(tmp_path: Path):
    write_whole(tmp_path / "job.sh", os.fsdecode(b"cd caf\xe9\n"), 0o600)
    assert (tmp_path / "job.sh").read_bytes() == b"cd caf\xe9\n"
    assert stat.S_IMODE((tmp_path / "job.sh").stat().st_mode) == 0o600


def test_a_run_below_a_name_that_is_no_unicode_has_its_report(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    shutil.copy(TINY, folder)
    ended = meshrun(folder, "run", "tiny.py", "--procs", 2, "--steps", 2)
    assert ended.status == 0 and "could not be drawn" not in ended.err, ended.err
    assert rb"caf\udce9" in (folder / "runs" / "tiny-1" / "report.html").read_bytes()


@pytest.mark.parametrize("foreign", ["owner", "all"])
def test_a_run_directory_in_the_hands_of_others_is_not_gone_on_with(tmp_path: Path, foreign: str):
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('executed').touch()\n\ndef experiment(): ...\n")
    run = RunDirectory.create(RunConfig(str(tmp_path / "evil.py"), runs=tmp_path / "runs"))
    if foreign == "all":
        run.path.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(run.path, 12345, 12345)
    else:
        pytest.skip("only root can make directories of others")
    ended = meshrun(tmp_path, "resume", run.path, "--from-start", "--procs", 2)
    assert ended.status == 2 and "decides which program is executed" in ended.sentences[-1], ended.err
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make directories of others")
@pytest.mark.parametrize("own_group", [True, False])
def test_a_run_directory_of_another_user_is_gone_on_with_where_he_shares_it_with_a_group_of_this_one(
    tmp_path: Path, own_group: bool
):
    run = RunDirectory.create(RunConfig(TINY, runs=tmp_path / "runs"))
    run.path.chmod(0o770)
    os.chown(run.path, 12345, os.getgid() if own_group else 54321)
    with (
        nullcontext() if own_group else pytest.raises(UserError, match="belongs to another user, whose number is 12345")
    ):
        assert parse_resume([str(run.path)]) is not None
