"""Checkpoints: any rectangle of any tensor comes back from whatever rectangles were written."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshrun import UserError
from meshrun.state import checkpoint as checkpoint_module
from meshrun.state import shards
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.manifest import Entry, File, Index, Manifest
from meshrun.state.region import Box, Region, take
from meshrun.state.shards import BLOCK, Damaged, Reader, write

from .places import numbers, saved

EVERY_TYPE = {
    "f64": numbers(5).double(),
    "bf16": numbers(5, 3).bfloat16(),
    "f16": numbers(7).half(),
    "i64": torch.arange(9),
    "u8": torch.arange(13, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "f8": numbers(6).to(torch.float8_e4m3fn),
    "number": torch.tensor(3.5),
    "c64": torch.view_as_complex(numbers(4, 2)),
}


def test_every_type_of_number_comes_back_bit_for_bit(tmp_path: Path):
    checkpoint = saved(tmp_path, EVERY_TYPE)
    for name, tensor in EVERY_TYPE.items():
        found = checkpoint.whole(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("saved_as", "wanted"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_numbers_of_another_type_are_converted_and_not_taken_bit_by_bit(
    tmp_path: Path, saved_as: torch.dtype, wanted: torch.dtype
):
    values = torch.tensor([1.0, -2.0, 0.0, 96.0])
    into = torch.empty(4, dtype=wanted)
    saved(tmp_path, {"w": values.to(saved_as)}).read(Region.whole("w", into))
    assert torch.equal(into, values.to(wanted))


def test_a_file_that_is_read_again_and_again_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_module, "MOST_OPEN", 2)
    boxes = {Box((row,), (1,)): torch.tensor([float(row)]) for row in range(3)}
    found = written(tmp_path, boxes, (3,))
    opened: list[str] = []
    real = checkpoint_module.Reader

    def counting(path: Path, *rest: Any) -> Reader:
        opened.append(path.name)
        return real(path, *rest)

    monkeypatch.setattr(checkpoint_module, "Reader", counting)
    names = sorted(found.manifest.files)
    for row in (0, 1, 0, 2, 0):
        into = torch.empty(1)
        found.read(Region("w", into, (3,), (row,)))
        assert into.item() == row
    assert opened == [names[0], names[1], names[2]]
    found.close()
    found.read(Region("w", into, (3,), (0,)))
    assert into.item() == 0 and opened[3:] == [names[0]]
    assert found.whole("w").tolist() == [0.0, 1.0, 2.0] and set(opened[3:]) == set(names), (
        "reading again opens them again"
    )


def test_a_rank_s_file_is_a_safetensors_file(tmp_path: Path):
    checkpoint = saved(tmp_path, EVERY_TYPE)
    found = load_file(checkpoint.path / "rank-00000.safetensors")
    assert found.keys() == EVERY_TYPE.keys()
    assert torch.equal(found["bf16"], EVERY_TYPE["bf16"])


def test_state_comes_back_with_numbers_that_json_does_not_know(tmp_path: Path):
    state = {"best": {"loss": math.inf}, "last": [math.nan, -math.inf, 0.1], "name": None, "ok": True}
    found = saved(tmp_path, {"a": numbers(2)}, state=state).state
    assert repr(found) == repr(state)
    assert "NaN" not in (tmp_path / "step-00000005" / "manifest.json").read_text()


def written(folder: Path, pieces: dict[Box, torch.Tensor], shape: tuple[int, ...]) -> Checkpoint:
    """A checkpoint of one tensor, each of whose pieces is in a file of its own."""
    folder.mkdir(exist_ok=True)
    indices = []
    for number, (box, tensor) in enumerate(pieces.items()):
        name = f"rank-{number:05d}.safetensors"
        file = write(folder / name, [("w", tensor)])
        entry = Entry("w", tensor.dtype, shape, box, file.offsets["w"])
        indices.append(Index(number, 1, "dp=1", 1, {}, name, File(file.bytes, file.blocks), [entry]))
    (folder / "manifest.json").write_bytes(Manifest.of(indices).encode())
    return Checkpoint.open(folder)


def test_a_tensor_of_as_many_elements_and_another_shape_is_refused(tmp_path: Path):
    found = written(tmp_path, {Box((0, 0), (2, 3)): torch.ones(2, 3)}, (2, 3))
    with pytest.raises(BadCheckpoint, match=r"'w' has the shape \[2, 3\] in it and \[3, 2\] in this run"):
        found.read(Region.whole("w", torch.zeros(3, 2)))


@st.composite
def cuts(draw):
    """A shape, a grid of pieces of it, and a rectangle in it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - at)) for n, at in zip(shape, start, strict=True))
    return shape, edges, start, size


