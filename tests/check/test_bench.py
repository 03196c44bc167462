"""`meshrun bench`: sides train the same, take turns, are compared; a step is counted; a rank of many runs alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshrun import Experiment, cross_entropy, mesh
from meshrun.check import bench_process
from meshrun.check.bench_count import Counts, count
from meshrun.check.bench_peers import MESHRUN, PEERS
from meshrun.check.bench_rank import fitted, measured, resolved, tokens_of
from meshrun.check.bench_roofline import Device, facts, sentence, shares_of, unsteady
from meshrun.check.bench_side import Built, Entry, Taken, Turn
from meshrun.check.bench_task import OwnLoop, Task
from meshrun.check.bench_turns import in_order, ratios, take_turns, to_be_let_go
from meshrun.cli.bench import bench_command
from meshrun.cli.bench_sides import task_of
from meshrun.cli.bench_table import document_of
from meshrun.config import RunConfig
from meshrun.errors import UserError
from meshrun.layout import parse
from meshrun.parallel.how import How
from meshrun.recipes import llama
from meshrun.train import reading
from meshrun.train.loop import Trainer
from meshrun.world import environment

CPU = torch.device("cpu")


class Vectors:
    light = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.linspace(-1, 1, 8) * (index % 7 - 3), index % 3


def small(precision: str = "fp32", **changes: object) -> Experiment:
    fields: dict[str, object] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        "train": Vectors(),
        "loss": cross_entropy,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),  # which shows how long gradients are
        "batch": 16,
        "steps": 40,
        "clip": 0.1,
        "schedule": lambda step, _: 1 / (1 + step),
        "precision": precision,
    }
    return Experiment(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    mesh.finish()
    mesh.use(mesh.Meeting())


def first_losses(name: str, task: Task, steps: int = 6) -> list[float]:
    side = ({"meshrun": MESHRUN} | PEERS)[name].make(task)
    try:
        return [float(getattr(each, "loss", each)) for each in itertools.islice(side, steps)]
    finally:
        side.close()


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.compiles and name != "torchtitan"])
def test_every_peer_trains_what_meshrun_does(name: str):
    """Same weights, batches, schedule and clipping: else the losses of later steps would not be the same."""
    if PEERS[name].missing:
        pytest.skip(str(PEERS[name].missing))
    task = Task(small(), How(), CPU, workers=0)
    ours = first_losses("meshrun", task)
    assert first_losses(name, task) == pytest.approx(ours, rel=1e-5)
    assert len(set(ours)) == 6


def test_augmented_samples_are_the_same_on_all_sides():
    task = Task(small(augment=lambda inputs, draws: inputs * draws.uniform()), How(), CPU, workers=0)
    assert first_losses("bare", task) == pytest.approx(first_losses("meshrun", task), rel=1e-5)
    plain = Task(small(), How(), CPU, workers=0)
    assert first_losses("bare", plain)[0] != pytest.approx(first_losses("bare", task)[0], rel=1e-4)


def test_a_trainer_with_a_loop_of_its_own_waits_to_be_asked_and_stops_when_told():
    done: list[int] = []

    def body(tell):
        for number in range(100):
            done.append(number)
            if not tell(number):
                return

    side = OwnLoop(body)
    assert [next(side), next(side)] == [0, 1]
    time.sleep(0.05)
    assert done == [0, 1]
    side.close()
    assert done == [0, 1]


def test_what_fails_in_a_loop_of_its_own_is_seen_by_who_asks():
    def body(tell):
        tell(1)
        raise ValueError("no")

    side = OwnLoop(body)
    assert next(side) == 1
    with pytest.raises(ValueError, match="no"):
        next(side)


def counting(seconds: float, fails: bool = False) -> Iterator[float]:
    for number in itertools.count():
        if fails and number == 2:
            raise ValueError("it broke")
        time.sleep(seconds)
        yield 1.0 / (1 + number)


def test_sides_take_turns_in_processes_of_their_own():
    entries = [
        Entry("slow", functools.partial(counting, 0.1), samples=4),
        Entry("fast", functools.partial(counting, 0.005), samples=4),
        Entry("broken", functools.partial(counting, 0.0, fails=True), samples=4),
        Entry("absent", functools.partial(counting, 0.0), samples=4, packages=("no_such_package",)),
    ]
    taken = take_turns(entries, rounds=3, steps=5, device=CPU)
    assert len(taken["slow"].turns) == len(taken["fast"].turns) == 3
    assert taken["slow"].built is not None and taken["slow"].built.losses == [1.0, 0.5, pytest.approx(1 / 3)]
    found = ratios(taken["fast"], taken["slow"])
    assert found is not None and 1.5 < found[0] < 25 and found[1] <= found[0] <= found[2]
    assert "it broke" in str(taken["broken"].error) and not taken["broken"].turns
    assert "no_such_package" in str(taken["absent"].error)
    assert ratios(taken["fast"], taken["broken"]) is None


def refusing() -> Iterator[float]:
    raise UserError("the optimizer is SGD (--states fp32)")
    yield 0.0


def test_what_the_user_gave_ends_all_before_any_round_where_nothing_can_be_compared_without():
    said: list[str] = []
    entries = [Entry("meshrun", refusing, samples=4, needed=True), Entry("bare", refusing, samples=4)]
    with pytest.raises(bench_process.Refused) as caught:
        take_turns(entries, rounds=2, steps=2, device=CPU, say=said.append)
    assert str(caught.value) == "the optimizer is SGD (--states fp32)"
    assert not said
    taken = take_turns([Entry("bare", refusing, samples=4)], rounds=1, steps=2, device=CPU)
    assert taken["bare"].error == "the optimizer is SGD (--states fp32)"


def test_memory_is_made_by_those_that_are_soon_built_again_and_no_more_than_needed():
    held, cost = {"a": 10, "b": 30, "c": 0}, {"a": 5.0, "b": 6.0, "c": 1.0}
    assert to_be_let_go(40, held, cost, 100) == []
    assert to_be_let_go(60, held, cost, 100) == ["b"]
    assert to_be_let_go(60, held, cost | {"a": 1.0}, 100) == ["a"]
    assert to_be_let_go(90, held, cost, 100) == ["b", "a"]
    assert to_be_let_go(900, held, cost, 100) == ["b", "a"]


def test_the_order_is_drawn_anew_each_round_where_all_fit_and_else_by_hunger():
    peaks, held = {"a": 10, "b": 30, "c": 20}, {"a": 1, "b": 1, "c": 1}
    assert len({tuple(in_order(peaks, held, 100, number)) for number in range(8)}) > 2
    assert in_order(peaks, held, 30, 0) == ["b", "c", "a"]
    assert in_order(peaks, held, 30, 1) == ["a", "c", "b"]


def taken(name: str, losses: list[float], seconds: float = 1.0) -> Taken:
    entry = Entry(name, functools.partial(counting, 0.0), samples=8)
    return Taken(entry, Built(1.0, losses, 0, 0), tuple(Turn(10, seconds, 1.0, 0.0) for _ in range(3)))


def test_a_side_with_other_losses_is_void():
    from meshrun.cli.bench_sides import About

    counts = Counts(8e9, 0.0, 1e6, 1e6, 10, 1000)
    about = About(8, 0.0, "fp32", False, counts, "", Device("a", 1e12, None, 1e11, 1e-6))
    ours = taken("meshrun", [2.0, 1.9, 1.8])
    sides = {
        "meshrun": ours,
        "bare": taken("bare", [2.0, 1.9, 1.8001], 2.0),
        "fabric": taken("fabric", [2.0, 1.9, 1.7]),
    }
    document = document_of(about, sides, {"deepspeed": "deepspeed is not installed"})
    assert document["ratios"] == {"vs_bare": 2.0, "vs_fabric": None}
    rows = {row["side"]: row for row in document["rows"]}
    assert rows["bare"]["losses_agree"] and not rows["fabric"]["losses_agree"]
    assert "void" in rows["fabric"]["note"] and "5.6%" in rows["fabric"]["note"]
    assert rows["meshrun"]["mfu"] == pytest.approx(8e9 / 0.1 / 1e12)
    assert document["left_out"] == [{"side": "deepspeed", "why": "deepspeed is not installed"}]
    json.dumps(document)


def test_a_side_that_failed_says_why_in_its_row():
    from meshrun.cli.bench_sides import About

    about = About(8, 0.0, "fp32", False, None, "it looks at numbers", Device("a", 1e12, None, 1e11, 1e-6))
    failed = Taken(Entry("bare", functools.partial(counting, 0.0), samples=8), error="ValueError: it broke")
    row = document_of(about, {"meshrun": taken("meshrun", [2.0]), "bare": failed}, {})["rows"][1]
    assert (row["note"], row["samples_per_s"], row["ratio"]) == ("ValueError: it broke", None, None)


class Attending(nn.Module):
    """One head that looks back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x[:, None].expand(-1, 5, -1)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1, :3]


