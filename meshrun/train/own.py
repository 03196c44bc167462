"""For training loops that users write themselves: the parts that make a single-device script a parallel one.

    model = replicate(Net())
    loader = shard(DataLoader(data, batch_size=64, shuffle=True))
    for inputs, targets in loader:
        loss = mean_over_ranks(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        loss.backward()
    print0(loss.item())
    save0(model, "model.pt")

`start()` is called by whichever of them comes first, and works under any launcher, or under none.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.data.seeding import put_back, snapshot
from meshrun.data.shuffle import FULL, NONE
from meshrun.errors import UserError, described
from meshrun.experiment import sample_of
from meshrun.mesh import Here, start
from meshrun.parallel.batchnorm import SYNCED, sync_batchnorms
from meshrun.parallel.dp import apply
from meshrun.state.weights import save_tensors, whole
from meshrun.train.by_sample import (
    compute_in,
    leave,
    samples,
    telling_of_other_draws,
    warn,
    warn_of_own_loss,
    warn_of_uneven_parts,
)
from meshrun.train.emptied import emptied
from meshrun.world import detect


def replicate(model: nn.Module, find_unused_parameters: bool = False, sync_batchnorm: bool = False) -> nn.Module:
    """The model on this rank's device, with rank 0's weights, its gradients averaged over all ranks in backward.

    Attributes and methods of the model are found as before, and `.module` is the model itself, on any number of ranks.
    `find_unused_parameters` is for models of which some parameters take no part in some losses. `sync_batchnorm` lets
    BatchNorm take the statistics of the whole batch, as one process does. A model that is replicated already is
    replicated anew, with the parameters that it trains now.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"replicate() was given {type(model).__name__}; it needs a model, which is an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            "replicate() was given a model of torch.jit.script or torch.jit.trace, whose modules cannot be watched; "
            "replicate the model itself, and script it when it is trained: torch.jit.script(unwrap(model))"
        )
    here = start()
    if here.layout.dp < here.size:
        raise UserError(
            f"replicate() copies the model to all ranks, but the layout is '{here.layout}'; use "
            f"dp={here.size} (--layout), or Trainer(experiment).steps(), which trains on every layout"
        )
    model = unwrap(model)
    if missing := [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]:
        raise UserError(
            f"{type(model).__name__} has parameters that get their sizes from a first batch{_named(missing)}; call the "
            f"model with one before replicate()"
        )
    if model in _untrained:
        _untrained.pop(model).remove()
    model = apply(model.to(here.device), here).model
    if here.mesh is not None:
        if sync_batchnorm:
            sync_batchnorms(model, here.mesh["dp"].get_group())
        elif here.rank == 0 and any(type(part) in SYNCED for part in model.modules()):
            warnings.warn(
                "BatchNorm takes the statistics of each rank's part of a batch, so losses depend on the number of "
                "ranks; replicate(model, sync_batchnorm=True) takes those of the whole batch",
                stacklevel=2,
            )
        if any(each.requires_grad for each in model.parameters()):
            kind = _kind_of_replica(type(model))
            return kind(model, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters)
        _untrained[model] = model.register_forward_pre_hook(_refuse_unfrozen)
    return _alone(model)


def _alone(model: nn.Module) -> nn.Module:
    """The model with all of its attributes, and with those of a replica beside them, where nobody else trains it.

    The model itself does not get them: who unwraps as long as there is a `.module`, as Hugging Face does, must come to
    an end.
    """
    plain = type(model)
    found: dict[str, Any] = {"module": property(lambda self: self._replicated), "no_sync": staticmethod(nullcontext)}
    methods = {
        **{name: value for name, value in found.items() if not hasattr(model, name)},
        "_replicated": model,
        "__jit_unused_properties__": [*getattr(plain, "__jit_unused_properties__", []), "module"],
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__reduce__": lambda self: (unwrap, (self._replicated,)),
        "__deepcopy__": lambda self, memo: _alone(copy.deepcopy(self._replicated, memo)),
    }
    same: nn.Module = object.__new__(type(plain.__name__, (plain,), methods))
    object.__setattr__(same, "__dict__", model.__dict__)
    return same


