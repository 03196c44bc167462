"""Checkpoints that somebody damaged, or wrote to do harm: refused in a sentence, and nothing in them runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrun import UserError
from meshrun.cli.export import Form, export_command
from meshrun.cli.inspect import inspect_command
from meshrun.state import catalog, manifest
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.manifest import Index, Manifest, Unfit
from meshrun.state.memory import memory_files
from meshrun.state.region import Region
from meshrun.state.saver import Saver

from .places import ALONE, numbers, saved

WHOLE = numbers(700, 600)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """The folder of a checkpoint, with an older one beside it."""
    saved(tmp_path / "c", {"model/w": WHOLE, "model/b": numbers(3)}, 4)
    return saved(tmp_path / "c", {"model/w": WHOLE, "model/b": numbers(3)}, 5).path


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.tensors:
        checkpoint.whole(name)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def bombs(marker: Path, scratch: Path) -> list[bytes]:
    """The same as a bare pickle, as what torch saves, and as what it saved before."""
    plain = pickle.dumps({"a": Bomb(marker)})
    torch.save({"a": Bomb(marker)}, scratch)
    with zipfile.ZipFile(scratch) as archive:
        assert any(name.endswith("data.pkl") for name in archive.namelist())
    new = scratch.read_bytes()
    torch.save({"a": Bomb(marker)}, scratch, _use_new_zipfile_serialization=False)
    return [plain, new, scratch.read_bytes()]


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_pickle_in_a_checkpoint_is_refused_and_never_loaded(good: Path, tmp_path: Path, name: str):
    marker = tmp_path / "exploded"
    for bomb in bombs(marker, tmp_path / "scratch"):
        (good / name).write_bytes(bomb)
        with pytest.raises(BadCheckpoint):
            read_all(good)
        assert inspect_command(good, None, True, False) == 1
        with pytest.raises(UserError):
            export_command(good, Form.TORCH, tmp_path / "out.pt", None, False, True, False)
        assert not (tmp_path / "out.pt").exists()
        catalog.newest(good.parent)
        catalog.prune(good.parent, 5, 4)
        Saver(good.parent, ALONE, None, keep=5)
        assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb is none"


@pytest.mark.parametrize("name", ["rank-00000.json", "words-00000.json", "passing-0-00000.json"])
def test_a_pickle_in_a_node_s_memory_is_passed_over(tmp_path: Path, name: str):
    node, marker = tmp_path / "node-0", tmp_path / "exploded"
    kept = Saver(tmp_path / "c", ALONE, node, keep=2)
    for kind in ("words", "passing-0"):
        kept.put(kind, [Region.whole("w", WHOLE)], 9, {})
    kept.snapshot([Region.whole("w", WHOLE)], 9, {})
    kept.put("words", [Region.whole("w", WHOLE)], 9, {})
    assert len(memory_files(node)) == 3
    for bomb in bombs(marker, tmp_path / "scratch"):
        (node / name).write_bytes(bomb)
        assert len(memory_files(node)) == 2
        (node / name).with_suffix(".safetensors").write_bytes(bomb)
        assert torch.equal(Checkpoint.from_memory([node], 9).whole("w"), WHOLE)
    assert not marker.exists()


def test_a_file_in_memory_that_is_too_short_is_passed_over(tmp_path: Path):
    kept = Saver(tmp_path / "c", ALONE, tmp_path / "node-0", keep=2)
    kept.snapshot([Region.whole("w", WHOLE)], 9, {})
    os.truncate(tmp_path / "node-0" / "rank-00000.safetensors", 1000)
    assert memory_files(tmp_path / "node-0") == []


def damaged(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / "rank-00000.safetensors")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "a bit of the last block": (
        damaged(lambda path: flip(path, -1)),
        "rank-00000.safetensors has a wrong checksum in bytes",
    ),
    "a bit of the header": (damaged(lambda path: flip(path, 20)), "wrong checksum in bytes 0 to 1,048,576"),
    "cut off": (damaged(lambda path: os.truncate(path, 1000)), "has 1,000 bytes where 1,680,"),
    "longer": (damaged(lambda path: path.write_bytes(path.read_bytes() + b"x")), "bytes where 1,680,"),
    "deleted": (damaged(Path.unlink), "rank-00000.safetensors cannot be read: No such file"),
    "a pipe": (damaged(fifo), "rank-00000.safetensors cannot be read: it is no plain file"),
    "a folder": (damaged(is_a_folder), "rank-00000.safetensors cannot be read: it is no plain file"),
    "a lying header": (
        damaged(lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])),
        "wrong checksum in bytes 0 to 1,048,576",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file"),
    "a pipe for a manifest": (lambda folder: fifo(folder / "manifest.json"), "manifest.json: it is no plain file"),
    "a folder for a manifest": (lambda folder: is_a_folder(folder / "manifest.json"), "it is no plain file"),
    "a bit of the manifest": (lambda folder: flip(folder / "manifest.json", 120), "manifest.json "),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 300), "manifest.json is not valid JSON"),
    "an empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json is not valid JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_said_in_a_sentence_that_names_checkpoint_and_file(good: Path, kind: str, capsys):
    damage, words = DAMAGE[kind]
    damage(good)
    with pytest.raises(BadCheckpoint) as raised:
        read_all(good)
    assert words in str(raised.value)
    assert str(good) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert inspect_command(good, None, True, False) == 1
    assert any(words in each for each in json.loads(capsys.readouterr().out)["problems"])


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_said(good: Path):
    good.chmod(0)
    try:
        with pytest.raises(BadCheckpoint, match="Permission denied"):
            Checkpoint.open(good)
    finally:
        good.chmod(0o755)


def test_without_a_readable_manifest_the_one_before_is_the_newest(good: Path):
    before = good.with_name("step-00000004")
    assert catalog.newest(good.parent) == good
    flip(good / "manifest.json", 120)
    assert catalog.newest(good.parent) == before
    assert catalog.complete(good.parent) == [before]
    assert catalog.newest(good.parent / "nowhere") is None


def sealed(body: Any, /, **outside: Any) -> bytes:
    """A document whose checksum is right, as somebody who means harm would make it."""
    digest = hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({"format": manifest.FORMAT, "sha256": digest, "body": body, **outside}).encode()


def body_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())["body"]
    return found


def at(*path: Any, put: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        place: Any = body
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = put

    return change


W = ("tensors", "model/w")
LIES = {
    "a negative offset": (at(*W, 2, 0, 1, put=-8), "the offset of 'model/w' is no count"),
    "an offset beyond the end": (at(*W, 2, 0, 1, put=1 << 40), "beyond the end of rank-00000.safetensors"),
    "an offset that is a truth value": (at(*W, 2, 0, 1, put=True), "is no count"),
    "an offset that is a fraction": (at(*W, 2, 0, 1, put=64.0), "is no count"),
    "two tensors in one place": (at("tensors", "model/b", 2, 0, 1, put=600), "two tensors overlap"),
    "a huge shape": (at(*W, 1, put=[1 << 50, 600]), "impossible shape|elements and pieces"),
    "a shape without an end": (at(*W, 1, put=[1 << 40] * 40), "impossible shape"),
    "no checksums": (at("files", 0, 2, put=None), "has no checksums of rank-00000.safetensors"),
    "a piece outside": (at(*W, 2, 0, 2, put=[100, 0]), "outside of its shape"),
    "a negative size": (at(*W, 2, 0, 3, put=[-700, -600]), "is no count"),
    "a piece of other dimensions": (at(*W, 2, 0, 3, put=[420000]), "another number of dimensions"),
    "a missing piece": (at(*W, 2, put=[]), "has 420,000 elements and pieces of 0"),
    "another type": (at(*W, 0, put="OBJECT"), "gives 'model/w' the type 'OBJECT'"),
    "a file elsewhere": (at("files", 0, 0, put="../../../etc/passwd"), "names a file '../../../etc/passwd'"),
    "a file at the root": (at("files", 0, 0, put="/etc/passwd"), "names a file '/etc/passwd'"),
    "a file that is none": (at(*W, 2, 0, 0, put=7), "lies in file 7 of 1"),
    "too few checksums": (at("files", 0, 2, put=[1]), "has 1 checksums for the"),
    "a huge file": (at("files", 0, 1, put=1 << 59), "checksums for the"),
    "a step that is none": (at("step", put="5"), "step is no count"),
    "a step that is nothing": (at("step", put=None), "step is no count"),
    "a state that is none": (at("state", put=[]), "state is no table"),
    "tensors that are none": (at("tensors", put=[[]]), "tensors is no table"),
    "an entry too short": (at("tensors", "model/w", put=["F32"]), "has not 3 fields"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_manifest_that_lies_is_refused(good: Path, kind: str):
    change, words = LIES[kind]
    body = body_of(good)
    change(body)
    (good / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(BadCheckpoint, match=words):
        Checkpoint.open(good)


def test_the_seal_of_these_lies_is_a_valid_one(good: Path):
    (good / "manifest.json").write_bytes(sealed(body_of(good)))
    read_all(good)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (sealed({}, format=2), "has format 2, which a newer meshrun wrote; this one reads up to format 1"),
        (sealed({}, format=True), "is no manifest of meshrun$"),
        (sealed({}, format=None), "is no manifest of meshrun$"),
        (sealed({}, sha256="0" * 64), "has a wrong checksum"),
        (sealed({}, body=[]), "body is no table"),
        (b"[" * 1_000_000, "is not valid JSON"),
        (b'{"format":1,"sha256":"","body":{"state":' + b'{"a":' * 800 + b"1" + b"}" * 800 + b"}}", "JSON|checksum"),
        (b'{"format":1,"sha256":"","body":{"step":1e999}}', "is not valid JSON"),
        (b'{"format":1,"sha256":"","body":{"step":NaN}}', "is not valid JSON"),
        (b'{"format":' + b"9" * 10_000 + b"}", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"null", "it is no table"),
        (b"", "is not valid JSON"),
    ],
    ids=range(13),
)
def test_a_document_that_is_no_manifest_is_refused(good: Path, raw: bytes, words: str):
    (good / "manifest.json").write_bytes(raw)
    with pytest.raises(BadCheckpoint, match=words):
        Checkpoint.open(good)
    with pytest.raises(Unfit):
        Index.decode(raw)


def test_a_manifest_that_is_too_long_is_refused_unread(good: Path):
    os.truncate(good / "manifest.json", manifest.MOST_BYTES + 1)
    with pytest.raises(BadCheckpoint, match=r"larger than 134,217,728 bytes"):
        Checkpoint.open(good)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


ODD = st.sampled_from(
    [None, True, -1, 0, 3, 1 << 31, 1 << 62, 1 << 200, 0.5, "", "F32", "x", [], [[]], [0, 0], {}, {"a": 1}]
)


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_is_changed_the_answer_is_a_refusal_or_a_checkpoint(data):
    entry = manifest.Entry("w", torch.float32, (4, 6), manifest.Box((0, 0), (4, 6)), 64)
    index = Index(0, 1, "dp=1", 1, {"a": [1.5]}, "rank-00000.safetensors", manifest.File(160, [7]), [entry])
    raw, decode = data.draw(
        st.sampled_from([(index.encode(), Index.decode), (Manifest.of([index]).encode(), Manifest.decode)])
    )
    body = json.loads(raw)["body"]
    decode(sealed(body))
    chosen = data.draw(st.sampled_from(places(body)[1:]))
    at(*chosen, put=data.draw(ODD))(body)
    try:
        found = decode(sealed(body))
    except Unfit as unfit:
        assert "\n" not in str(unfit)
    else:
        assert isinstance(found, Index | Manifest)


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys):
    folder = saved(tmp_path, {"model/\x1b[2Jevil": numbers(2)}, state={"\x1b[31m": "\x1b[0m"}).path
    assert inspect_command(folder, None, False, False) == 0
    assert "\x1b[2J" not in (shown := capsys.readouterr().out)
    assert "\x1b[31m" not in shown
    assert "model/?[2Jevil" in shown


def test_names_of_tensors_with_numbers_of_thousands_of_digits_are_listed(tmp_path: Path):
    checkpoint = saved(tmp_path / "c", {f"model/{'1' * 5000}": numbers(3), "model/2": numbers(3)}, 4)
    assert inspect_command(checkpoint.path, None, True, False) == 0
