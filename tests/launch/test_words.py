"""What a launcher leaves in memory for its ranks, and what ranks show it while they write."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from meshrun.launch.words import Word, word_of_the_launcher, writing


def said(memory: Path, generation: int, ranks: list[int], final: bool) -> None:
    (memory / f"dead-{generation}.json").write_text(json.dumps({"ranks": ranks, "final": final}))


@pytest.mark.parametrize("final", [False, True])
def test_who_is_dead_and_whether_it_is_over_is_read_for_this_start_alone(tmp_path: Path, final: bool):
    said(tmp_path, 0, [5], not final)
    said(tmp_path, 2, [1, 3], final)
    assert word_of_the_launcher(tmp_path, 2) == Word(frozenset({1, 3}), final)
    assert word_of_the_launcher(tmp_path, 1) is None


def test_a_word_is_waited_for_and_half_a_word_is_none(tmp_path: Path):
    (tmp_path / "dead-0.json").write_text('{"ranks": [')
    began = time.monotonic()
    assert word_of_the_launcher(tmp_path, 0, within=0.2) is None
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.1, said, (tmp_path, 0, [2], False)).start()
    assert word_of_the_launcher(tmp_path, 0, within=20) == Word(frozenset({2}), False)


def test_a_rank_that_writes_is_seen_until_it_has_written_or_failed(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path, 3):
        assert [path.name for path in tmp_path.iterdir()] == ["words-3.busy"]
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
