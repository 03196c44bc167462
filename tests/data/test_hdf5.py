"""HDF5: rows are what h5py gives for the same numbers, however they are stored, and errors are sentences."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshrun import Hdf5
from meshrun.data import cache
from meshrun.data.sources import chunks, hdf5, rows, slots, source
from meshrun.errors import BadSample, RunFailed, UserError
from tests.data.forked import forked

COUNT = 101
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 3, 6, 5), dtype=np.uint8)
LABELS = np.arange(COUNT) % 7
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (8, 3, 6, 5)},
    "rows": {"chunks": (1, 3, 6, 5)},
    "split": {"chunks": (8, 3, 3, 5)},
    "gzip": {"chunks": (8, 3, 6, 5), "compression": "gzip"},
    "shuffled": {"chunks": (8, 3, 6, 5), "compression": "gzip", "shuffle": True, "dtype": ">f8"},
    "packed parts": {"chunks": (8, 2, 6, 5), "compression": "gzip", "shuffle": True, "dtype": "f4"},
    "lzf": {"chunks": (7, 3, 6, 5), "compression": "lzf", "shuffle": True},
    "checked": {"chunks": (16, 3, 6, 5), "fletcher32": True},
    "half": {"dtype": "f2"},
    "double": {"dtype": ">f8"},
    "words": {"dtype": "u2", "chunks": (9, 3, 6, 5)},
    "long words": {"dtype": "u4"},
    "virtual": {},
    "external": {},
}
DTYPES = {
    "half": torch.float16,
    "double": torch.float32,
    "shuffled": torch.float32,
    "packed parts": torch.float32,
    "words": torch.int32,
    "long words": torch.int64,
}
FROM_THE_FILE = {"contiguous", "chunked", "rows", "half", "double", "words", "long words"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hdf5") / "all.h5"
    with h5py.File(path, "w") as file:
        file.attrs["classes"] = [f"c{number}" for number in range(7)]
        for kind, options in KINDS.items():
            group = file.create_group(kind)
            group["labels"] = LABELS
            if kind == "virtual":
                layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
                layout[:] = h5py.VirtualSource(file["gzip/images"])
                group.create_virtual_dataset("images", layout)
            elif kind == "external":
                beside = [(str(path.with_suffix(".raw")), 0, IMAGES.nbytes)]
                group.create_dataset("images", IMAGES.shape, np.uint8, external=beside)[...] = IMAGES
            else:
                group.create_dataset("images", data=IMAGES, **options)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_h5py_gives(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "is_small", lambda _size: False)  # few slots: chunks push each other out
    monkeypatch.setattr(slots, "LEAST", 1)
    monkeypatch.setattr(slots, "CHUNKS", 8)
    data = Hdf5(path, kind)
    assert len(data) == COUNT and data.classes[6] == "c6" and data.chunk > 100
    assert (data._rows._slots is None) == (kind in FROM_THE_FILE)

    @settings(max_examples=15)
    @given(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=60))
    def same(ids: list[int]) -> None:
        images, labels = data.batch_of(ids)
        assert (images.numpy() == IMAGES[ids]).all() and (labels.numpy() == LABELS[ids]).all()

    same()
    assert (data.batch_of(list(range(COUNT)))[0].numpy() == IMAGES).all()
    assert (pickle.loads(pickle.dumps(data))[100][0].numpy() == IMAGES[100]).all()
    assert data[0][0].dtype == DTYPES.get(kind, torch.uint8) and data[0][1].dtype == torch.int64
    with pytest.raises(IndexError):
        data[COUNT]


def test_a_chunk_is_unpacked_once_for_all_readers(path: Path, monkeypatch: pytest.MonkeyPatch):
    data = Hdf5(path, "gzip")
    counted = cache.shared(f"loads {path}", 64)
    load = data._rows._load

    def counting(unit: int, into: np.ndarray) -> int:
        counted.bytes[os.getpid() % 64] += 1  # a place for each process: adding is not atomic
        return load(unit, into)

    monkeypatch.setattr(data._rows._slots, "load", counting)
    ids = np.random.default_rng(1).permutation(COUNT).tolist()
    found = forked(2, lambda number: (data.batch_of(ids[number::2])[0].numpy() == IMAGES[ids[number::2]]).all())
    assert found == [True, True]
    assert 13 <= counted.bytes.sum() <= 26
    before = counted.bytes.sum()
    assert (data.batch_of(ids)[0].numpy() == IMAGES[ids]).all() and counted.bytes.sum() == before


def test_readers_who_push_out_each_others_chunks_read_the_right_rows(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "is_small", lambda _size: False)
    monkeypatch.setattr(slots, "LEAST", 1)
    monkeypatch.setattr(slots, "CHUNKS", 2)
    monkeypatch.setattr(slots, "WAYS", 2)
    data = Hdf5(path, "gzip")
    assert (data._rows._slots.ways, data._rows._slots.sets) == (2, 1)

    def read(number: int) -> bool:
        draw = np.random.default_rng(number)
        batches = [draw.integers(0, COUNT, 8) for _ in range(60)]
        return all((data.batch_of(ids.tolist())[0].numpy() == IMAGES[ids]).all() for ids in batches)

    assert forked(3, read) == [True] * 3


def test_targets_may_be_numbers_or_arrays_and_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fields, energy = np.random.default_rng(0).random((20, 4)), np.random.default_rng(1).random((20, 2))
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["fields"], file["energy"] = fields, energy
    for most in (1 << 20, 0):
        monkeypatch.setattr("meshrun.data.sources.hdf5.IN_MEMORY", most)
        data = Hdf5(tmp_path / "s.h5", inputs="fields", targets="energy")
        inputs, targets = data.batch_of([3, 19])
        assert inputs.dtype == targets.dtype == torch.float32 and data.classes == []
        assert np.allclose(inputs, fields[[3, 19]]) and np.allclose(targets, energy[[3, 19]])


def test_the_fingerprint_is_that_of_the_data(path: Path, tmp_path: Path):
    copy = tmp_path / "copy.h5"
    copy.write_bytes(path.read_bytes())
    first = Hdf5(path, "contiguous").fingerprint
    assert first == Hdf5(copy, "contiguous").fingerprint != Hdf5(path, "chunked").fingerprint
    with h5py.File(copy, "a") as file:
        file["contiguous/images"][...] = 0
    assert Hdf5(copy, "contiguous").fingerprint != first


def test_the_copy_on_the_node_is_read(path: Path, tmp_path: Path):
    cache.use(tmp_path / "node", None)
    try:
        data = Hdf5(path, "contiguous")
    finally:
        cache.use(None, None)
    assert data._file.path.parent == tmp_path / "node" and (data[4][0].numpy() == IMAGES[4]).all()


@pytest.fixture(params=[{}, {"chunks": (64,)}, {"chunks": (50,), "compression": "gzip"}], ids=["whole", "cut", "gzip"])
def encoded(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    files = []
    for number in range(5):
        file = io.BytesIO()
        Image.new("RGB", (20, 10), (number * 40, 0, 9)).save(file, "PNG")
        files.append(file.getvalue())
    files[3] = b"broken"
    with h5py.File(tmp_path / "e.h5", "w") as file:
        group = file.create_group("train")
        group.create_dataset("bytes", data=np.frombuffer(b"".join(files), np.uint8), **request.param)
        group["offsets"] = np.cumsum([0, *map(len, files)])
        group["labels"] = np.arange(5) % 2
        group["names"] = [f"cat/{number}.png" for number in range(5)]
        group.attrs["classes"] = ["cat", "dog"]
    return tmp_path / "e.h5"


def test_encoded_images_are_decoded_and_bad_ones_named(encoded: Path):
    data = Hdf5(encoded, "train", size=4)
    images, labels = data.batch_of([4, 0, 1])
    assert images[:, 0, 2, 2].tolist() == [160, 0, 40] and labels.tolist() == [0, 0, 1]
    assert data.classes == ["cat", "dog"] and data.chunk > 1000
    with pytest.raises(BadSample) as bad:
        data.batch_of([2, 3])
    assert str(bad.value) == (
        f"sample 3 of train ({encoded}: cat/3.png) cannot be read: its 6 bytes are no image that Pillow knows; "
        f"repair or remove it, or go on without such samples (--skip-bad-samples)"
    )
    with pytest.raises(UserError, match=r"/train/bytes holds encoded images, which need a size .*size=224"):
        Hdf5(encoded, "train")


def test_offsets_that_fall_or_lie_outside_are_refused(encoded: Path):
    with h5py.File(encoded) as file:
        right = file["train/offsets"][()]
    for place, value in ((2, right[1] - 1), (0, -1), (5, right[5] + 1)):
        with h5py.File(encoded, "r+") as file:
            file["train/offsets"][()] = np.where(np.arange(6) == place, value, right)
        with pytest.raises(UserError, match=r"/train/offsets does not fit .*/train/bytes: it must rise from 0 to"):
            Hdf5(encoded, "train", size=4)


def test_a_chunk_that_cannot_be_unpacked_is_a_bad_sample(path: Path, tmp_path: Path):
    broken = tmp_path / "broken.h5"
    broken.write_bytes(path.read_bytes())
    with h5py.File(broken) as file:
        where = file["gzip/images"].id.get_chunk_info(2).byte_offset
    with broken.open("r+b") as raw:
        raw.seek(where)
        raw.write(bytes(40))
    data = Hdf5(broken, "gzip")
    with pytest.raises(
        BadSample, match=r"sample 17 of gzip \(.*broken.h5\) cannot be read: /gzip/images cannot be read"
    ):
        data.batch_of([1, 17, 30])
    assert (data[30][0].numpy() == IMAGES[30]).all()


def refusal(*arguments: Any, **named: Any) -> str:
    with pytest.raises(UserError) as refused:
        Hdf5(*arguments, **named)
    return str(refused.value)


def test_what_is_no_dataset_is_refused_in_a_sentence(path: Path, tmp_path: Path):
    other = tmp_path / "o.h5"
    assert refusal(other) == f"HDF5 file {other} does not exist"
    assert refusal(tmp_path) == f"HDF5 file {tmp_path} is a folder"
    other.write_bytes(b"no HDF5" * 100)
    assert refusal(other).startswith(f"{other} is not an HDF5 file")
    whole = path.read_bytes()
    other.write_bytes(whole[:9000])
    assert refusal(other) == f"HDF5 file {other} is truncated: 9000 of {len(whole)} bytes are there; copy it anew"
    assert refusal(path, "train").startswith(f"HDF5 file {path} has no group 'train'; it has checked, chunked,")
    assert "has no dataset 'pixels'; it has images, labels (inputs=…" in refusal(path, "gzip", inputs="pixels")
    assert "has no dataset 'labels'; it has no datasets, and the groups checked," in refusal(path)
    assert "size is 8 but" in refusal(path, "gzip", size=8) and "arrays of 3 x 6 x 5;" in refusal(path, "gzip", size=8)
    assert "targets of Hdf5(" in refusal(path, "gzip", targets=None) and "is None; it must be" in refusal(
        path, targets=None
    )


@pytest.mark.parametrize(("size", "offset", "right"), [(32, 512, True), (31, 512, False), (32, 2000, False)])
def test_a_chunk_that_is_shorter_than_a_chunk_or_outside_of_its_file_is_refused(size: int, offset: int, right: bool):
    """The library would fill it up with memory that nobody wrote."""
    about = SimpleNamespace(chunk_offset=(0,), byte_offset=offset, size=size)
    dataset = SimpleNamespace(is_virtual=False, external=None, chunks=(8,), shape=(8,), dtype=np.dtype("f4"), name="/x")
    dataset.file = SimpleNamespace(id=SimpleNamespace(get_filesize=lambda: 2000))
    plain = SimpleNamespace(get_nfilters=lambda: 0)
    dataset.id = SimpleNamespace(get_create_plist=lambda: plain, chunk_iter=lambda look: look(about))
    if right:
        assert chunks.places(dataset).tolist() == [512]
    else:
        with pytest.raises(ValueError, match=f"/x has a chunk of {size} bytes at"):
            chunks.places(dataset)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: np.array([b"a", b"b"]), "is an array of strings or objects; it must be an array of numbers"),
        (lambda: np.zeros(2, [("x", "f4"), ("y", "f4")]), "is an array of several fields"),
        (lambda: np.float32(3), "is a single value"),
        (lambda: np.zeros(3), "has 3 inputs but 2 targets (labels); there must be one for each"),
        (lambda: np.zeros(1), "has 1 inputs but 2 targets (labels); there must be one for each"),
        (lambda: np.zeros((0, 4)), "is empty (shape (0, 4))"),
    ],
)
def test_datasets_of_a_wrong_kind_are_refused(tmp_path: Path, make: Callable[[], Any], says: str):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["images"], file["labels"] = make(), np.arange(2)
    assert says in refusal(tmp_path / "w.h5")


def test_bytes_that_make_no_whole_number_stay_behind_those_that_were_shuffled():
    """As where what is shuffled was packed before."""
    assert chunks._without_shuffle(b"aceg" + b"bdfh" + b"x", (2,)) == b"abcdefghx"
    assert chunks._without_shuffle(b"abc", (4,)) == b"abc"


@pytest.mark.parametrize(
    ("skipped", "stored", "why"),
    [
        (0, zlib.compress(b"x" * 9), "unpacks to 9 bytes instead of 720"),
        (0, zlib.compress(b"x" * 800), "unpacks to other than 720 bytes"),
        (0, zlib.compress(b"x" * 720)[:-1], "unpacks to other than 720 bytes"),
        (1, b"x" * 719, "unpacks to 719 bytes instead of 720"),
        (1, b"x" * 721, "unpacks to 721 bytes instead of 720"),
    ],
    ids=["short", "long", "cut off", "not packed, short", "not packed, long"],
)
def test_a_packed_chunk_that_is_no_whole_chunk_is_refused(tmp_path: Path, skipped: int, stored: bytes, why: str):
    """HDF5's own library returns memory that nobody wrote for what is missing."""
    with h5py.File(tmp_path / "short.h5", "w") as file:
        images = file.create_dataset("images", data=IMAGES, chunks=(8, 3, 6, 5), compression="gzip")
        images.id.write_direct_chunk((16, 0, 0, 0), stored, skipped)
        file["labels"] = LABELS
    data = Hdf5(tmp_path / "short.h5")
    np.testing.assert_array_equal(data.batch_of([15, 24])[0], IMAGES[[15, 24]])
    with pytest.raises(BadSample, match=rf"sample 17 .* \(a chunk {why}\)"):
        data.batch_of([17])


