"""One task a node: it becomes its node's launcher, the first one leads, and all of them end together.

What Slurm or MPI would have set is set by hand, so that two nodes are two processes here; tests/cluster has real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli.launcher import wanted_of
from meshrun.config import RunConfig
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch import agents, secret, wire
from meshrun.launch import munge as credentials
from meshrun.launch.agents import likely_port, ranks_to_start
from meshrun.launch.head import Outcome
from meshrun.launch.nodes import Blind, Hub, Unfit
from meshrun.world import World, detect
from meshrun.world.rendezvous import lookup, publish
from tests import warm
from tests.launch.command import TINY, events, meshrun, wait_until
from tests.launch.test_hub import Open, answering, door  # noqa: F401 - fixtures
from tests.launch.test_local import free_port


def of_task(node: int, job: str = "77", hosts: str = "localhost,elsewhere") -> dict[str, str]:
    """What srun sets for the only task of one of two nodes."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(node),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": hosts,
    }


class Tasks:
    """Tasks of one job, each as on a node of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, str(os.getpid() * 1000 + time.monotonic_ns() % 1000)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, node: int, *words: object, folder: Path | None = None) -> subprocess.Popen[str]:
        task = warm.Popen(
            [sys.executable, "-m", "meshrun", *map(str, words)],
            cwd=folder or self.folder,
            env={**os.environ, **of_task(node, self.job)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(task)
        return task

    def clean_up(self) -> None:
        for task in self.started:
            task.kill()
            task.communicate()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    made = Tasks(tmp_path)
    yield made
    made.clean_up()


def said_by(task: subprocess.Popen[str]) -> list[str]:
    """What meshrun itself said on standard error."""
    err = task.communicate(timeout=60)[1]
    return [line.removeprefix("meshrun: ") for line in err.splitlines() if line.startswith("meshrun: ")]


def test_nodes_that_are_all_one_machine_are_joined_on_loopback_alone(tmp_path: Path):
    world = detect(of_task(0), "here")
    for address, at in (("127.0.0.1", "127.0.0.1"), ("10.1.0.1", "0.0.0.0")):
        for port in (None, free_port()):
            hub = agents.open_hub(world, tmp_path, tmp_path, address, port)
            assert hub._server.getsockname()[0] == at
            hub.finish(Outcome())


@pytest.mark.parametrize(
    ("changes", "options", "env", "expected"),
    [
        ({}, {"procs": 4}, {}, 4),
        ({}, {}, {"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({}, {"procs": 2}, {"SLURM_GPUS_ON_NODE": "4"}, 2),
        ({}, {"device": "cpu"}, {"SLURM_GPUS_ON_NODE": "4"}, None),
        ({}, {}, {"SLURM_GPUS_ON_NODE": "1"}, None),
        ({}, {"procs": 1}, {}, None),
        ({}, {"procs": 1, "nodes": "1:2"}, {}, 1),
        ({}, {"procs": 1, "join": "n1:4711"}, {}, 1),
        ({"size": 4, "local_size": 2}, {"procs": 2}, {"SLURM_GPUS_ON_NODE": "4"}, None),
        ({"size": 3}, {}, {"SLURM_GPUS_ON_NODE": "2"}, None),
        ({"size": 1, "nodes": 1}, {"nodes": "2", "device": "cpu"}, {}, 1),
        ({"source": "torchrun"}, {"procs": 2}, {}, None),
        ({"source": "openmpi"}, {"procs": 2}, {}, 2),
        ({"size": 1, "nodes": 1}, {}, {"SLURM_GPUS_ON_NODE": "2"}, 2),
    ],
)
def test_a_task_alone_on_its_node_with_several_ranks_to_run_is_their_launcher(
    changes: dict[str, Any], options: dict[str, Any], env: dict[str, str], expected: int | None
):
    place = {"size": 2, "local_size": 1, "nodes": 2, "source": "slurm", **changes}
    world = World(rank=0, local_rank=0, node=0, host="n1", **place)
    assert ranks_to_start(world, RunConfig("digits", **options), {"SLURM_JOB_ID": "1", **env}) == expected


def test_all_nodes_of_a_job_guess_the_same_port_and_other_jobs_another():
    mine, other = detect(of_task(0)), detect(of_task(1))
    assert likely_port(mine.job) == likely_port(other.job)
    ports = {likely_port(detect(of_task(0, job=str(number))).job) for number in range(200)}
    assert len(ports) > 190 and all(1024 < port < 32768 for port in ports)


def test_the_port_that_can_be_guessed_is_not_tried_before_an_address_may_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = list[World]()
    monkeypatch.setattr(agents, "refuse_blindness", tried.append)
    for unseen in (60.0, 0.0):
        monkeypatch.setattr(agents, "UNSEEN", unseen)
        with pytest.raises(RunFailed, match="waited 0 s for the run's first node"):
            agents.find_hub(detect(of_task(1)), tmp_path, ranks=1, patience=0.1)
        assert bool(tried) is (unseen == 0.0)


def test_what_the_first_node_refuses_ends_the_others_at_once(tmp_path: Path):
    first, second = detect(of_task(0)), detect(of_task(1))
    agents.give_up(first, tmp_path)
    with pytest.raises(RunFailed) as ended:
        agents.find_hub(second, tmp_path, ranks=2, patience=60)
    assert str(ended.value) == "", "the first node says why"


def test_an_address_that_nobody_answers_at_is_a_left_over_and_is_read_again(tmp_path: Path):
    world = detect(of_task(1))
    publish(tmp_path, world.job, world.attempt, "127.0.0.1", free_port())
    with pytest.raises(RunFailed, match=r"waited 1 s for the run's first node to write its address into"):
        agents.find_hub(world, tmp_path, ranks=2, patience=1)


@pytest.fixture
def unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The first node's hub, of a run whose secret is not to be seen, as on a node that does not have its disk."""
    monkeypatch.setattr(agents, "UNSEEN", 0.2)
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.2)
    run = tmp_path / "run"
    run.mkdir()
    first = detect(of_task(0, job=str(os.getpid())))
    hub = agents.open_hub(first, tmp_path, run, "127.0.0.1", None)
    assert hub.port == agents.likely_port(first.job)
    (run / ".join").unlink()
    yield hub
    hub.finish(Outcome())


