"""What torch's recorder of collectives tells about a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrun.observe import flight
from meshrun.observe.flight import Call, Group, familiar, groups_of


def entry(number: int, name: str = "gloo:all_reduce", group: str = "0", retired: bool = True, **more: Any) -> Any:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": [group, "default_pg"],
        "input_sizes": [[10]],
        "input_dtypes": ["Float"],
        "time_created_ns": 1_000_000_000 * number,
        "retired": retired,
        **more,
    }


def test_entries_are_told_apart_by_group_and_backend():
    entries = [entry(1), entry(2, retired=False), entry(1, "nccl:all_reduce"), entry(1, group="2")]
    groups = groups_of(entries, {"0": (0, 1), "2": (1, 3)}, now=5_000_000_000)
    assert [(group.name, group.ranks, group.issued) for group in groups] == [
        ("gloo:0", (0, 1), 2),
        ("nccl:0", (0, 1), 1),
        ("gloo:2", (1, 3), 1),
    ]
    assert groups[0].pending == [Call(2, "all_reduce", "[10] Float", 3.0, False)]


def test_messages_between_two_ranks_are_no_collectives():
    assert groups_of([entry(1, is_p2p=True)], {}, now=0) == []


def group(*kinds: str) -> Group:
    """The last of these calls is the one that the rank is stuck in."""
    age = range(len(kinds), 0, -1)
    calls = [Call(number, kind, "", age[number - 1], number < len(kinds)) for number, kind in enumerate(kinds, 1)]
    return Group("gloo:0", (0, 1), tuple(calls))


@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        (("barrier", "sum", "barrier", "sum", "barrier"), 3),
        (("barrier", "sum", "barrier", "sum", "sum"), 1),
        (("sum", "sum", "sum", "barrier"), 0),
        ((), 0),
    ],
)
def test_calls_that_leave_the_order_of_the_steps_before_are_not_familiar(kinds: tuple[str, ...], known: int):
    assert familiar([group(*kinds)]) == known


@pytest.mark.ranks(3)
def test_rank_that_has_not_come_has_issued_fewer_collectives(tmp_path: Path):
    import time

    import torch
    import torch.distributed as dist

    from meshrun import mesh

    mesh.use(mesh.Meeting(device="cpu"))
    here = mesh.start()
    dist.all_reduce(torch.ones(2))
    work = dist.all_reduce(torch.ones(4), async_op=True) if here.rank != 1 else None
    time.sleep(0.3)
    flight.write_own(tmp_path, here.rank, 7)
    while any(flight.read(tmp_path, rank, 7) is None for rank in range(here.size)):
        time.sleep(0.05)
    if work is None:
        dist.all_reduce(torch.ones(4))
    else:
        work.wait()
    found = flight.read(tmp_path, here.rank, 7)
    assert found is not None
    (default,) = [each for each in found if each.ranks == (0, 1, 2) and each.calls[0].shape == "[2] Float"]
    assert default.issued - default.calls[0].number == (0 if here.rank == 1 else 1)
    assert [call.shape for call in default.pending] == ([] if here.rank == 1 else ["[4] Float"])
    assert all(0.2 < call.age < 60 for call in default.pending)


def test_a_call_is_over_when_it_is_retired_or_completed():
    entries = [entry(1, retired=False, state="completed"), entry(2, retired=False, state="started"), entry(3)]
    (group,) = groups_of(entries, {}, now=5_000_000_000)
    assert [call.number for call in group.pending] == [2]


def test_an_answer_is_that_to_the_question_that_was_asked_last(tmp_path: Path):
    flight.write_own(tmp_path, 3, 7)
    assert flight.read(tmp_path, 3, 7) == []
    assert flight.read(tmp_path, 3, 8) is None and flight.read(tmp_path, 4, 7) is None


def test_of_many_calls_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flight, "RECENT", 2)
    (group,) = groups_of([entry(number) for number in (3, 1, 4, 2)], {}, now=0)
    assert [call.number for call in group.calls] == [3, 4]