@pytest.mark.parametrize(
    ("options", "right", "wrong", "why"),
    [
        ({}, (IMAGES.nbytes,), (192,), "/images has 192 bytes instead of 9,090"),
        ({"chunks": (8, 3, 6, 5)}, (16, 0, 0, 0), (16, 0, 0, 5), r"a chunk of 720 bytes at \(16, 0, 0, 5\)"),
        ({"chunks": (8, 3, 6, 5)}, (16, 0, 0, 0), (8, 0, 0, 0), "/images has a chunk twice"),
        ({"chunks": (8, 3, 6, 5)}, (16, 0, 0, 0), (800, 0, 0, 0), "a chunk of 720 bytes at"),
    ],
    ids=["too few bytes", "outside of a row", "twice", "outside of all rows"],
)
def test_an_index_of_places_that_cannot_be_right_is_refused(
    tmp_path: Path, options: dict[str, Any], right: tuple[int, ...], wrong: tuple[int, ...], why: str
):
    """HDF5's own library believes it, and returns memory that nobody wrote for some of the rows."""
    path = tmp_path / "index.h5"
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", data=IMAGES, **options)
        file["labels"] = LABELS
        # An entry for a chunk begins with its size and with the filters that were left out.
        head = struct.pack("<II", 720, 0) if options else struct.pack("<Q", images.id.get_offset())
    before, after = (head + struct.pack(f"<{len(each)}Q", *each) for each in (right, wrong))
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    with pytest.raises(UserError, match=f"is damaged: .*{why}"):
        Hdf5(path)


