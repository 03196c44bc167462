"""Image folders: what is a sample, how pictures of all kinds come out, and what is said of those that do not."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from meshrun import Experiment, ImageFolder
from meshrun.data import cache
from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.data.samples import Read
from meshrun.data.sending import unpacked
from meshrun.data.sources import pictures, source
from meshrun.errors import BadSample, RunFailed, UserError
from tests.data.forked import forked


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, size: int = 8) -> torch.Tensor:
    into = torch.zeros(3, size, size, dtype=torch.uint8)
    pictures.decode(data, into)
    return into


def gradient(height: int = 30, width: int = 50) -> Image.Image:
    """Red grows to the right, green downwards, blue is 100."""
    pixels = np.full((height, width, 3), 100, np.uint8)
    pixels[:, :, 0] = np.linspace(0, 250, width)
    pixels[:, :, 1] = np.linspace(0, 250, height)[:, None]
    return Image.fromarray(pixels)


def written(folder: Path, *names: str) -> Path:
    """A folder with a picture of one colour in each of these files, another colour each."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"jpg": "JPEG", "png": "PNG"}.get(path.suffix[1:].lower(), "PNG")
        colour = (number * 10, 200 - number * 10, 30)
        path.write_bytes(encoded(Image.new("RGB", (12, 9), colour), kind, **{"quality": 95} if kind == "JPEG" else {}))
    return folder


def test_pictures_below_a_name_that_is_no_unicode_are_read(tmp_path: Path):
    folder = written(tmp_path / os.fsdecode(b"caf\xe9"), f"{os.fsdecode(bytes([0xFF]))}/a.png")
    assert ImageFolder(folder, 8).batch_of([0])[0].shape == (1, 3, 8, 8)


def test_the_middle_is_cut_out_and_resized():
    found = decoded(encoded(gradient()), 10).float()
    wanted = np.asarray(gradient().resize((10, 10), Image.Resampling.BILINEAR, box=(10, 0, 40, 30))).transpose(2, 0, 1)
    assert np.abs(found.numpy() - wanted).max() <= 8  # at the edges the one looks beyond the box
    assert np.abs(found.numpy() - wanted).mean() < 1


def test_a_picture_of_the_right_size_is_as_it_was():
    image = gradient(8, 8)
    assert (decoded(encoded(image)).numpy() == np.asarray(image).transpose(2, 0, 1)).all()


def test_a_large_jpeg_is_decoded_at_a_reduced_scale(monkeypatch: pytest.MonkeyPatch):
    seen = []
    before = pictures._coloured
    monkeypatch.setattr(pictures, "_coloured", lambda image: before(seen.append(image.size) or image))
    data = encoded(gradient(600, 1000), "JPEG", quality=95)
    small, large = decoded(data, 60), decoded(data, 400)
    assert seen == [(75, 75), (600, 600)]
    smaller = torch.nn.functional.interpolate(large[None].float(), (60, 60), mode="area")[0]
    assert (small.float() - smaller).abs().mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_the_camera_was_held(orientation: int):
    upright = gradient(32, 32)
    back = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright.transpose(back) if back is not None else upright
    found = decoded(encoded(stored, "JPEG", quality=100, subsampling=0, exif=exif), 32)
    assert (found.numpy().astype(int) - np.asarray(upright).transpose(2, 0, 1)).__abs__().max() < 12


def in_mode(mode: str) -> bytes:
    return encoded(gradient(8, 8).convert(mode), "JPEG" if mode == "CMYK" else "PNG")


def in_sixteen_bits() -> bytes:
    values = np.full((8, 8), 200 << 8, np.uint16)
    return encoded(Image.fromarray(values))


def in_palette_with_holes() -> bytes:
    image = gradient(8, 8).convert("P")
    return encoded(image, transparency=bytes(range(256)))


MODES: dict[str, Callable[[], bytes]] = {
    mode: (lambda mode=mode: in_mode(mode)) for mode in ("1", "L", "LA", "RGBA", "P", "CMYK")
}


@pytest.mark.parametrize("mode", MODES)
def test_all_kinds_of_pixels_become_three_colours(mode: str, recwarn: pytest.WarningsRecorder):
    data = MODES[mode]()
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    assert (decoded(data).numpy() == wanted).all()
    assert [str(each.message) for each in recwarn.list] == []


def test_a_palette_with_holes_is_decoded_without_a_warning(recwarn: pytest.WarningsRecorder):
    data = in_palette_with_holes()
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA").convert("RGB")).transpose(2, 0, 1)
    assert (decoded(data).numpy() == wanted).all() and not recwarn.list


