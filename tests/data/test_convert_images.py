"""Folders of pictures to HDF5: what the folder itself gives, the same bytes however made, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from meshrun import Hdf5, ImageFolder
from meshrun.cli.main import main
from meshrun.data.convert import to_hdf5 as module
from meshrun.data.convert.result import Converted
from meshrun.data.convert.to_hdf5 import Pictures, to_hdf5
from meshrun.data.convert.work import Crew
from meshrun.data.download import Quiet
from meshrun.errors import UserError


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_PART", 4000)
    monkeypatch.setattr(module, "_CHUNK", 6000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/ and val/ of two classes, one of which is not in val/."""
    drawn = np.random.default_rng(0)
    for split, classes in {"train": {"cat": 9, "dög": 7}, "val": {"dög": 4}}.items():
        for name, count in classes.items():
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 256, (20 + number, 30, 3), np.uint8)
                ending = "png" if number % 3 else "jpg"
                Image.fromarray(pixels).save(tmp_path / "pets" / split / name / f"{number}.{ending}")
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("no picture")
    return tmp_path / "pets"


def convert(source: Path, dest: Path, workers: int = 1, **options: Any) -> Converted:
    return to_hdf5(source, dest, Pictures(**options), Crew(workers), Quiet())


FORMS = [{"form": "encoded"}, {"form": "arrays", "size": 16}, {"form": "arrays", "size": 16, "compress": "gzip"}]


@pytest.mark.parametrize("options", FORMS, ids=lambda each: "-".join(map(str, each.values())))
def test_the_file_holds_what_the_folder_holds(
    folder: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    dest, flushed = tmp_path / "pets.h5", list[tuple[int, bool]]()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.fstat(file).st_ino, dest.exists())))
    made = convert(folder, dest, **options)
    assert (dest.stat().st_ino, False) in flushed, "it is on the disk before it has its name"
    assert (made.samples, made.kind, made.bytes) == (20, "images", dest.stat().st_size)
    size = 16 if options["form"] == "encoded" else None
    train, ours = ImageFolder(folder / "train", size=16), Hdf5(dest, "train", size=size)
    ids = list(range(len(train)))
    assert len(ours) == 16 and ours.classes == train.classes == ["cat", "dög"]
    for theirs, mine in zip(train.batch_of(ids), ours.batch_of(ids), strict=True):
        assert torch.equal(theirs, mine)
    assert Hdf5(dest, "val", size=size).batch_of([0, 3])[1].tolist() == [1, 1]  # numbered as in train
    with h5py.File(dest, locking=False) as file:
        assert [each.decode() for each in file["train/names"]] == list(train.files)
        if options["form"] == "arrays":
            assert np.array_equal(file["train/images"][:], train.batch_of(ids)[0])
            chunk = file["train/images"].id.get_chunk_info(2)
            assert options.get("compress") or chunk.size == 7 * 3 * 16 * 16  # the last one is whole too
        assert file.attrs["format"] == file["val"].attrs["format"] == "meshrun-images-1"


@pytest.mark.parametrize("options", FORMS, ids=lambda each: "-".join(map(str, each.values())))
def test_any_number_of_processes_gives_the_same_bytes(folder: Path, tmp_path: Path, options: dict[str, Any]):
    made = [convert(folder, tmp_path / f"{workers}.h5", workers, **options) for workers in (1, 2)]
    assert made[0].sha256 == made[1].sha256 and not list(tmp_path.glob(".*"))


def test_after_a_failure_it_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = convert(folder, tmp_path / "whole.h5")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_joined", killed)
        convert(folder, tmp_path / "again.h5")
    made = convert(folder, tmp_path / "again.h5", workers=2)
    assert made.resumed > 3 and made.sha256 == expected.sha256


def test_ctrl_c_says_how_it_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_joined", pressed)
    with pytest.raises(SystemExit) as ended:
        main(["convert-data", str(folder), str(tmp_path / "pets.h5"), "--workers", "1", "--json"])
    assert ended.value.code == 130
    said = capsys.readouterr()
    sentence = "stopped by CTRL-C; the same command goes on where it was"
    assert f"meshrun: {sentence}\n" in said.err and json.loads(said.out) == {"error": sentence, "status": 130}


def test_classes_at_the_top_are_in_the_root(folder: Path, tmp_path: Path):
    convert(folder / "train", tmp_path / "pets.hdf5", form="arrays", size=8)
    data = Hdf5(tmp_path / "pets.hdf5")
    assert len(data) == 16 and data[15][1] == 1 and data[0][0].shape == (3, 8, 8)


def test_a_broken_picture_ends_it_or_is_left_out(folder: Path, tmp_path: Path):
    whole = folder / "train" / "cat" / "0.jpg"
    whole.write_bytes(whole.read_bytes()[:-200])
    (folder / "train" / "dög" / "9.png").write_bytes(b"")
    for options in FORMS[:2]:
        with pytest.raises(UserError, match=r"cat/0\.jpg cannot be used: it is truncated.*--skip-bad-samples"):
            convert(folder, tmp_path / "bad.h5", workers=2, **options)
        made = convert(folder, tmp_path / f"{options['form']}.h5", skip_bad=True, **options)
        assert (made.samples, made.bad) == (19, 2) and len(made.why) == 2
        with h5py.File(made.destination) as file:
            assert file["train/names"][0] == b"cat/1.png" and len(file["train/labels"]) == 15


def test_what_cannot_be_converted_is_a_sentence(folder: Path, tmp_path: Path):
    dest = tmp_path / "pets.h5"
    for options, said in [
        ({"form": "arrays"}, "--size 224$"),
        ({"size": 8}, "--images arrays"),
        ({"compress": "gzip"}, "leave --compress out"),
    ]:
        with pytest.raises(UserError, match=said):
            convert(folder, dest, **options)
    for each in (folder / "val" / "dög").iterdir():
        each.write_bytes(b"broken")
    with pytest.raises(UserError, match=r"val has no picture that can be read: .*0\.jpg"):
        convert(folder, dest, skip_bad=True)
    (folder / "val" / "bird").mkdir()
    with pytest.raises(UserError, match=r"class folder .*val/bird has no pictures"):
        convert(folder, dest)
    with pytest.raises(UserError, match="has no folders of classes"):
        convert(folder / "train" / "cat", dest)
    with pytest.raises(UserError, match="No such file"):
        convert(folder / "none", dest)
    assert not list(tmp_path.glob(".*")) and not dest.exists()
