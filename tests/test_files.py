"""Opening files of others: only plain files, of a size that documents have, are read."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrun import files
from meshrun.files import LARGEST, new_file, open_plain, read_own, read_plain


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_socket, link_to_device])
def test_pipes_sockets_and_devices_are_no_plain_files(make: object, tmp_path: Path):
    path = tmp_path / "file"
    make(path)  # type: ignore[operator]
    for read in (open_plain, read_plain):
        with pytest.raises(OSError, match="it is no plain file") as refused:
            read(path)
        assert refused.value.errno == errno.EINVAL


def test_a_folder_that_was_opened_by_mistake_is_closed_again(tmp_path: Path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_only_plain_files_of_this_user_and_no_links_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, link, pipe = (tmp_path / name for name in ("own", "link", "pipe"))
    own.write_bytes(b"content")
    link.symlink_to(own)
    make_pipe(pipe)
    assert read_own(own) == b"content"
    for path in (link, pipe):
        with pytest.raises(OSError):
            read_own(path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match="no plain file of this user"):
        read_own(own)


@pytest.mark.parametrize("plant", [Path.touch, lambda path: path.symlink_to(path.with_name("target"))])
def test_a_new_file_is_not_one_that_somebody_makes_at_that_very_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]
):
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"another's")
    with new_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda removed, **_: unlink(removed) or plant(removed))
    with pytest.raises(FileExistsError):
        new_file(path)
    assert target.read_bytes() == b"another's"


def test_a_file_of_holes_is_not_read_into_memory(tmp_path: Path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, LARGEST + 1)
    with pytest.raises(OSError, match="it has more than") as refused:
        read_plain(path)
    assert refused.value.errno == errno.EFBIG


def test_a_plain_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(files, "LARGEST", len(b"content"))
    assert read_plain(tmp_path / "file") == b"content"


def test_a_new_file_is_for_whom_its_mode_says(tmp_path: Path):
    for mode in (0o600, 0o644):
        new_file(tmp_path / "file", mode).close()
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