def test_labels_whose_packed_chunk_is_too_short_are_refused(tmp_path: Path):
    with h5py.File(tmp_path / "short.h5", "w") as file:
        file["images"] = IMAGES
        labels = file.create_dataset("labels", data=LABELS, chunks=(50,), compression="gzip")
        labels.id.write_direct_chunk((50,), zlib.compress(LABELS[:49].tobytes()))
    with pytest.raises(UserError, match="is damaged: a chunk unpacks to 392 bytes instead of 400"):
        Hdf5(tmp_path / "short.h5")


def test_chunks_that_were_never_written_or_that_no_filter_packed_are_read(tmp_path: Path):
    with h5py.File(tmp_path / "sparse.h5", "w") as file:
        images = file.create_dataset("images", IMAGES.shape, "u1", chunks=(8, 3, 6, 5), compression="gzip", fillvalue=7)
        images.id.write_direct_chunk((16, 0, 0, 0), IMAGES[16:24].tobytes(), 1)
        file["labels"] = LABELS
    read = Hdf5(tmp_path / "sparse.h5").batch_of([15, 16])[0]
    np.testing.assert_array_equal(read, np.stack([np.full_like(IMAGES[0], 7), IMAGES[16]]))


@pytest.mark.parametrize("kind", ["contiguous", "gzip"])
@pytest.mark.parametrize("change", ["truncate", "rewrite", "replace", "remove"])
def test_a_file_that_changes_under_the_run_fails_it(
    path: Path, tmp_path: Path, kind: str, change: str, monkeypatch: pytest.MonkeyPatch
):
    mine = tmp_path / "mine.h5"
    mine.write_bytes(path.read_bytes())
    data = Hdf5(mine, kind)
    data.batch_of([1, 2])
    monkeypatch.setattr("meshrun.data.sources.source.LOOK_AGAIN", 0.0)
    if change == "truncate":
        os.truncate(mine, 5000)
    elif change == "rewrite":
        with mine.open("r+b") as file:
            file.write(b"x")
        os.utime(mine, ns=(5, 5))
    elif change == "replace":
        (tmp_path / "new").write_bytes(b"shorter")
        (tmp_path / "new").replace(mine)
    else:
        mine.unlink()
    with pytest.raises(RunFailed, match=r"mine.h5 has changed while it is being trained on \("):
        data.batch_of(list(range(COUNT)))


