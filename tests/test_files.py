"""Opening files of others: only plain files, of a size that documents have, are read."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from meshrun.files import LARGEST, open_plain, read_plain


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


def test_a_file_of_holes_is_not_read_into_memory(tmp_path: Path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, LARGEST + 1)
    with pytest.raises(OSError, match="it has more than") as refused:
        read_plain(path)
    assert refused.value.errno == errno.EFBIG


def test_a_plain_file_is_read_whole(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    assert read_plain(tmp_path / "file") == b"content"
