"""The folder in a node's memory lies beside those of other users, who must not choose where it is."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrun import config
from meshrun.config import RunDirectory, memory_of_user
from meshrun.launch.memory import LOCK, Memory, is_locked, sweep
from tests.launch.command import MODULE, meshrun


def link_to_nothing(usual: Path) -> None:
    usual.symlink_to(usual.parent / "nothing")


def link_to_a_folder(usual: Path) -> None:
    (usual.parent / "target").mkdir()
    usual.symlink_to(usual.parent / "target")


def folder_of_another_user(usual: Path) -> None:
    usual.mkdir(mode=0o777)
    os.chown(usual, 65534, 65534)


def folder_that_all_can_write_to(usual: Path) -> None:
    usual.mkdir()
    usual.chmod(0o777)


@pytest.mark.parametrize(
    "plant",
    [
        link_to_nothing,
        link_to_a_folder,
        pytest.param(
            folder_of_another_user, marks=pytest.mark.skipif(os.getuid() != 0, reason="root gives folders away")
        ),
        folder_that_all_can_write_to,
        Path.touch,
    ],
)
def test_another_place_is_used_where_somebody_has_taken_the_usual_one_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]
):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    usual = memory_of_user()
    usual.parent.mkdir()
    plant(usual)
    folder_of_another_user_or_file(usual.with_name(f"{usual.name}.0"))
    with Memory(RunDirectory(tmp_path / "run"), "7") as memory, Memory(RunDirectory(tmp_path / "run"), "8") as other:
        place = memory.path.parent.parent
        assert place.parent == usual.parent and len(place.name) > len(usual.name) + 32
        assert place.stat().st_mode & 0o077 == 0 and place.stat().st_uid == os.getuid()
        assert RunDirectory(tmp_path / "run").memory_of("7") == memory.path and other.path.parent == memory.path.parent
    assert memory_of_user() == place and list(place.iterdir()) == []
    assert not usual.is_dir() or list(usual.iterdir()) == []


def folder_of_another_user_or_file(path: Path) -> None:
    """What somebody plants who knows how other places are named, but not which one will be taken."""
    if os.getuid() == 0:
        folder_of_another_user(path)
    else:
        path.touch()


def test_a_folder_for_this_user_alone_is_there_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    for _ in range(2):
        with Memory(RunDirectory(tmp_path / "run"), "7") as memory:
            for folder in (memory.path, memory.path.parent, memory.path.parent.parent):
                assert folder.stat().st_mode & 0o077 == 0
        assert not memory.path.exists()


OWN_MEMORY = ("unshare", "--mount", "bash", "-c")
"""Starts a command with a /dev/shm of its own, of eight megabytes."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount file systems")
@pytest.mark.parametrize("filled", ["", "head -c 9M /dev/zero >/dev/shm/fill;"])
def test_a_full_memory_costs_a_run_nothing_that_has_a_checkpoint(tmp_path: Path, filled: str):
    """It gets full while a rank is killed, or is full from the start."""
    line = f'mount -t tmpfs -o size=8m none /dev/shm; {filled} exec "$@"'
    launcher = (*OWN_MEMORY, line, "bash", *MODULE)
    program = Path(__file__).parent / "programs" / "full_memory.py"
    ended = meshrun(tmp_path, "run", program, "--procs", 2, "--checkpoint", 1, "--json", launcher=launcher)
    assert ended.status == 0 and ended.document["steps"] == 8, ended.err
    assert ("was killed by SIGKILL" in ended.err) == (not filled)


def test_folders_of_launchers_that_live_stay_and_those_of_killed_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    left = RunDirectory(tmp_path / "killed-1").memory_of("1")
    with Memory(RunDirectory(tmp_path / "lives-1"), "1") as lives:
        left.mkdir(parents=True)
        (left / LOCK).touch()
        with Memory(RunDirectory(tmp_path / "next-1"), "1"):
            assert lives.path.is_dir() and not left.exists()


def test_a_launcher_waits_while_another_one_makes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    run = RunDirectory(tmp_path / "run")
    of_user = run.memory_of("7").parent.parent
    with Memory(run, "6"):
        pass
    other = os.open(of_user, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    began = threading.Event()

    def take() -> None:
        began.set()
        with Memory(run, "7"):
            made.set()

    made = threading.Event()
    thread = threading.Thread(target=take)
    thread.start()
    began.wait()
    assert not made.wait(0.1), "the other one may sweep away a folder that nobody holds yet"
    os.close(other)
    thread.join(20)
    assert made.is_set()


def test_what_a_killed_launcher_left_while_the_usual_place_was_full_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    left = tmp_path / "tmp" / f"meshrun-{os.getuid()}" / "0123456789abcdef" / "node-1"
    left.mkdir(parents=True, mode=0o700)
    left.parent.parent.chmod(0o700)
    (left / LOCK).touch()
    (left.parent.parent / "rows.csv-0123456789abcdef").touch()
    (tmp_path / "shm").mkdir()
    with Memory(RunDirectory(tmp_path / "run"), "7"):
        assert [each.name for each in left.parent.parent.iterdir()] == ["rows.csv-0123456789abcdef"]


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path):
    (tmp_path / "target").touch()
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        is_locked(tmp_path / LOCK)
    assert is_locked(tmp_path / "target") is False
    folder = tmp_path / "run" / "node"
    folder.mkdir(parents=True)
    (folder / LOCK).symlink_to(tmp_path / "target")
    sweep(tmp_path)
    assert folder.is_dir(), "nobody knows whether it is held"
