"""State in a node's memory: what is taken for whole, of one moment, and of this user."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun.state import memory
from meshrun.state.checkpoint import Checkpoint
from meshrun.state.manifest import File, Index, laid_out
from meshrun.state.memory import Staging, fitting, mark, memory_files, of_one_moment, write_image
from meshrun.state.region import Region


def left(folder: Path, rank: int, step: int, content: bytes = b"abcd", **changes: Any) -> Index:
    folder.mkdir(parents=True, exist_ok=True)
    name = changes.pop("name", f"rank-{rank:05d}.safetensors")
    fields = {"layout": "dp=2", "world": 2, "state": {}}
    index = Index(rank, step, **{**fields, **changes}, name=name, file=File(4, None), entries=[])
    path = folder / f"rank-{rank:05d}.safetensors"
    path.write_bytes(content)
    mark(path, index)
    return index


def test_the_newest_step_comes_first_and_then_the_lowest_rank(tmp_path: Path):
    for rank, step in ((0, 3), (1, 7), (2, 7), (3, 5)):
        left(tmp_path, rank, step)
    assert [(file.step, file.rank) for file in memory_files(tmp_path)] == [(7, 1), (7, 2), (5, 3), (3, 0)]


def test_a_file_that_is_short_or_whose_index_speaks_of_another_is_passed_over(tmp_path: Path):
    left(tmp_path, 0, 3)
    left(tmp_path, 1, 3, content=b"abc")
    left(tmp_path, 2, 3, name="rank-00000.safetensors")
    left(tmp_path, 3, 3, content=b"abcdefg")
    assert [file.rank for file in memory_files(tmp_path)] == [0, 3], "room for a longer state is kept"


def test_who_reads_an_index_while_it_is_replaced_has_the_one_before(tmp_path: Path):
    before = left(tmp_path, 0, 3)
    with (tmp_path / "rank-00000.json").open("rb") as reader:
        left(tmp_path, 0, 4)
        assert Index.decode(reader.read()) == before


def test_a_folder_of_another_user_holds_nothing_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left(tmp_path, 0, 3)
    assert memory_files(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert memory_files(tmp_path) == []
    assert memory_files(tmp_path / "none") == []


def test_of_several_moments_of_a_step_the_one_that_holds_most_is_taken(tmp_path: Path):
    left(tmp_path, 0, 3, layout="dp=4")
    for rank in (1, 2):
        left(tmp_path, rank, 3, layout="fsdp=2")
    left(tmp_path, 3, 3, layout="fsdp=2", state={"evaluated": 3})
    assert [file.rank for file in of_one_moment([tmp_path], 3)] == [1, 2]
    assert of_one_moment([tmp_path], 4) == []
    assert fitting([]) == []
    words = [Index(rank, 3, "dp=1", 3, {}, "words", File(10, None), []) for rank in range(3)]
    state = [Index(0, 3, "dp=2", 2, {}, "state", File(500, None), [])]
    assert fitting([*words, *state]) == state, "the bytes count, and not the files"


def test_of_a_file_on_two_nodes_the_first_is_taken(tmp_path: Path):
    left(tmp_path / "a", 0, 3)
    left(tmp_path / "b", 0, 3)
    left(tmp_path / "b", 1, 3)
    found = of_one_moment([tmp_path / "a", tmp_path / "b"], 3)
    assert [file.path.parent.name for file in found] == ["a", "b"]


def test_an_image_is_not_whole_while_it_is_filled_and_is_the_users_alone(tmp_path: Path):
    path = tmp_path / "deep/rank-00000.safetensors"
    staging = Staging(path)
    room = staging.room(4)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    room.fill_(7)
    index = Index(0, 3, "dp=1", 1, {}, path.name, File(4, None), [])
    staging.mark(index)
    assert path.read_bytes() == b"\7" * 4 and memory_files(path.parent)[0].index == index
    staging.room(3)
    assert memory_files(path.parent) == [], "the next snapshot has begun"


def test_a_link_in_place_of_an_image_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_bytes(b"keep me")
    path = tmp_path / "rank-00000.safetensors"
    path.symlink_to(tmp_path / "precious")
    staging = Staging(path)
    staging.room(4).fill_(7)
    assert (tmp_path / "precious").read_bytes() == b"keep me"
    assert staging.path is None and "no spare copy" in staging.notes[0]


def test_room_is_made_anew_only_for_a_larger_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, staging = list[int](), Staging(tmp_path / "rank-00000.safetensors")
    mapped = staging._mapped
    monkeypatch.setattr(staging, "_mapped", lambda size: made.append(size) or mapped(size))  # type: ignore[func-returns-value]
    assert [staging.room(size).numel() for size in (4, 4, 3, 5, 5)] == [4, 4, 3, 5, 5]
    assert made == [4, 5]


def test_state_that_lies_in_the_memory_of_two_nodes_is_read_from_both(tmp_path: Path):
    whole = torch.arange(6.0)
    for rank in (0, 1):
        region = Region("w", whole[3 * rank : 3 * rank + 3], (6,), (3 * rank,))
        laid, entries = laid_out([region], {})
        name = f"rank-{rank:05d}.safetensors"
        index = Index(rank, 4, "fsdp=2", 2, {}, name, File(laid.bytes, None), entries)
        write_image(tmp_path / f"node-{rank}" / name, laid.header, [region], index)
    folders = [tmp_path / "node-0", tmp_path / "node-1"]
    assert torch.equal(Checkpoint.from_memory(folders, 4).whole("w"), whole)


def test_states_that_have_left_out_other_steps_or_are_of_other_layouts_are_of_two_moments(tmp_path: Path):
    state = {"skipped": [2], "evaluated": 0}
    left(tmp_path, 0, 3, state=state)
    left(tmp_path, 1, 3, state=state)
    left(tmp_path, 2, 3, state={**state, "skipped": []})
    left(tmp_path, 3, 3, state=state, layout="fsdp=2")
    left(tmp_path, 4, 3, state=state, world=5)
    assert [file.rank for file in of_one_moment([tmp_path], 3)] == [0, 1]


def test_an_image_that_is_written_anew_is_not_whole_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    region = Region.whole("w", torch.ones(3))
    laid, entries = laid_out([region], {})
    before = left(tmp_path, 0, 3)
    seen: list[object] = []

    def writing(path: Path, *_: Any, **__: Any) -> None:
        seen.append(memory_files(tmp_path))
        path.write_bytes(bytes(laid.bytes))

    monkeypatch.setattr(memory, "write_buffers", writing)
    path = tmp_path / before.name
    write_image(path, laid.header, [region], replace(before, step=4, file=File(laid.bytes, None), entries=entries))
    assert seen == [[]] and [file.step for file in memory_files(tmp_path)] == [4]


def test_numbers_of_several_widths_lie_where_the_index_says(tmp_path: Path):
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "wide": torch.arange(3.0).double(),
        "half": torch.ones(3).half(),
    }
    regions = [Region.whole(name, tensor) for name, tensor in tensors.items()]
    laid, entries = laid_out(regions, {})
    name = "words-00000.safetensors"
    index = Index(0, 4, "dp=1", 1, {}, name, File(laid.bytes, None), entries)
    write_image(tmp_path / name, laid.header, regions, index)
    found = Checkpoint.from_memory([tmp_path], 4)
    assert all(torch.equal(found.whole(name), tensor) for name, tensor in tensors.items())
