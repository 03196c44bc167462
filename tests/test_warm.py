"""Commands that are forked from a warm process are, to whoever starts them, processes like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm

SHOWS = """
import atexit, json, os, subprocess, sys, tempfile, time
from pathlib import Path

print(json.dumps({
    "warm": "torch._dynamo" in sys.modules, "argv": sys.argv[1:], "cwd": os.getcwd(), "parent": os.getppid(),
    "tests": "tests" in sys.modules,
    "session": os.getsid(0), "group": os.getpgid(0), "colour": os.environ.get("COLOUR"), "path": sys.path[0],
    "input": sys.stdin.readline(), "shown": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\\0").split("\\0"),
    "open": sorted(int(each) for each in os.listdir("/proc/self/fd")),
}), flush=True)
print("beside", file=sys.stderr)
"""
ENDS = """
import atexit, signal, subprocess, sys, tempfile, time
from pathlib import Path

kept = tempfile.TemporaryDirectory()
atexit.register(print, "the end")
if sys.argv[-1] == "inside":
    print("inside of", sys.argv[-2])
    sys.exit(5)
elif sys.argv[-1] == "sleep":
    print("asleep", flush=True)
    time.sleep(60)
else:
    inner = subprocess.run([sys.executable, "-m", "meshrun", "run", __file__, "one", "inside"], capture_output=True)
    print(inner.returncode, inner.stdout, Path(kept.name).is_dir())
    sys.exit("gone")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "ends.py").write_text(ENDS)
    return tmp_path


def words(*more: object) -> list[str]:
    return [sys.executable, "-m", "meshrun", "run", *map(str, more)]


def test_it_has_words_environment_folder_streams_and_parent_of_its_own(script: Path):
    found = []
    for way in (subprocess.run, warm.run):
        ended = way(
            words(script / "shows.py", "--width", "3"),
            cwd=script,
            env={**os.environ, "COLOUR": "blue"},
            input="hello\nyou\n",
            capture_output=True,
            text=True,
            process_group=0,
        )
        assert ended.returncode == 0 and ended.stderr == "beside\n"
        shown = json.loads(ended.stdout)
        assert shown.pop("group") != os.getpgid(0)
        found.append(shown)
    fresh, forked = found
    assert forked.pop("warm") and not fresh.pop("warm")
    assert forked == fresh
    assert fresh["parent"] == os.getpid() and fresh["input"] == "hello\n" and fresh["colour"] == "blue"


def test_it_ends_as_an_interpreter_does_and_so_do_its_own_forks(script: Path):
    found = [way(words(script / "ends.py"), capture_output=True, text=True) for way in (subprocess.run, warm.run)]
    for ended in found:
        assert ended.returncode == 1 and ended.stderr.endswith("gone\n")
        assert ended.stdout == "5 b'inside of one\\nthe end\\n' True\nthe end\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_is_waited_for_and_hears_signals(script: Path, number: signal.Signals):
    with warm.Popen(words(script / "ends.py", "sleep"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "asleep\n"
        assert process.poll() is None and psutil.Process(process.pid).ppid() == os.getpid()
        process.send_signal(number)
        assert process.wait(60) == -number


def test_what_cannot_be_forked_is_started_as_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm, "_fork_there", lambda _asked: pytest.fail("it must be a process of its own"))
    code = "import sys; print('torch' in sys.modules)"
    assert warm.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    version = [sys.executable, "-m", "meshrun", "version"]
    other = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert warm.run(version, env=other, capture_output=True, text=True).returncode == 0
