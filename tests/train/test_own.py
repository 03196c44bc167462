"""The parts for a loop of one's own: a script with them computes on many ranks what it computes on one."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from meshrun import (
    Here,
    UserError,
    barrier,
    broadcast,
    gather,
    gather_rows,
    mean_over_ranks,
    print0,
    replicate,
    save0,
    shard,
    unwrap,
)
from meshrun.data.order import slice_of
from meshrun.layout import parse
from meshrun.train.emptied import emptied
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


@pytest.mark.ranks(2)
def test_several_sums_in_one_tensor_are_divided_each_by_itself():
    start_on_cpu(2)
    sums = torch.tensor([3.0, 5.0], requires_grad=True)
    mean = mean_over_ranks(sums * (1 + rank()), torch.tensor([2, 4]))
    assert mean.tolist() == [9 / 4, 15 / 8] and mean_over_ranks([1.0, 2.0], 2).tolist() == [0.5, 1.0]
    mean.sum().backward()
    assert sums.grad.tolist() == [(1 + rank()) * 2 / 4, (1 + rank()) * 2 / 8]
    with pytest.raises(UserError, match=r"mean_over_ranks\(\) needs tensors of the same shape .* \[\[2\], \[3\]\]"):
        mean_over_ranks(torch.ones(2 + rank()))


@pytest.mark.usefixtures("alone")
def test_the_mean_of_whole_numbers_is_formed_in_doubles():
    many = (1 << 24) + 1
    assert mean_over_ranks(torch.tensor(many)).item() == many
    assert mean_over_ranks(torch.tensor(3), 2).dtype == torch.float64


@pytest.mark.usefixtures("alone")
def test_a_part_that_is_called_module_is_still_found_in_one_process():
    model = Wrapper()
    assert replicate(model).module is model._modules["module"]


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
        (3 * loss).backward()
        whole = F.cross_entropy(alone(inputs), targets)
        (3 * whole).backward()
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.03 * each.grad


@pytest.mark.ranks(2)
def test_replicate_gives_all_ranks_the_weights_of_rank_0():
    here = start_on_cpu(2)
    torch.manual_seed(rank())
    own = small_net()
    first = here.from_rank_0({name: value.tolist() for name, value in own.state_dict().items()})
    assert {name: value.tolist() for name, value in replicate(own).module.state_dict().items()} == first


@pytest.mark.usefixtures("alone")
def test_in_one_process_the_parts_are_plain_torch():
    model = small_net()
    replicated = replicate(model)
    assert isinstance(replicated, nn.Sequential) and replicated.__dict__ is model.__dict__
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


class Coder(nn.Module):
    """A model with a method and a number of its own, as a VAE has."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.width = nn.Linear(4, 2), nn.Linear(2, 4), 2

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.decoder(code)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(inputs))


def unwrapped(model: nn.Module) -> nn.Module:
    """As Hugging Face and others do it."""
    return unwrapped(model.module) if hasattr(model, "module") else model


def reach_the_model_inside() -> None:
    plain = Coder()
    model = replicate(plain)
    assert model.width == 2 and model.decode(torch.ones(3, 2)).shape == (3, 4)
    assert model.module is plain and unwrap(model) is plain and unwrapped(model) is plain
    assert unwrap(replicate(model)) is plain
    model.width, model.other = 3, "new"
    assert plain.width == 3 and model.other == "new"
    model.width = 2
    model.eval()
    assert not plain.training and not model.training
    model.train()
    assert list(model.state_dict()) == list(plain.state_dict())
    weights = Coder().state_dict()
    model.load_state_dict(weights)
    assert torch.equal(plain.decoder.weight, weights["decoder.weight"])
    with pytest.raises(AttributeError, match="'Coder' object has no attribute 'nothing'"):
        _ = model.nothing


@pytest.mark.usefixtures("alone")
def test_the_model_inside_is_reached_in_one_process():
    reach_the_model_inside()
    assert unwrap(Wrapper()).module.in_features == 2


@pytest.mark.ranks(2)
def test_the_model_inside_is_reached_by_the_same_names_on_two_ranks():
    start_on_cpu(2)
    reach_the_model_inside()