def test_a_step_is_counted_without_values():
    found = count(small(), CPU)
    # Forward and gradients of weights for both matrices, gradients of inputs for the second.
    assert found.products == 2 * 16 * (8 * 16 * 2 + 16 * 3 * 3)
    assert found.attention == 0
    assert found.parameters == 8 * 16 + 16 + 16 * 3 + 3
    assert found.optimizer == found.parameters * 20
    assert count(small(batch=32), CPU).products == 2 * found.products


def test_causal_attention_counts_what_is_needed():
    found = count(small(model=Attending), CPU)
    pairs = 5 * 6 / 2
    assert found.attention == pytest.approx(3 * 16 * pairs * 2 * (8 + 8))
    assert found.products == 2 * 2 * (16 * 5) * 8 * 24


def test_moments_in_8_bits_are_a_quarter_of_the_bytes():
    of_adam = small(
        model=lambda: nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 3, bias=False)),
        optimizer=lambda params: torch.optim.AdamW(params),
    )
    saved = count(of_adam, CPU).optimizer - count(of_adam, CPU, "8bit").optimizer
    assert saved == pytest.approx(8 * 1024 * 2 * 6, rel=0.01)  # of the first matrix alone: the others are small


def test_a_step_in_bf16_moves_fewer_bytes():
    assert count(small("bf16", batch=64), CPU).traffic < count(small(batch=64), CPU).traffic