def test_a_file_cut_off_between_looking_and_reading_fails_the_run(path: Path, tmp_path: Path):
    """Rows are not mapped: reading beyond the end is a sentence, not a signal."""
    mine = tmp_path / "mine.h5"
    mine.write_bytes(path.read_bytes())
    data = Hdf5(mine, "contiguous")
    os.truncate(mine, 3000)
    data._file.watched.check = lambda _file: None  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"mine.h5 has changed"):
        data.batch_of([COUNT - 1])


@pytest.mark.parametrize("wrong", [0, -1], ids=["first", "last"])
def test_rows_that_are_not_where_the_library_says_are_read_through_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
):
    before = rows._starts

    def moved(*arguments: Any) -> Any:
        found = before(*arguments)
        found[wrong] += 1
        return found

    monkeypatch.setattr(rows, "NEIGHBOURS", 1)
    monkeypatch.setattr(rows, "_starts", moved)
    data = Hdf5(path, "contiguous")
    assert data._rows._slots is not None and (data[50][0].numpy() == IMAGES[50]).all()


def link_to_itself(file: h5py.File) -> None:
    file["images"], file["labels"] = h5py.SoftLink("/images"), np.arange(3)


def billion_rows(file: h5py.File) -> None:
    file.create_dataset("images", shape=(10**9, 1000, 1000), dtype="f4", chunks=(1, 100, 100))
    file.create_dataset("labels", shape=(10**9,), dtype="i8", chunks=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [(link_to_itself, r"some\.h5.*(damaged|has no dataset)"), (billion_rows, r"some\.h5.* cannot hold; it is damaged")],
)
def test_metadata_that_cannot_be_are_a_sentence_at_once(tmp_path: Path, make: Callable[[Any], None], says: str):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        make(file)
    with pytest.raises(UserError, match=says):
        Hdf5(tmp_path / "some.h5")


