"""Ranks find rank 0 through a file, and its address is one that other nodes can reach."""

from __future__ import annotations

import ipaddress
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.errors import RunFailed, UserError
from meshrun.world import detect
from meshrun.world import rendezvous as module
from meshrun.world.rendezvous import lookup, own_address, publish

TWO_NODES = replace(detect({}), size=2, nodes=2)


def test_what_is_published_is_found(tmp_path: Path) -> None:
    path = publish(tmp_path / "run", "slurm-42.0.0", 0, "10.0.0.1", 4242)
    assert path == tmp_path / "run/.rendezvous/slurm-42.0.0-0.json"
    assert lookup(tmp_path / "run", "slurm-42.0.0", 0) == ("10.0.0.1", 4242)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


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


def test_a_launcher_without_a_key_is_refused(tmp_path: Path) -> None:
    for refused in (lambda: publish(tmp_path, "", 0, "10.0.0.1", 1), lambda: lookup(tmp_path, "", 0)):
        with pytest.raises(UserError, match="gives its ranks nothing to find each other by"):
            refused()


def test_a_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"rendezvous file .*job-0\.json cannot be written \(Not a directory\)"):
        publish(tmp_path / "file", "job", 0, "10.0.0.1", 1)


def test_one_node_meets_on_loopback() -> None:
    assert own_address(detect({})) == "127.0.0.1"


def test_a_host_name_that_resolves_is_taken() -> None:
    assert own_address(replace(TWO_NODES, host="192.0.2.7")) == "192.0.2.7"


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost", "no-such-host.invalid", "0.0.0.0"])
def test_a_host_name_on_loopback_is_passed_over_for_an_interface(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_routed", lambda: ["10.1.2.3"])
    assert own_address(replace(TWO_NODES, host=host)) == "10.1.2.3"


def test_without_a_default_route_the_first_interface_but_loopback_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_routed", list)
    monkeypatch.setattr(module, "_interfaces", lambda: ["127.0.0.1", "169.254.1.1", "10.1.2.4", "10.1.2.5"])
    assert own_address(replace(TWO_NODES, host="localhost")) == "10.1.2.4"


def test_a_machine_with_loopback_only_cannot_meet_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_routed", list)
    monkeypatch.setattr(module, "_interfaces", lambda: ["127.0.0.1"])
    with pytest.raises(RunFailed, match="host 'localhost' has no network address but loopback"):
        own_address(replace(TWO_NODES, host="localhost"))


def test_the_addresses_found_on_this_machine_can_be_listened_on() -> None:
    found = {*module._routed(), *module._interfaces()}
    assert "127.0.0.1" in found
    for address in found:
        ipaddress.IPv4Address(address)
        with socket.create_server((address, 0)):
            pass
