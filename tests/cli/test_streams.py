"""Standard output and error of a command: readers that go away, disks that take no more, streams that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrun.errors import printable
from tests.launch.command import TINY

MESHRUN = [sys.executable, "-m", "meshrun"]


def shell(line: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which "$@" is a meshrun command; its status is that command's."""
    command = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}", "bash", *MESHRUN, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False, env=env)


@pytest.mark.parametrize("line", ['"$@" | head -1', '"$@" 2>&1 | head -1', '"$@" | true', '"$@" 2>&1 | true'])
def test_a_reader_that_goes_away_is_no_error(line: str, tmp_path: Path):
    ended = shell(line, tmp_path, "sites")
    assert ended.returncode == 0 and not ended.stderr, ended.stderr


@pytest.mark.parametrize("width", ["9" * 5000, "9" * 12, "²", "-1", ""])
def test_a_terminal_of_any_width_is_written_to(width: str, tmp_path: Path):
    ended = shell(f'export COLUMNS={width} LINES={width}; "$@"', tmp_path, "--help")
    assert (ended.returncode, ended.stderr) == (0, "") and len(ended.stdout) < 10_000


def test_a_status_other_than_0_reaches_the_shell_though_nobody_reads(tmp_path: Path):
    assert shell('"$@" 2>&1 | true', tmp_path, "inspect", "nowhere").returncode == 2


def test_a_training_whose_reader_has_gone_comes_to_its_end(tmp_path: Path):
    ended = shell('"$@" 2>&1 | head -1', tmp_path, "run", TINY, "--procs", "2", "--steps", "6")
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert json.loads((tmp_path / "runs" / "tiny-1" / "result.json").read_text())["steps"] == 6


def test_output_that_cannot_be_written_is_an_error_in_one_sentence(tmp_path: Path):
    ended = shell('"$@" >/dev/full', tmp_path, "sites", "--json")
    assert ended.returncode == 1
    assert ended.stderr == "meshrun: standard output cannot be written: No space left on device\n"


def test_where_neither_output_nor_error_can_be_written_the_status_still_says_it(tmp_path: Path):
    assert shell('"$@" >/dev/full 2>&1', tmp_path, "version").returncode == 1
    assert shell('"$@" >/dev/full 2>&1', tmp_path, "inspect", "nowhere").returncode == 2


CLOSES = """
import sys, torch
from meshrun import Experiment, mean_squared_error

def loss(outputs, targets):
    {closes}
    return mean_squared_error(outputs, targets)

def experiment():
    data = [(torch.ones(2), torch.ones(1))] * 8
    sgd = lambda given: torch.optim.SGD(given, lr=0.1)
    return Experiment(lambda: torch.nn.Linear(2, 1), data, loss, sgd, batch=4, steps=2)
"""


@pytest.mark.parametrize("closes", ["sys.stdout.close(); sys.stderr.close()", "sys.stdout = sys.stderr = None"])
def test_a_program_that_closes_its_streams_keeps_nobody_from_its_result(closes: str, tmp_path: Path):
    (tmp_path / "closes.py").write_text(CLOSES.format(closes=closes))
    ended = shell('"$@"', tmp_path, "run", "closes.py", "--json", "--workers", "0")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["steps"] == 2


@pytest.mark.parametrize("line", ['"$@" >&-', '"$@" 2>&-', '"$@" <&-', '"$@" <&- >&- 2>&-', '"$@" 2>/dev/full'])
def test_streams_that_are_not_there_are_no_error(line: str, tmp_path: Path):
    ended = shell(line, tmp_path, "version")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


def test_a_file_is_never_taken_for_a_stream_that_was_closed(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import os\nwith open('notes', 'w') as file:\n    os.write(1, b'printed')\n    file.write('noted')\n"
    )
    ended = shell('"$@" >&-', tmp_path, "run", "script.py")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "notes").read_text() == "noted"


def test_control_characters_are_shown_and_not_obeyed():
    assert printable("a\x1b]0;owned\x07\x1b[2Jb\n\tc ü漢 \u2028\x85") == (
        r"a\x1b]0;owned\x07\x1b[2Jb" + "\n\tc ü漢 " + r"\u2028\x85"
    )


def test_what_a_program_raises_does_nothing_to_the_terminal(tmp_path: Path):
    (tmp_path / "evil.py").write_text(
        "from meshrun import UserError\ndef experiment():\n    raise UserError('\\x1b[2Jgone')\n"
    )
    ended = shell('"$@"', tmp_path, "run", "evil.py")
    assert ended.returncode == 2
    assert ended.stderr == "meshrun: \\x1b[2Jgone\n"


def test_halves_of_characters_are_written_out_and_names_of_files_as_they_are(tmp_path: Path):
    """JSON can hold the former; the latter stand for bytes that are no UTF-8."""
    code = "from meshrun.cli.streams import open_streams; open_streams(); print('a\\ud800b\\udcffc\\udfff')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, b"a\\ud800b\xffc\\udfff\n"), ended.stderr
