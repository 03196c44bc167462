"""Curves for TensorBoard: which steps are points, and a disk that takes none of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.observe.board import Board


class Writer:
    def __init__(self, error: OSError | None = None) -> None:
        self.points: list[tuple[str, int]] = []
        self.error = error

    def add_scalar(self, name: str, _value: float, step: int) -> None:
        if self.error is not None:
            raise self.error
        self.points.append((name, step))

    def close(self) -> None:
        pass


def board_with(writer: Writer, folder: Path) -> Board:
    made = Board(folder, folder / "events")
    made._writer = writer  # type: ignore[assignment]
    return made


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "samples": 8, "seconds": 0.0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1}


def test_the_first_step_and_every_tenth_are_points(tmp_path: Path):
    writer = Writer()
    board = board_with(writer, tmp_path)
    for number in range(1, 21):
        board.add(step(number))
    assert [at for name, at in writer.points if name == "train/loss"] == [1, 10, 20]


def test_of_an_evaluation_counts_are_no_curves(tmp_path: Path):
    writer = Writer()
    board_with(writer, tmp_path).add({"kind": "eval", "step": 5, "scores": {"val": {"loss": 1.0, "count": 9.0}}})
    assert writer.points == [("val/loss", 5)]


def test_a_disk_that_takes_no_curves_ends_nothing_and_is_tried_again_a_while_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writer, now = Writer(), [100.0]
    board = board_with(Writer(OSError(28, "No space left on device")), tmp_path)
    monkeypatch.setattr(board, "_open", lambda: setattr(board, "_writer", writer))
    monkeypatch.setattr(writer, "flush", lambda: None, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board.add(step(1))
    now[0] += 9
    board.add(step(10))
    assert board._writer is None
    now[0] += 2
    board.add(step(20))
    assert board._writer is writer


def test_the_thread_that_writes_curves_ends_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    writing = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    board = Board.open(tmp_path / "curves", tmp_path / "events")
    assert board is not None
    monkeypatch.setattr(writing, "write", refuse)
    board.add(step(1))
    board.close()
    other = threading.Thread(target=refuse)
    other.start()
    other.join()
    assert [each.thread for each in told] == [other]