def test_metadata_on_which_the_library_loops_are_a_sentence(tmp_path: Path):
    damaged = Path(__file__).parents[1] / "fuzz" / "corpus" / "hdf5" / "heap-without-end"
    (tmp_path / "some.h5").write_bytes(damaged.read_bytes())
    with pytest.raises(UserError, match=r"some\.h5 is damaged: the HDF5 library has no end with"):
        Hdf5(tmp_path / "some.h5")


def test_names_of_classes_that_are_not_utf8_are_shown_as_they_can_be(tmp_path: Path):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((2, 3)), np.arange(2)
        file.attrs["classes"] = np.array([b"\xff\xfe", b"cat"])
    assert Hdf5(tmp_path / "some.h5").classes == ["\\xff\\xfe", "cat"]


@pytest.mark.parametrize("kind", ["contiguous", "chunked", "gzip"])
def test_neighbouring_rows_are_read_across_chunks_wherever_these_lie(kind: str, tmp_path: Path):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        made = file.create_dataset("images", IMAGES.shape, np.uint8, **KINDS[kind])
        for first in range(96, -1, -8):  # the last chunk first
            made[first : first + 8] = IMAGES[first : first + 8]
        file["labels"] = LABELS
    data = Hdf5(tmp_path / "some.h5")
    for start, stop in ((0, COUNT), (3, 21), (7, 9), (8, 16), (100, 101)):
        assert data._rows.span(start, stop) == IMAGES[start:stop].tobytes()


