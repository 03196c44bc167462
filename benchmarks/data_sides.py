"""The material of benchmarks/data.py, and its sides: each a generator that reads epochs and gives the size of batches.

    case = CASES["images"](folder)           # writes what is to be read, in the form that each side wants it in
    for size in case.sides["meshrun"](): …

Sides of others are written as their own documentation shows them.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import tarfile
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import meshrun.recipes
from meshrun import Hdf5, ImageFolder, Table, TokenFile
from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.data.sources import token_format
from meshrun.experiment import MapDataset

MESHRUN, READERS = "meshrun", 2
SHIPPED = Path(meshrun.recipes.__file__).parent / "data"
PICTURES, SIZE = 600, 224
ROWS = 8_192
CONTEXT = 1_024

Side = Callable[[], Generator[int, None, None]]


@dataclass(frozen=True)
class Case:
    """Sides that read the same, and how many samples a turn is."""

    samples: int
    sides: dict[str, Side]
    left_out: dict[str, str] = field(default_factory=dict)
    """Sides that are not here, and why."""


def ours(dataset: MapDataset, batch: int, shuffle: str = "full", readers: int = READERS) -> Side:
    """Through meshrun's loader, epoch after epoch."""

    def side() -> Generator[int, None, None]:
        order = Order.of(dataset, batch, 0, shuffle)
        for step in Loader(dataset, order, 0, 1, Reading(workers=readers)).steps(0, 10**6):
            yield len(step.ids)

    return side


def through(make: Callable[[], Iterable[Any]]) -> Side:
    """Through anything that can be gone through, again and again."""

    def side() -> Generator[int, None, None]:
        loader = make()
        while True:
            for batch in loader:
                yield len(batch[0])

    return side


def plain(dataset: Any, batch: int, collate: Any = None) -> Side:
    """torch's DataLoader as everybody writes it."""
    return through(
        lambda: DataLoader(
            dataset, batch, shuffle=True, num_workers=READERS, collate_fn=collate, persistent_workers=True
        )
    )


def missing(*names: str) -> dict[str, str]:
    return {name: "not installed" for name in names if importlib.util.find_spec(name) is None}


# Images


def images(folder: Path) -> Case:
    """A folder of JPEGs, the same in a tar of webdataset's and in chunks of litdata's."""
    files = pictures(folder / "pictures")
    sides = {MESHRUN: ours(ImageFolder(folder / "pictures", SIZE, keep=False), 32)}
    sides["DataLoader, Pillow"] = plain(PlainFolder(files), 32)
    left_out = missing("webdataset", "litdata")
    if "webdataset" not in left_out:
        sides["webdataset"] = webdataset(folder / "pictures.tar", files)
    if "litdata" not in left_out:
        sides["litdata"] = litdata_images(folder / "litdata-pictures", files)
    return Case(PICTURES, sides, left_out)


def pictures(folder: Path) -> list[tuple[Path, int]]:
    """Pictures with large and small structures, which compress like photographs: about 60 kB."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    files = []
    for number in range(PICTURES):
        coarse = Image.fromarray(drawn.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        grain = drawn.normal(0, 9, (375, 500, 1))
        path = folder / f"class-{number % 2}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)).save(path, quality=90)
        files.append((path, number % 2))
    return files


def decoded(file: Any) -> Tensor:
    """Shorter side to 224, the middle cut out: as torchvision's Resize and CenterCrop do it with Pillow."""
    from PIL import Image

    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    scale = SIZE / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
    array = np.array(picture.crop((left, top, left + SIZE, top + SIZE)))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