@settings(max_examples=60)
@given(cut=cuts(), chunk=st.sampled_from([8, 24, 1 << 20]), kind=st.sampled_from([torch.float32, torch.float64]))
def test_any_rectangle_is_read_from_any_pieces(tmp_path_factory, cut, chunk, kind):
    shape, edges, start, size = cut
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    pieces: dict[Box, torch.Tensor] = {}
    spans = [list(itertools.pairwise(each)) for each in edges]
    for corner in torch.cartesian_prod(*(torch.arange(len(each)) for each in spans)).reshape(-1, len(shape)).tolist():
        chosen = [spans[dim][at] for dim, at in enumerate(corner)]
        box = Box(tuple(low for low, _ in chosen), tuple(high - low for low, high in chosen))
        pieces[box] = tensor[tuple(slice(low, high) for low, high in chosen)].contiguous()
    checkpoint = written(tmp_path_factory.mktemp("c"), pieces, shape)
    wanted = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
    # Memory with gaps, as a column of a larger tensor has it.
    found = torch.zeros(*size[:-1], 2 * size[-1], dtype=kind)[..., ::2]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("meshrun.state.checkpoint.CHUNK", chunk)
        checkpoint.read(Region("w", found, shape, start))
        assert torch.equal(found, tensor[wanted].to(kind))
        checkpoint.read(Region("w", found := torch.zeros(size), shape, start))
        assert torch.equal(found, tensor[wanted])
    assert checkpoint.covers("w", start, size)
    checkpoint.close()


def test_what_is_not_there_is_said(tmp_path: Path):
    checkpoint = saved(tmp_path, {"model/a": numbers(4, 3), "model/b": numbers(2)})
    wrong = (("model/b", numbers(3), r"shape \[2\] in it and \[3\]"), ("model/c", numbers(1), "no tensor 'model/c'"))
    for name, tensor, words in wrong:
        with pytest.raises(BadCheckpoint, match=words):
            checkpoint.read(Region.whole(name, tensor))
    assert issubclass(BadCheckpoint, UserError)
    assert not checkpoint.covers("model/a", (0,), (4,))
    assert not checkpoint.covers("model/c", (0,), (1,))


def test_copies_are_written_once_and_shared_out(tmp_path: Path):
    del tmp_path
    large, small, single = numbers(1000, 400), numbers(10), torch.tensor(2.0)
    for copies in (2, 3, 5):
        taken = [
            take([Region.whole(name, t, copy, copies) for name, t in {"l": large, "s": small, "n": single}.items()])
            for copy in range(copies)
        ]
        rows = [(each.start[0], each.tensor.shape[0]) for part in taken for each in part if each.name == "l"]
        assert len(rows) == copies
        assert max(n for _, n in rows) - min(n for _, n in rows) <= 1
        assert sorted(rows)[0][0] == 0 and sum(n for _, n in rows) == 1000
        for name in ("s", "n"):
            assert sum(each.name == name for part in taken for each in part) == 1
    assert take([Region.whole("empty", numbers(0, 3))]) == []


def test_each_block_of_a_file_is_verified(tmp_path: Path):
    path = tmp_path / "rank-00000.safetensors"
    tensor = numbers(3 * BLOCK // 4 + 100)
    file = write(path, [("w", tensor)])
    assert len(file.blocks) == -(-file.bytes // BLOCK) == 4
    reader = Reader(path, file.bytes, file.blocks)
    offset = file.offsets["w"]
    assert reader.read(offset + 4, 8) == shards.bytes_of(tensor)[4:12]
    assert reader.read(offset, 4 * tensor.numel()) == shards.bytes_of(tensor)
    with path.open("r+b") as opened:
        opened.seek(BLOCK + 17)
        byte = opened.read(1)[0]
        opened.seek(BLOCK + 17)
        opened.write(bytes([byte ^ 1]))
    reader = Reader(path, file.bytes, file.blocks)
    assert reader.read(offset, 100)
    with pytest.raises(Damaged, match=r"rank-00000.safetensors has a wrong checksum in bytes 1,048,576 to 2,097,152"):
        reader.read(BLOCK + 900, 4)
    with pytest.raises(Damaged, match="has no bytes"):
        reader.read(file.bytes - 3, 4)
