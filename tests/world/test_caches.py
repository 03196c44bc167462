"""Compiled code is kept in a folder of this user alone, unless they have said where."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from meshrun.world.caches import CODE, KERNELS, folder_of, keep_compiled_code, settings


def test_it_is_below_the_cache_directory_of_the_user(tmp_path: Path):
    assert folder_of({"HOME": "/home/me"}, "compile") == Path("/home/me/.cache/meshrun/compile")
    assert folder_of({"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch/me"}, "compile") == Path(
        "/scratch/me/meshrun/compile"
    )
    found, why = settings({"XDG_CACHE_HOME": str(tmp_path)})
    folder = tmp_path / "meshrun" / "compile"
    assert (found, why) == ({CODE: str(folder), KERNELS: str(folder / "triton")}, None)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_who_has_chosen_a_folder_keeps_it(tmp_path: Path):
    assert settings({CODE: "/elsewhere", "XDG_CACHE_HOME": str(tmp_path)}) == ({}, None)
    assert list(tmp_path.iterdir()) == []
    found, _ = settings({CODE: f"{tempfile.gettempdir()}/torchinductor_me", "XDG_CACHE_HOME": str(tmp_path)})
    assert CODE in found, "that is what torch has set itself"
    found, _ = settings({KERNELS: "/elsewhere", "XDG_CACHE_HOME": str(tmp_path)})
    assert found[KERNELS] == "/elsewhere"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_without_a_home_torchs_own_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its name can be guessed, and torch runs what it reads back from there."""
    taken = tmp_path / "torchinductor_root"
    taken.mkdir()
    os.chown(taken, 65534, 65534)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {CODE: str(taken)})
    assert keep_compiled_code() is not None
    chosen = Path(os.environ[CODE])
    assert chosen != taken and chosen.stat().st_uid == os.getuid() and chosen.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("env", [{}, {"XDG_CACHE_HOME": "here"}, {"HOME": ""}])
def test_without_a_home_a_note_says_that_nothing_is_kept(env: dict[str, str]):
    found, why = settings(env)
    assert found == {} and why is not None and "there is no home directory" in why


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path):
    """What torch reads back from it could run anything."""
    folder = tmp_path / "meshrun" / "compile"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    found, why = settings({"XDG_CACHE_HOME": str(tmp_path)})
    assert found == {} and why is not None and "nobody else may write to" in why


def test_a_link_to_a_folder_is_not_used(tmp_path: Path):
    (tmp_path / "meshrun").mkdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "meshrun" / "compile").symlink_to(tmp_path / "theirs")
    assert settings({"XDG_CACHE_HOME": str(tmp_path)})[0] == {}


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path):
    (tmp_path / "meshrun").write_text("a file")
    found, why = settings({"XDG_CACHE_HOME": str(tmp_path)})
    assert found == {} and why is not None and str(tmp_path / "meshrun" / "compile") in why


@pytest.mark.skipif(os.getuid() == 0, reason="who may do anything may write there too")
def test_a_folder_that_cannot_be_written_to_is_not_used(tmp_path: Path):
    folder = tmp_path / "meshrun" / "compile"
    folder.mkdir(parents=True, mode=0o500)
    assert settings({"XDG_CACHE_HOME": str(tmp_path)})[0] == {}


def test_a_folder_below_one_where_all_users_can_rename_things_is_not_used(tmp_path: Path):
    """As with umask 000: what is loaded from there can run anything."""
    (tmp_path / "meshrun").mkdir()
    (tmp_path / "meshrun").chmod(0o777)
    found, why = settings({"XDG_CACHE_HOME": str(tmp_path)})
    assert found == {} and why is not None and "nor all users to one above it" in why
    (tmp_path / "meshrun").chmod(0o1777)
    assert settings({"XDG_CACHE_HOME": str(tmp_path)})[1] is None


def test_the_folder_above_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        assert settings({"XDG_CACHE_HOME": str(tmp_path)})[1] is None
    finally:
        os.umask(before)
    assert (tmp_path / "meshrun").stat().st_mode & 0o777 == 0o700
