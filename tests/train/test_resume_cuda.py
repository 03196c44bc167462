"""State on a GPU: saved through pinned memory, resumed bit for bit, and found again after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun import Experiment, mesh
from meshrun.mesh import Meeting
from meshrun.state import catalog
from meshrun.state.checkpoint import Checkpoint
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.train.test_resume import assert_equal, llama, noisy, result_of, seeded
from tests.train.whole import Result, assert_same

pytestmark = pytest.mark.gpu


def trainer_on_gpu(layout: str, folder: Path | None, experiment: Experiment, every: Every | None = None) -> Trainer:
    mesh.use(Meeting(layout=layout, device="cuda", backend="gloo"))
    keeping = Keeping(folder, every=every or Every(never=True)) if folder is not None else None
    return Trainer(experiment, mesh.start(), keeping=keeping)


def stop_at(cut: int, trainer: Trainer) -> None:
    for update in trainer.steps():
        if trainer._to_be_evaluated(trainer.step):
            trainer._evaluate_and_keep()
        if update.step == cut:
            break
    assert trainer.keeper is not None
    trainer.keeper.finish()


def interrupted_and_uninterrupted(layout: str, experiment: Experiment, folder: Path) -> tuple[Result, Result]:
    trainer_on_gpu(layout, None, experiment)
    seeded()
    wanted = result_of(trainer_on_gpu(layout, None, experiment))
    seeded()
    stop_at(4, trainer_on_gpu(layout, folder, experiment, Every(steps=4)))
    again = trainer_on_gpu(layout, folder, experiment)
    found = again.resume()
    assert found is not None and found["step"] == 4
    return result_of(again), wanted


def test_alone_on_a_gpu_it_goes_on_bit_for_bit(tmp_path: Path):
    try:
        assert_equal(*interrupted_and_uninterrupted("dp=1", noisy(8), tmp_path))
        checkpoint = Checkpoint.open(catalog.complete(tmp_path)[-1])
        assert checkpoint.verify() == [] and "rng/0/cuda" in checkpoint.tensors
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
@pytest.mark.ranks(2, timeout=120)
def test_on_ranks_that_share_a_gpu_it_goes_on(layout: str, tmp_path: Path):
    # Gradients of a table are added up in an order that differs from run to run on a GPU.
    assert_same(*interrupted_and_uninterrupted(layout, llama(), tmp_path))


def saved_by_two(folder: Path) -> None:
    stop_at(3, trainer_on_gpu("fsdp=2", folder, llama(), Every(steps=3)))


def test_what_a_gpu_has_saved_goes_on_on_a_cpu(tmp_path: Path):
    from tests.ranks import run_on_ranks

    run_on_ranks(__file__, "saved_by_two", 2, {"folder": tmp_path}, 120)
    try:
        mesh.use(Meeting(device="cpu"))
        wanted = result_of(Trainer(llama(), mesh.start()))
        again = Trainer(llama(), mesh.start(), keeping=Keeping(tmp_path, every=Every(never=True)))
        assert again.resume() is not None
        assert_same(result_of(again), wanted, tolerance=1e-4)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


def run_digits(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "meshrun",
        "run",
        "digits",
        "--procs",
        "2",
        "--device",
        "cuda",
        "--backend",
        "gloo",
    ]
    command += ["--steps", "120", "--runs", str(folder), "--json", "--checkpoint", "20", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / "digits-1" / "events" / f"rank-{rank:05d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_a_rank_killed_on_a_gpu_is_replaced_and_the_result_is_the_same(layout: str, tmp_path: Path):
    assert torch.cuda.device_count() > 0
    whole = run_digits(tmp_path / "whole", "--layout", layout)
    wanted = json.loads(whole.communicate(timeout=120)[0])
    process = run_digits(tmp_path / "killed", "--layout", layout)
    give_up = time.monotonic() + 60
    while not any(each["kind"] == "step" and each["step"] > 50 for each in events(tmp_path / "killed", 1)):
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.02)
    os.kill(next(each["pid"] for each in events(tmp_path / "killed", 1) if each["kind"] == "start"), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert any(each["kind"] == "resumed" for each in events(tmp_path / "killed", 0))
    # Convolutions on a GPU add up in an order that differs from run to run.
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-3)
    assert found["sample_ids_sha256"] == wanted["sample_ids_sha256"]
