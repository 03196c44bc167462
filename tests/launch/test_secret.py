"""The secret of a run: from which directory and which file it is taken, and what it proves."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.errors import UserError
from meshrun.launch import secret
from meshrun.launch.nodes import nodes_of
from meshrun.launch.secret import FIRST, JOINING, Handshake


def test_a_directory_that_every_user_may_write_to_holds_no_secret(tmp_path: Path):
    made = secret.make(tmp_path)
    assert secret.read(tmp_path) == made
    for mode in (0o777, 0o702):
        tmp_path.chmod(mode)
        for use in (secret.read, secret.make):
            with pytest.raises(UserError, match="may be written to by every user"):
                use(tmp_path)
    tmp_path.chmod(0o775)
    assert secret.read(tmp_path) == made, "a group may share it"


def test_a_directory_of_root_s_is_another_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to another user"):
        secret.make(tmp_path)


@pytest.mark.parametrize("part", ["secret", "run", "nonce", "answer"])
def test_proofs_and_keys_go_by_all_that_a_handshake_is_of(part: str):
    one = Handshake(b"s" * 64, "/runs/a", "n", "m")
    other = replace(one, **{part: b"t" * 64 if part == "secret" else "x"})
    for role in (FIRST, JOINING):
        assert one.is_proof(one.proof(role), role) and not one.is_proof(other.proof(role), role)
        assert one.key(role) != other.key(role)


def test_a_secret_is_never_written_into_a_file_that_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret, "remove", lambda _: None)  # another user has made it anew in the meantime
    (tmp_path / secret.NAME).touch(0o666)
    with pytest.raises(UserError, match=r"cannot write .*: File exists"):
        secret.make(tmp_path)
    assert (tmp_path / secret.NAME).read_bytes() == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_or_a_secret_of_another_user_is_refused(tmp_path: Path):
    secret.make(tmp_path)
    os.chown(tmp_path / secret.NAME, 12345, -1)
    with pytest.raises(UserError, match="must be a file that this user alone can read"):
        secret.read(tmp_path)
    os.chown(tmp_path, 12345, -1)
    for use in (secret.read, secret.make):
        with pytest.raises(UserError, match="belongs to another user, whose number is 12345"):
            use(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path):
    secret.make(tmp_path)
    (tmp_path / secret.NAME).chmod(0o640)
    with pytest.raises(UserError, match="must be a file that this user alone can read"):
        secret.read(tmp_path)


def test_a_link_in_place_of_the_secret_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    secret.make(elsewhere)
    (tmp_path / secret.NAME).symlink_to(elsewhere / secret.NAME)
    with pytest.raises(secret.Unseen):
        secret.read(tmp_path)


def test_a_secret_that_a_file_system_shows_late_is_waited_for(tmp_path: Path):
    late = threading.Timer(0.3, secret.make, [tmp_path])
    late.start()
    assert len(secret.read(tmp_path)) == 64
    late.join()


def test_each_role_has_a_key_and_a_proof_of_its_own():
    shaken = Handshake(b"s" * 64, "/runs/a-1", "n", "m")
    assert shaken.key(FIRST) != shaken.key(JOINING)
    assert not shaken.is_proof(shaken.proof(FIRST), JOINING)


@pytest.mark.parametrize("text", ["4:1", "0", "0:3", "2:", "x"])
def test_a_number_of_nodes_that_cannot_be_is_refused(text: str):
    with pytest.raises(UserError, match=r"\(--nodes\)"):
        nodes_of(text)


def test_a_secret_is_on_the_disk_before_anybody_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    assert synced == [] and len(secret.make(tmp_path)) == 64
    assert synced == [64]
    assert stat.S_IMODE((tmp_path / secret.NAME).stat().st_mode) == 0o600


def test_an_empty_secret_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk leaves one: anybody knows it, and could make a node of this user take part."""
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.0)
    (tmp_path / secret.NAME).touch(mode=0o600)
    with pytest.raises(secret.Unseen, match="it is empty"):
        secret.read(tmp_path)
