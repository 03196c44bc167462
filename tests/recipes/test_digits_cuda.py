"""The digits recipe on a GPU, alone and shared, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.running import result, run

pytestmark = pytest.mark.gpu

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# A convolution in TF32 rounds by the algorithm that cuDNN picks for a size of batch, not by the rank.
FULL_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SHORT = ("--steps", "20", "--device", "cuda")


def test_the_gpu_trains_to_the_losses_of_the_cpu(tmp_path: Path):
    gpu = result(tmp_path, *SHORT, "--procs", "1", **FULL_FP32)
    cpu = result(tmp_path, "--steps", "20", "--device", "cpu")
    assert (gpu["device"], cpu["device"]) == ("cuda:0", "cpu")
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-3)
    assert gpu["grad_norms"] == pytest.approx(cpu["grad_norms"], rel=1e-2)
    assert gpu["sample_ids_sha256"] == cpu["sample_ids_sha256"]
    for split, scores in cpu["eval"].items():
        assert gpu["eval"][split]["count"] == scores["count"]
        assert gpu["eval"][split]["accuracy"] == pytest.approx(scores["accuracy"], abs=5e-3)


def test_the_gpu_is_taken_without_being_asked_for(tmp_path: Path):
    assert result(tmp_path, "--steps", "2", **ONE_GPU)["device"] == "cuda:0"


def test_every_loss_is_recorded_in_order_though_it_is_read_one_update_later(tmp_path: Path):
    document = result(tmp_path, *SHORT, "--procs", "1", "--eval-every", "7")
    events = (Path(document["run"]) / "events" / "rank-00000.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, events) if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 21))
    assert [event["loss"] for event in steps] == document["losses"]
    assert len(set(document["losses"])) == 20, "each step has its own loss, none is read twice"
    assert document["losses"][-1] < document["losses"][0]
    evals = [event["step"] for event in map(json.loads, events) if event["kind"] == "eval"]
    assert evals == [7, 14, 20]


def test_one_rank_under_torchrun_trains_as_without(tmp_path: Path):
    alone = result(tmp_path, *SHORT, "--procs", "1", **ONE_GPU, **FULL_FP32)
    launched = result(tmp_path, *SHORT, launcher=(*TORCHRUN, "1"), **ONE_GPU, **FULL_FP32)
    assert (launched["world"], launched["device"]) == (1, "cuda:0")
    assert launched["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_two_ranks_on_one_gpu_over_gloo_train_as_one_does(tmp_path: Path):
    one = result(tmp_path, *SHORT, "--procs", "1", **ONE_GPU, **FULL_FP32)
    two = result(tmp_path, *SHORT, "--procs", "2", "--backend", "gloo", **ONE_GPU, **FULL_FP32)
    assert (two["world"], two["device"]) == (2, "cuda:0")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["sample_ids_sha256"] == one["sample_ids_sha256"]
    for split, scores in one["eval"].items():
        assert two["eval"][split]["count"] == scores["count"]
        assert two["eval"][split]["accuracy"] == pytest.approx(scores["accuracy"], abs=2e-4)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--device", "cuda"), "shows 1 GPU but 2 ranks are to run there"),
        ((), "ranks 0 and 1 would share the GPU"),
        (("--backend", "nccl"), "ranks 0 and 1 would share the GPU"),
    ],
    ids=["asked-for", "auto", "nccl"],
)
def test_two_ranks_on_one_gpu_over_nccl_are_refused(words: tuple[str, ...], said: str, tmp_path: Path):
    done = run(tmp_path, "--steps", "2", "--procs", "2", *words, **ONE_GPU)
    assert done.returncode == 2
    assert said in done.stderr and "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_bf16_trains_close_to_fp32(tmp_path: Path):
    words = ("--steps", "60", "--device", "cuda", "--procs", "1")
    fp32, bf16 = result(tmp_path, *words), result(tmp_path, *words, "--precision", "bf16")
    assert bf16["losses"][0] == pytest.approx(fp32["losses"][0], rel=2e-2)
    assert bf16["losses"] != fp32["losses"]
    assert bf16["eval"]["test"]["accuracy"] == pytest.approx(fp32["eval"]["test"]["accuracy"], abs=0.03)
    assert bf16["eval"]["test"]["accuracy"] > 0.75