def test_what_a_file_system_gives_in_parts_is_put_together_and_an_end_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, read = Hdf5(path, "contiguous"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:50]], offset))
    assert (data.batch_of([3, 4, 5, 90])[0].numpy() == IMAGES[[3, 4, 5, 90]]).all()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(RunFailed, match="it ends before byte"):
        data.batch_of([3])


def through_a_pipe(file: h5py.File) -> None:
    file.create_dataset("images", shape=(4, 3), dtype="u1", external=[("pipe", 0, 12)])
    file["labels"] = np.arange(4)


def joined_from_a_pipe(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(4, 3), dtype="u1")
    layout[:] = h5py.VirtualSource("pipe", "images", shape=(4, 3))
    file.create_virtual_dataset("images", layout)
    file["labels"] = np.arange(4)


def linked_to_a_pipe(file: h5py.File) -> None:
    file["images"] = h5py.ExternalLink("pipe", "/images")
    file["labels"] = np.arange(4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (through_a_pipe, "has rows in .*pipe, which is no plain file"),
        (joined_from_a_pipe, "has rows in .*pipe, which is no plain file"),
        (linked_to_a_pipe, "a file that its links name, does not open within 1 s"),
    ],
)
def test_a_pipe_that_a_file_leads_to_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], None], says: str
):
    monkeypatch.chdir(tmp_path)  # HDF5 looks for other files here
    monkeypatch.setattr("meshrun.data.sources.rows._SECONDS_TO_OPEN", 1)
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "some.h5", "w") as file:
        make(file)
    with pytest.raises(UserError, match=says):
        Hdf5(tmp_path / "some.h5")


