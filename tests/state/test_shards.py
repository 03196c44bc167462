"""One rank's file: whatever the system does in between, its bytes are those of the tensors, or an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshrun.state import shards
from meshrun.state.shards import ALIGN, BLOCK, Damaged, Reader, Spec, plan, write, write_buffers

from .places import numbers


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors are called 'w'"):
        plan([Spec("w", torch.float32, (2,)), Spec("w", torch.float32, (3,))])


def test_wide_numbers_come_first_so_that_all_are_aligned():
    laid = plan(
        [Spec("bytes", torch.uint8, (3,)), Spec("wide", torch.float64, (5,)), Spec("half", torch.bfloat16, (1,))]
    )
    assert list(laid.offsets) == ["wide", "half", "bytes"]
    assert len(laid.header) % ALIGN == 0 and laid.offsets["wide"] == len(laid.header)
    assert laid.bytes == len(laid.header) + 5 * 8 + 2 + 3


def test_a_write_that_the_system_cuts_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensor, write_some = numbers(1000), os.write
    monkeypatch.setattr(os, "write", lambda file, chunk: write_some(file, chunk[:777]))
    written = write(tmp_path / "a.safetensors", [("w", tensor)])
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], tensor)
    assert (tmp_path / "a.safetensors").stat().st_size == written.bytes


def test_every_block_has_a_checksum_of_its_own(tmp_path: Path):
    path, tensor = tmp_path / "a.safetensors", numbers(3 * BLOCK // 4)
    written = write(path, [("w", tensor)])
    assert len(written.blocks) == 4
    damaged = bytearray(path.read_bytes())
    damaged[2 * BLOCK + 5] ^= 1
    path.write_bytes(damaged)
    reader = Reader(path, written.bytes, written.blocks)
    seen: list[int] = []
    (problem,) = reader.problems(seen.append)
    assert f"bytes {2 * BLOCK:,} to {3 * BLOCK:,}" in problem
    assert sum(seen) == written.bytes
    assert reader.read(0, BLOCK) == damaged[:BLOCK]
    for start, length in ((2 * BLOCK, BLOCK), (2 * BLOCK + 1, 3), (3 * BLOCK - 1, 2)):
        with pytest.raises(Damaged, match="wrong checksum"):
            reader.read(start, length)


def test_a_file_of_another_length_is_refused_and_no_bytes_beyond_it_are_read(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    written = write(path, [("w", numbers(10))])
    reader = Reader(path, written.bytes, written.blocks)
    assert reader.read(written.bytes - 4, 4)
    for offset, length in ((written.bytes - 3, 4), (-1, 1), (written.bytes, 1)):
        with pytest.raises(Damaged, match="has no bytes"):
            reader.read(offset, length)
    for size in (written.bytes - 1, written.bytes + 1):
        with pytest.raises(Damaged, match="were written"):
            Reader(path, size, written.blocks)
    # Room in a node's memory is kept for the next, longer state: only a shorter file is wrong.
    assert Reader(path, written.bytes - 1, None).size == written.bytes - 1
    with pytest.raises(Damaged, match="were written"):
        Reader(path, written.bytes + 1, None)


@pytest.mark.timeout(20)
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    written = write(path, [("w", numbers(1000))])
    reader = Reader(path, written.bytes, written.blocks)
    os.truncate(path, 100)
    with pytest.raises(Damaged, match=r"ends at byte 100 where [\d,]+ were written"):
        reader.read(0, written.bytes)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Damaged, match="no plain file"):
        Reader(tmp_path / "pipe", 10, [0])


def test_memory_of_a_tensor_with_gaps_is_that_of_a_copy():
    whole = numbers(4, 6)
    assert bytes(shards.bytes_of(whole[:, 1:3])) == whole[:, 1:3].contiguous().numpy().tobytes()


@pytest.mark.parametrize(("size", "blocks"), [(BLOCK, 1), (BLOCK + 1, 2), (2 * BLOCK, 2)])
def test_each_mebibyte_that_was_begun_has_one_checksum(tmp_path: Path, size: int, blocks: int):
    assert len(write_buffers(tmp_path / "file", [memoryview(bytes(size))], sync=False)) == blocks
