"""For whoever keeps their own loop: the parts that make a single-device script a parallel one.

    model = replicate(Net())
    loader = shard(DataLoader(data, batch_size=64, shuffle=True))
    for inputs, targets in loader:
        loss = mean_over_ranks(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        loss.backward()
    print0(loss.item())
    save0(model.state_dict(), "model.pt")

`start()` is called by whichever of them comes first, and works under any launcher, or under none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.data.shuffle import FULL, NONE
from meshrun.errors import UserError
from meshrun.mesh import Here, start
from meshrun.parallel.dp import apply
from meshrun.state.weights import save_tensors, whole
from meshrun.world import detect


def replicate(model: nn.Module) -> nn.Module:
    """The model on this rank's device, with rank 0's weights, its gradients averaged over all ranks in backward."""
    here = start()
    if here.layout.dp < here.size:
        raise UserError(
            f"replicate() copies the model to all ranks, but the layout is '{here.layout}'; use "
            f"dp={here.size} (--layout), or Trainer(experiment).steps(), which trains on every layout"
        )
    placed = apply(model.to(here.device), here)
    return model if here.mesh is None else DistributedDataParallel(placed.model, gradient_as_bucket_view=True)


def shard(loader: DataLoader[Any], seed: int = 0) -> Sharded:
    """This rank's part of every batch that the loader would give: its batch size becomes the GLOBAL batch size."""
    if loader.batch_size is None or not hasattr(loader.dataset, "__len__"):
        raise UserError("shard() needs a DataLoader with a batch_size over a map-style dataset")
    if not _is_plain(loader.sampler, len(loader.dataset)):
        raise UserError(
            f"shard() cannot keep the order of a {type(loader.sampler).__name__}; "
            f"it needs a DataLoader that was given shuffle and no sampler"
        )
    here = start()
    if loader.batch_size < here.replicas:
        raise UserError(
            f"a batch of {loader.batch_size} samples cannot be cut for {here.replicas} ranks; make it larger"
        )
    return Sharded(loader, here, seed)


def _is_plain(sampler: Any, length: int) -> bool:
    """Whether every epoch is all samples once, in order or in any."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == length
    return isinstance(sampler, SequentialSampler)


class Sharded:
    """Iterated once an epoch, each time in another order, the same order on any number of ranks."""

    def __init__(self, loader: DataLoader[Any], here: Here, seed: int) -> None:
        self.drop_last, self.epoch = loader.drop_last, 0
        assert loader.batch_size is not None
        shuffle = FULL if isinstance(loader.sampler, RandomSampler) else NONE
        order = Order(len(loader.dataset), loader.batch_size, seed, shuffle)  # type: ignore[arg-type]
        reading = Reading(
            workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            pin=loader.pin_memory,
            collate=loader.collate_fn,
        )
        self._loader = Loader(loader.dataset, order, here.replica, here.replicas, reading)  # type: ignore[arg-type]
        self._here = here

    def __len__(self) -> int:
        order = self._loader.order
        return order.length // order.batch if self.drop_last else order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        first = self.epoch * self._loader.order.steps_per_epoch
        self.epoch += 1
        for data in self._loader.steps(first, first + len(self)):
            yield data.batches[0] if data.batches else self._nothing(int(data.ids[0]))

    def _nothing(self, sample: int) -> Any:
        """A batch of no samples, for a rank that has none at an epoch's end but must take part in backward."""
        collate = self._loader.reading.collate
        assert collate is not None
        return _emptied(collate([self._loader.dataset[sample]]))


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_emptied(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_emptied(value) for value in batch)
    return batch


class _MeanOverRanks(torch.autograd.Function):
    """Sum of totals over sum of counts; backward undoes that DDP will divide gradients by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, here: Here) -> Tensor:
        sums = torch.stack([total.detach().double(), count.double()])
        with here.waiting("mean_over_ranks of the other ranks"):
            dist.all_reduce(sums)
        ctx.factor = here.size / sums[1]
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient * ctx.factor.to(gradient.dtype), None, None


def mean_over_ranks(total: Tensor | float, count: Tensor | float = 1) -> Tensor:
    """The sum of `total` over all ranks divided by the sum of `count`: exact also where ranks have uneven parts.

    With a sum and its count, the result is the loss of the global batch, and its backward gives the right gradients
    through `replicate`. With one argument it is the plain mean over the ranks.
    """
    here = start()
    total = torch.as_tensor(total, device=here.device)
    if not total.is_floating_point():
        total = total.double()
    count = torch.as_tensor(count, device=here.device)
    return total / count if here.mesh is None else _MeanOverRanks.apply(total, count, here)


def print0(*values: Any, **options: Any) -> None:
    """print(), on rank 0 only."""
    if _rank() == 0:
        print(*values, **{"flush": True, **options})


def save0(state: dict[str, Any], path: str | Path) -> None:
    """Save on rank 0 only, whole or not at all; a name in .safetensors makes a file that no pickle is needed for."""
    if _rank() != 0:
        return
    path, state = Path(path), _own_names(state)
    if path.suffix != ".safetensors":
        with whole(path) as beside:
            torch.save(state, beside)
        return
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{path} can hold tensors only, but {name!r} is {type(value).__name__}; use a name in .pt")
    # A copy each: in such a file tied weights may not share memory.
    save_tensors({name: each.detach().to("cpu", copy=True).contiguous() for name, each in state.items()}, path, {})


def _own_names(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Names as the model itself has them: `replicate` puts the same word before all of them."""
    wrapped = dist.is_initialized() and all(str(name).startswith("module.") for name in state)
    own = {str(name).removeprefix("module."): value for name, value in state.items()} if wrapped else state
    return {name: _own_names(value) if isinstance(value, dict) else value for name, value in own.items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else detect(os.environ).rank
