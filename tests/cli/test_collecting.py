import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrun.cli.collecting import SELDOM, importing


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_objects_are_looked_through_seldom_while_modules_are_imported_and_as_ever_afterwards() -> None:
    before = gc.get_threshold()
    with importing():
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() > 1000


def test_a_program_that_chooses_for_itself_has_what_it_chose() -> None:
    with importing():
        gc.set_threshold(5000, 7, 7)
    assert gc.get_threshold() == (5000, 7, 7)


def test_what_is_to_happen_at_the_end_of_a_process_happens(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, threading, time\n"
        "left_open = open('left-open', 'w')\n"
        "left_open.write('all of it')\n"
        "atexit.register(lambda: open('at-exit', 'w').close())\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), open('by-thread', 'w').close())).start()\n"
    )
    command = [sys.executable, "-m", "meshrun", "run", str(script), "--device", "cpu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "left-open").read_text() == "all of it"
    assert (tmp_path / "at-exit").exists() and (tmp_path / "by-thread").exists()
