"""`meshrun doctor` on this machine: silent when all is well, and every rank is heard though ways are broken."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from meshrun.check.doctor import listener as listener_module
from meshrun.check.doctor.exchange import FOLDER, Exchange, ports_of
from meshrun.check.doctor.listener import Listener, ask
from meshrun.check.doctor.reading import core_is_file, cpuset, fabric, filesystem, folder
from meshrun.world import World
from tests.launch.command import Ended, meshrun
from tests.launch.test_strangers import as_nobody

MODULE = [sys.executable, "-m", "meshrun", "doctor"]


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Where the suite itself is bound to some cores, `doctor` is right to say so: here it has all there are."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, before)


def ranks(folder: Path, size: int, *words: object, env: Mapping[str, str] | None = None, runs: str = "") -> Ended:
    """The ranks of one node as a script starts them that sets torchrun's variables; `runs` is for the last rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in reversed(range(size)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **own}
        given = {**os.environ, **{name: str(value) for name, value in place.items()}, **(env or {})}
        other = ["--runs", runs] if runs and rank == size - 1 else []
        started.append(
            subprocess.Popen(
                [*MODULE, *map(str, words), *other],
                cwd=folder,
                env=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [(*each.communicate(timeout=60), each.returncode) for each in started]
    assert all(not out for out, _, _ in ended[:-1]), "only rank 0 prints"
    out, err, status = ended[-1]
    return Ended(status, out, err)


def findings(ended: Ended) -> list[str]:
    return [finding["what"] for finding in ended.document["findings"]]


def test_alone_on_a_healthy_machine_it_finds_nothing(tmp_path: Path):
    ended = meshrun(tmp_path, "doctor", "--json")
    assert (ended.status, ended.document["ok"], ended.document["findings"]) == (0, True, []), ended.out
    [node] = ended.document["nodes"].values()
    assert node["ranks"] == [0] and min(node["flops"].values()) > 1e8
    assert node["cores"]["bound"] == len(os.sched_getaffinity(0)) and node["versions"]["torch"]


def test_quick_it_draws_what_it_looked_at_and_loads_no_torch(tmp_path: Path):
    watched = (sys.executable, "-X", "importtime", "-m", "meshrun")
    ended = meshrun(tmp_path, "doctor", "--quick", launcher=watched)
    assert ended.status == 0 and "✓" in ended.out and "✗" not in ended.out
    assert "nothing found" in ended.out.splitlines()[-1]
    assert not [line for line in ended.err.splitlines() if line.rpartition("|")[2].strip() in ("torch", "numpy")]


def test_local_ranks_are_all_heard_and_leave_nothing_behind(tmp_path: Path):
    ended = ranks(tmp_path, 3, "--quick", "--json")
    assert (ended.status, findings(ended), ended.document["ranks"]) == (0, [], 3), ended.out
    assert not list((tmp_path / "runs").iterdir())


def test_a_rank_that_never_comes_is_named_after_the_timeout(tmp_path: Path):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = [*MODULE, "--quick", "--json", "--timeout", "1"]
    ended = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **place, "MASTER_PORT": "29123"}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["findings"][0]["what"] == "rank 1 of 2 was not heard"


def test_a_rank_without_rank_0_says_so_itself(tmp_path: Path):
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = [*MODULE, "--quick", "--json", "--timeout", "0.5"]
    ended = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **place, "MASTER_PORT": "29123"}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (1, "") and "rank 0 of 2 was not heard" in ended.stderr


def test_a_folder_that_is_not_shared_is_found_though_ranks_meet_otherwise(tmp_path: Path):
    ended = ranks(tmp_path, 2, "--quick", "--json", runs=str(tmp_path / "other"))
    [what] = findings(ended)
    assert ended.status == 1 and "is not the one that" in what


def test_a_folder_that_cannot_be_written_is_found_on_the_only_rank_that_has_it(tmp_path: Path):
    ended = ranks(tmp_path, 2, "--quick", "--json", runs="/proc/runs")
    assert len(findings(ended)) == 1 and "nothing can be written to /proc/runs" in findings(ended)[0]


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_stale_and_taken_ports_are_named_with_who_has_them(tmp_path: Path, busy_port: int):
    left = tmp_path / "runs" / ".rendezvous" / "slurm-1.0.0-0.json"
    left.parent.mkdir(parents=True)
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        left.write_text(json.dumps({"address": "127.0.0.1", "port": gone.getsockname()[1]}))
    (left.parent / "alive.json").write_text(json.dumps({"address": "127.0.0.1", "port": busy_port}))
    (left.parent / "half.json").write_text('{"addr')
    ended = meshrun(tmp_path, "doctor", "--quick", "--json", "--port", busy_port)
    taken, stale = findings(ended)
    assert f"port {busy_port} of" in taken and f"is taken by process {os.getpid()}" in taken
    assert "runs/.rendezvous/slurm-1.0.0-0.json says" in stale and "more" not in stale