def test_sixteen_bits_are_brought_to_eight():
    assert (decoded(in_sixteen_bits()) == 200).all()


def test_why_a_picture_cannot_be_decoded():
    jpeg = encoded(gradient(200, 200), "JPEG", quality=95)
    with pytest.raises(ValueError, match="it is truncated"):
        decoded(jpeg[: len(jpeg) // 2])
    with pytest.raises(ValueError, match="the file is empty"):
        decoded(b"")
    with pytest.raises(ValueError, match="its 40 bytes are no image that Pillow knows"):
        decoded(b"<html>no such page</html>".ljust(40))
    with pytest.raises(ValueError, match="nothing says which of them is white"):
        decoded(encoded(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"))
    png = bytearray(encoded(gradient()))
    png[60:90] = bytes(30)
    with pytest.raises(ValueError, match=r"it is (broken|truncated)"):
        decoded(bytes(png))


def test_a_picture_that_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"too large \(image size \(1500 pixels\)"):
        decoded(encoded(gradient()))


def solid(width: int, height: int, mode: str = "RGB", format: str = "PNG", **how: object) -> bytes:
    return encoded(Image.new(mode, (width, height)), format, **how)


BOMBS = {
    "rgba": lambda: solid(600, 500, "RGBA"),
    "wide": lambda: solid(100_000, 1, "RGBA"),
    "tall": lambda: solid(1, 150_000, "L"),
    "webp": lambda: solid(300, 300, format="WEBP", lossless=True),
    "progressive": lambda: solid(600, 600, format="JPEG", progressive=True, quality=1),
    "tiff": lambda: solid(500, 400, format="TIFF", compression="tiff_deflate"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_would_become_a_picture_beyond_reason_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str):
    data = BOMBS[kind]()
    decoded(data)
    monkeypatch.setattr(source, "AT_ONCE", 1 << 20)
    with pytest.raises(ValueError, match=r"pixels, which take [1-9],[\d,]{7} bytes of memory; that is too much for"):
        decoded(data)


def test_a_large_picture_takes_its_memory_once(monkeypatch: pytest.MonkeyPatch):
    scan = solid(4960, 7016, "1", "TIFF", compression="group4")  # a page at 600 dots an inch, in two kilobytes
    monkeypatch.setattr(pictures, "_BAND", 1 << 18)
    whole, most = pictures._coloured, []
    monkeypatch.setattr(pictures, "_coloured", lambda band: whole(most.append(band.width * band.height) or band))
    assert len(scan) < 3000 and not decoded(scan, 64).any() and max(most) <= 1 << 18 and sum(most) == 4960**2


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16"])
def test_a_picture_in_bands_is_the_picture_as_a_whole(monkeypatch: pytest.MonkeyPatch, mode: str):
    pixels = np.random.default_rng(1).integers(0, 256, (150, 130, 3), dtype=np.uint8)
    image = (
        Image.fromarray(pixels[..., 0].astype(np.uint16) << 8)
        if mode == "I;16"
        else Image.fromarray(pixels).convert(mode)
    )
    data = encoded(image)
    whole = [decoded(data, size) for size in (20, 130, 200)]
    monkeypatch.setattr(pictures, "_BAND", 1000)
    assert all(torch.equal(decoded(data, each.shape[-1]), each) for each in whole)


def test_samples_are_numbered_by_class_and_name(tmp_path: Path):
    names = ["dog/b.jpg", "cat/2.png", "cat/10.PNG", "cat/deep/1.png", "dog/a.jpg", "cat/.hidden.png", "cat/notes.txt"]
    written(tmp_path, *(each for each in names if not each.endswith("txt")))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("no class")
    data = ImageFolder(tmp_path, 6)
    assert data.classes == ["cat", "dog"] and data.ignored == 1
    assert list(data.files) == ["cat/10.PNG", "cat/2.png", "cat/deep/1.png", "dog/a.jpg", "dog/b.jpg"]
    assert data.files[-1] == "dog/b.jpg" and data.files[1:3] == ["cat/2.png", "cat/deep/1.png"]
    images, classes = data.batch_of([4, 0, 4])
    assert images.shape == (3, 3, 6, 6) and classes.tolist() == [1, 0, 1] and classes.dtype == torch.int64
    assert images[1, :, 3, 3].tolist() == [20, 180, 30] and torch.equal(images[0], images[2])
    image, label = data[1]
    assert image[:, 0, 0].tolist() == [10, 190, 30] and label == 0
    for number in (5, -1):
        with pytest.raises(IndexError, match=f"no sample {number}: they are numbered from 0 to 4"):
            data[number]
    assert len(data.__getitems__([1, 2])) == 2


def test_the_fingerprint_is_of_names_and_sizes(tmp_path: Path):
    first = ImageFolder(written(tmp_path / "one", "a/1.png", "b/1.png"), 6)
    same = ImageFolder(written(tmp_path / "two", "a/1.png", "b/1.png"), 6)
    other = ImageFolder(written(tmp_path / "three", "a/1.png", "b/2.png"), 6)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    (tmp_path / "two" / "b" / "1.png").write_bytes(encoded(gradient()) + b"more")
    assert ImageFolder(tmp_path / "two", 6).fingerprint != first.fingerprint


def test_a_folder_that_has_not_all_classes_is_numbered_like_one_that_has(tmp_path: Path):
    train = ImageFolder(written(tmp_path / "train", "a/1.png", "b/1.png", "c/1.png"), 6)
    val = written(tmp_path / "val", "b/1.png", "b/2.png")
    given = {"model": print, "loss": print, "optimizer": print, "batch": 1, "steps": 1}
    with pytest.raises(UserError, match=r"train has the classes a, b, c but evals\['val'\] has b, so that"):
        Experiment(train=train, evals={"val": ImageFolder(val, 6)}, **given)
    like = ImageFolder(val, 6, classes=train.classes)
    assert like.batch_of([0, 1])[1].tolist() == [1, 1] and like.fingerprint != ImageFolder(val, 6).fingerprint
    Experiment(train=train, evals={"val": like}, **given)
    with pytest.raises(UserError, match=r"val has the class 'b', which is none of a, c; remove it, or name it too"):
        ImageFolder(val, 6, classes=["a", "c"])


def test_links_that_lead_back_end(tmp_path: Path):
    written(tmp_path / "real", "a/1.png")
    (tmp_path / "set" / "b").mkdir(parents=True)
    (tmp_path / "set" / "a").symlink_to(tmp_path / "real" / "a")
    (tmp_path / "real" / "a" / "again").symlink_to(tmp_path / "real" / "a")
    written(tmp_path / "set", "b/1.png")
    assert list(ImageFolder(tmp_path / "set", 4).files) == ["a/1.png", "b/1.png"]


def test_folders_that_are_no_dataset_are_refused_in_a_sentence(tmp_path: Path):
    def refusal(size: int = 8) -> str:
        with pytest.raises(UserError) as refused:
            ImageFolder(tmp_path / "set", size)
        return str(refused.value)

    assert refusal().startswith(f"image folder {tmp_path / 'set'} cannot be read: No such file")
    written(tmp_path / "set", "x.png")
    assert "has 1 images but no class folder; it must hold a folder for each class" in refusal()
    (tmp_path / "set" / "cat").mkdir()
    assert refusal() == f"class folder {tmp_path / 'set' / 'cat'} is empty; put images into it, or remove it"
    (tmp_path / "set" / "cat" / "list.txt").touch()
    assert "has no image among its 1 files, such as list.txt; images end in bmp" in refusal()
    assert "is 0; it must be a number of pixels above 0" in refusal(0)


def test_one_class_is_noted(tmp_path: Path):
    told: list[str] = []
    cache.use(None, None, told.append)
    try:
        ImageFolder(written(tmp_path, "only/1.png"), 4)
    finally:
        cache.use(None, None)
    assert told == [f"{tmp_path} holds one class only (only): there is nothing to tell apart"]


@pytest.mark.parametrize("keep", [True, False])
def test_a_bad_image_is_named_with_its_file_and_number(tmp_path: Path, keep: bool):
    written(tmp_path, "a/1.png", "b/1.png", "b/2.png")
    (tmp_path / "b" / "1.png").write_bytes(b"nonsense")
    (tmp_path / "b" / "3.png").symlink_to("nowhere")
    data = ImageFolder(tmp_path, 8, keep=keep)
    for _ in range(2):
        with pytest.raises(BadSample) as bad:
            data.batch_of([2, 1, 0])
        assert str(bad.value) == (
            f"sample 1 of {tmp_path} ({tmp_path}/b/1.png) cannot be read: its 8 bytes are no image that Pillow knows; "
            f"repair or remove it, or go on without such samples (--skip-bad-samples)"
        )
    with pytest.raises(BadSample, match=r"sample 3 .*b/3.png\) cannot be read: No such file"):
        data[3]
    assert data[2][1] == 1


def test_a_machine_that_has_no_files_left_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = ImageFolder(written(tmp_path, "a/1.png", "b/1.png"), 8, keep=False)
    data[0]

    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fails)
    for number in (0, 1):
        with pytest.raises(RunFailed, match=r"1\.png cannot be read on .*: Too many open files; try again"):
            data[number]


@pytest.mark.parametrize("keep", [False, True], ids=["read again", "decoded once"])
def test_a_file_that_changes_or_goes_after_it_was_read_fails_the_run(tmp_path: Path, keep: bool):
    data = ImageFolder(written(tmp_path, "a/1.png", "b/1.png", "b/2.png"), 8, keep=keep)
    forked(1, lambda _number: data.batch_of([0, 1])[1].tolist())  # what another reader has seen counts too
    (tmp_path / "a" / "1.png").write_bytes(encoded(gradient()))
    with pytest.raises(RunFailed, match=r"a/1.png has changed while it is being trained on \(it had \d+ bytes and has"):
        data[0]
    os.utime(tmp_path / "b" / "1.png", ns=(1, 1))
    with pytest.raises(RunFailed, match="written anew"):
        data[1]
    (tmp_path / "b" / "2.png").unlink()
    with pytest.raises(RunFailed, match=r"b/2.png has changed .*No such file"):
        data[2]


def test_decoded_images_are_kept_for_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [f"{name}/{number}.png" for name in "ab" for number in range(8)]
    data = ImageFolder(written(tmp_path, *names), 8)
    fresh = ImageFolder(tmp_path, 8, keep=False).batch_of(list(range(16)))[0]
    forked(2, lambda number: data.batch_of(list(range(16))[number::2])[0].sum().item())

    def never(_data: bytes, _into: torch.Tensor) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(pictures, "decode", never)
    assert torch.equal(data.batch_of(list(range(16)))[0], fresh)
    copy = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 4000 and torch.equal(copy.batch_of([3, 1])[0], fresh[[3, 1]])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_beside_a_gpu_readers_end_when_all_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Read, "pin_memory", lambda read: replace(read, batch=unpacked(read.batch)))
    names = [f"{name}/{number}.png" for name in "ab" for number in range(6)]
    data = ImageFolder(written(tmp_path, *names), 8)
    order = Order(12, 3, seed=1)
    loader = Loader(data, order, 0, 1, Reading(workers=2, pin=True))
    expected, readers = ImageFolder(tmp_path, 8, keep=False), []
    with closing(loader.steps(0, 12)) as steps:
        for step in steps:
            images, labels = step.batches[0]
            assert step.pieces == [order.batch_ids(step.step).tolist()]
            assert torch.equal(images, expected.batch_of(step.pieces[0])[0])
            assert torch.equal(labels, expected.batch_of(step.pieces[0])[1])
            readers.append(len(multiprocessing.active_children()))
    assert readers[0] == 2 and readers[-1] == 0 and data.decoded


def test_a_large_set_is_not_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "a/1.png", "b/1.png")
    monkeypatch.setattr("meshrun.data.sources.kept.SMALL", 100)
    assert not ImageFolder(tmp_path, 8)._kept.on
    assert ImageFolder(tmp_path, 8, keep=True)._kept.on


def test_a_pipe_or_a_device_that_is_called_like_a_picture_is_a_bad_sample(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "a.png")
    (tmp_path / "cat" / "b.png").symlink_to("/dev/zero")
    images = ImageFolder(tmp_path, 8)
    for number in range(2):
        with pytest.raises(BadSample, match=r"cannot be read: it is no plain file"):
            images[number]


def test_only_usual_kinds_of_pictures_are_decoded():
    """Pillow would run a program for PostScript, whatever the file is called."""
    script = encoded(gradient(), "EPS")
    with pytest.raises(ValueError, match="are no image that Pillow knows"):
        decoded(script)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_usual_kinds_of_pictures_are_decoded(kind: str):
    assert decoded(encoded(gradient(), kind)).any()


def test_a_socket_that_is_called_an_image_is_a_bad_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "a/1.png", "b/1.png")
    monkeypatch.chdir(tmp_path / "b")
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind("2.png")
    with pytest.raises(BadSample, match="it is no plain file"):
        ImageFolder(tmp_path, 8)[2]


def test_a_size_beyond_reason_is_refused(tmp_path: Path):
    written(tmp_path, "a/1.png", "b/1.png")
    with pytest.raises(UserError, match="above 0 and at most 16,384"):
        ImageFolder(tmp_path, 10**9)
