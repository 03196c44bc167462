"""The parts for a loop of one's own: a script with them computes on many ranks what it computes on one."""

from __future__ import annotations

import contextlib
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from meshrun import Here, UserError, mean_over_ranks, print0, replicate, save0, shard
from meshrun.data.order import slice_of
from meshrun.layout import parse
from meshrun.train.own import Sharded
from meshrun.world import World
from tests import warm
from tests.train.small import points, small_net, start_on_cpu

ROOT = Path(__file__).parents[2]


def rank() -> int:
    return dist.get_rank()


@pytest.mark.ranks(3)
def test_mean_over_ranks_is_exact_for_uneven_parts():
    start_on_cpu(3)
    totals, counts = [10.0, 1.0, 4.0], [6, 1, 3]
    mean = mean_over_ranks(torch.tensor(totals[rank()]), counts[rank()])
    assert mean.item() == pytest.approx(15 / 10)
    assert mean_over_ranks(torch.tensor(totals[rank()]), torch.tensor(counts[rank()])).item() == pytest.approx(1.5)


@pytest.mark.ranks(3)
def test_mean_over_ranks_of_one_number_is_the_plain_mean():
    start_on_cpu(3)
    assert mean_over_ranks([1.0, 2.0, 6.0][rank()]).item() == pytest.approx(3)
    assert mean_over_ranks(rank() + 1).item() == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 1, 2), (5, 3, 0)], ids=str)
def test_gradients_through_replicate_are_those_of_one_process(sizes: tuple[int, int, int]):
    start_on_cpu(3)
    inputs, targets = points(sum(sizes)).tensors
    first = sum(sizes[: rank()])
    mine = slice(first, first + sizes[rank()])
    torch.manual_seed(rank())
    model = replicate(small_net())
    for _ in range(2):
        alone = small_net()
        alone.load_state_dict(model.module.state_dict())
        model.zero_grad()
        loss = mean_over_ranks(F.cross_entropy(model(inputs[mine]), targets[mine], reduction="sum"), sizes[rank()])
        loss.backward()
        whole = F.cross_entropy(alone(inputs), targets)
        whole.backward()
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad


@pytest.mark.ranks(2)
def test_replicate_gives_all_ranks_the_weights_of_rank_0():
    here = start_on_cpu(2)
    torch.manual_seed(rank())
    own = small_net()
    first = here.from_rank_0(own.state_dict())
    for name, value in replicate(own).module.state_dict().items():
        assert torch.equal(value, first[name])


@pytest.mark.usefixtures("alone")
def test_in_one_process_the_parts_are_plain_torch():
    model = small_net()
    assert replicate(model) is model
    total = torch.tensor(6.0, requires_grad=True)
    mean = mean_over_ranks(total, 4)
    mean.backward()
    assert mean.item() == 1.5 and total.grad.item() == 0.25
    assert mean_over_ranks(7).item() == 7


@pytest.mark.ranks(3)
def test_print0_prints_once(tmp_path: Path):
    with (tmp_path / f"{rank()}").open("w") as file, contextlib.redirect_stdout(file):
        print0("loss", 0.5, sep="=")
        start_on_cpu(3)
        print0("done")
    dist.barrier()
    assert [(tmp_path / f"{number}").read_text() for number in range(3)] == ["loss=0.5\ndone\n", "", ""]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_save0_writes_on_rank_0_names_that_the_plain_model_has(name: str, tmp_path: Path):
    start_on_cpu(3)
    model = replicate(small_net())
    save0(model.state_dict(), tmp_path / f"rank-{rank()}" / name)
    dist.barrier()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")] == [f"rank-0/{name}"]
    saved = loaded(tmp_path / "rank-0" / name)
    small_net().load_state_dict(saved)
    assert all(torch.equal(saved[key], value) for key, value in model.module.state_dict().items())


def loaded(path: Path) -> dict[str, Any]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


