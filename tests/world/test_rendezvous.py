"""Ranks find rank 0 through a file."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun import strict_json
from meshrun.errors import UserError
from meshrun.world import detect
from meshrun.world.rendezvous import FOLDER, forget, lookup, lookup_store, own_address, publish

TWO_NODES = replace(detect({}), size=2, nodes=2)


def test_what_is_published_is_found(tmp_path: Path) -> None:
    path = publish(tmp_path / "run", "slurm-42.0.0", 0, "10.0.0.1", 4242)
    assert path == tmp_path / "run/.rendezvous/slurm-42.0.0-0.json"
    assert lookup(tmp_path / "run", "slurm-42.0.0", 0) == ("10.0.0.1", 4242)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_job_of_any_name_is_found(tmp_path: Path) -> None:
    for job in (os.fsdecode(b"caf\xe9"), "../x", "\n"):
        publish(tmp_path / "run", job, 0, "10.0.0.1", 4242)
        assert lookup(tmp_path / "run", job, 0) == ("10.0.0.1", 4242)


def test_nothing_is_found_before_it_is_published(tmp_path: Path) -> None:
    assert lookup(tmp_path / "absent", "job", 0) is None
    publish(tmp_path, "job", 0, "10.0.0.1", 4242)
    assert lookup(tmp_path, "job", 1) is None
    assert lookup(tmp_path, "another", 0) is None


@pytest.mark.parametrize("text", ["", '{"address": "10.0', "[]", "null", '{"address": "10.0.0.1"}', '{"port": 1}'])
def test_a_half_written_file_is_not_there_yet(tmp_path: Path, text: str) -> None:
    publish(tmp_path, "job", 0, "10.0.0.1", 4242).write_text(text)
    assert lookup(tmp_path, "job", 0) is None


def test_a_later_address_replaces_a_stale_one(tmp_path: Path) -> None:
    publish(tmp_path, "job", 0, "10.0.0.1", 4242)
    publish(tmp_path, "job", 0, "10.0.0.2", 4243)
    assert lookup(tmp_path, "job", 0) == ("10.0.0.2", 4243)


def test_a_reader_never_sees_half_of_an_address(tmp_path: Path) -> None:
    seen, done = set(), threading.Event()
    publish(tmp_path, "job", 0, "10.0.0.0", 0)

    def read() -> None:
        while not done.is_set():
            seen.add(lookup(tmp_path, "job", 0))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        publish(tmp_path, "job", 0, f"10.0.0.{number}", number)
    done.set()
    reader.join()
    assert seen <= {(f"10.0.0.{number}", number) for number in range(200)}


@pytest.mark.parametrize("job", ["../../up", "a/b", "torchrun-[::1]:29500", "a b\n", "j" * 400, "\u00e4" * 60])
def test_any_job_key_is_a_file_inside_the_folder(tmp_path: Path, job: str) -> None:
    path = publish(tmp_path, job, 0, "10.0.0.1", 1)
    assert path.parent == tmp_path / ".rendezvous"
    assert lookup(tmp_path, job, 0) == ("10.0.0.1", 1)


def test_job_keys_that_look_alike_do_not_meet(tmp_path: Path) -> None:
    keys = ["a:b", "a_b", "a%3Ab", "a/b", "j" * 400, "j" * 401]
    assert len({publish(tmp_path, key, 0, "10.0.0.1", 1) for key in keys}) == len(keys)


def test_the_end_of_a_job_takes_away_what_its_own_steps_have_left(tmp_path: Path) -> None:
    for job in ("slurm-47.0.0", "slurm-47.1.0", "slurm-471.0.0"):
        publish(tmp_path, job, 0, "10.0.0.1", 4242)
    forget(tmp_path, "47")
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == ["slurm-471.0.0-0.json"]


def test_a_launcher_without_a_key_is_refused(tmp_path: Path) -> None:
    for refused in (lambda: publish(tmp_path, "", 0, "10.0.0.1", 1), lambda: lookup(tmp_path, "", 0)):
        with pytest.raises(UserError, match="gives its ranks nothing to find each other by"):
            refused()


def test_a_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"rendezvous file .*job-0\.json cannot be written \(Not a directory\)"):
        publish(tmp_path / "file", "job", 0, "10.0.0.1", 1)


def test_an_address_follows_the_rule_of_the_site_and_of_an_unknown_one_is_said_so() -> None:
    assert own_address(detect({}), "juwels-booster") == "127.0.0.1", "one node needs no rule"
    with pytest.raises(UserError, match=r"'no-such-hosti' stands for no address here"):
        own_address(replace(TWO_NODES, host="no-such-host.cluster"), "juwels-booster")
    with pytest.raises(UserError, match="there is no site 'atlantis'"):
        own_address(TWO_NODES, "atlantis")


def test_only_its_owner_can_read_the_file_with_the_secret(tmp_path: Path):
    path = publish(tmp_path / "run", "job", 0, "10.0.0.1", 4242, b"secret")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert lookup_store(tmp_path / "run", "job", 0) == ("10.0.0.1", 4242, b"secret")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path):
    os.chown(publish(tmp_path, "job", 0, "10.0.0.1", 4242), 65534, 65534)
    with pytest.raises(UserError, match="belongs to another user"):
        lookup(tmp_path, "job", 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_file_that_is_exchanged_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = publish(tmp_path, "j", 0, "10.0.0.9", 1)
    own = path.read_bytes()
    os.chown(path, 65534, 65534)
    loads = strict_json.loads

    def exchanged(text: bytes) -> object:
        path.unlink()
        path.write_bytes(own)
        return loads(text)

    monkeypatch.setattr(strict_json, "loads", exchanged)
    with pytest.raises(UserError, match="belongs to another user"):
        lookup(tmp_path, "j", 0)