def test_one_core_of_several_is_found(tmp_path: Path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    core = str(min(os.sched_getaffinity(0)))
    ended = meshrun(tmp_path, "doctor", "--quick", "--json", launcher=("taskset", "-c", core, *MODULE[:3]))
    [what] = findings(ended)
    assert "may run on 1 core" in what and ended.document["findings"][0]["check"] == "cores"


def test_few_open_files_and_a_cache_that_is_not_there_are_found(tmp_path: Path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shell = ("prlimit", f"--nofile=100:{hard}", "env", "HF_HOME=/nowhere", "HF_HUB_OFFLINE=1", *MODULE[:3])
    cache, files = findings(meshrun(tmp_path, "doctor", "--quick", "--json", launcher=shell))
    assert "HF_HOME=/nowhere is not there" in cache and "may open 100 files" in files


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--timeout", "0"), "timeout is 0.0; it must be above 0 seconds (--timeout)"),
        (("--port", "70000"), "port is 70000; it must be between 1 and 65535 (--port)"),
        (("--site", "atlantis"), "there is no site 'atlantis'"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str):
    ended = meshrun(tmp_path, "doctor", *words)
    assert ended.status == 2 and len(ended.sentences) == 1 and sentence in ended.sentences[0]


FORMS_HERE = {"facts": {"rank": int}}


def world(rank: int) -> World:
    return World(rank, 2, rank, 2, 0, 1, "here", "slurm", job="slurm-1.0.0")


def rounds(folder: Path, listeners: list[Listener], answers: list[Any]) -> None:
    """One round of two ranks in two threads."""
    import threading

    def one(rank: int) -> None:
        exchange = Exchange(world(rank), folder, listeners[rank], ["127.0.0.1"], 5.0)
        answers[rank] = exchange.round("facts", {"rank": rank}, lambda letters: {"sum": list(letters)})

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("way", ["both", "network", "files"])
def test_one_way_is_enough(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path if way != "network" else Path("/proc/nowhere")
    if way == "files":
        monkeypatch.setattr("meshrun.check.doctor.exchange.ask", lambda *_, **__: None)
    answers: list[Any] = [None, None]
    with (
        Listener("slurm-1.0.0", ports_of("slurm-1.0.0"), size=2, forms=FORMS_HERE) as first,
        Listener("slurm-1.0.0") as second,
    ):
        rounds(folder, [first, second], answers)
    assert answers == [{"sum": [0, 1]}] * 2


def test_what_an_earlier_launch_of_the_same_name_left_is_not_heard(tmp_path: Path):
    home = tmp_path / FOLDER / "slurm-1.0.0-0"
    (home / "old").mkdir(parents=True)
    (home / "rank-0.json").write_text(json.dumps({"at": ["127.0.0.1"], "port": 9, "token": "old"}))
    (home / "old" / "facts-answer.json").write_text(json.dumps({"answer": {"sum": "old"}, "heard": {"1": "older"}}))
    answers: list[Any] = [None, None]
    with (
        Listener("slurm-1.0.0", ports_of("slurm-1.0.0"), size=2, forms=FORMS_HERE) as first,
        Listener("slurm-1.0.0") as second,
    ):
        rounds(tmp_path, [first, second], answers)
    assert answers == [{"sum": [0, 1]}] * 2


def test_a_listener_answers_its_own_job_only():
    with Listener("mine") as listener:
        assert ask("127.0.0.1", listener.port, {"job": "mine", "kind": "time"}, 1.0)
        for question in ({"job": "yours", "kind": "time"}, {"job": "mine", "kind": "secret"}, {"job": "mine"}):
            assert ask("127.0.0.1", listener.port, question, 1.0) is None
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
        assert ask("127.0.0.1", listener.port, {"job": "mine", "kind": "time"}, 1.0)


def test_what_the_system_says_is_read(tmp_path: Path):
    (tmp_path / "mounts").write_text(
        "disk / ext4 rw 0 0\nserver:/x /scratch lustre rw 0 0\ntmp /scratch2 tmpfs rw 0 0\n"
    )
    for path, kind in (("/scratch/runs", "lustre"), ("/scratch2", "tmpfs"), ("/home/me", "ext4")):
        assert filesystem(Path(path), tmp_path / "mounts") == kind
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand"), ("state", "4: ACTIVE")):
        (port / name).write_text(text + "\n")
    assert [(each.device, each.active, each.gbit) for each in fabric(tmp_path)] == [("mlx5_0", True, 200)]
    (tmp_path / "cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpuset.cpus.effective").write_text("0-3,8,10-11\n")
    assert cpuset(tmp_path, tmp_path / "cgroup") == 7
    for text, is_file in (("core.%p\n", True), ("|/usr/lib/systemd/systemd-coredump %P\n", False), ("\n", False)):
        (tmp_path / "core_pattern").write_text(text)
        assert core_is_file(tmp_path / "core_pattern") is is_file
    assert not core_is_file(tmp_path / "nothing")


@pytest.mark.parametrize(("table", "left"), [(100, 7), (0, -1)])
def test_file_systems_without_a_table_of_files_have_room_for_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: int, left: int
):
    space = SimpleNamespace(f_bavail=3, f_frsize=4096, f_files=table, f_favail=7 if table else 0)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    found = folder(tmp_path)
    assert (found.error, found.free, found.free_files) == ("", 3 * 4096, left)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")
def test_on_one_machine_the_doctor_hears_this_user_alone_and_no_other_machine():
    with Listener("mine", address="127.0.0.1") as listener:
        found = psutil.Process().net_connections("tcp")
        assert {each.laddr.ip for each in found if each.laddr.port == listener.port} == {"127.0.0.1"}
        question = {"job": "mine", "kind": "time"}
        assert as_nobody(lambda: ask("127.0.0.1", listener.port, question, 1.0)) is None
        assert ask("127.0.0.1", listener.port, question, 1.0) is not None


def test_letters_of_no_rank_are_neither_believed_nor_kept():
    with Listener("slurm-1.0.0", size=2, forms=FORMS_HERE) as listener:
        document = {"rank": 1}
        letter = {"job": "slurm-1.0.0", "kind": "letter", "rank": 1, "phase": "facts", "token": "x"}
        for wrong in ({"document": None}, {"document": 7}, {"rank": 2}, {"rank": -1}, {"token": 1}, {"phase": 1}):
            assert ask("127.0.0.1", listener.port, {**letter, "document": document, **wrong}, 1.0) is None
        for forged in ({"document": {}}, {"document": {"rank": "1"}}, {"document": document, "phase": "facts-2"}):
            assert ask("127.0.0.1", listener.port, {**letter, **forged}, 1.0) is None
        long = {"rank": 1, "more": "x" * listener_module.LONGEST_LETTER}
        assert ask("127.0.0.1", listener.port, {**letter, "document": long}, 1.0) is None
        assert not listener.letters
        assert ask("127.0.0.1", listener.port, {**letter, "document": document}, 1.0) is not None
        assert list(listener.letters) == [("facts", 1)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("whose", ["folder", "link", "file"])
def test_what_another_user_has_put_where_ranks_leave_files_is_not_used(tmp_path: Path, whose: str):
    (elsewhere := tmp_path / "elsewhere" / "slurm-1.0.0-0").mkdir(parents=True)
    home = tmp_path / "runs" / FOLDER
    home.parent.mkdir()
    with Listener("slurm-1.0.0", size=2, forms=FORMS_HERE) as listener:
        if whose == "file":
            exchange = Exchange(world(0), home.parent, listener, ["127.0.0.1"], 0.2)
            (letters,) = home.glob("*/*/")
            (letters / "facts-1.json").write_text(json.dumps({"token": "x", "document": {"rank": 1}}))
            os.chown(letters / "facts-1.json", 65534, 65534)
            assert exchange.round("facts", {"rank": 0}, lambda heard: {"heard": list(heard)}) == {"heard": [0]}
            return
        if whose == "link":
            home.symlink_to(elsewhere.parent)
        else:
            home.mkdir()
            os.chown(home, 65534, 65534)
        exchange = Exchange(world(0), home.parent, listener, ["127.0.0.1"], 0.2)
        exchange.close()
        assert not exchange.files_work and list(elsewhere.parent.glob("**/*")) == [elsewhere]


def test_a_file_that_no_rank_can_have_left_is_not_believed(tmp_path: Path):
    with Listener("slurm-1.0.0", size=2, forms=FORMS_HERE) as listener:
        exchange = Exchange(world(0), tmp_path, listener, ["127.0.0.1"], 0.2)
        (letters,) = tmp_path.glob(f"{FOLDER}/*/*/")
        (letters / "facts-1.json").write_text(json.dumps({"token": "x", "document": {"rank": "no number"}}))
        assert exchange.round("facts", {"rank": 0}, lambda heard: {"heard": list(heard)}) == {"heard": [0]}


def test_silent_connections_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener_module, "MOST", 4)
    before = threading.active_count()
    with Listener("mine") as listener, contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        time.sleep(0.5)
        assert threading.active_count() <= before + 1 + 4
