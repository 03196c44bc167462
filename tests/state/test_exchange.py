"""Which state in the memory of several nodes a run goes on from, decided from what the nodes offer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from meshrun import mesh
from meshrun.state import exchange
from meshrun.state.exchange import Offer, bring, gather, missing, moments
from meshrun.state.manifest import File, Index
from meshrun.state.memory import mark, memory_files

from .places import ALONE


def index(name: str = "rank-00000.safetensors", **changes: Any) -> Index:
    fields = {"rank": int(name[-17:-12]), "step": 3, "layout": "dp=2", "world": 2, "state": {"evaluated": 0}}
    size = changes.pop("size", 100)
    return Index(**{**fields, **changes}, name=name, file=File(size, None), entries=[])


def names(group: list[Index]) -> list[tuple[int, str]]:
    return [(each.step, each.name) for each in group]


OTHER = "rank-00001.safetensors"


def test_the_newest_step_in_memory_is_offered_first():
    offers = [Offer(0, [index(step=3), index(step=9)]), Offer(1, [index(OTHER, step=5)])]
    assert [group[0].step for group in moments(offers, ALONE)] == [9, 5, 3]


def test_files_of_the_own_node_come_before_larger_files_of_other_nodes():
    offers = [Offer(0, [index(size=10)]), Offer(1, [index(OTHER, size=500)])]
    (group,) = moments(offers, ALONE)
    assert names(group) == [(3, "rank-00000.safetensors"), (3, OTHER)]


def test_of_files_elsewhere_the_largest_comes_first_since_its_state_is_taken_for_all():
    offers = [Offer(1, [index(OTHER, size=10), index("rank-00002.safetensors", size=500)])]
    (group,) = moments(offers, ALONE)
    assert [each.file.bytes for each in group] == [500, 10]


def test_a_copy_on_another_node_is_the_same_file_and_listed_once():
    offers = [Offer(0, [index()]), Offer(1, [index()])]
    (group,) = moments(offers, ALONE)
    assert names(group) == [(3, "rank-00000.safetensors")]


@pytest.mark.parametrize(
    "changes", [{"layout": "fsdp=2"}, {"world": 4}, {"state": {"evaluated": 3}}, {"state": {"skipped": [2]}}]
)
def test_files_of_another_mesh_or_of_other_batches_are_not_mixed_in(changes: dict[str, Any]):
    offers = [Offer(0, [index(size=500)]), Offer(1, [index(OTHER, **changes)])]
    (group,) = moments(offers, ALONE)
    assert names(group) == [(3, "rank-00000.safetensors")]


def test_an_offer_has_a_file_only_of_the_same_step_size_and_mesh():
    offer = Offer(0, [index()])
    assert offer.has(index())
    for other in (index(step=4), index(size=99), index(OTHER), index(layout="tp=2"), index(state={"evaluated": 1})):
        assert not offer.has(other)


def left_in(memory: Path, found: Index, content: bytes) -> None:
    memory.mkdir(parents=True, exist_ok=True)
    (memory / found.name).write_bytes(content)
    mark(memory / found.name, found)


def test_files_that_are_not_in_memory_are_named(tmp_path: Path):
    left_in(tmp_path, index(size=3), b"abc")
    assert missing(tmp_path, [index(size=3)]) == ""
    assert missing(tmp_path, [index(size=3), index(OTHER)]) == (f"{OTHER} of step 3 could not be brought to {tmp_path}")
    assert missing(tmp_path, [index(size=3, step=4)]).startswith("rank-00000.safetensors of step 4 ")


def test_a_file_for_which_there_is_no_room_is_taken_and_not_marked_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A write that the system cut short: the sender must not wait, and nobody may find the file."""
    came = iter(range(100))
    monkeypatch.setattr(exchange.dist, "recv", lambda chunk, _: chunk.fill_(next(came)))
    monkeypatch.setattr(exchange, "CHUNK", 4)
    whole, cut = index(size=10), index(OTHER, size=10)
    exchange._receive(tmp_path / whole.name, whole, 1)
    assert next(came) == 3, "three chunks"
    opened = Path.open

    class Short:
        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            return self.file.write(data) - 1

    monkeypatch.setattr(Path, "open", lambda path, *given, **named: Short(opened(path, *given, **named)))
    left_in(tmp_path, index(OTHER, size=4, step=2), b"gone")  # written over in part, and no longer there
    exchange._receive(tmp_path / cut.name, cut, 1)
    monkeypatch.undo()
    assert [file.index.name for file in memory_files(tmp_path)] == [whole.name]


@pytest.mark.ranks(2)
def test_a_file_travels_to_the_node_that_needs_it_and_only_there(tmp_path: Path):
    here = mesh.start()
    # Two nodes of one rank each.
    here = replace(here, world=replace(here.world, local_rank=0, local_size=1, node=here.rank, nodes=2))
    memory, content = tmp_path / str(here.rank), bytes(range(256)) * 5
    own = index(f"rank-{here.rank:05d}.safetensors", size=len(content))
    left_in(memory, own, content)
    offers = gather(here, memory)
    assert [(each.leader, names(each.indices)) for each in offers] == [
        (0, [(3, "rank-00000.safetensors")]),
        (1, [(3, OTHER)]),
    ]
    (group,) = moments(offers, here)
    assert group[0].name == own.name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("meshrun.state.exchange.CHUNK", 500)
        bring(here, memory, offers, group, [set(), {"rank-00000.safetensors", OTHER}])
    found = {file.index.name: file.path.read_bytes() for file in memory_files(memory)}
    both = {"rank-00000.safetensors": content, OTHER: content}
    assert found == (both if here.rank == 1 else {own.name: content})


def test_nobody_reads_before_all_nodes_have_what_they_need(tmp_path: Path):
    """All ranks meet twice: to know who leads whom, and once every file is there."""
    met: list[Any] = []
    here = SimpleNamespace(
        rank=0, world=SimpleNamespace(local_rank=0), gathered=lambda value: met.append(value) or [value]
    )
    bring(here, tmp_path, [Offer(0, [index()])], [index()], [{index().name}])  # type: ignore[arg-type]
    assert met == [0, None]


def test_files_are_sent_in_one_order_by_a_node_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Node 1 has both files and node 2 needs them, in whatever order their ranks list them."""
    for own in (0, 1, 2):
        for listed in ([index(), index(OTHER)], [index(OTHER), index()]):
            moved: list[tuple[str, str, int]] = []
            monkeypatch.setattr(exchange, "_send", lambda path, _, to: moved.append(("send", path.name, to)))  # noqa: B023
            monkeypatch.setattr(exchange, "_receive", lambda path, _, to: moved.append(("receive", path.name, to)))  # noqa: B023
            here = SimpleNamespace(rank=own, world=SimpleNamespace(local_rank=0), gathered=lambda _: [0, 1, 2])
            offers = [Offer(0, []), Offer(1, listed), Offer(2, [])]
            bring(here, tmp_path, offers, listed, [set(), set(), {index().name, OTHER}])  # type: ignore[arg-type]
            how = {0: [], 1: ["send", 2], 2: ["receive", 1]}[own]
            assert moved == [(how[0], name, how[1]) for name in (index().name, OTHER) if how]
