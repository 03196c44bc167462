"""Files that torch loads as a state dict: tensors of every type, aligned, tied names on the same bytes."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import torch

from meshrun.state.archive import Archive
from meshrun.state.shards import Spec, bytes_of

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "counts": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "empty": torch.zeros(0, 3),
    "hollow": torch.zeros(2, 0, 3),
}


def written(path: Path) -> Path:
    with Archive(path) as archive:
        specs = {name: Spec(name, each.dtype, tuple(each.shape)) for name, each in TENSORS.items()}
        archive.describe(specs, tied={"head": "weight"})
        for name, each in TENSORS.items():
            archive.add(name, [bytes_of(each)])
    return path


def test_torch_loads_what_was_written(tmp_path: Path):
    found = torch.load(written(tmp_path / "a.pt"), weights_only=True)
    assert list(found) == [*TENSORS, "head"]
    for name, each in TENSORS.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each)
        assert found[name].stride() == each.stride()
    assert found["head"].data_ptr() == found["weight"].data_ptr()


def test_the_bytes_of_each_tensor_are_aligned_for_mapping(tmp_path: Path):
    path = written(tmp_path / "a.pt")
    with zipfile.ZipFile(path) as file, path.open("rb") as opened:
        for info in file.infolist():
            opened.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", opened.read(4))
            assert (info.header_offset + 30 + name + extra) % 64 == 0, info.filename