class PlainFolder(Dataset[Any]):
    """What torchvision's ImageFolder does."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return decoded(path), label


def webdataset(path: Path, files: Sequence[tuple[Path, int]]) -> Side:
    """https://webdataset.github.io/webdataset: shards, a shuffle buffer, batches made by the readers."""
    import webdataset as wds

    shards = []
    for shard in range(4):
        name = path.with_name(f"{path.stem}-{shard}.tar")
        with tarfile.open(name, "w") as tar:
            for number, (file, label) in enumerate(files[shard::4]):
                for suffix, content in (("jpg", file.read_bytes()), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{shard}-{number:05d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        shards.append(str(name))

    def sample(entry: dict[str, bytes]) -> tuple[Tensor, int]:
        return decoded(io.BytesIO(entry["jpg"])), int(entry["cls"])

    def make() -> Iterable[Any]:
        dataset = wds.WebDataset(shards, shardshuffle=4).shuffle(1000).map(sample).batched(32)
        return wds.WebLoader(dataset, batch_size=None, num_workers=READERS, persistent_workers=True)

    return through(make)


def litdata_images(folder: Path, files: Sequence[tuple[Path, int]]) -> Side:
    """https://github.com/Lightning-AI/litdata: optimized chunks, its StreamingDataLoader."""
    import litdata

    folder.mkdir()
    _written(folder, ({"image": path.read_bytes(), "label": label} for path, label in files))

    class Streamed(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            entry = super().__getitem__(index)
            return decoded(io.BytesIO(entry["image"])), entry["label"]

    return through(
        lambda: litdata.StreamingDataLoader(Streamed(str(folder), shuffle=True), batch_size=32, num_workers=READERS)
    )


def _written(folder: Path, entries: Iterable[dict[str, Any]]) -> None:
    """litdata's chunks by its own writer, without the processes that `litdata.optimize` starts."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="8MB")
    for number, entry in enumerate(entries):
        writer.add_item(number, entry)
    writer.done()
    writer.merge()


# HDF5


def hdf5(folder: Path, compression: str | None = None) -> Case:
    """Rows in an HDF5 file, read shuffled by all, and from front to back."""
    import h5py

    path = folder / f"rows-{compression}.h5"
    drawn = np.random.default_rng(0)
    small = drawn.integers(0, 256, (ROWS, 3, 16, 16), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        rows = small.repeat(4, axis=2).repeat(4, axis=3)
        file.create_dataset("images", data=rows, chunks=(64, 3, 64, 64), compression=compression)
        file["labels"] = np.arange(ROWS) % 10
    dataset = Hdf5(path)
    sides = {
        MESHRUN: ours(dataset, 64, "window"),
        "meshrun, sequential": ours(dataset, 64, "none"),
        "meshrun, full shuffle": ours(dataset, 64, "full"),
        "DataLoader, h5py": plain(PlainHdf5(path), 64),
    }
    return Case(ROWS if compression is None else ROWS // 2, sides)


class PlainHdf5(Dataset[Any]):
    """The file opened once a reader, a row at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import h5py

        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["images"][index]), int(self.file["labels"][index])


# Tokens


def tokens(folder: Path) -> Case:
    """The speeches as tokens, and the same windows as text."""
    from tokenizers import Tokenizer

    shipped = TokenFile(SHIPPED / "speeches.tokens", CONTEXT, cross=True)
    tokenizer = Tokenizer.from_file(str(shipped.tokenizer))
    windows = [shipped[number][0].numpy() for number in range(len(shipped))]
    texts = tokenizer.decode_batch([window.tolist() for window in windows])
    whole = np.concatenate(windows).astype(np.uint16)
    path = folder / "windows.tokens"
    token_format.write(path, [whole], np.array([len(whole)]), vocabulary=2048)
    whole.tofile(folder / "windows.bin")
    sides = {
        MESHRUN: ours(TokenFile(path, CONTEXT, cross=True), 16, readers=0),
        "meshrun, 2 readers": ours(TokenFile(path, CONTEXT, cross=True), 16),
        "tokenised on the fly": plain(OnTheFly(texts, str(shipped.tokenizer)), 16),
        "DataLoader, numpy.memmap": plain(Mapped(folder / "windows.bin", len(windows) - 1), 16),
    }
    left_out = missing("litdata")
    if "litdata" not in left_out:
        sides["litdata"] = litdata_tokens(folder / "litdata-tokens", whole)
    return Case(2 * len(windows), sides, left_out)


class OnTheFly(Dataset[Any]):
    """Text that becomes tokens when it is read."""

    def __init__(self, texts: Sequence[str], tokenizer: str) -> None:
        self.texts, self.file, self.tokenizer = texts, tokenizer, None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from tokenizers import Tokenizer

        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_file(self.file)
            self.tokenizer.enable_truncation(CONTEXT + 1)
            self.tokenizer.enable_padding(length=CONTEXT + 1)
        window = torch.tensor(self.tokenizer.encode(self.texts[index]).ids)
        return window[:-1], window[1:]


class Mapped(Dataset[Any]):
    """The memory map of every language model that was written in an afternoon."""

    def __init__(self, path: Path, windows: int) -> None:
        self.tokens, self.windows = np.memmap(path, np.uint16, "r"), windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1].astype(np.int64))
        return window[:-1], window[1:]


