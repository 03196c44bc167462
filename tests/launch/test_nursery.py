"""The warm process: what it imports for all ranks, what it leaves to each of them, and when it must not be forked."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshrun.cli.nursery import imports_of, is_installed
from meshrun.launch.job import Job
from meshrun.launch.local import launch
from meshrun.launch.nursery import _buried, _is_warm
from tests.launch.command import meshrun

BESIDE = """
import os
with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
DRAWING = """
import os, random, threading
import numpy
import own
import meshrun
here = meshrun.start()
files = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
print(os.getpid(), os.getppid(), random.random(), numpy.random.rand(), sum("pidfd" in each for each in files))
meshrun.finish()
"""


def test_ranks_are_forks_that_import_the_users_own_files_themselves_and_draw_different_numbers(tmp_path: Path):
    (tmp_path / "own.py").write_text(BESIDE)
    (tmp_path / "drawing.py").write_text(DRAWING)
    ended = meshrun(tmp_path, "run", "drawing.py", "--procs", 2)
    assert ended.status == 0, ended.err
    logs = [(tmp_path / f"runs/drawing-1/logs/rank-0000{rank}.log").read_text().split() for rank in (0, 1)]
    assert (tmp_path / "imported").read_text().split() in ([logs[0][0], logs[1][0]], [logs[1][0], logs[0][0]])
    assert logs[0][1] == logs[1][1], "both are children of one process"
    assert logs[0][2] != logs[1][2] and logs[0][3] != logs[1][3]
    assert logs[0][4] == logs[1][4] == "0", "a rank learns nothing of the end of others"


def test_imports_at_the_top_of_a_file_are_read_without_running_it(tmp_path: Path):
    file = tmp_path / "program.py"
    file.write_text("import a.b, c\nfrom d.e import f\nfrom . import g\nraise SystemExit\ndef h():\n    import i\n")
    assert list(imports_of(file)) == ["a.b", "c", "d.e"]


def test_only_what_is_installed_is_imported_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("numpy") and is_installed("torch.nn") and is_installed("json") and is_installed("sys")
    assert not is_installed("beside") and not is_installed("not_there_at_all")


def test_a_process_with_threads_or_an_open_gpu_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert _is_warm()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not _is_warm()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not _is_warm()
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "torch")
    assert not _is_warm()


def test_fresh_processes_that_end_while_others_are_started_are_told_of():
    assert launch(Job(["-I", "-S", "-c", "pass"], 24)) == []
    found = launch(Job(["-I", "-S", "-c", "raise SystemExit(3)"], 24))
    assert {each.code for each in found} <= {3, -15} and any(each.code == 3 for each in found)


def test_other_programs_than_meshrun_start_as_fresh_processes_with_their_place(tmp_path: Path):
    program = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    assert launch(Job(["-c", program], 3)) == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_what_a_rank_has_started_ends_with_it():
    words = ["sh", "-c", "sleep 60 & echo $!; exit 3"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as rank:
        assert rank.stdout is not None
        reader = os.pidfd_open(int(rank.stdout.readline()))
        assert _buried(rank.pid, rank) == 3
        assert select.select([reader], [], [], 10)[0], "it lives on"
        os.close(reader)