def save_what_the_courses_save(folder: Path) -> None:
    model = replicate(small_net())
    optimizer = torch.optim.Adam(model.parameters())
    model(points(4).tensors[0]).sum().backward()
    optimizer.step()
    wrapped = nn.parallel.DistributedDataParallel(small_net()) if dist.is_initialized() else small_net()
    save0(model, folder / "model.pt")
    save0(wrapped, folder / "ddp.pt")
    save0(model, folder / "model.safetensors")
    save0({"model": model, "optimizer": optimizer, "loss": 0.5}, folder / "all.pt")
    save0(torch.arange(3), folder / "tensor.pt")
    save0([("generator", model)], folder / "list.pt")
    barrier()
    small_net().load_state_dict(loaded(folder / "list.pt")[0][1])
    for name in ("model.pt", "ddp.pt", "model.safetensors"):
        small_net().load_state_dict(loaded(folder / name))
    everything = loaded(folder / "all.pt")
    model.load_state_dict(everything["model"])
    optimizer.load_state_dict(everything["optimizer"])
    assert torch.equal(loaded(folder / "tensor.pt"), torch.arange(3))


@pytest.mark.usefixtures("alone")
def test_save0_takes_a_model_in_one_process_and_writes_no_pickled_code(tmp_path: Path):
    save_what_the_courses_save(tmp_path)


@pytest.mark.ranks(2)
def test_save0_takes_a_model_on_two_ranks_and_writes_no_pickled_code(tmp_path: Path):
    start_on_cpu(2)
    save_what_the_courses_save(tmp_path)


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
def test_save0_keeps_the_name_of_a_part_that_is_called_module(tmp_path: Path):
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
        UserError, match=r"model.safetensors can hold a dict of tensors only, but 'epoch' is int; use a name in .p"
    ):
        save0({"weight": torch.ones(2), "epoch": 3}, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_save0_says_that_it_needs_a_path():
    with pytest.raises(UserError, match=r"save0\(\) needs the path of a file, .* was given BytesIO"):
        save0(torch.ones(2), io.BytesIO())


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


class Tokens(UserDict):
    """What a tokenizer's collate function gives."""

    def lengths(self) -> list[int]:
        return self["lengths"]


def test_what_belongs_to_a_sample_is_taken_out_of_any_batch():
    def time_first(rows: list[Any]) -> Any:
        stacked = torch.stack([row[0] for row in rows], 1)
        tokens = Tokens(ids=stacked, lengths=[len(row[0]) for row in rows], pad=0, name="words")
        return tokens, tuple(row[1] for row in rows), torch.tensor(len(rows) * 4), np.ones((len(rows), 3))

    row = (torch.arange(4), "a text")
    tokens, texts, count, table = emptied(time_first([row]), time_first([row, row]))
    assert tokens["ids"].shape == (4, 0) and tokens.lengths() == [] and tokens["pad"] == 0 and tokens["name"] == "words"
    assert texts == () and count == 0 and table.shape == (0, 3)
    assert emptied(("a",), ("a", "a")) == () and emptied([], []) == [] and emptied(3, 3) == 3
    with pytest.raises(UserError, match=r"collate_fn made a object, which .* DataLoader\(drop_last=True\)"):
        emptied([object(), 1], [object(), 2])


@pytest.mark.ranks(2)
def test_a_rank_without_samples_draws_as_many_numbers_as_the_others():
    class Noisy(list[float]):
        def __getitem__(self, number: Any) -> Any:
            return torch.rand(3)

    here = start_on_cpu(2)
    torch.manual_seed(0)
    assert len(list(shard(DataLoader(Noisy([0.0] * 3), batch_size=2)))) == 2
    drawn = here.gathered(torch.rand(()).item())
    assert drawn[0] == drawn[1]


class Flattened(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.view(len(inputs), -1))


@pytest.mark.ranks(2)
def test_a_model_that_cannot_compute_without_samples_is_told_what_to_do():
    start_on_cpu(2)
    model = replicate(Flattened(5, 3))
    refused = pytest.raises(UserError, match=r"a batch without samples \(.*drop_last=True.*x\.flatten\(1\)")
    for inputs, _ in shard(DataLoader(points(3), batch_size=2)):
        with refused if len(inputs) == 0 else contextlib.nullcontext(), torch.no_grad():
            model(inputs)
    assert len(inputs) == 1 - rank()


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


@pytest.mark.usefixtures("alone")
def test_what_a_dataset_draws_goes_by_the_seed_that_was_given():
    class Noisy(list[float]):
        def __getitem__(self, number: Any) -> Any:
            return torch.rand(())

    def drawn(seed: int) -> list[float]:
        return torch.cat(list(shard(DataLoader(Noisy([0.0] * 6), batch_size=3), seed))).tolist()

    assert drawn(1) == drawn(1) and not set(drawn(1)) & set(drawn(2))


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
        ({"batch_size": 4, "sampler": RandomSampler(range(10), num_samples=6)}, "the order of a RandomSampler"),
        ({"batch_size": 4, "sampler": [3, 1, 2]}, "the order of a list"),
    ],
)
def test_an_order_that_shard_would_not_keep_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        shard(numbers(10, **options))