def litdata_tokens(folder: Path, whole: np.ndarray[Any, Any]) -> Side:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=(CONTEXT + 1) * 256, item_loader=litdata.TokensLoader())
    for start in range(0, len(whole) - 65_536, 65_536):
        writer.add_item(start // 65_536, torch.from_numpy(whole[start : start + 65_536].astype(np.int32)))
    writer.done()
    writer.merge()

    class Windows(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
            window = super().__getitem__(index).long()
            return window[:-1], window[1:]

    def make() -> Iterable[Any]:
        windows = Windows(str(folder), item_loader=litdata.TokensLoader(CONTEXT + 1), shuffle=True)
        return litdata.StreamingDataLoader(windows, batch_size=16, num_workers=READERS)

    return through(make)


# Tables


def lengths(row: dict[str, Any]) -> tuple[int, int]:
    return len(row["document"]), len(row["summary"])


def table(folder: Path, kind: str) -> Case:
    """Rows of text, each read whole."""
    source = folder / "summaries.jsonl"
    source.write_bytes(gzip.decompress((SHIPPED / "summaries.jsonl.gz").read_bytes()))
    rows = [json.loads(line) for line in source.open(encoding="utf-8")]
    path = {"lines": source, "parquet": folder / "summaries.parquet", "saved": folder / "summaries-saved"}[kind]
    left_out = missing("datasets")
    if kind != "lines":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "summaries.parquet")
    if kind == "saved":
        if left_out:
            return Case(0, {}, left_out)
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    sides = {MESHRUN: ours(Table(path, columns=["document", "summary"], transform=lengths), 64)}
    if kind == "lines":
        sides["DataLoader, json"] = plain(PlainLines(source), 64)
    if not left_out:
        sides["datasets"] = from_datasets(path, kind, folder)
    return Case(len(rows), sides, left_out)


def from_datasets(path: Path, kind: str, folder: Path) -> Side:
    """https://huggingface.co/docs/datasets/use_with_pytorch"""
    import datasets

    datasets.disable_progress_bars()
    if kind == "saved":
        loaded = datasets.load_from_disk(str(path))
    else:
        builder = "json" if kind == "lines" else "parquet"
        loaded = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(folder / "cache"))

    def collated(rows: list[dict[str, Any]]) -> Any:
        return [torch.tensor(column) for column in zip(*map(lengths, rows), strict=True)]

    return plain(loaded.select_columns(["document", "summary"]), 64, collated)


class PlainLines(Dataset[Any]):
    """All lines in memory, each parsed when it is read."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return lengths(json.loads(self.lines[index]))


CASES: dict[str, Callable[[Path], Case]] = {
    "images": images,
    "hdf5": hdf5,
    "hdf5-gzip": lambda folder: hdf5(folder, "gzip"),
    "tokens": tokens,
    "lines": lambda folder: table(folder, "lines"),
    "parquet": lambda folder: table(folder, "parquet"),
    "saved": lambda folder: table(folder, "saved"),
}
