"""Token files: windows of all documents, documents kept apart, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from meshrun import TokenFile
from meshrun.data.sources import source
from meshrun.data.sources.token_format import read_layout, sha256_of_numbers, write
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
    for wrong in (-1, len(data)):
        with pytest.raises(IndexError, match=f"there is no sample {wrong}"):
            data.batch_of([0, wrong])


def test_documents_are_chosen_as_from_a_list(file: Path):
    ends = np.cumsum(LENGTHS)
    head, tail = (TokenFile(file, 5, documents=each, cross=True) for each in (slice(None, -2), slice(-2, None)))
    assert head[0][0][0] == 1 and head[len(head) - 1][1][-1] <= ends[-3]
    assert tail[0][0][0] == ends[-3] + 1 and len(tail) == (61 - 1) // 5
    assert {head.fingerprint, tail.fingerprint}.isdisjoint({TokenFile(file, 5, cross=True).fingerprint})


def test_most_keeps_windows_that_are_evenly_spread(file: Path):
    some = TokenFile(file, 5, most=10, cross=True)
    first = [int(some[index][0][0]) for index in range(len(some))]
    assert len(first) == 10 and first[0] == 1
    assert set(np.diff(first)) <= {45, 50}  # of 99 windows every ninth or tenth


def test_the_file_is_one_that_safetensors_reads_and_says_its_own_sum(file: Path):
    tensors = load_file(file)
    assert tensors["tokens"].dtype == np.uint16 and tensors["starts"].tolist() == [0, *np.cumsum(LENGTHS)]
    layout = read_layout(file)
    assert sha256_of_numbers(file, layout) == layout.sha256
    again = file.with_name("again.tokens")
    write(again, np.split(np.arange(1, LENGTHS.sum() + 1), [3, 100]), LENGTHS, vocabulary=600)
    assert again.read_bytes() == file.read_bytes()


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
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


def test_a_billion_windows_cost_nothing(tmp_path: Path):
    path, count = tmp_path / "huge.tokens", 1_000_000_001
    metadata = {"format": "meshrun-tokens-1", "vocabulary": "9", "documents": "1", "sha256": "0" * 64}
    header = {
        "__metadata__": metadata,
        "starts": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "tokens": {"dtype": "U16", "shape": [count], "data_offsets": [16, 16 + 2 * count]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as sparse:
        sparse.write(struct.pack("<Q", len(text)) + text + struct.pack("<qq", 0, count))
        sparse.truncate(8 + len(text) + 16 + 2 * count)
    began = time.process_time()
    data = TokenFile(path, 1)
    data.batch_of([0, 999_999_999])
    assert len(data) == 1_000_000_000 and time.process_time() - began < 0.5


def test_a_token_beyond_the_vocabulary_is_a_bad_sample_and_others_are_not(file: Path):
    content = bytearray(file.read_bytes())
    at = read_layout(file).tokens_at + 2 * 31
    content[at : at + 2] = struct.pack("<H", 5000)
    file.write_bytes(content)
    data = TokenFile(file, 7)
    with pytest.raises(
        BadSample, match=r"sample 4 of .*some\.tokens .*token 3 \(token 31 of the file\) is 5000.* 600;"
    ):
        data.batch_of([9, 4])
    data.batch_of([9, 3])


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
