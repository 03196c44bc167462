"""A run has one owner: a second one is refused with the name of the first, and death gives the run free."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import UserError
from meshrun.launch import lock as locks
from meshrun.launch.lock import _has_died_here, is_left, lock
from tests.launch.command import wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig(target="digits", runs=tmp_path))


def test_a_link_in_the_place_of_the_lock_is_not_written_through(run: RunDirectory, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("my thesis")
    (run.path / ".lock").symlink_to(precious)
    with pytest.raises(UserError, match=r"cannot write .*lock"), lock(run):
        pass
    assert precious.read_text() == "my thesis"


HOLDING = """
import sys, time
from pathlib import Path
from meshrun.config import RunDirectory
from meshrun.launch.lock import _has_died_here, is_left, lock
with lock(RunDirectory(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_owner_is_refused_with_who_where_and_since_when_until_the_first_is_killed(run: RunDirectory):
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as refused, lock(run):
            pass
        who = rf"by process {holder.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d;"
        assert re.search(f"is in use {who}", str(refused.value))
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with lock(run):
        pass


WITH_A_READER = """
import os, sys, time
from pathlib import Path
from meshrun.config import RunDirectory
from meshrun.launch.lock import _has_died_here, is_left, lock
with lock(RunDirectory(Path(sys.argv[1]))):
    owner, reader = os.getpid(), os.fork()
    if reader:
        print(reader, flush=True)
        time.sleep(60)
    while os.getppid() == owner:
        time.sleep(0.01)
    time.sleep(float(sys.argv[2]))
    os._exit(0)
"""


@pytest.mark.parametrize("seconds", [1.0, 60.0])
def test_readers_of_a_killed_owner_that_still_hold_the_lock_are_waited_for_a_while(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, seconds: float
):
    monkeypatch.setattr(locks, "ORPHANS", 3.0)
    command = [sys.executable, "-c", WITH_A_READER, str(run.path), str(seconds)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    reader = int(owner.stdout.readline())
    try:
        owner.kill()
        owner.wait()
        if seconds < 3:
            with lock(run):
                pass
        else:
            with pytest.raises(UserError, match=f"is in use by process {owner.pid}"), lock(run):
                pass
    finally:
        owner.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(reader, signal.SIGKILL)


def test_a_run_is_free_after_its_owner_even_if_that_failed(run: RunDirectory):
    with pytest.raises(ZeroDivisionError), lock(run):
        raise ZeroDivisionError
    with lock(run):
        assert json.loads((run.path / ".lock").read_text())["pid"] == os.getpid()
    assert json.loads((run.path / ".lock").read_text()) == {}


def held_by_another_host(run: RunDirectory) -> Path:
    """As an owner on another host leaves it, where the file system's locks do not reach."""
    path = run.path / ".lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "2026-01-02 03:04:05"}))
    return path


def test_an_owner_on_another_host_that_keeps_touching_the_file_is_respected(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(locks, "BEAT", 0.1)
    path = held_by_another_host(run)
    touching = f"while true; do touch {path}; sleep 0.05; done"
    other = subprocess.Popen(["bash", "-c", touching])
    try:
        with pytest.raises(UserError, match="process 7 on elsewhere since 2026-01-02 03:04:05"), lock(run):
            pass
    finally:
        other.kill()
        other.wait()


def test_an_owner_on_another_host_that_has_stopped_touching_is_gone(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locks, "BEAT", 0.1)
    held_by_another_host(run)
    with lock(run):
        pass


HOLDING_FOR_ANOTHER_HOST = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", [1.0, 60.0])
def test_a_lock_that_the_file_server_keeps_for_a_dead_host_is_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, seconds: float
):
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "LEASE", 3.0)
    path, notes = held_by_another_host(run), list[str]()
    command = [sys.executable, "-c", HOLDING_FOR_ANOTHER_HOST, str(path), str(seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "held\n"
        refused = pytest.raises(UserError, match="process 7 on elsewhere") if seconds > 3 else contextlib.nullcontext()
        with refused, lock(run, notes.append):
            pass
    finally:
        server.kill()
        server.communicate()
    assert notes == [f"waiting for the lock of {run.path}: elsewhere, which held it, gives no sign of life"]


def test_only_the_clock_of_the_file_system_counts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """Were this machine's clock asked, an owner whose machine is an hour behind would count as gone at once."""
    monkeypatch.setattr(time, "time", lambda: pytest.fail("this machine's clock was asked"))
    path = held_by_another_host(run)
    os.utime(path, (1, 1))
    with lock(run):
        pass
    assert list(run.path.glob(".lock*")) == [path], "what was asked for the time is left"


def test_the_owner_keeps_touching_its_lock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locks, "BEAT", 0.2)
    with lock(run):
        before = (run.path / ".lock").stat().st_mtime_ns
        wait_until(lambda: (run.path / ".lock").stat().st_mtime_ns > before, 10)


def test_a_holder_that_gives_a_sign_of_life_while_its_lock_is_waited_for_is_respected(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    path, waits = held_by_another_host(run), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        later = path.stat().st_mtime + 1
        os.utime(path, (later, later))

    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(locks, "_flocked", lambda _file: False)
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=wait))
    with pytest.raises(UserError, match="process 7 on elsewhere"):
        locks._outlast(run, path, -1)
    assert len(waits) == 1


def test_the_launcher_of_another_user_on_this_host_is_not_taken_for_a_dead_one(monkeypatch: pytest.MonkeyPatch):
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not locks._has_died_here({"host": socket.gethostname(), "pid": 7})


def test_a_lock_is_left_once_its_owner_has_let_it_go_and_not_before(run: RunDirectory):
    with lock(run):
        assert not is_left(run)
    assert is_left(run)


def test_a_process_of_another_host_is_not_looked_for_on_this_one():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert _has_died_here({"host": socket.gethostname(), "pid": gone.pid})
    assert not _has_died_here({"host": "elsewhere", "pid": gone.pid})
    assert not _has_died_here({"host": socket.gethostname(), "pid": os.getpid()})
    assert not _has_died_here({"host": socket.gethostname()})


@pytest.mark.parametrize("pid", [10**30, 1 << 31, 0, -1, True, "7"])
def test_a_number_that_is_no_process_is_asked_about_nowhere(monkeypatch: pytest.MonkeyPatch, pid: object):
    """Negative ones would be groups of processes, and larger ones are refused by Python."""
    asked: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _signal: asked.append(pid))
    assert not locks._has_died_here({"host": socket.gethostname(), "pid": pid})
    assert asked in ([], [1])


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o660), (0o022, 0o640), (0o000, 0o660)])
def test_the_group_may_take_the_lock_where_the_umask_says_so_and_others_cannot_even_hold_it(
    run: RunDirectory, umask: int, mode: int
):
    before = os.umask(umask)
    try:
        with lock(run):
            assert stat.S_IMODE((run.path / locks.NAME).stat().st_mode) == mode
    finally:
        os.umask(before)


def test_an_owner_that_lives_on_this_host_is_respected_at_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    with lock(run):
        waits = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
        monkeypatch.setattr(locks, "time", waits)
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
            locks.refuse_held(run)
