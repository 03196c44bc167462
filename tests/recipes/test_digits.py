"""The digits recipe: real digits, learnt well, and to the same losses on any number of processes."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrun import RunFailed, UserError, mesh
from meshrun.data import staging
from meshrun.recipes import digits
from meshrun.recipes.digits import DATA, Digits, Net, experiment
from meshrun.train.loop import Trainer
from tests.data.server import Server
from tests.ranks import run_on_ranks
from tests.recipes.running import result

STEPS = 30
SIZES = {"train": 22_000, "val": 2_000, "test": 10_000}


@pytest.mark.parametrize("split", SIZES)
def test_a_split_holds_pictures_of_all_ten_digits(split: str):
    data = Digits(split)
    assert len(data) == len(data.images) == len(data.labels) == SIZES[split]
    image, label = data[0]
    assert (image.shape, image.dtype, label.dtype) == ((1, 28, 28), torch.uint8, torch.int64)
    shares = data.labels.bincount(minlength=10) / len(data)
    assert len(shares) == 10 and shares.min() > 0.07 and shares.max() < 0.13
    ink = (data.images > 0).float().mean((1, 2, 3))
    assert 0.15 < ink.mean() < 0.25 and ink.min() > 0.02, "strokes on an empty ground"
    assert data.images.amax((1, 2, 3)).min() > 200


def test_a_batch_is_its_samples():
    data = Digits("val")
    images, labels = data.batch_of([7, 0, 1999])
    assert torch.equal(images, torch.stack([data[i][0] for i in (7, 0, 1999)]))
    assert torch.equal(labels, torch.stack([data[i][1] for i in (7, 0, 1999)])) and data.light


def test_all_of_mnist_is_trained_on_once_it_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = staging.Place(tmp_path / "staged", "meshrun stage digits")
    monkeypatch.setattr(staging, "_place", place)
    with pytest.raises(UserError, match=r"mnist\.npz is not here; on a machine with internet: meshrun stage digits"):
        experiment(full=True)
    whole = io.BytesIO()
    random = np.random.default_rng(0)
    parts = {"train": 2_100, "test": 30}
    pictures = {f"x_{part}": random.integers(0, 256, (count, 28, 28), np.uint8) for part, count in parts.items()}
    labels = {f"y_{part}": random.integers(0, 10, count, np.uint8) for part, count in parts.items()}
    np.savez_compressed(whole, **pictures, **labels)
    with Server({"mnist.npz": whole.getvalue()}) as server, staging.staging(place.folder) as stage:
        monkeypatch.setattr(digits, "MNIST", f"{server.url}/mnist.npz")
        with pytest.raises(RunFailed, match=r"checksum|sha256"):
            digits.stage_data(stage)
        monkeypatch.setattr(digits, "MNIST_SHA256", hashlib.sha256(whole.getvalue()).hexdigest())
        digits.stage_data(stage)
    made = experiment(full=True)
    assert (len(made.train), *map(len, made.evals.values())) == (100, 2_000, 30)
    assert np.array_equal(made.train[0][0][0].numpy(), pictures["x_train"][2_000])
    assert made.evals["test"][29][1] == int(labels["y_test"][29])


def test_no_picture_is_in_two_splits():
    pictures = {split: {image.numpy().tobytes() for image in Digits(split).images} for split in SIZES}
    assert len(pictures["train"] | pictures["val"] | pictures["test"]) == sum(map(len, pictures.values()))
    assert sum(map(len, pictures.values())) == sum(SIZES.values()), "nor twice in one"


def test_the_data_is_small_and_loads_without_pickle():
    assert DATA.stat().st_size < 10e6
    with np.load(DATA, allow_pickle=False) as arrays:
        assert sorted(arrays) == ["test_images", "test_labels", "train_images", "train_labels"]


def test_source_and_licence_of_the_data_are_told_beside_it():
    text = (DATA.parent / "README.md").read_text()
    assert DATA.name in text and "MNIST" in text
    assert "LeCun" in text and "npm" in text and "licence" in text and "CC BY-SA" in text


def test_the_functions_parameters_reach_model_and_optimizer():
    made = experiment(width=64, lr=0.5)
    assert made.model().hidden.out_features == 64
    assert made.optimizer(made.model().parameters()).param_groups[0]["lr"] == 0.5


def test_the_net_tells_ten_classes_apart():
    assert Net(32)(Digits("val").images[:3]).shape == (3, 10)


@pytest.mark.ranks(2)
def test_two_ranks_learn_to_read_in_120_steps():
    mesh.use(mesh.Meeting(device="cpu"))
    scores = Trainer(replace(experiment(width=32, lr=6e-3), steps=120)).train()["eval"]
    assert scores["val"]["count"] == SIZES["val"] and scores["test"]["count"] == SIZES["test"]
    assert scores["test"]["accuracy"] > 0.9 and scores["val"]["accuracy"] > 0.9


def train(folder: Path, micro: int | None = None) -> None:
    """The body of a rank; rank 0 writes down what came out."""
    mesh.use(mesh.Meeting(device="cpu"))
    found = Trainer(replace(experiment(width=32), steps=STEPS, micro=micro)).train()
    if mesh.start().rank == 0:
        (folder / "result.json").write_text(json.dumps({**found, "world": mesh.start().size}))


def by_ranks(folder: Path, ranks: int, micro: int | None = None) -> dict[str, Any]:
    run_on_ranks(__file__, "train", ranks, {"folder": folder, "micro": micro}, 60)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_any_number_of_processes_trains_to_the_same_losses(tmp_path: Path):
    """64 is not divisible by three, nor 32 by five. One of them is as a user runs it."""
    one = by_ranks(tmp_path, 1)
    assert (one["world"], len(one["losses"])) == (1, STEPS)
    assert one["losses"][-1] < 0.9 * one["losses"][0]
    words = ("--steps", str(STEPS), "--width", "32", "--device", "cpu", "--no-tensorboard")
    by_a_user = result(tmp_path, *words, "--procs", "2", "--micro", "5")
    assert (by_a_user["layout"], by_a_user["steps"]) == ("dp=2", STEPS)
    for many, world in ((by_ranks(tmp_path, 3), 3), (by_a_user, 2)):
        assert (many["world"], len(many["losses"])) == (world, STEPS)
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)
        assert many["sample_ids_sha256"] == one["sample_ids_sha256"]
        for split, scores in one["eval"].items():
            assert many["eval"][split]["count"] == scores["count"] == SIZES[split]
            assert many["eval"][split]["accuracy"] == scores["accuracy"]
            assert many["eval"][split]["loss"] == pytest.approx(scores["loss"], rel=1e-5)