@pytest.mark.usefixtures("munge")
def test_a_node_that_does_not_see_the_runs_finds_the_first_node_all_the_same_and_both_know_it(
    unseen: Hub, tmp_path: Path
):
    with ThreadPoolExecutor() as pool:
        news = pool.submit(lambda: heard_by(unseen, 30))
        sentence = f"{socket.gethostname()} cannot see {tmp_path / 'run'} of the run that it joins"
        with pytest.raises(UserError, match=sentence):
            agents.find_hub(detect(of_task(1, job=str(os.getpid()))), tmp_path / "elsewhere", ranks=2, patience=20)
        assert news.result() == [Blind(socket.gethostname())]


@pytest.mark.usefixtures("no_munge")
def test_where_nobody_signs_who_a_node_is_it_waits_for_the_first_one_which_does_not_believe_it(
    unseen: Hub, tmp_path: Path
):
    with ThreadPoolExecutor() as pool:
        news = pool.submit(lambda: heard_by(unseen, 2))
        with pytest.raises(RunFailed, match="waited 2 s for the run's first node to write its address"):
            agents.find_hub(detect(of_task(1, job=str(os.getpid()))), tmp_path / "elsewhere", ranks=2, patience=2)
        assert news.result() == []


def test_a_stranger_at_the_port_that_can_be_guessed_ends_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agents, "UNSEEN", 0.0)
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.0)
    world = detect(of_task(1, job=str(os.getpid())))
    with socket.create_server(("127.0.0.1", agents.likely_port(world.job))) as rogue, ThreadPoolExecutor() as pool:

        def talk() -> int:
            answers = 0
            with contextlib.suppress(OSError):
                while True:
                    with rogue.accept()[0] as connection:
                        connection.sendall(b'{"run": "/rogue/run", "nonce": "n"}\n{"credential": "MUNGE:x:"}\n')
                        answers += 1
            return answers

        answers = pool.submit(talk)
        with pytest.raises(RunFailed, match="waited 2 s for the run's first node"):
            agents.find_hub(world, tmp_path, ranks=2, patience=2)
        rogue.shutdown(socket.SHUT_RDWR)
        assert answers.result() > 0


def said_blind(hub: Hub, credential: str | None) -> list[object]:
    """The news of a hub that is told over one connection that a host does not see the run directory."""
    with socket.create_connection(("127.0.0.1", hub.port), timeout=5) as who, ThreadPoolExecutor() as pool:
        news = pool.submit(lambda: heard_by(hub, 1))
        given = {} if credential is None else {"nonce": "n", "credential": credential}
        who.sendall(json.dumps({"blind": "elsewhere", **given}).encode() + b"\n")
        return news.result()


@pytest.mark.usefixtures("munge")
@pytest.mark.parametrize("credential", [None, "", "MUNGE:AwQFAADtle2S:", "x" * 100_000, "\udc80"])
def test_a_stranger_who_says_that_a_node_does_not_see_the_run_is_not_believed(unseen: Hub, credential: str | None):
    assert said_blind(unseen, credential) == []


