"""Token files: windows of all documents, documents kept apart, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from meshrun import TokenFile
from meshrun.data.samples import may_draw
from meshrun.data.sources import source, tokens
from meshrun.data.sources.token_format import (
    dtype_for,
    read_layout,
    sha256_of_numbers,
    tokenizer_beside,
    write,
    write_many,
)
from meshrun.errors import BadSample, RunFailed, UserError

LENGTHS = np.array([5, 1, 9, 300, 2, 40, 0, 3, 77, 1, 1, 60])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Documents of very different lengths, whose tokens say where they are: 1, 2, 3, …"""
    path = tmp_path / "some.tokens"
    write(path, [np.arange(1, LENGTHS.sum() + 1)], LENGTHS, vocabulary=600)
    return path


def all_of(data: TokenFile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs, targets = data.batch_of(list(range(len(data))))
    return inputs["tokens"].numpy(), inputs["documents"].numpy(), targets.numpy()


def test_every_token_is_read_once_and_no_target_is_in_another_document(file: Path):
    tokens, documents, targets = all_of(TokenFile(file, 7))
    count = tokens.size
    assert len(TokenFile(file, 7)) == (LENGTHS.sum() - 1) // 7
    assert (tokens.ravel() == np.arange(1, count + 1)).all()
    whose = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    crosses = whose[1 : count + 1] != whose[:count]
    assert (targets.ravel() == np.where(crosses, -100, np.arange(2, count + 2))).all()
    dense = np.unique(whose[:count], return_inverse=True)[1].reshape(tokens.shape)  # a document without tokens is none
    assert (documents == dense - dense[:, :1]).all()


def test_crossing_windows_are_plain_text(file: Path):
    tokens, targets = TokenFile(file, 7, cross=True).batch_of([3, 0])
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.tolist() == [list(range(22, 29)), list(range(1, 8))]
    assert torch.equal(targets, tokens + 1)


def test_a_sample_is_a_row_of_the_batch(file: Path):
    data = TokenFile(file, 7)
    inputs, targets = data.batch_of([1, 44])
    for row, sample in enumerate((1, 44)):
        ours, theirs = data[sample]
        assert torch.equal(ours["tokens"], inputs["tokens"][row]) and torch.equal(theirs, targets[row])
        assert torch.equal(ours["documents"], inputs["documents"][row])
    with pytest.raises(IndexError):
        data[len(data)]
    assert torch.equal(data[-1][1], data[len(data) - 1][1])
    assert not may_draw(data, None), "a thread may read them"
    for wrong in (-1, len(data)):
        with pytest.raises(IndexError, match=f"there is no sample {wrong}"):
            data.batch_of([0, wrong])


def test_documents_are_chosen_as_from_a_list(file: Path):
    ends = np.cumsum(LENGTHS)
    head, tail = (TokenFile(file, 5, documents=each, cross=True) for each in (slice(None, -2), slice(-2, None)))
    assert head[0][0][0] == 1 and head[len(head) - 1][1][-1] <= ends[-3]
    assert tail[0][0][0] == ends[-3] + 1 and len(tail) == (61 - 1) // 5
    assert {head.fingerprint, tail.fingerprint}.isdisjoint({TokenFile(file, 5, cross=True).fingerprint})


def test_windows_of_another_context_or_of_other_documents_are_other_data(file: Path):
    five, six, again = (TokenFile(file, context, most=10, cross=True).fingerprint for context in (5, 6, 6))
    assert five != six == again
    chosen = [TokenFile(file, 5, most=1, documents=slice(first, last)) for first, last in ((0, 9), (1, 9), (1, 10))]
    assert len({each.fingerprint for each in chosen}) == 3


def test_most_keeps_windows_that_are_evenly_spread(file: Path):
    some = TokenFile(file, 5, most=10, cross=True)
    first = [int(some[index][0][0]) for index in range(len(some))]
    assert len(first) == 10 and first[0] == 1
    assert set(np.diff(first)) == {45, 50}  # of 99 windows every ninth or tenth


def test_the_file_is_one_that_safetensors_reads_and_says_its_own_sum(file: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = load_file(file)
    assert tensors["tokens"].dtype == np.uint16 and tensors["starts"].tolist() == [0, *np.cumsum(LENGTHS)]
    layout = read_layout(file)
    assert sha256_of_numbers(file, layout) == layout.sha256
    again = file.with_name("again.tokens")
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    counts, numbers = (len(LENGTHS), int(LENGTHS.sum())), np.arange(1, LENGTHS.sum() + 1)
    write_many(again, counts, np.split(LENGTHS, [2, 2, 5]), np.split(numbers, [3, 100]), 600, None)
    assert len(flushed) == 1 and again.read_bytes() == file.read_bytes()


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    assert [dtype_for(count).itemsize for count in (1 << 16, (1 << 16) + 1)] == [2, 4]
    write(tmp_path / "large.tokens", [np.array([0, 70_000, 5])], np.array([3]), vocabulary=100_000)
    assert TokenFile(tmp_path / "large.tokens", 2, cross=True)[0][1].tolist() == [70_000, 5]


def test_readers_that_are_forked_or_sent_the_dataset_read_the_same(file: Path):
    data = TokenFile(file, 7)
    data[0]
    assert torch.equal(pickle.loads(pickle.dumps(data))[4][1], data[4][1])
    child = os.fork()
    if child == 0:
        os._exit(int(data[4][1][1] != data[4][0]["tokens"][1] + 1))
    assert os.waitpid(child, 0)[1] == 0


def sparse_file(folder: Path, documents: int, tokens: int) -> Path:
    """A token file that takes no disk: all documents but the last are empty, all tokens are 0."""
    path, first = folder / "huge.tokens", 8 * (documents + 1)
    metadata = {"format": "meshrun-tokens-1", "vocabulary": "9", "documents": str(documents), "sha256": "0" * 64}
    header = {
        "__metadata__": metadata,
        "starts": {"dtype": "I64", "shape": [documents + 1], "data_offsets": [0, first]},
        "tokens": {"dtype": "U16", "shape": [tokens], "data_offsets": [first, first + 2 * tokens]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as sparse:
        sparse.write(struct.pack("<Q", len(text)) + text)
        sparse.truncate(8 + len(text) + first + 2 * tokens)
        sparse.seek(first - 8, os.SEEK_CUR)
        sparse.write(struct.pack("<q", tokens))
    return path


def test_a_billion_windows_cost_nothing(tmp_path: Path):
    path = sparse_file(tmp_path, documents=1, tokens=1_000_000_001)
    began = time.process_time()
    data = TokenFile(path, 1)
    data.batch_of([0, 999_999_999])
    assert len(data) == 1_000_000_000 and time.process_time() - began < 0.5


@pytest.mark.parametrize("token", [600, 5000])
def test_a_token_beyond_the_vocabulary_is_a_bad_sample_and_others_are_not(file: Path, token: int):
    content = bytearray(file.read_bytes())
    at = read_layout(file).tokens_at + 2 * 31
    content[at : at + 2] = struct.pack("<H", token)
    file.write_bytes(content)
    data = TokenFile(file, 7)
    with pytest.raises(
        BadSample, match=rf"sample 4 of .*some\.tokens .*token 3 \(token 31 of the file\) is {token}.* 600;"
    ):
        data.batch_of([9, 4])
    data.batch_of([9, 3])


def test_a_reader_that_is_sent_the_dataset_of_a_file_that_was_written_anew_refuses_it(file: Path):
    sent = pickle.dumps(TokenFile(file, 7))
    write(file, [np.arange(60) % 7], np.array([60]), vocabulary=600)
    with pytest.raises(RunFailed, match=r"some\.tokens has changed .*its header is another one"):
        pickle.loads(sent).batch_of([0])


@pytest.mark.parametrize("change", ["shorter", "written anew", "replaced", "removed"])
def test_a_file_that_changes_under_the_run_ends_it(file: Path, change: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "LOOK_AGAIN", 0.0)
    data = TokenFile(file, 7)
    data[0]
    match change:
        case "shorter":
            os.truncate(file, 100)
        case "written anew":
            os.utime(file, ns=(1, 1))
        case "replaced":
            other = file.with_name("other")
            other.write_bytes(file.read_bytes())
            os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
            other.replace(file)
        case "removed":
            file.unlink()
    with pytest.raises(RunFailed, match=r"some\.tokens has changed"):
        data.batch_of([1])


def test_a_model_that_knows_fewer_tokens_is_refused(file: Path):
    with pytest.raises(UserError, match=r"vocabulary of 600 but the model knows only 512; .*--vocabulary"):
        TokenFile(file, 7, vocabulary=512)
    TokenFile(file, 7, vocabulary=600)


def test_files_that_are_none_are_sentences(file: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"is a folder and not a token file; meshrun convert-data .* makes one"):
        TokenFile(tmp_path, 7)
    whole = file.read_bytes()
    for content, said in [
        (b"", "is not a token file"),
        (b"What is this?" * 30, "is not a token file"),
        (whole[:-2], r"has [\d,]+ bytes, but its header speaks of"),
        (whole + b"x", r"has [\d,]+ bytes, but its header speaks of"),
        (whole.replace(b'"U16"', b'"F16"'), "tokens of type F16"),
    ]:
        bad = tmp_path / "bad.tokens"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=said) as error:
            TokenFile(bad, 7)
        assert "bad.tokens" in str(error.value)
    write(tmp_path / "empty.tokens", [], np.array([], np.int64), vocabulary=5)
    with pytest.raises(UserError, match="is empty"):
        TokenFile(tmp_path / "empty.tokens", 7)
    with pytest.raises(UserError, match="No such file"):
        TokenFile(tmp_path / "none.tokens", 7)


def test_what_cannot_be_cut_from_the_file_is_a_sentence(file: Path):
    with pytest.raises(UserError, match=r"context is 499; it must be at least 1 and below 499.*--context"):
        TokenFile(file, 499)
    with pytest.raises(UserError, match=r"below 61, the tokens of the 2 chosen documents"):
        TokenFile(file, 100, documents=slice(-2, None))
    with pytest.raises(UserError, match=r"documents 50: of .* are none; it has 12"):
        TokenFile(file, 7, documents=slice(50, None))
    with pytest.raises(UserError, match="step 2"):
        TokenFile(file, 7, documents=slice(None, None, 2))
    with pytest.raises(UserError, match="most is 0"):
        TokenFile(file, 7, most=0)
    with pytest.raises(UserError, match=r"some\.tokenizer\.json"):
        _ = TokenFile(file, 7).tokenizer


WHOLE, HEAD, TAIL = None, slice(None, -4), slice(-4, None)


@pytest.mark.parametrize(
    ("documents", "number", "bit"),
    [
        *((WHOLE, 5, bit) for bit in (0x200, 1 << 32, 1 << 62, -1 << 63)),
        *((HEAD, 8, bit) for bit in (0x1, 0x200, 1 << 32, 1 << 40, -1 << 63)),  # the end of the chosen documents
        *((TAIL, 8, bit) for bit in (0x200, 1 << 32, -1 << 63)),  # their start
        *((TAIL, 10, bit) for bit in (0x200, 1 << 40)),
    ],
)
@pytest.mark.parametrize("cross", [False, True])
def test_one_flipped_bit_in_a_start_is_a_sentence_with_file_and_cure(
    file: Path, documents: slice | None, number: int, bit: int, cross: bool
):
    content = bytearray(file.read_bytes())
    at = read_layout(file).starts_at + 8 * number
    flipped = struct.unpack_from("<q", content, at)[0] ^ bit
    struct.pack_into("<q", content, at, flipped)
    file.write_bytes(content)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    starts[number] = flipped
    if starts[number - 1] <= flipped <= starts[number + 1]:  # such a flip is found by the checksum alone
        TokenFile(file, 7, documents=documents, cross=cross)
        return
    with pytest.raises(UserError, match=r"some\.tokens is damaged: its document .*; copy or convert it again"):
        TokenFile(file, 7, documents=documents, cross=cross)


def test_starts_of_ten_million_documents_are_checked_in_a_moment(tmp_path: Path):
    path = sparse_file(tmp_path, documents=10_000_000, tokens=20)
    began = time.process_time()
    data = TokenFile(path, 8)
    assert time.process_time() - began < 1.0
    inputs, _ = data.batch_of([len(data) - 1])
    assert inputs["documents"].tolist() == [[0] * 8]


def test_a_header_that_lies_about_its_tensors_is_a_sentence(file: Path):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    tokens, starts = header["tokens"]["data_offsets"], header["starts"]["data_offsets"]
    for tensor, field, value in [
        ("tokens", "shape", [-499]),
        ("tokens", "shape", [499.0]),
        ("tokens", "shape", [True]),
        ("tokens", "data_offsets", [tokens[0] - 8, tokens[1] - 8]),
        ("starts", "data_offsets", [starts[0] + 8, starts[1] + 8]),
        ("starts", "data_offsets", [tokens[0], tokens[0] + starts[1] - starts[0]]),
        ("starts", "shape", [0]),
        ("__metadata__", "vocabulary", "-5"),
        ("__metadata__", "vocabulary", "9" * 30),
        ("__metadata__", "documents", "11"),
        ("__metadata__", "sha256", 5),
    ]:
        lie = {**header, tensor: {**header[tensor], field: value}}
        text = json.dumps(lie).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        with pytest.raises(UserError, match=r"some\.tokens"):
            TokenFile(file, 7)


def test_a_gap_between_the_tensors_is_a_sentence(file: Path):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    first, second = sorted(("tokens", "starts"), key=lambda name: header[name]["data_offsets"])
    end = header[first]["data_offsets"][1]
    header[second]["data_offsets"] = [each + 8 for each in header[second]["data_offsets"]]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body[:end] + bytes(8) + body[end:])
    with pytest.raises(UserError, match="is not a token file"):
        TokenFile(file, 7)


@pytest.mark.parametrize(
    ("starts", "chosen"), [([0, 5, 3, 9], (2, 3)), ([0, 5, 3, 9], (0, 1)), ([0, 3, 12, 9], (0, 1))]
)
def test_a_choice_next_to_documents_that_do_not_follow_each_other_is_refused(
    starts: list[int], chosen: tuple[int, int]
):
    """One of the numbers between them is wrong, and nobody knows which one."""
    with pytest.raises(UserError, match="token file x is damaged: its document 1 spans"):
        tokens._checked(Path("x"), np.array(starts), *chosen, 9)


def test_only_the_tokenizer_that_made_a_file_is_taken_for_its_own(file: Path):
    data, beside = TokenFile(file, 7), tokenizer_beside(file)
    with pytest.raises(UserError, match=r"the tokenizer of .* cannot be read"):
        assert data.tokenizer
    beside.write_bytes(b"words")
    assert data.tokenizer == beside, "an earlier version has not said which one it was"
    for content, is_own in ((b"words", True), (b"other words", False)):
        data.layout = replace(data.layout, tokenizer_sha256=hashlib.sha256(content).hexdigest())
        with contextlib.nullcontext() if is_own else pytest.raises(UserError, match="is not the tokenizer that made"):
            assert data.tokenizer == beside
