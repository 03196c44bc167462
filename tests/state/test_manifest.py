"""What a checkpoint says of itself: indices of ranks that fit together, and what is covered by their pieces."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun.state import checkpoint as module
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.manifest import Entry, File, Index, Manifest, Unfit, laid_out
from meshrun.state.region import Box, Region
from meshrun.state.shards import BLOCK

from .places import numbers, saved


def index(rank: int, entry: Entry | None = None, **changes: Any) -> Index:
    """Rows 2 * rank and 2 * rank + 1 of a matrix of four."""
    entry = entry or Entry("w", torch.float32, (4, 3), Box((2 * rank, 0), (2, 3)), 64)
    fields = {"step": 5, "layout": "fsdp=2", "world": 2, "state": {"seen": float("inf")}}
    return Index(
        rank, **{**fields, **changes}, name=f"rank-{rank:05d}.safetensors", file=File(88, [1]), entries=[entry]
    )


@pytest.mark.parametrize("seen", [-float("inf"), {"__float__": "a word"}, {"__float__": "1e9"}, {"__float__": [1]}])
def test_an_index_comes_back_from_its_text(seen: Any):
    made = index(1, state={"seen": seen})
    assert Index.decode(made.encode()) == made


def test_indices_become_a_manifest_that_comes_back_from_its_text():
    made = Manifest.of([index(0), index(1)])
    assert (made.step, made.layout, made.world) == (5, "fsdp=2", 2)
    assert [piece.box.start for piece in made.tensors["w"].pieces] == [(0, 0), (2, 0)]
    assert Manifest.decode(made.encode()) == made


@pytest.mark.parametrize("change", [{"dtype": torch.int32}, {"shape": (4, 4)}])
def test_ranks_that_disagree_on_a_tensor_make_no_manifest(change: dict[str, Any]):
    other = index(1, index(1).entries[0]._replace(**change))
    with pytest.raises(Unfit, match=r"'w' is .* on rank 1 and F32 \[4, 3\] on another"):
        Manifest.of([index(0), other])


def test_a_tensor_with_a_hole_and_tensors_that_overlap_are_refused():
    with pytest.raises(Unfit, match="'w' has 12 elements and pieces of 6"):
        Manifest.of([index(0)]).check_extent()
    entries = [Entry(name, torch.float32, (2,), Box((0,), (2,)), at) for name, at in (("a", 0), ("b", 4))]
    with pytest.raises(Unfit, match=r"two tensors overlap in rank-00000"):
        Manifest.of([replace(index(0), entries=entries)]).check_extent()


LIES: dict[str, Any] = {
    "a rank that is true": ("rank", True),
    "a negative step": ("step", -1),
    "a step with a fraction": ("step", 5.0),
    "a name with a path": ("name", "rank-00000.safetensors/../../x"),
    "a name above": ("name", "../rank-00000.safetensors"),
    "too few checksums": ("blocks", []),
    "too many checksums": ("blocks", [1, 2]),
    "entries that are no list": ("entries", {}),
    "an entry that lacks a field": ("entries", [["w", "F32", [4, 3], [0, 0], [2, 3]]]),
    "an unknown type": ("entries", [["w", "F7", [4, 3], [0, 0], [2, 3], 64]]),
    "a piece outside": ("entries", [["w", "F32", [4, 3], [3, 0], [2, 3], 64]]),
    "a piece of other dimensions": ("entries", [["w", "F32", [4, 3], [0], [2], 64]]),
    "more dimensions than a tensor has": ("entries", [["w", "F32", [1] * 65, [0] * 65, [1] * 65, 64]]),
    "a piece beyond the file": ("entries", [["w", "F32", [4, 3], [0, 0], [2, 3], 65]]),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_even_with_a_valid_seal(lie: str):
    body = json.loads(index(0).encode())["body"]
    key, value = LIES[lie]
    from meshrun.state.manifest import _seal

    assert Index.decode(_seal(body)) == index(0)
    with pytest.raises(Unfit):
        Index.decode(_seal({**body, key: value}))


def test_a_manifest_that_speaks_of_a_file_it_does_not_list_is_refused():
    from meshrun.state.manifest import _seal

    body = json.loads(Manifest.of([index(0), index(1)]).encode())["body"]
    body["tensors"]["w"][2][0][0] = 2
    with pytest.raises(Unfit, match="'w' lies in file 2 of 2"):
        Manifest.decode(_seal(body))


def test_what_is_covered_and_by_which_files():
    there = Checkpoint.of_indices(Path("/nowhere"), [index(0)])
    assert there.covers("w", (0, 1), (2, 2)) and there.covers("w", (3, 0), (0, 3))
    assert not there.covers("w", (1, 0), (2, 3)), "row 2 is of a rank that is not there"
    assert not there.covers("other", (0,), (1,)) and not there.covers("w", (0,), (1,))
    both = Checkpoint.of_indices(Path("/nowhere"), [index(0), index(1)])
    assert both.files_for("w", (2, 0), (1, 3)) == {"rank-00001.safetensors"}
    assert len(both.files_for("w", (1, 0), (2, 1))) == 2


def test_a_region_that_is_there_in_part_is_refused(tmp_path: Path):
    whole = saved(tmp_path, {"w": numbers(4, 3)})
    info = whole.tensors["w"]
    piece = info.pieces[0]
    info.pieces[:] = [piece._replace(box=Box((0, 0), (2, 3)))]
    with pytest.raises(BadCheckpoint, match="has only a part of 'w'"):
        whole.read(Region("w", torch.empty(3, 3), (4, 3), (0, 0)))
    found = torch.empty(2, 3)
    whole.read(Region("w", found, (4, 3), (0, 0)))
    assert torch.equal(found, numbers(4, 3)[:2])


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path):
    whole = saved(tmp_path, {"w": numbers(4, 3)})
    with pytest.raises(BadCheckpoint, match=r"has the shape \[4, 3\] in it and \[5, 3\] in this run"):
        whole.read(Region("w", torch.empty(2, 3), (5, 3), (0, 0)))


def test_no_more_files_are_open_than_a_process_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    entries = {f"rank-{n:05d}.safetensors": saved(tmp_path / str(n), {"w": numbers(3, seed=n)}) for n in range(5)}
    indices = []
    (tmp_path / "all").mkdir()
    for n, (name, each) in enumerate(entries.items()):
        (tmp_path / "all" / name).write_bytes((each.path / "rank-00000.safetensors").read_bytes())
        entry = Entry(f"w{n}", torch.float32, (3,), Box((0,), (3,)), each.tensors["w"].pieces[0].offset)
        file = each.manifest.files["rank-00000.safetensors"]
        indices.append(replace(index(n, entry), file=file))
    both = Checkpoint.of_indices(tmp_path / "all", indices)
    for n in range(5):
        assert torch.equal(both.whole(f"w{n}"), numbers(3, seed=n))
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]  # noqa: PTH115
    assert sum(str(tmp_path / "all") in link for link in links) <= 2
    both.close()


def test_several_parts_of_a_tensor_on_one_rank_have_a_place_each():
    """As of a matrix for queries, keys and values, of each of which tp gives a rank some rows."""
    parts = [Region("qkv", torch.full((2, 3), float(at)), (12, 3), (at, 0)) for at in (0, 4, 8)]
    laid, entries = laid_out(parts, {})
    assert [(each.name, each.box) for each in entries] == [("qkv", each.box) for each in parts]
    assert len({each.offset for each in entries}) == 3 and laid.bytes == len(laid.header) + 3 * 24


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_file_of_whole_blocks_has_a_checksum_of_each_and_no_more(blocks: int):
    whole = replace(index(0), file=File(blocks * BLOCK, [7] * blocks), entries=[])
    assert Index.decode(whole.encode()) == whole
    with pytest.raises(Unfit, match="checksums"):
        Index.decode(replace(whole, file=File(blocks * BLOCK + 1, [7] * blocks)).encode())


def test_infinities_in_pairs_come_back():
    found = Index.decode(replace(index(0), state={"betas": (float("inf"), 0.9)}).encode()).state
    assert found == {"betas": [float("inf"), 0.9]}