def test_sentences_say_what_bounds_a_step():
    device = Device("a", products=800e12, float8=1500e12, bandwidth=4e12, call_s=5e-6)
    step = Counts(products=200e12, attention=13e12, traffic=0.08e12, optimizer=0.03e12, calls=2000, parameters=10**9)
    text = sentence(shares_of(step, device, 0.35, "bf16"))
    assert text == (
        "bound by matrix products: they take 71 % of the step at the pace of a large one, attention 5 %, "
        "memory traffic of other operations at most 6 %, that of the optimizer 2 %"
    )
    assert sentence(shares_of(step, device, 0.35, "float8")) == (
        "of the measured step, 51 % is explained, and nothing takes half of it: matrix products take 38 % of the step "
        "at the pace of a large one, attention 5 %, memory traffic of other operations at most 6 %, that of the "
        "optimizer 2 %; the host takes up to 3 % of the step to start operations"
    )
    tiny = Counts(products=1e9, attention=0, traffic=1e6, optimizer=1e6, calls=2000, parameters=10**5)
    assert sentence(shares_of(tiny, device, 0.012, "bf16")).startswith("bound by the host")
    light = Counts(products=1e12, attention=0, traffic=0.2e12, optimizer=0.01e12, calls=100, parameters=10**6)
    assert sentence(shares_of(light, device, 0.07, "bf16")).startswith("bound by memory traffic")
    assert sentence(shares_of(tiny, device, 0.1, "bf16", data_wait=0.8)).startswith("bound by data")
    assert sentence(shares_of(tiny, device, 1.0, "bf16")).startswith("of the measured step, 0 % is explained")


def test_a_device_that_was_not_equally_fast_all_the_time_is_told():
    steady = Device("a", products=800e12, float8=None, bandwidth=4e12, call_s=5e-6, varied=1.1)
    assert unsteady(steady) is None
    assert "up to 2.4 times slower" in str(unsteady(dataclasses.replace(steady, varied=2.4)))


def test_what_a_gpu_keeps_up_is_told_beside_its_peak():
    counts = Counts(products=1e12, attention=0, traffic=1e9, optimizer=1e9, calls=100, parameters=10**6)
    device = Device("a", products=790e12, float8=None, bandwidth=4e12, call_s=5e-6, lasting=680e12)
    assert "790 TFLOP/s in large matrix products (680 TFLOP/s for a second on end)," in facts(counts, device)[0]