@pytest.mark.usefixtures("alone")
def test_what_is_no_dataloader_and_no_model_is_refused():
    with pytest.raises(UserError, match=r"shard\(\) was given TensorDataset; it needs a DataLoader, such as shard\("):
        shard(points(8))
    with pytest.raises(UserError, match=r"replicate\(\) was given type; it needs a model, which is an nn.Module"):
        replicate(Wrapper)


@pytest.mark.usefixtures("alone")
def test_a_sharded_loader_has_the_attributes_of_the_loader_that_was_given():
    data = points(10)
    loader = shard(DataLoader(data, batch_size=4, drop_last=True))
    assert loader.dataset is data and loader.batch_size == 4 and loader.drop_last and loader.num_workers == 0
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'nothing'"):
        _ = loader.nothing


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_is_no_error_without_a_gpu(workers: int):
    loader = shard(DataLoader(points(6), batch_size=4, pin_memory=True, num_workers=workers))
    assert [len(inputs) for inputs, _ in loader] == [4, 2]


@pytest.mark.ranks(3)
def test_values_are_gathered_and_broadcast():
    start_on_cpu(3)
    only = torch.arange(6, dtype=torch.int16).view(2, 3) if rank() == 0 else None
    assert torch.equal(broadcast(only), torch.arange(6, dtype=torch.int16).view(2, 3))
    assert broadcast(torch.ones(2) if rank() else "a text") == "a text"
    assert gather({"rank": rank(), "scores": [0.5, None]}) == [
        {"rank": number, "scores": [0.5, None]} for number in range(3)
    ]
    assert broadcast(f"from {rank()}") == "from 0"
    assert broadcast(torch.full((2,), float(rank()))).tolist() == [0.0, 0.0]
    barrier()
    for function, instead in ((gather, "gather_rows"), (broadcast, "broadcast")):
        with pytest.raises(UserError, match=rf"{function.__name__}\(\) takes numbers, .* a tensor; use {instead}\("):
            function([torch.ones(2)])


@pytest.mark.usefixtures("alone")
def test_in_one_process_values_are_gathered_from_itself():
    barrier()
    tensor = torch.ones(2)
    assert gather(3) == [3] and broadcast("a") == "a" and broadcast(tensor) is tensor and gather_rows(tensor) is tensor


def contrast(rows: torch.Tensor, everyone: torch.Tensor) -> torch.Tensor:
    """A sum over rows that compares each with all rows of the batch."""
    return (rows @ everyone.T).logsumexp(1).sum()


@pytest.mark.ranks(3)
def test_a_loss_over_all_rows_has_the_gradients_of_one_process():
    start_on_cpu(3)
    sizes = (3, 1, 2)
    inputs, _ = points(sum(sizes)).tensors
    mine = inputs[sum(sizes[: rank()]) :][: sizes[rank()]]
    torch.manual_seed(0)
    model, alone = replicate(small_net()), small_net()
    alone.load_state_dict(model.state_dict())
    rows = model(mine)
    loss = mean_over_ranks(contrast(rows, gather_rows(rows)), len(rows))
    loss.backward()
    outputs = alone(inputs)
    whole = contrast(outputs, outputs) / len(inputs)
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_rows_that_cannot_be_gathered_are_refused():
    start_on_cpu(2)
    for value, said in ((torch.tensor(1.0), "a tensor without rows"), ([1.0], "list")):
        with pytest.raises(UserError, match=rf"gather_rows\(\) needs a tensor with rows, but was given {said};"):
            gather_rows(value)
    for value in (torch.ones(2, 3 + rank()), torch.ones(2, dtype=[torch.int64, torch.float32][rank()])):
        with pytest.raises(UserError, match=r"gather_rows\(\) needs tensors of the same shape and type on all ranks"):
            gather_rows(value)
    assert gather_rows(torch.ones(rank(), 0)).shape == (1, 0)
    assert gather_rows(torch.full((1,), rank(), dtype=torch.int16)).tolist() == [0, 1]