@pytest.mark.usefixtures("munge")
def test_a_credential_holds_for_its_user_and_its_words_alone():
    sent = credentials.credential("a", "b")
    assert sent is not None and not credentials.is_own(sent, "a", "c")
    again = credentials.credential("a", "b")
    assert again is not None and credentials.is_own(again, "a", "b") and not credentials.is_own(again, "a", "b")
    if os.getuid() == 0:
        nobody = ["setpriv", "--reuid=65534", "--clear-groups", "munge", "--string", json.dumps(("a", "b"))]
        foreign = subprocess.run(nobody, capture_output=True, text=True, check=True).stdout
        assert foreign.startswith("MUNGE:") and not credentials.is_own(foreign, "a", "b")


@pytest.fixture
def munge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A MUNGE service of this test's own, which its commands speak to."""
    if not all(map(shutil.which, ("munged", "munge", "unmunge"))):
        pytest.skip("MUNGE is not installed")
    folder = Path(tempfile.mkdtemp(prefix="munge-", dir="/tmp"))  # other users must reach the socket
    folder.chmod(0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("munge", "unmunge"):
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={folder}/socket "$@"\n')
        command.chmod(0o755)
    files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
    service = subprocess.Popen(
        [shutil.which("munged") or "", "--foreground", f"--socket={folder}/socket", *files], stderr=subprocess.DEVNULL
    )
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    wait_until((folder / "socket").exists, 30)
    yield
    service.terminate()
    service.wait()
    shutil.rmtree(folder)


@pytest.fixture
def no_munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without MUNGE."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_node_that_cannot_take_part_tells_the_first_one_why(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    first, second = (detect(of_task(node, job=str(os.getpid()))) for node in (0, 1))
    hub = agents.open_hub(first, tmp_path, run, "127.0.0.1", None)
    with ThreadPoolExecutor() as pool:
        news = pool.submit(lambda: heard_by(hub, 30))
        agents.excuse(second, tmp_path, "no such module")
        assert news.result() == [Unfit(socket.gethostname(), "no such module")]
    hub.finish(Outcome())
    agents.give_up(first, tmp_path)
    began = time.monotonic()
    agents.excuse(second, tmp_path, "no such module")
    assert time.monotonic() - began < 8, "nobody listens"


def test_what_a_launch_that_gave_up_has_left_is_removed_by_the_next_of_its_name_and_after_an_hour_by_any(
    tmp_path: Path,
):
    old, other, new = (detect(of_task(0, job=name)) for name in ("1", "2", "3"))
    publish(tmp_path, other.job, 0, "127.0.0.1", 7)
    agents.give_up(old, tmp_path)
    for file in (tmp_path / ".rendezvous").iterdir():
        os.utime(file, (1, 1))
    agents.give_up(new, tmp_path)
    assert [lookup(tmp_path, world.job, 0) for world in (old, other, new)] == [None, ("127.0.0.1", 7), ("", 0)]
    agents.begin(new, tmp_path)
    assert lookup(tmp_path, new.job, 0) is None


def heard_by(hub: Hub, seconds: float) -> list[object]:
    found: list[object] = []
    end = time.monotonic() + seconds
    while not found and time.monotonic() < end:
        found += hub.news(time.monotonic())
        time.sleep(0.01)
    return found


def test_all_nodes_that_were_started_are_expected_and_later_any_number_that_suits():
    wanted = wanted_of(RunConfig("digits", procs=2, nodes="1:2"), replace(detect(of_task(0)), nodes=4))
    assert (wanted.least, wanted.most, wanted.expected) == (1, 2, 2), "no more than were asked for"
    wanted = wanted_of(RunConfig("digits", procs=2, layout="dp=*"), detect(of_task(0)))
    assert (wanted.least, wanted.most, wanted.expected, wanted.hosts) == (1, 2, 2, ("localhost", "elsewhere"))


def test_more_nodes_than_were_started_are_refused():
    with pytest.raises(UserError) as refused:
        wanted_of(RunConfig("digits", procs=2, nodes="3"), detect(of_task(0)))
    assert str(refused.value) == (
        "nodes is 3 but slurm has started this on 2 nodes; ask for as many, or leave --nodes away"
    )


def test_two_tasks_train_as_one_world_and_a_signal_to_either_stops_the_run_in_time(tasks: Tasks):
    words = ("run", TINY, "--procs", 2, "--steps", 10_000, "--pause", 0.02, "--json")
    second = tasks.start(1, *words)
    first = tasks.start(0, *words)
    run = tasks.folder / "runs/tiny-1"
    wait_until(lambda: len(events(run, 0, "step")) > 5, 60)
    second.send_signal(signal.SIGUSR2)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    result, stopped = json.loads(out), json.loads((run / "stopped.json").read_text())
    assert (result["world"], result["layout"], result["steps"]) == (4, "dp=4", stopped["step"])
    assert (run / f"checkpoints/step-{stopped['step']:08d}").is_dir()
    assert second.communicate(timeout=60) == ("", "") and second.returncode == 0, "the first one speaks for both"
    assert not list((tasks.folder / "runs/.rendezvous").iterdir())
    alone = meshrun(tasks.folder, "run", TINY, "--steps", stopped["step"], "--json").document
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert result["sample_ids_sha256"] == alone["sample_ids_sha256"]


def test_a_node_where_the_program_cannot_be_read_is_not_waited_for(tasks: Tasks):
    first = tasks.start(0, "run", TINY, "--procs", 2, "--json")
    second = tasks.start(1, "run", "missing.py", "--procs", 2)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert json.loads(out)["world"] == 2
    assert f"{socket.gethostname()} cannot take part: target 'missing.py' does not exist" in err
    assert second.wait(60) == 2


def test_where_the_first_node_cannot_begin_the_others_do_not_wait(tasks: Tasks):
    tasks.start(0, "run", "missing.py", "--procs", 2)
    second = tasks.start(1, "run", TINY, "--procs", 2)
    assert second.wait(60) == 1


def test_credentials_are_for_this_user_and_long_ones_are_not_read(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(credentials, "_answer", lambda command, _text: asked.append(command))
    credentials.credential("blind")
    assert asked == [["munge", f"--restrict-uid={os.getuid()}"]]
    assert not credentials.is_own("x" * (credentials.LONGEST + 1), "blind") and len(asked) == 1


def test_a_node_that_cannot_write_beside_the_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SharedError, match=r"cannot make a run directory in .*Permission denied"):
        agents._refuse_unwritable(tmp_path)


def test_a_silent_stranger_at_an_old_address_does_not_keep_a_node_from_the_true_one(
    answering: Open,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(agents, "ANSWERED", 0.1)
    monkeypatch.setattr(wire, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = iter([silent.getsockname(), ("127.0.0.1", answering.hub.port)])
        monkeypatch.setattr(agents, "lookup", lambda *_: next(addresses))
        joined = agents.find_hub(detect(of_task(1)), tmp_path, ranks=2, patience=3)
    assert joined.where == f"127.0.0.1:{answering.hub.port}"
    joined.close()


def test_a_pipe_among_the_rendezvous_files_keeps_nobody_waiting(tmp_path: Path):
    """Where all may write beside the runs, anybody can put one there."""
    world = detect(of_task(0))
    publish(tmp_path, world.job, 0, "127.0.0.1", 7)
    pipe = tmp_path / ".rendezvous" / "a.json"
    os.mkfifo(pipe)
    os.utime(pipe, (1, 1))
    swept = threading.Thread(target=agents._sweep, args=(tmp_path,), daemon=True)
    swept.start()
    swept.join(5)
    assert not swept.is_alive()


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("UID: me (12)", True),
        ("UID: 12", True),
        ("UID: you (123)", False),
        ("UID: you (112)", False),
        ("GID: 12", False),
    ],
)
def test_a_credential_is_this_users_by_his_whole_number(monkeypatch: pytest.MonkeyPatch, line: str, own: bool):
    monkeypatch.setattr(os, "getuid", lambda: 12)
    monkeypatch.setattr(credentials, "_answer", lambda *_: f"STATUS: Success (0)\n{line}\n\n{json.dumps(('a',))}")
    assert credentials.is_own("MUNGE:", "a") is own and not credentials.is_own("MUNGE:", "b")


@pytest.mark.parametrize("is_own", [True, False])
def test_only_a_process_of_the_same_user_can_have_a_node_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
):
    def read(_: Path) -> None:
        raise secret.Unseen("it is not there")

    said = iter([{"run": str(tmp_path), "nonce": "1"}, {"credential": "signed by somebody"}])
    sent: list[dict[str, str]] = []
    monkeypatch.setattr(agents, "lines", lambda *_: said)
    monkeypatch.setattr(agents, "directory_named", Path)
    monkeypatch.setattr(secret, "read", read)
    monkeypatch.setattr(credentials, "credential", lambda *_: "signed by this node")
    monkeypatch.setattr(credentials, "is_own", lambda *_: is_own)
    wire: Any = SimpleNamespace(send=sent.append)
    found = agents._proven_blindness(wire)
    assert isinstance(found, secret.Unseen) if is_own else found is None
    assert [each["credential"] for each in sent] == ["signed by this node"]