def test_numbers_that_torch_cannot_hold_are_refused(tmp_path: Path):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["images"], file["labels"] = np.array([1, 1 << 63], np.uint64), np.arange(2, dtype=np.uint64)
    with pytest.raises(UserError, match=r"holds the number 9,223,372,036,854,775,808; it must be below 2\^63"):
        Hdf5(tmp_path / "some.h5").batch_of([0, 1])
    with pytest.raises(UserError, match=r"holds the number 9,223,372,036,854,775,808; it must be below 2\^63"):
        Hdf5(tmp_path / "some.h5", inputs="labels", targets="images")


def joined_from_itself(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4, 3), "f4")
    layout[:] = h5py.VirtualSource(".", "images", shape=(4, 3))
    file.create_virtual_dataset("images", layout)
    file["labels"] = np.arange(4)


def joined_from_nothing(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4, 3), "f4")
    layout[:] = h5py.VirtualSource("gone.h5", "images", shape=(4, 3))
    file.create_virtual_dataset("images", layout)
    file["labels"] = np.arange(4)


def in_a_file_of(size: int, shape: tuple[int, ...]) -> Callable[[h5py.File], None]:
    def make(file: h5py.File) -> None:
        Path("raw.bin").write_bytes(bytes(range(size)))
        file.create_dataset("images", shape=shape, dtype="u1", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])
        file["labels"] = np.arange(4)

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (joined_from_itself, "is damaged: the HDF5 library crashes on what it says of its datasets"),
        (joined_from_nothing, r"some\.h5: has rows in gone\.h5, which is not there; copy it too"),
        (in_a_file_of(11, (4, 3)), r"some\.h5: has rows in raw\.bin up to byte 12, which is cut off before it"),
        (in_a_file_of(12, (4, 10**9)), r"some\.h5: has rows in raw\.bin up to byte 4,000,000,000, which is cut off"),
    ],
)
def test_rows_in_other_files_that_are_not_all_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], None], says: str
):
    monkeypatch.chdir(tmp_path)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        make(file)
    with pytest.raises(UserError, match=says):
        Hdf5(tmp_path / "some.h5")


def test_rows_in_another_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        in_a_file_of(12, (4, 3))(file)
    assert Hdf5(tmp_path / "some.h5").batch_of([3])[0].tolist() == [[9, 10, 11]]


def test_a_packed_chunk_that_is_larger_than_its_dataset_is_read(tmp_path: Path):
    with h5py.File(tmp_path / "grows.h5", "w") as file:
        chunks, growing = (64, 5, 8, 8), (None,) * 4
        file.create_dataset("images", data=IMAGES, chunks=chunks, maxshape=growing, compression="gzip")
        file["labels"] = LABELS
    read = Hdf5(tmp_path / "grows.h5").batch_of([0, 15, 70])[0]
    np.testing.assert_array_equal(read, IMAGES[[0, 15, 70]])


def test_rows_that_were_never_written_must_not_be_far_more_than_the_file_could_hold(tmp_path: Path):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file.create_dataset("images", shape=(4, 10**8), dtype="u1")
        file["labels"] = np.arange(4)
    with pytest.raises(UserError, match=r"400,000,000 bytes of data by its shape .* cannot hold"):
        Hdf5(tmp_path / "some.h5")


GZIP = {"compression": "gzip"}