@pytest.mark.parametrize("layout", ["fsdp=8", "dp=2,fsdp=4", "fsdp=4,tp=2"])
def test_one_rank_of_eight_holds_its_share(layout: str):
    whole = sum(each.numel() for each in llama.Llama(llama.PRESETS["tiny"]).parameters())
    experiment = dataclasses.replace(llama.experiment(context=16), precision="bf16")
    on = parse(layout)
    found = measured(fitted(experiment, on, None, 2), How(), on, place=5, device=CPU, steps=2)
    assert found.parameters == pytest.approx(whole / (on.fsdp * on.tp), rel=0.02)
    assert (found.of, found.place, found.batch, found.micro) == (8, 5, on.dp * on.fsdp, 1)
    assert found.tokens_per_s == pytest.approx(16 / found.seconds)
    assert found.chosen["recompute"] == "none"
    assert (found.device, found.precision) == ("cpu", "bf16")


@pytest.mark.parametrize(
    ("layout", "place", "says"),
    [
        ("pp=2,fsdp=2", 0, "layout 'pp=2,fsdp=2' cuts the model into stages"),
        ("dp=4", 0, "on layout 'dp=4' every rank computes the whole model"),
        ("fsdp=4", 4, "place is 4; it must be a rank from 0 to 3"),
    ],
)
def test_ranks_that_cannot_be_alone_are_refused(layout: str, place: int, says: str):
    on = parse(layout)
    with pytest.raises(UserError, match=says):
        measured(fitted(llama.experiment(), on, None, 2), How(), on, place, CPU, steps=2)


def test_what_is_proposed_can_be_measured():
    """Not dp=8, which a run could do."""
    on = parse("tp=8")
    with pytest.raises(UserError, match=r"ranks that work: dp=2,tp=4; dp=4,tp=2 \(--layout\)$"):
        measured(fitted(llama.experiment(), on, None, 2), How(), on, 0, CPU, steps=2)
    with pytest.raises(UserError, match=r"layouts near it: dp=2,fsdp=4; fsdp=8; dp=4,fsdp=2$"):
        resolved(parse("fsdp=3"), 8)
    assert str(resolved(parse("fsdp=*,tp=2"), 8)) == "fsdp=4,tp=2"


def test_tokens_are_the_longest_row_of_whole_numbers():
    assert tokens_of({"a": torch.zeros(7, dtype=torch.int64), "b": torch.ones(9)}) == 7
    assert tokens_of(torch.zeros(3, 4, dtype=torch.int64)) == tokens_of(torch.ones(5)) == 0


def printed(words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert bench_command(words.split()) == 0
    return out.getvalue()


def test_bench_train_prints_one_document():
    document = json.loads(
        printed("train digits --width 8 --batch 16 --rounds 2 --steps 2 --peers bare --device cpu --json")
    )
    assert [row["side"] for row in document["rows"]] == ["meshrun", "bare"]
    assert document["ratios"]["vs_bare"] > 0
    assert all(row["losses_agree"] and row["samples_per_s"] > 0 for row in document["rows"])
    assert document["roofline"]["sentence"].startswith(("bound by", "of the measured step"))
    assert document["chosen"]["recompute"] == "none"


def test_bench_prints_what_bounds_a_step_that_has_readers_and_what_was_chosen_for_it():
    text = printed("digits --width 8 --batch 16 --steps 2 --device cpu --workers 1 --graphs")
    assert "FLOP/s in large matrix products" in text and "a step takes" in text
    assert "bound by" in text or "of the measured step" in text
    assert "not compiled; activations computed twice: none" in text
    assert "steps are not replayed as CUDA graphs: the device is cpu" in text


def test_bench_rank_says_what_its_figures_are_of():
    text = printed("rank llama --of 4 --layout fsdp=4 --context 16 --steps 1 --device cpu")
    assert "rank 0 of 4 on fsdp=4, fp32, global batch 4; measured on cpu" in text
    assert "no memory figure on a CPU" in text and "tokens/s of this rank alone" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train digits --peers fabrik", "peer 'fabrik' is not known; peers are bare"),
        ("train digits --rounds 0", "rounds is 0; it must be at least 1"),
        ("rank llama --layout fsdp=8", "bench rank needs --of: ranks of the job"),
        ("rank llama --of 8 --layout fsdp=3", "layout 'fsdp=3' needs 3 ranks, but the job has 8"),
        ("rank llama --of 8", "bench rank needs --layout: arrangement of these ranks"),
        ("train digits --peers bare,bare", "peer 'bare' is named 2 times"),
        ("train", "bench train needs a TARGET"),
        ("", "bench needs a TARGET"),
        ("trian digits", "'trian' is neither .* bench takes a TARGET, train TARGET, or rank TARGET"),
    ],
)
def test_what_the_user_gave_wrong_is_said_in_a_sentence(words: str, says: str):
    with pytest.raises(UserError, match=says):
        bench_command(words.split())