@pytest.mark.ranks(2)
def test_save0_keeps_the_models_names_inside_a_larger_checkpoint(tmp_path: Path):
    start_on_cpu(2)
    model = replicate(small_net())
    optimizer = torch.optim.Adam(model.parameters())
    save0({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, str(tmp_path / "all.pt"))
    dist.barrier()
    saved = loaded(tmp_path / "all.pt")
    small_net().load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert saved["epoch"] == 3


class Wrapper(nn.Module):
    """A model with a part of its own that is called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.usefixtures("alone")
def test_save0_in_one_process_changes_no_name(tmp_path: Path):
    save0(Wrapper().state_dict(), tmp_path / "model.pt")
    Wrapper().load_state_dict(loaded(tmp_path / "model.pt"))


@pytest.mark.ranks(2)
def test_save0_takes_away_one_word_only(tmp_path: Path):
    start_on_cpu(2)
    save0(replicate(Wrapper()).state_dict(), tmp_path / "model.pt")
    dist.barrier()
    Wrapper().load_state_dict(loaded(tmp_path / "model.pt"))


@pytest.mark.usefixtures("alone")
def test_save0_writes_tied_weights_under_both_names(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save0(model.state_dict(), tmp_path / "model.safetensors")
    saved = loaded(tmp_path / "model.safetensors")
    assert torch.equal(saved["0.weight"], saved["1.weight"]) and torch.equal(saved["1.weight"], model[0].weight)


@pytest.mark.usefixtures("alone")
def test_save0_says_what_a_safetensors_file_cannot_hold(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"model.safetensors can hold tensors only, but 'epoch' is int; use a name in .p"
    ):
        save0({"weight": torch.ones(2), "epoch": 3}, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_save0_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "model.pt"
    save0({"a": torch.ones(2)}, path)
    with pytest.raises(Exception, match=r"pickle|local object"):
        save0({"a": torch.zeros(2), "b": lambda: None}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"] and loaded(path)["a"].sum() == 2


ALONE = Here(World(0, 1, 0, 1, 0, 1, "here", "none"), parse("dp=1").resolve(1), torch.device("cpu"), None)


def numbers(length: int, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(length), torch.arange(length) * 2), **options)


def epochs(loader: Any, count: int) -> list[list[list[int]]]:
    return [[inputs.tolist() for inputs, _ in loader] for _ in range(count)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_parts_of_each_batch_are_together_that_of_one_process(workers: int):
    here = start_on_cpu(3)
    loader = numbers(23, batch_size=7, shuffle=True, num_workers=workers)
    mine = epochs(shard(loader, seed=5), 2)
    whole = epochs(Sharded(loader, ALONE, seed=5), 2)
    everyone = here.gathered(mine)
    for epoch in range(2):
        together = [[number for part in everyone for number in part[epoch][step]] for step in range(4)]
        assert together == whole[epoch], "disjoint, complete and in the order of one process"
        assert sorted(number for batch in together for number in batch) == list(range(23))
    assert whole[0] != whole[1], "another order each epoch"
    assert everyone[rank()][0][3] == list(slice_of(whole[0][3], rank(), 3))


@pytest.mark.ranks(3)
def test_a_last_batch_with_fewer_samples_than_ranks_gives_some_an_empty_part():
    here = start_on_cpu(3)
    loader = shard(numbers(8, batch_size=3, shuffle=False))
    parts = here.gathered(epochs(loader, 1)[0])
    assert parts == [[[0], [3], [6]], [[1], [4], [7]], [[2], [5], []]]
    assert len(loader) == 3
    (*_, (inputs, targets)) = iter(loader)
    assert inputs.dtype == targets.dtype == torch.int64


Pair = namedtuple("Pair", "first second")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["dict", "namedtuple"])
def test_an_empty_part_has_the_structure_of_the_others(kind: str):
    start_on_cpu(2)
    rows = [torch.full((4,), float(number)) for number in range(3)]
    data = [({"x": row} if kind == "dict" else Pair(row, row), number) for number, row in enumerate(rows)]
    *_, last = shard(DataLoader(data, batch_size=2))
    inputs, targets = last
    tensors = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    assert type(inputs) is type(data[0][0])
    assert [tuple(each.shape) for each in tensors] == [(1 - rank(), 4)] * len(tensors) and len(targets) == 1 - rank()


@pytest.mark.ranks(2)
def test_drop_last_leaves_the_short_batch_out_of_every_epoch():
    here = start_on_cpu(2)
    loader = shard(numbers(10, batch_size=4, shuffle=True, drop_last=True))
    assert len(loader) == 2
    everyone = here.gathered(epochs(loader, 2))
    for epoch in range(2):
        used = [number for part in everyone for batch in part[epoch] for number in batch]
        assert len(used) == len(set(used)) == 8


@pytest.mark.ranks(3)
def test_a_batch_that_cannot_be_cut_for_all_ranks_is_refused():
    start_on_cpu(3)
    with pytest.raises(UserError, match="a batch of 2 samples cannot be cut for 3 ranks"):
        shard(numbers(10, batch_size=2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "options, said",
    [
        ({"batch_sampler": BatchSampler(range(10), 4, False)}, "needs a DataLoader with a batch_size"),
        ({"batch_size": None}, "needs a DataLoader with a batch_size"),
        ({"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 10, 10)}, "the order of a WeightedRandomSampler"),
        ({"batch_size": 4, "sampler": RandomSampler(range(10), replacement=True)}, "the order of a RandomSampler"),
        ({"batch_size": 4, "sampler": [3, 1, 2]}, "the order of a list"),
    ],
)
def test_an_order_that_shard_would_not_keep_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        shard(numbers(10, **options))


# A long switch interval keeps threads that outlive the loop waiting for the interpreter until the process ends.
SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from meshrun import mean_over_ranks, print0, replicate, save0, shard

sys.setswitchinterval(5)
torch.manual_seed(0)
inputs = torch.randn(50, 5)
data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
model = replicate(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = shard(DataLoader(data, batch_size=7, shuffle=True))
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = mean_over_ranks(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        loss.backward()
        optimizer.step()
        print0(f"{loss.item():.6f}")
save0(model.state_dict(), "model.pt")
"""


def run_script(folder: Path, *command: str) -> list[float]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    run = warm.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    return [float(line) for line in run.stdout.split()]


def test_the_classic_script_trains_alike_in_one_process_and_in_two(tmp_path: Path):
    alone = run_script(tmp_path / "one", "train.py")
    assert len(alone) == 16 and alone[-1] < alone[0]
    two = run_script(tmp_path / "two", "-m", "meshrun", "run", "train.py", "--procs", "2", "--device", "cpu")
    assert two == pytest.approx(alone, abs=2e-6)
    weights = [loaded(tmp_path / folder / "model.pt") for folder in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6)