class Branches(nn.Module):
    """A model of which each batch uses one half."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, inputs: torch.Tensor, half: int) -> torch.Tensor:
        return self.halves[half](inputs)


@pytest.mark.ranks(2)
def test_parameters_that_some_losses_do_not_use_are_found_where_asked():
    start_on_cpu(2)
    model = replicate(Branches(), find_unused_parameters=True)
    for half in (0, 1, 0):
        mean_over_ranks(model(torch.ones(2, 5), half).sum(), 2).backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.ranks(2)
def test_parameters_that_a_loss_did_not_use_are_named_with_the_switch_that_allows_it():
    start_on_cpu(2)
    model = replicate(Branches())
    mean_over_ranks(model(torch.ones(2, 5), 0).sum(), 2).backward()
    with pytest.raises(UserError, match=r"did not use .*: halves\.1\.weight, halves\.1\.bias;.*find_unused"):
        model(torch.ones(2, 5), 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(5, 3), nn.Linear(3, 2), 1.0

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.hidden(inputs)) * self.scale


@pytest.mark.ranks(2)
def test_a_replicated_container_is_still_one():
    start_on_cpu(2)
    model = replicate(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    assert model[1].in_features == 4 and len(model) == 2 and [part.in_features for part in model] == [5, 4]
    assert "head" in replicate(nn.ModuleDict({"head": nn.Linear(2, 2)}))
    assert replicate(Scaled()), "a model without a length is true"


def copy_pickle_and_compile(plain: nn.Module) -> None:
    model = replicate(plain)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        assert type(copy.deepcopy(model)) is type(model)
    model(torch.ones(2, 5)).sum().backward()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.first.weight += 1
    assert not torch.equal(copied.first.weight, model.first.weight)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert type(saved) is Scaled and torch.equal(saved.first.weight, plain.first.weight)
    before = model(torch.ones(2, 5))
    model.compile(backend="eager")
    torch.testing.assert_close(model(torch.ones(2, 5)), before)


@pytest.mark.usefixtures("alone")
def test_a_model_in_one_process_is_copied_pickled_and_compiled():
    copy_pickle_and_compile(Scaled())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_model_in_one_process_is_scripted():
    assert torch.jit.script(replicate(small_net()))(torch.ones(2, 5)).shape == (2, 3)


@pytest.mark.ranks(2)
def test_a_model_on_two_ranks_is_copied_pickled_and_compiled():
    start_on_cpu(2)
    copy_pickle_and_compile(Scaled())


@pytest.mark.ranks(2)
def test_a_model_that_trains_nothing_is_replicated():
    here = start_on_cpu(2)
    assert replicate(nn.ReLU())(torch.ones(2)).tolist() == [1, 1]
    torch.manual_seed(here.rank)
    frozen = replicate(Scaled().requires_grad_(False))
    weights = here.gathered(frozen.first.weight.tolist())
    assert weights[0] == weights[1] and frozen.module is unwrap(frozen)
    frozen.second.requires_grad_(True)
    with pytest.raises(UserError, match=r"after replicate\(\): second\.weight, second\.bias; .* replicate anew"):
        frozen(torch.ones(2, 5))
    assert replicate(frozen)(torch.ones(2, 5)).requires_grad


@pytest.mark.usefixtures("alone")
def test_a_scripted_model_is_refused():
    with pytest.raises(
        UserError, match=r"torch\.jit\.script or torch\.jit\.trace, .*: torch\.jit\.script\(unwrap\(model\)\)"
    ):
        replicate(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.usefixtures("alone")
def test_a_lazy_model_is_refused_until_it_has_sizes():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UserError, match=r"first batch: 0\.weight, 0\.bias; call the model with one before replicate"):
        replicate(model)
    model(torch.ones(2, 5))
    replicate(model)


@pytest.mark.ranks(2)
def test_an_attribute_is_set_where_the_model_finds_it_and_a_new_part_is_refused():
    start_on_cpu(2)
    model = replicate(Scaled())
    before = model(torch.ones(2, 5))
    model.scale = 2.0
    torch.testing.assert_close(model(torch.ones(2, 5)), before * 2)
    with pytest.raises(UserError, match=r"model\.second was given after replicate\(\)"):
        model.second = nn.Linear(3, 4)


@pytest.mark.ranks(2)
def test_parameters_frozen_after_replicate_are_refused_until_it_is_replicated_anew():
    here = start_on_cpu(2)
    model = replicate(Scaled())
    for parameter in model.first.parameters():
        parameter.requires_grad = False
    with pytest.raises(UserError, match=r"frozen or unfrozen after replicate\(\): first\.bias, first\.weight;"):
        model(torch.ones(2, 5))
    for frozen in (True, False):
        model.first.requires_grad_(not frozen)
        model = replicate(model)
        assert not isinstance(unwrap(model), nn.parallel.DistributedDataParallel)
        for _ in range(2):
            mean_over_ranks(model(torch.full((2, 5), float(here.rank))).sum(), 2).backward()
        assert (model.first.weight.grad is None) == frozen
        gradients = here.gathered([each.grad.tolist() for each in model.parameters() if each.grad is not None])
        assert gradients[0] == gradients[1]


@pytest.mark.ranks(2)
def test_a_loss_from_a_method_of_the_model_is_refused():
    start_on_cpu(2)
    model = replicate(Scaled())
    with pytest.raises(UserError, match=r"gradients for 'first\.\w+' but does not come from model"):
        model.hidden(torch.ones(2, 5)).sum().backward()
    model(torch.ones(2, 5)).sum().backward()


@pytest.mark.ranks(2)
def test_buffers_with_strides_of_their_own_are_replicated():
    start_on_cpu(2)
    model = Scaled()
    model.register_buffer("positions", torch.arange(12.0).view(1, 4, 3).transpose(0, 1))
    model.register_buffer("mask", torch.ones(5).expand(4, 5))
    model = replicate(model)
    for _ in range(2):  # buffers travel in the second forward pass as well
        model(torch.ones(2, 5)).sum().backward()
    assert model.positions.tolist() == torch.arange(12.0).view(4, 1, 3).tolist()
    assert model.mask.shape == (4, 5)


@pytest.mark.ranks(2)
def test_batch_norms_take_the_statistics_of_the_whole_batch_where_asked():
    here = start_on_cpu(2)
    rows = torch.arange(24.0).view(6, 4).sin()
    mine = rows[:4] if here.rank == 0 else rows[4:]
    with pytest.warns(UserWarning, match="sync_batchnorm=True") if here.rank == 0 else contextlib.nullcontext():
        replicate(nn.Sequential(nn.BatchNorm1d(4)))
    model = replicate(nn.Sequential(nn.BatchNorm1d(4)), sync_batchnorm=True)
    expected = nn.BatchNorm1d(4)(rows)
    torch.testing.assert_close(model(mine), expected[:4] if here.rank == 0 else expected[4:])


@pytest.mark.usefixtures("alone")
def test_in_one_process_no_sync_is_there_too():
    model = replicate(small_net())
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


@pytest.mark.usefixtures("alone")
def test_an_iterable_dataset_is_refused_with_what_to_do_instead():
    with pytest.raises(UserError, match=r"IterableDataset gives every rank all samples; .* start\(\)\.rank"):
        shard(DataLoader(Endless(), batch_size=2))
    with pytest.raises(UserError, match="batch_dim is 2; it may be 0, or 1"):
        shard(DataLoader(points(8), batch_size=2), batch_dim=2)


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
model = replicate(
    torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = shard(DataLoader(data, batch_size=7, shuffle=True, pin_memory=True))
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = mean_over_ranks(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        loss.backward()
        optimizer.step()
        print0(f"{loss.item():.6f}")
save0(model, "model.pt")
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
