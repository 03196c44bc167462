"""Bytecode of packages that come without it is kept in a folder of the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTING = """
import sys
from meshrun.world.bytecode import keep_bytecode
keep_bytecode("bare")
import bare
print(bare.__cached__, sys.pycache_prefix)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "bare.py").write_text("number = 7\n")
    return folder


def imported(package: Path, cache: Path, **env: str) -> tuple[Path, str]:
    """Where the package's bytecode is looked for, and below what."""
    paths = os.pathsep.join([str(package), str(Path(__file__).parents[2])])
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env={**given, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    cached, prefix = done.stdout.split()
    return Path(cached), prefix


def test_what_has_no_bytecode_is_compiled_once(package: Path, tmp_path: Path):
    cached, _ = imported(package, tmp_path / "cache")
    assert cached.is_relative_to(tmp_path / "cache" / "meshrun" / "bytecode")
    written = cached.stat()
    assert imported(package, tmp_path / "cache")[0].stat().st_mtime_ns == written.st_mtime_ns
    assert not (package / "__pycache__").exists()


def test_what_has_its_bytecode_beside_it_is_left_alone(package: Path, tmp_path: Path):
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True)
    assert imported(package, tmp_path / "cache") == (next((package / "__pycache__").iterdir()), "None")
    assert not (tmp_path / "cache").exists()


def test_a_place_that_was_chosen_is_kept(package: Path, tmp_path: Path):
    cached, prefix = imported(package, tmp_path / "cache", PYTHONPYCACHEPREFIX=str(tmp_path / "mine"))
    assert prefix == str(tmp_path / "mine") and cached.is_relative_to(tmp_path / "mine")


def test_a_folder_that_others_may_write_to_is_not_used(package: Path, tmp_path: Path):
    theirs = tmp_path / "cache" / "meshrun" / "bytecode"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    assert imported(package, tmp_path / "cache")[1] == "None"


def test_a_folder_below_one_where_all_users_can_rename_things_is_not_used(package: Path, tmp_path: Path):
    theirs = tmp_path / "cache" / "meshrun"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    assert imported(package, tmp_path / "cache")[1] == "None"