@pytest.mark.parametrize(
    "dataset",
    [
        {"data": np.zeros((8, 10**6), "u1"), "chunks": (8, 10**6), **GZIP},
        {"data": np.zeros((8, 10**6), "u1"), "chunks": (8, 10**4), **GZIP},
        {"data": np.zeros((2, 10**6), "f4"), "chunks": (1, 10**6), **GZIP},
        {"data": np.zeros((2, 10**6), "f4"), "chunks": (1, 10**4), **GZIP},
        {"shape": (8, 10**6), "dtype": "u1", "chunks": (8, 10**6)},
        {"shape": (2, 10**7), "dtype": "u1"},
    ],
    ids=["rows", "rows of parts", "a row", "a row of parts", "nothing in chunks", "nothing"],
)
def test_chunks_and_rows_that_would_take_far_more_memory_than_their_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: dict[str, Any]
):
    with h5py.File(tmp_path / "some.h5", "w") as file:
        count = len(file.create_dataset("images", **dataset))
        file["labels"] = np.arange(count)
    assert not Hdf5(tmp_path / "some.h5").batch_of([1])[0].any()
    monkeypatch.setattr(source, "AT_ONCE", 10**7)
    with pytest.raises(
        UserError, match=r"some\.h5:/images can only be read [\d,]{9,} bytes at a time, .* smaller rows and chunks"
    ):
        Hdf5(tmp_path / "some.h5")


def test_data_that_no_filter_packs_are_read_however_large_their_chunks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source, "AT_ONCE", 1)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file.create_dataset("images", data=IMAGES, chunks=IMAGES.shape)
        file["labels"] = LABELS
    assert (Hdf5(tmp_path / "some.h5").batch_of([7])[0].numpy() == IMAGES[7]).all()


def test_offsets_that_would_take_far_more_memory_than_their_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source, "AT_ONCE", 10**7)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["bytes"], file["labels"] = np.zeros(8, "u1"), np.zeros(8)
        file.create_dataset("offsets", data=np.zeros(10**6, "i8"), chunks=(1000,), **GZIP)
    with pytest.raises(UserError, match=r"/offsets can only be read 8,000,000 bytes at a time"):
        Hdf5(tmp_path / "some.h5", size=8)


def test_a_picture_or_a_target_that_would_take_far_more_memory_than_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source, "AT_ONCE", 10**7)
    monkeypatch.setattr(hdf5, "IN_MEMORY", 0)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file.create_dataset("bytes", data=np.zeros(8 * 10**6, "u1"), chunks=(10**5,), **GZIP)
        file["offsets"], file["labels"] = [0, 8 * 10**6], np.zeros(1)
        file["images"] = np.zeros(2)
        file.create_dataset("wide", data=np.zeros((2, 10**6), "u1"), chunks=(1, 10**5), **GZIP)
    with pytest.raises(UserError, match=r"some\.h5:/bytes can only be read 8,000,000 bytes at a time"):
        Hdf5(tmp_path / "some.h5", inputs="encoded", size=8)
    with pytest.raises(UserError, match=r"some\.h5:/wide can only be read 8,000,000 bytes at a time"):
        Hdf5(tmp_path / "some.h5", targets="wide")


def test_of_targets_no_more_is_in_memory_than_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Labels of a byte become eight times as many; and chunks are unpacked one by one."""
    monkeypatch.setattr(hdf5, "IN_MEMORY", 1 << 21)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        for name, kind in (("bytes", "u1"), ("words", "i8")):
            file[f"{name}/images"] = np.zeros(1 << 18, "u1")
            file.create_dataset(f"{name}/labels", data=np.arange(1 << 18).astype(kind), chunks=(4096,), **GZIP)
        file["many/images"] = np.zeros(1 << 19, "u1")
        file.create_dataset("many/labels", data=np.arange(1 << 19, dtype="u1"), chunks=(4096,), **GZIP)
    for name in ("bytes", "words", "many"):
        tracemalloc.start()
        data = Hdf5(tmp_path / "some.h5", name)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2.5 * (1 << 21)
        assert data.batch_of([3, 300])[1].tolist() == [3, 300 if name == "words" else 44]


@pytest.mark.parametrize("size", [0, -1, 10**9, "8", 1.5])
def test_a_size_that_no_picture_has_is_refused(encoded: Path, size: Any):
    assert "it must be a number of pixels above 0 and at most 16,384" in refusal(encoded, "train", size=size)
