"""Another user of the machine, at every port of every kind of run: there is nothing to be had, and no run is hurt."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  another user may not be able to import it when a name is looked up
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import meshrun
from tests.launch.command import PROGRAMS, started, wait_until
from tests.launch.test_nodes import LOSING, Nodes
from tests.launch.test_restarts import lives

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
VERDICT = (b"/meshrun/0/verdict", b"\x1b]0;owned\x07")
PROBES = {
    "silence": b"",
    "keys of a TCPStore": VALIDATE + b"\x0d" + struct.pack("<I", 7) + b"\x07" + b"\x11",
    "a verdict": VALIDATE + b"\x01" + b"".join(struct.pack("<Q", len(each)) + each for each in VERDICT) + b"\x07",
    "noise": os.urandom(4096),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}  # fmt: skip


def processes(roots: list[int]) -> list[int]:
    found = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return found


def listeners(roots: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes and their children listen."""
    found = set()
    for pid in processes(roots):
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((each.laddr.ip, each.laddr.port))
    return found


def as_nobody(action: Callable[[], object]) -> object:
    """What a function returns in a process of another user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def heard(address: str, port: int, said: bytes) -> str:
    """What a port answers within half a second."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=0.5) as connection:
        connection.sendall(said)
        while chunk := connection.recv(65536):
            answer += chunk
    return answer.decode(errors="replace")


def is_challenge(answer: str) -> bool:
    """A nonce of the store's, or the hub's first line, which names the run and a nonce."""
    if re.fullmatch("[0-9a-f]{64}\n", answer):
        return True
    with contextlib.suppress(ValueError):
        return set(json.loads(answer)) <= {"run", "nonce"}
    return False


@contextlib.contextmanager
def one_machine(folder: Path, procs: int) -> Iterator[tuple[list[int], list[subprocess.Popen[str]]]]:
    words = ["--diary", folder / "diary", "--steps", 100_000, "--pause", 0.02, "--lives", 0, "--procs", procs]
    launcher = started(folder, "run", LOSING, *words)
    try:
        wait_until(lambda: len(lives(folder / "diary")) == procs, 60)
        yield [launcher.pid], [launcher]
    finally:
        launcher.kill()
        launcher.communicate()


@contextlib.contextmanager
def plain_script(folder: Path, procs: int) -> Iterator[tuple[list[int], list[subprocess.Popen[str]]]]:
    launcher = started(folder, "run", PROGRAMS / "meeting.py", "--procs", procs, "--", folder, procs)
    try:
        wait_until(lambda: len(list(folder.glob("met-*"))) == procs, 60)
        yield [launcher.pid], [launcher]
        (folder / "stop").touch()
        assert launcher.wait(30) == 0
    finally:
        launcher.kill()
        launcher.communicate()


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[list[int], list[subprocess.Popen[str]]]]:
    nodes = Nodes(folder, "2")
    try:
        nodes.start()
        time.sleep(1.0)
        nodes.start()
        nodes.reach(2)
        yield [launcher.pid for launcher in nodes.launchers], nodes.launchers
    finally:
        nodes.clean_up()


KINDS = {
    "one process": lambda folder: plain_script(folder, 1),
    "two ranks": lambda folder: one_machine(folder, 2),
    "plain script": lambda folder: plain_script(folder, 2),
    "two nodes": two_nodes,
}


@ROOT_ONLY
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_gets_nothing_from_any_port_of_a_run(kind: str, tmp_path: Path):
    with KINDS[kind](tmp_path) as (roots, launchers):
        ports = listeners(roots)
        if kind == "two ranks":
            assert len(ports) >= 3, "the store and the two ranks listen"
        if kind != "two nodes":
            assert {address for address, _ in ports} <= {"127.0.0.1"}, "a run on one machine is open to others"
        asked = [(*port, what) for port in ports for what in PROBES]
        answers = as_nobody(lambda: [[*each, heard(*each[:2], PROBES[each[2]])] for each in asked])
        assert isinstance(answers, list)
        assert len(answers) == len(asked)
        told = [each for each in answers if each[3] and not (kind == "two nodes" and is_challenge(each[3]))]
        assert not told, told
        assert all(launcher.poll() is None for launcher in launchers), "the run goes on"


@ROOT_ONLY
def test_silent_connections_of_a_stranger_cost_ranks_nothing_and_do_not_keep_a_run_from_restarting(tmp_path: Path):
    with one_machine(tmp_path, 2) as (roots, _):
        ports = listeners(roots)
        ranks = [psutil.Process(each.pid) for each in lives(tmp_path / "diary")]
        before = [len(rank.net_connections("tcp")) for rank in ranks]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(NOBODY)
                held = [socket.socket() for _ in range(100) for _ in ports]
                for place, each in enumerate(held):
                    each.setblocking(False)
                    each.connect_ex(list(ports)[place % len(ports)])
                os.write(writing, b"x")
                time.sleep(100)
                held.clear()
            finally:
                os._exit(0)
        os.close(writing)
        try:
            assert os.read(reading, 1) == b"x", "the stranger has tried"
            after = [len(rank.net_connections("tcp")) for rank in ranks]
            assert all(now - then < 50 for now, then in zip(after, before, strict=True)), "gloo takes ranks alone"
            os.kill(lives(tmp_path / "diary")[0].pid, 9)
            wait_until(lambda: len(lives(tmp_path / "diary")) == 4, 60)
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_modules_that_another_user_has_put_into_the_working_directory_are_not_imported(tmp_path: Path):
    """Who starts the command `meshrun` in /tmp does not ask for what lies there, as with `python -m meshrun`."""
    (tmp_path / "selectors.py").write_text("import pathlib; pathlib.Path('imported').touch(); raise SystemExit(3)")
    command = "import sys; sys.path.remove(''); from meshrun.cli.main import main; main()"
    words = [LOSING, "--diary", tmp_path / "diary", "--steps", 2, "--lives", 0, "--procs", 2]
    environment = {**os.environ, "PYTHONPATH": str(Path(meshrun.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", command, "run", *map(str, words)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "imported").exists()
