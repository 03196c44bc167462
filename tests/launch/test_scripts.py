"""Plain scripts: their place in torchrun's words, what they are told, and what becomes of those that hang."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from meshrun.observe.idle import Activity
from tests.launch.command import meshrun

HOST = re.escape(socket.gethostname())

PLACE = """
import os, sys
import torch.distributed as dist

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print([os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0)
if "--meet" in sys.argv:
    dist.init_process_group("gloo")
    print("met", dist.get_world_size())
    dist.destroy_process_group()
sys.exit()
"""

KILLED = """
import os, signal
print("begins", flush=True)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""

STUCK = """
import sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    if "--spin" in sys.argv:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass
    else:
        time.sleep(1000)
dist.barrier()
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_script_in_one_process_has_the_variables_of_torchrun(tmp_path: Path):
    ended = meshrun(tmp_path, "run", written(tmp_path, PLACE), "--procs", 1, "--device", "cpu", "--meet")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["['0', '0', '1', '1', '127.0.0.1'] True", "met 1"]


OWN_PORT = """
import os, socket
import torch.distributed as dist

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(free.getsockname()[1])
print("told children", "TORCHELASTIC_USE_AGENT_STORE" in os.environ)
dist.init_process_group("gloo", rank=0, world_size=1)
print("met", dist.get_world_size())
dist.destroy_process_group()
"""


def test_a_script_in_one_process_may_choose_its_own_port_as_one_that_starts_its_ranks_by_itself_does(tmp_path: Path):
    ended = meshrun(tmp_path, "run", written(tmp_path, OWN_PORT), "--procs", 1, "--device", "cpu")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["told children False", "met 1"]


def test_ranks_of_a_script_that_never_meet_are_told_so_and_where_their_logs_are(tmp_path: Path):
    ended = meshrun(tmp_path, "run", written(tmp_path, PLACE), "--procs", 2, "--device", "cpu")
    assert ended.status == 0, ended.err
    first, second = ended.err.splitlines()
    assert first == "mine.py: a plain script on 2 ranks  ->  runs/mine-1/logs"
    assert second == (
        "mine.py has formed no process group (neither with meshrun nor with torch.distributed), so each of its 2 ranks "
        "does all of the work by itself; docs/own-loop.md has the lines that share it among them"
    )


def test_ranks_of_a_script_that_meet_are_told_nothing_more(tmp_path: Path):
    ended = meshrun(tmp_path, "run", written(tmp_path, PLACE), "--procs", 2, "--device", "cpu", "--meet")
    assert ended.status == 0, ended.err
    assert "met 2" in ended.out and len(ended.err.splitlines()) == 1


def test_a_rank_of_a_script_that_hangs_is_named_with_its_line_and_the_run_ends(tmp_path: Path):
    program = written(tmp_path, STUCK)
    ended = meshrun(tmp_path, "run", program, "--procs", 2, "--device", "cpu", "--hang-after", 3, "--on-hang", "end")
    assert ended.status == 1
    assert re.search(
        rf"rank 1 on {HOST} has been in mine\.py:12 <module> \(time\.sleep\(1000\)\) for \d s, while rank 0 waits for "
        r"it in (barrier|all_reduce|mine\.py:13)",
        ended.err,
    ), ended.err


def test_a_long_computation_of_a_script_is_no_hang(tmp_path: Path):
    program = written(tmp_path, STUCK)
    words = ("--procs", 2, "--device", "cpu", "--hang-after", 2, "--on-hang", "end", "--spin")
    ended = meshrun(tmp_path, "run", program, *words)
    assert ended.status == 0, ended.err
    assert "rank" not in "".join(ended.err.splitlines()[1:])


@pytest.mark.parametrize("restarts", [None, 1])
def test_a_script_of_which_a_rank_is_killed_begins_anew_only_where_that_is_asked_for(
    tmp_path: Path, restarts: int | None
):
    words = ("--procs", 2, "--device", "cpu", *(("--restarts", restarts) if restarts else ()))
    ended = meshrun(tmp_path, "run", written(tmp_path, KILLED), *words)
    assert (ended.status, ended.out.count("begins")) == (75, (restarts or 0) + 1), ended.err
    why = ended.sentences[-1]
    assert re.match(rf"rank 1 on {HOST} was killed by SIGKILL(; a plain script has no checkpoint|$)", why), why
    assert ("--restarts N asks for it" in why) == (restarts is None)


def forked(body: str) -> int:
    pid = os.fork()
    if pid == 0:
        os.execvp("python3", ["python3", "-c", body])
    return pid


@pytest.mark.parametrize(
    "body, works",
    [
        ("import time; time.sleep(60)", False),
        ("while True: pass", True),
        ("import time\nwhile True: open('/dev/null', 'w').write('x'); time.sleep(0.02)", True),
        ("import subprocess; subprocess.run(['sh', '-c', 'while :; do :; done'])", True),
    ],
    ids=["sleeps", "computes", "writes", "waits for a child that computes"],
)
def test_activity_of_a_process_is_seen_from_outside(body: str, works: bool):
    pid = forked(f"import os; os.setsid()\n{body}")
    try:
        activity = Activity()
        time.sleep(1.0)
        assert activity.seen(pid), "what it did before is not known"
        activity.forget(pid)
        time.sleep(0.5)
        assert activity.seen(pid) == works
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
