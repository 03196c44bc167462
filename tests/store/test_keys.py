"""torch's own clients against the store's server: each operation answers as torch's server does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshrun.store import process
from meshrun.store.server import Server

SECRET = b"s" * 32


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, tuple[dist.TCPStore, dist.TCPStore]]]:
    """Two clients of torch's server, and two of ours, one of which comes through a relay."""
    ports = process.serve(0, "127.0.0.1", SECRET)
    relay = process.relay("127.0.0.1", ports["network"], SECRET)
    serving = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    yield {
        "torch": (serving, client(serving.port)),
        "meshrun": (client(ports["loopback"]), client(relay["loopback"])),
    }
    process.end()


@pytest.fixture(params=["torch", "meshrun"])
def pair(request: pytest.FixtureRequest, stores: dict[str, tuple[dist.TCPStore, dist.TCPStore]]):
    return stores[request.param]


def soon(action) -> threading.Thread:
    def act() -> None:
        time.sleep(0.1)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_what_asks_ranks_to_stop_leaves_them_their_store(stores: dict[str, tuple[dist.TCPStore, dist.TCPStore]]):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        for child in process._children:
            child.send_signal(number)
    one, other = stores["meshrun"]
    one.set("state", "kept")
    assert other.get("state") == b"kept" and all(child.poll() is None for child in process._children)


def test_values_are_set_counted_compared_appended_and_deleted(pair):
    one, other = pair
    one.set("x", "1")
    assert other.get("x") == b"1"
    assert (one.add("n", 3), other.add("n", -5), other.get("n")) == (3, -2, b"-2")
    assert one.compare_set("c", "", "v") == b"v"
    assert other.compare_set("c", "v", "w") == b"w"
    assert other.compare_set("c", "z", "y") == b"w"
    assert one.compare_set("absent", "expected", "new") == b"expected"
    one.append("l", "ab")
    assert one.get("l") == b"ab", "an append has no answer: only the same client knows that it is done"
    other.append("l", "cd")
    assert other.get("l") == one.get("l") == b"abcd"
    before = one.num_keys()
    assert one.delete_key("x")
    assert not other.delete_key("x")
    assert other.num_keys() == before - 1
    assert (one.check(["n", "c"]), one.check(["n", "x"])) == (True, False)


def test_many_values_and_large_ones_go_in_one_message(pair):
    one, other = pair
    one.multi_set(["a", "b"], ["1", "2"])
    assert other.multi_get(["b", "a"]) == [b"2", b"1"]
    large = "z" * (5 << 20)
    one.set("large", large)
    assert other.get("large") == large.encode()


def test_a_client_waits_until_all_keys_are_set_or_its_time_is_over(pair):
    one, other = pair
    one.set("first", "1")
    thread = soon(lambda: other.set("second", "2"))
    one.wait(["first", "second"], timedelta(seconds=20))
    thread.join()
    with pytest.raises(dist.DistStoreError, match="timeout"):
        one.wait(["never"], timedelta(seconds=0.1))
    other.set("never", "after all")
    assert one.get("never") == b"after all"


def test_queues_hand_each_entry_to_one_client(pair):
    one, other = pair
    one.queue_push("q", "1")
    one.queue_push("q", "2")
    assert (one.queue_len("q"), other.queue_pop("q"), one.queue_pop("q")) == (2, b"1", b"2")
    thread = soon(lambda: other.queue_push("q", "3"))
    assert one.queue_pop("q") == b"3"
    thread.join()


@pytest.mark.skipif(not hasattr(dist.TCPStore, "barrier"), reason="this torch has no barrier of the store")
def test_a_barrier_ends_when_all_have_come(pair):
    one, other = pair
    thread = soon(lambda: other.barrier("all here", 2))
    one.barrier("all here", 2)
    thread.join()


def test_copies_of_a_client_see_the_same_keys(pair):
    one, other = pair
    one.clone().set("by a copy", "1")
    assert other.get("by a copy") == b"1"
    if hasattr(one, "list_keys"):
        assert "by a copy" in other.list_keys()


@pytest.mark.parametrize("value", [b"many", b"9223372036854775807"])
def test_a_counter_that_cannot_be_raised_ends_that_client_alone(value: bytes):
    with Server() as server:
        one, other = client(server.port), client(server.port)
        one.set("counter", value)
        with pytest.raises(dist.DistNetworkError):
            one.add("counter", 1)
        assert other.get("counter") == value