IN_MEMORY = """
import torch
from torch.utils.data import Dataset, TensorDataset
from meshrun import Experiment, cross_entropy

class Read(TensorDataset):
    light = False

def experiment(kept: bool = True):
    train = (TensorDataset if kept else Read)(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    return Experiment(lambda: torch.nn.Linear(3, 2), train, loss=cross_entropy, optimizer=sgd, batch=4, steps=2)
"""


@pytest.mark.parametrize(("kept", "cores", "readers"), [(True, 9, 0), (False, 9, 8), (False, 3, 2)])
def test_sides_have_the_readers_that_a_run_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, cores: int, readers: int
):
    (tmp_path / "program.py").write_text(IN_MEMORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(reading, "granted", lambda: frozenset(range(9)))
    monkeypatch.setattr(reading, "quota", lambda: cores)  # a container may show more than it lets run
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    task = task_of(RunConfig(target=str(tmp_path / "program.py"), options={"kept": kept}), CPU)
    assert task.workers == readers == Trainer(task.experiment, mesh.start(), how=task.how).reading.workers


def test_peers_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch):
    from meshrun.cli.bench_sides import peers_of

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else there("os"))
    names, left_out = peers_of(None, CPU)
    assert "accelerate" not in names and left_out["accelerate"] == "accelerate is not installed"
    assert "trains only its own models" in left_out["torchtitan"] and "on a CPU" in left_out["bare-compiled"]
    with pytest.raises(UserError, match="cannot compare with accelerate: accelerate is not installed"):
        peers_of("accelerate", CPU)


def test_no_process_is_left_behind():
    with bench_process.Process(CPU) as process:
        pid = process.ask(os.getpid)
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


KILLED = """
import os, time, torch
from meshrun.check import bench_process

if __name__ == "__main__":
    with bench_process.Process(torch.device("cpu")) as process:
        print(process.ask(os.getpid), flush=True)
        process.ask(time.sleep, 300)
"""


def test_modules_that_another_user_has_put_into_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "selectors.py").write_text("import pathlib; pathlib.Path('imported').touch(); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_IS_WORKING_DIRECTORY_SEARCHED", False)
    with bench_process.Process(torch.device("cuda")) as process:  # on a CPU a server of forks may be there already
        assert process.ask(os.getenv, "PYTHONSAFEPATH") == os.getenv("PYTHONSAFEPATH"), "programs have it as it was"
    assert not (tmp_path / "imported").exists()


def test_a_side_ends_amid_its_turn_when_who_asks_is_killed(tmp_path: Path):
    program = tmp_path / "asks.py"
    program.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        side = int(asking.stdout.readline())
        os.kill(side, 0)
        asking.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while Path(f"/proc/{side}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{side}").exists()


@pytest.mark.gpu
def test_sides_on_a_gpu_tell_what_memory_they_need():
    document = json.loads(printed("train digits --width 64 --precision bf16 --rounds 2 --steps 3 --peers bare --json"))
    assert all(row["peak_gib"] > 0 and row["losses_agree"] for row in document["rows"]), document["rows"]
    assert document["ratios"]["vs_bare"] > 0 and document["device"]["products"] > 1e13


@pytest.mark.gpu
def test_one_rank_of_many_on_a_gpu_needs_less_with_more_ranks():
    found = {}
    for layout in ("fsdp=2", "fsdp=16", "fsdp=4,tp=4"):
        on = parse(layout)
        experiment = dataclasses.replace(llama.experiment(preset="20m", context=128), precision="bf16")
        found[layout] = measured(
            fitted(experiment, on, None, 2), How(), on, place=1, device=torch.device("cuda", 0), steps=2
        )
        mesh.finish()
    few, many = found["fsdp=2"], found["fsdp=16"]
    assert few.peak_gib is not None and many.peak_gib is not None and many.peak_gib < few.peak_gib