_untrained: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Models that trained nothing when they were replicated, each with its hook against training."""


def _refuse_unfrozen(model: nn.Module, inputs: Any) -> None:
    """Nobody averages the gradients of a model that has been replicated without any."""
    del inputs
    unfrozen = [name for name, each in model.named_parameters() if each.requires_grad]
    if unfrozen and torch.is_grad_enabled():
        raise _changed(unfrozen)


def _changed(parameters: list[str]) -> UserError:
    return UserError(
        f"parameters were added, frozen or unfrozen after replicate(){_named(parameters)}; do so before it, or "
        f"replicate anew: model = replicate(model)"
    )


def _kind_of_replica(kind: type[nn.Module]) -> type[Replica]:
    """With the container's methods that the model has: Python looks for that of `model[0]` in the class only."""
    names = [name for name in ("__getitem__", "__len__", "__iter__", "__contains__") if hasattr(kind, name)]
    methods = {name: lambda self, *key, name=name: getattr(self.module, name)(*key) for name in names}
    return type(Replica.__name__, (Replica,), methods)


class Replica(DistributedDataParallel):
    """A model whose gradients are averaged, which else looks like the model that it was made of."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        trained = [each for each in model.parameters() if each.requires_grad]
        refuse = partial(_refuse_gradient, weakref.ref(self))  # weakly: the model may be replicated anew
        self._until_called = [each.register_post_accumulate_grad_hook(refuse) for each in trained]
        self._trained = {name: each.requires_grad for name, each in model.named_parameters()}
        self._looked_at = False
        self._complete = True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            self._refuse_other_parameters()
            while self._until_called:
                self._until_called.pop().remove()
        looks = self.training and torch.is_grad_enabled() and not self._looked_at
        try:
            if not looks:
                return super().forward(*inputs, **named)
            self._looked_at = True
            with self._telling_of_buffers(), telling_of_other_draws(start().device):
                outputs = super().forward(*inputs, **named)
            self._tell_of_own_loss()
            return outputs
        except Exception as error:
            if samples() == 0:
                raise UserError(
                    f"the model cannot compute a batch without samples ({described(error)}), and this rank has none "
                    f"of the last batch of the epoch, which has fewer samples than there are ranks; leave it out with "
                    f"DataLoader(drop_last=True), choose another batch_size, or write the model for any number of "
                    f"samples, such as x.flatten(1) instead of x.view(len(x), -1)"
                ) from error
            if "finished reduction in the prior iteration" not in str(error):
                raise
            missing = [
                name for name, each in self.module.named_parameters() if each.requires_grad and each.grad is None
            ]
            raise UserError(
                f"the last loss did not use all parameters of the model{_named(missing)}; if that is meant, use "
                f"replicate(model, find_unused_parameters=True)"
            ) from error

    def _tell_of_own_loss(self) -> None:
        """After the first forward pass for training: in its backward pass, say so if the loss is not of all ranks."""
        told = _OverRanks.backwards

        def look(gradient: Tensor) -> None:
            del gradient
            handle.remove()
            if _OverRanks.backwards == told:
                warn_of_own_loss()

        trained = [each for each in self.module.parameters() if each.requires_grad]
        handle = torch.autograd.graph.register_multi_grad_hook(trained, look, mode="any")

    @contextmanager
    def _telling_of_buffers(self) -> Iterator[None]:
        """Inside, the model computes; afterwards say so if ranks have made different buffers of their parts."""
        before = {name: each.clone() for name, each in self._buffers_of_forward()}
        yield
        if not before:
            return
        changed = {
            name: hashlib.blake2b(str(each.double().flatten().tolist()).encode()).hexdigest()
            for name, each in self._buffers_of_forward()
            if name in before and not torch.equal(each, before[name])
        }
        everyone = start().gathered(changed)
        apart = [name for name in changed if any(each.get(name) != changed[name] for each in everyone)]
        if apart and dist.get_rank() == 0:
            warnings.warn(
                f"the forward pass changes buffers by what is in a rank's part of a batch, and all ranks go on with "
                f"those of rank 0, so losses depend on the number of ranks{_named(apart)}",
                stacklevel=2,
            )

    def _buffers_of_forward(self) -> Iterator[tuple[str, Tensor]]:
        """Those with fractions, but for the statistics of BatchNorm, of which `replicate` tells."""
        for prefix, part in self.module.named_modules():
            for name, each in part.named_buffers(prefix, recurse=False):
                if type(part) not in SYNCED and not isinstance(part, nn.SyncBatchNorm) and each.is_floating_point():
                    yield name, each

    def named_modules(self, *args: Any, **options: Any) -> Any:
        """The model's own, so that parameters and buffers too have the names that they have in one process."""
        return self.module.named_modules(*args, **options) if "_complete" in self.__dict__ else super().named_modules()

    def _refuse_other_parameters(self) -> None:
        """Gradients of what was not trained when the model was replicated are not averaged."""
        now = {name: each.requires_grad for name, each in self.module.named_parameters()}
        if now != self._trained:
            changed = sorted(name for name, _ in now.items() ^ self._trained.items())
            raise _changed(list(dict.fromkeys(changed)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes where the model finds them."""
        if "_complete" not in self.__dict__ or name in self.__dict__:
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module | nn.Parameter):
            raise UserError(f"model.{name} was given after replicate(), which does not know of it; give it before")
        elif hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        """A replica too, unlike what a pickle holds."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce__(self) -> Any:
        """Pickled as the model itself, which any number of processes can load."""
        return unwrap, (self.module,)

    def compile(self, *args: Any, **options: Any) -> None:
        self.module.compile(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The model's own, with the names that it has in one process."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **options)


def _refuse_gradient(of: weakref.ref[Replica], parameter: Tensor) -> None:
    """Before the first call of a model: its gradients would stay those of this rank."""
    replica = of()
    if replica is not None and replica.require_backward_grad_sync:
        name = next((name for name, each in replica.module.named_parameters() if each is parameter), "")
        raise UserError(
            f"a loss has gradients for {name!r} but does not come from model(…), so ranks would train apart; let "
            f"forward() call the method that computes it"
        )


def _named(parameters: list[str]) -> str:
    return f": {', '.join(parameters[:4])}{', …' * (len(parameters) > 4)}" if parameters else ""


def unwrap(model: nn.Module) -> nn.Module:
    """The model that `replicate` was given, on any number of ranks; also the one inside torch's own wrapper."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    return vars(type(model)).get("_replicated", model)


def shard(loader: DataLoader[Any], seed: int = 0, batch_dim: int | None = None) -> Sharded:
    """This rank's part of every batch that the loader would give: its batch size becomes the GLOBAL batch size.

    `batch_dim` says which dim of what a dropout gets is the batch, 0 or 1, where the sizes do not tell.
    """
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"shard() was given {type(loader).__name__}; it needs a DataLoader, such as "
            f"shard(DataLoader(data, batch_size=64, shuffle=True))"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(
            "shard() needs a map-style dataset, with len(data) and data[i]: an IterableDataset gives every rank all "
            "samples; let it yield those whose number modulo start().size is start().rank, and do not shard its loader"
        )
    if loader.batch_size is None or not hasattr(loader.dataset, "__len__"):
        raise UserError("shard() needs a DataLoader with a batch_size over a map-style dataset")
    if batch_dim not in (None, 0, 1):
        raise UserError(f"batch_dim is {batch_dim!r}; it may be 0, or 1 for (time, batch, …)")
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
    return Sharded(loader, here, seed, batch_dim)


_begun: weakref.WeakSet[Any] = weakref.WeakSet()
"""Datasets of which a loop has begun with epoch 0 of the order that seed 0 gives."""


def _is_plain(sampler: Any, length: int) -> bool:
    """Whether every epoch is all samples once, in order or in any."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == length
    return isinstance(sampler, SequentialSampler)


class Sharded:
    """Iterated once an epoch, each time in another order, the same order on any number of ranks.

    `epoch` is the number of the next epoch; all other attributes are those of the DataLoader that was given. Dropout
    in a loop over it draws by sample: see `by_sample`.
    """

    def __init__(self, loader: DataLoader[Any], here: Here, seed: int, batch_dim: int | None = None) -> None:
        self.given, self.epoch = loader, 0
        self._batch_dim, self._tried_collate = batch_dim, False
        assert loader.batch_size is not None
        shuffle = FULL if isinstance(loader.sampler, RandomSampler) else NONE
        order = Order(len(loader.dataset), loader.batch_size, seed, shuffle)  # type: ignore[arg-type]
        reading = Reading(
            workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            pin=loader.pin_memory and here.device.type != "cpu",
            collate=loader.collate_fn,
            seed=seed,
        )
        self._loader = Loader(loader.dataset, order, here.replica, here.replicas, reading)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "given":  # while a copy of it is being made
            raise AttributeError(name)
        return getattr(self.given, name)

    def __len__(self) -> int:
        order = self._loader.order
        return order.length // order.batch if self.drop_last else order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self._tell_of_an_order_again()
        first = self.epoch * self._loader.order.steps_per_epoch
        self.epoch += 1
        loop = object()
        self._tell_of_draws_in_collate()
        try:
            for data in self._loader.steps(first, first + len(self)):
                ids = torch.tensor(data.pieces[0] if data.pieces else [], dtype=torch.int64)
                compute_in(loop, ids, self._batch_dim, uneven=len(data.ids) % self._loader.of > 0)
                yield data.batches[0] if data.batches else self._nothing(int(data.ids[0]))
        finally:
            leave(loop)

    def _tell_of_draws_in_collate(self) -> None:
        """Once, where ranks collate parts of a batch."""
        collate = self._loader.reading.collate
        if self._tried_collate or self._loader.of == 1 or collate in (None, default_collate):
            return
        self._tried_collate = True
        with contextlib.suppress(Exception), put_back():  # what it cannot do is told where the batch is made
            samples = [sample_of(self._loader.dataset, number) for number in range(min(2, self._loader.order.length))]
            before = snapshot()
            collate(samples)
            if not before.same(snapshot()):
                warnings.warn(
                    "collate_fn draws random numbers for the samples of a rank together, so losses depend on the "
                    "number of ranks; draw them in the dataset, where they belong to samples",
                    stacklevel=3,
                )

    def _tell_of_an_order_again(self) -> None:
        """Once, where two loaders begin with the same shuffled order of the same data."""
        order, dataset = self._loader.order, self._loader.dataset
        if self.epoch or order.seed or order.shuffle != FULL:
            return
        with contextlib.suppress(TypeError):  # what has no hash or no weak references, such as a list
            if dataset in _begun:
                warn(
                    "two loaders over the same data begin with the same shuffled order; where one is made anew for "
                    "every epoch, make it once before, or set loader.epoch; two that go side by side need "
                    "shard(loader, seed=1) for one of them"
                )
            _begun.add(dataset)

    def _nothing(self, sample: int) -> Any:
        """A batch of no samples, for a rank that has none at an epoch's end but must take part in backward."""
        collate = self._loader.reading.collate
        assert collate is not None
        with put_back():
            row = sample_of(self._loader.dataset, sample)
            return emptied(collate([row]), collate([row, row]))


class _OverRanks(torch.autograd.Function):
    """What makes one loss of those of all ranks."""

    backwards = 0
    """Backward passes through any of them."""


class _MeanOverRanks(_OverRanks):
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
        _OverRanks.backwards += 1
        return gradient * ctx.factor.to(gradient.dtype), None, None


def mean_over_ranks(total: Tensor | float, count: Tensor | float | None = None) -> Tensor:
    """The sum of `total` over all ranks divided by the sum of `count`: exact also where ranks have uneven parts.

    With a sum and its count, the result is the loss of the global batch, and its backward gives the right gradients
    through `replicate`. With one argument it is the plain mean over the ranks. Several sums in one tensor are divided
    each by itself.
    """
    here = start()
    total = torch.as_tensor(total, device=here.device)
    if not total.is_floating_point():
        total = total.double()
    if count is None:
        if total.requires_grad:
            warn_of_uneven_parts()
        count = 1
    totals, counts = torch.broadcast_tensors(total, torch.as_tensor(count, device=here.device))
    if here.mesh is None:
        return totals / counts
    if totals.dim():
        _refuse_other_shapes("mean_over_ranks", here.gathered(list(totals.shape)))
    return _MeanOverRanks.apply(totals, counts, here)


def _refuse_other_shapes(function: str, shapes: list[Any]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise UserError(f"{function}() needs tensors of the same shape and type on all ranks, but they are {shapes}")


def barrier() -> None:
    """Wait until all ranks have come here."""
    start().gathered(None)


def gather(value: Any) -> list[Any]:
    """The value of every rank, in order, on every rank: numbers, texts, None, and lists and dicts of them."""
    _refuse_tensors("gather", value, "gather_rows(tensor)")
    return start().gathered(value)


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank: a tensor, or numbers, texts, None, and lists and dicts of them."""
    here = start()
    if not isinstance(value, Tensor):
        _refuse_tensors("broadcast", value, "broadcast(tensor) for each")
    if here.mesh is None:
        return value
    # Rank 0 says what it is: the others may have None.
    sent = {"type": str(value.dtype), "shape": list(value.shape)} if isinstance(value, Tensor) else {"value": value}
    sent = here.from_rank_0(sent)
    if "value" in sent:
        return sent["value"]
    if here.rank == 0:
        values = value.detach().to(here.device, copy=True).contiguous()
    else:
        dtype = getattr(torch, sent["type"].removeprefix("torch."))
        values = torch.empty(sent["shape"], dtype=dtype, device=here.device)
    with here.waiting("a tensor from rank 0"):
        dist.broadcast(_bytes_of(values), src=0)
    return values


def _bytes_of(values: Tensor) -> Tensor:
    """The same memory as bytes, which every process group can send; gloo knows no int16."""
    return values.view(-1).view(torch.uint8)


def _refuse_tensors(function: str, value: Any, instead: str) -> None:
    if isinstance(value, Tensor):
        raise UserError(f"{function}() takes numbers, texts, lists and dicts, but was given a tensor; use {instead}")
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _refuse_tensors(function, each, instead)


class _GatherRows(_OverRanks):
    """Rows of all ranks; the gradient of this rank's rows is the sum over what all ranks computed with them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, here: Here) -> Tensor:
        kinds = here.gathered([len(rows), list(rows.shape[1:]), str(rows.dtype)])
        _refuse_other_shapes("gather_rows", [kind[1:] for kind in kinds])
        counts = [kind[0] for kind in kinds]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = [torch.empty_like(padded) for _ in counts]
        with here.waiting("the rows of the other ranks"):
            dist.all_gather([_bytes_of(part) for part in everyone], _bytes_of(padded))
        ctx.here, ctx.first, ctx.count = here, sum(counts[: here.rank]), len(rows)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        _OverRanks.backwards += 1
        gradient = gradient.contiguous().clone()
        with ctx.here.waiting("the gradients of rows of the other ranks"):
            dist.all_reduce(gradient)
        return gradient[ctx.first : ctx.first + ctx.count], None


def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all ranks' tensors, in the order of ranks; gradients flow back to the rank that has the row.

    For losses that compare all samples of the global batch, such as contrastive ones: what every rank then computes
    from all rows is the loss of the whole batch, and `replicate` averages its gradients rightly. Ranks may have
    different numbers of rows.
    """
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        what = "a tensor without rows" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UserError(f"gather_rows() needs a tensor with rows, but was given {what}; gather(value) takes numbers")
    here = start()
    return tensor if here.mesh is None else _GatherRows.apply(tensor, here)


def print0(*values: Any, **options: Any) -> None:
    """print(), on rank 0 only."""
    if _rank() == 0:
        print(*values, **{"flush": True, **options})


def save0(value: Any, path: str | Path) -> None:
    """Save on rank 0 only, whole or not at all; a name in .safetensors makes a file that no pickle is needed for.

    Of a model or an optimizer, also inside a dict or a list, the state dict is saved, with the names that it has in one
    process. torch reads such a file back with `weights_only=True`, which runs no code.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"save0() needs the path of a file, such as 'model.pt', but was given {type(path).__name__}")
    if _rank() != 0:
        return
    path, value = Path(path), _plain(value)
    if path.suffix != ".safetensors":
        with whole(path) as beside:
            torch.save(value, beside)
        return
    state = value if isinstance(value, Mapping) else {"": value}
    for name, each in state.items():
        if not isinstance(each, Tensor):
            what = f"{name!r} is {type(each).__name__}" if name else f"this is {type(each).__name__}"
            raise UserError(f"{path} can hold a dict of tensors only, but {what}; use a name in .pt")
    # A copy each: in such a file tied weights may not share memory.
    save_tensors({name: each.detach().to("cpu", copy=True).contiguous() for name, each in state.items()}, path, {})


def _plain(value: Any) -> Any:
    """State dicts instead of what has them: torch would save a model as a pickle of its code's names."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, nn.Module):
        value = unwrap(value)
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else detect(os.environ).rank
