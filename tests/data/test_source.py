"""What all sources share: files that must stay as they are, what each process opens, pictures that are kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrun.data.convert.work import SHOWN, Bad
from meshrun.data.sources import kept
from meshrun.data.sources.kept import Kept, is_small
from meshrun.data.sources.source import OncePerProcess, Watched, inside
from meshrun.errors import BadSample, RunFailed


def test_a_process_that_was_forked_opens_anew(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    opened = OncePerProcess(lambda: made.append(1) or len(made))
    assert (opened(), opened()) == (1, 1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert (opened(), opened()) == (2, 2)


def test_a_file_that_was_replaced_by_one_of_the_same_size_and_time_is_noticed(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(b"old")
    watched, found = Watched(path), path.stat()
    watched.check()
    (tmp_path / "new").write_bytes(b"new")
    os.utime(tmp_path / "new", ns=(found.st_atime_ns, found.st_mtime_ns))
    (tmp_path / "new").rename(path)
    with pytest.raises(RunFailed, match="has changed while it is being trained on"):
        watched.look()


def test_numbers_of_samples_begin_with_0_and_end_before_their_count():
    assert inside([0, 4], 5).tolist() == [0, 4] and inside([], 5).tolist() == []
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"there is no sample {wrong}: they are numbered from 0 to 4"):
            inside([0, wrong], 5)


def test_a_set_is_kept_unasked_if_it_is_small_beside_the_free_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "free_memory", lambda: 1000)
    assert is_small(100) and not is_small(101)
    monkeypatch.setattr(kept, "free_memory", lambda: kept.SMALL * 100)
    assert is_small(kept.SMALL) and not is_small(kept.SMALL + 1)


@pytest.mark.parametrize(("handy", "all_there"), [(2 * 3 * 4 * 4, True), (2 * 3 * 4 * 4 - 1, False)])
def test_a_set_that_is_too_large_to_be_copied_by_the_rank_is_left_to_readers(
    handy: int, all_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept, "HANDY", handy)
    pictures = Kept(f"pictures {tmp_path}", count=2, size=4, keep=True)
    assert not pictures.all_there
    pictures.take(np.array([0, 1]), torch.empty(2, 3, 4, 4, dtype=torch.uint8), lambda number, into: into.fill_(number))
    assert pictures.all_there is all_there


def test_the_first_bad_samples_are_told_and_all_are_counted():
    bad = Bad()
    for number in range(SHOWN + 3):
        bad.add(BadSample(f"sample {number} cannot be read; repair it"))
    assert bad.count == SHOWN + 3 and len(bad.why) == SHOWN
    assert bad.why[0] == "sample 0 cannot be read"
