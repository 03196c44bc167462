"""All that a training is, as named tensors and plain values, and the way back.

    regions(trainer)                 # this rank's parts of weights, buffers, optimizer state, random numbers
    values(trainer)                  # the rest: cursor, best score, sums, what the optimizer keeps in its groups
    restore(trainer, checkpoint)     # from a checkpoint of any layout

Names say whose a tensor is: `model/W`, `optimizer/W/exp_avg`, `buffer/B@REPLICA`, `rng/RANK/torch`, `totals/losses`.
Weights and optimizer state belong to the model, so any layout finds its part of them. Running statistics and generators
of random numbers belong to a rank: the same layout gets them back as they were, another one the mean of the former and
new ones of the latter.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshrun.errors import SharedError, UserError
from meshrun.kernels.eightbit import Eight
from meshrun.mesh import Here
from meshrun.parallel.placed import Shard
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint, Region
from meshrun.train.data_wait import read_from

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer

_NUMBERS = {"int": int, "float": float, "bool": bool}
"""Plain numbers of an optimizer's state are kept as tensors whose names end in #int and so on."""


Writer = Callable[[tuple[int, ...]], int]
"""Which of several ranks that hold the same writes what cannot be shared out."""


_last_of_numpy: tuple[bytes, tuple[Any, ...]] = b"", ()


def _of_numpy() -> tuple[Any, ...]:
    """Where numpy's generator stands; what numpy makes of that is kept as long as its words are the same."""
    global _last_of_numpy
    words, (before, state) = b"", _last_of_numpy
    bits = np.random.mtrand._rand._bit_generator
    if isinstance(bits, np.random.MT19937):
        words = ctypes.string_at(bits.ctypes.state_address, 625 * 4)
    # Of two normal numbers, which are drawn together, the second one comes without a change of these words.
    if not words or words != before or state[3]:
        state = np.random.get_state(legacy=True)  # type: ignore[assignment]
        _last_of_numpy = words, state
    return state


@dataclass(frozen=True)
class Drawn:
    """Where the generators stand that a program may draw from: torch's, Python's, numpy's and the GPU's."""

    generator: Tensor
    """torch's own."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Drawn:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), random.getstate(), _of_numpy(), cuda)

    def same(self, other: Drawn) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            torch.equal(self.generator, other.generator)
            and self.python == other.python
            and self.numpy[2:4] == other.numpy[2:4]  # the second half of a pair is drawn without moving on
            and np.array_equal(self.numpy[1], other.numpy[1])
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
        )

    def tensors(self) -> dict[str, Tensor]:
        _, words, gauss = self.python
        _, numbers, position, has_gauss, cached = self.numpy
        found = {
            "torch": self.generator,
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
            "numpy": torch.from_numpy(np.append(numbers.astype(np.int64), [position, has_gauss])),
            "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}


def draw_on(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let all generators go on from where these say."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *numbers, position, has_gauss = states["numpy"].tolist()
    words = np.array(numbers, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@dataclass(frozen=True)
class Moment:
    """What changes while a step is computed, as it was before: a step that is cut off must leave no trace."""

    step: int
    evaluated: int
    random: Drawn
    buffers: Mapping[str, Tensor]


class Copies(Mapping[str, Tensor]):
    """Copies of many small tensors, in a few that are cut apart for who looks at them, which is rare."""

    def __init__(self, names: list[str], joined: list[tuple[list[str], list[int], Tensor]]) -> None:
        self._names, self._joined = names, joined
        self._apart: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if self._apart is None:
            parts = (zip(names, _parts(whole, sizes), strict=True) for names, sizes, whole in self._joined)
            self._apart = dict(each for pairs in parts for each in pairs)
        return self._apart[name]


def _parts(whole: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return whole.split(sizes) if sizes else whole.unbind()


class Copier:
    """Copies a model's buffers in few operations; which of them belong together is found once."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.dtype, torch.Size]] = []
        self._kinds: list[tuple[list[str], list[int]]] = []

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> Copies:
        seen = [(name, each.dtype, each.shape) for name, each in tensors.items()]  # a module may change a shape
        if seen != self._seen:
            self._seen, self._kinds = seen, self._sorted(tensors)
        joined = []
        for alike, sizes in self._kinds:
            found = [tensors[name] for name in alike]
            joined.append((alike, sizes, torch.cat(found) if sizes else torch.stack(found)))
        return Copies(list(tensors), joined)

    def _sorted(self, tensors: Mapping[str, Tensor]) -> list[tuple[list[str], list[int]]]:
        """Names of rows of one type, with their lengths, and of others of one type and shape, without."""
        rows: dict[torch.dtype, tuple[list[str], list[int]]] = {}
        others: dict[tuple[torch.dtype, torch.Size], tuple[list[str], list[int]]] = {}
        for name, each in tensors.items():
            if each.dim() == 1:
                names, sizes = rows.setdefault(each.dtype, ([], []))
                names.append(name)
                sizes.append(len(each))
            else:
                others.setdefault((each.dtype, each.shape), ([], []))[0].append(name)
        return [*rows.values(), *others.values()]


def moment(trainer: Trainer) -> Moment:
    """The present one."""
    buffers = trainer.copier(trainer.placed.own_buffers())
    return Moment(trainer.step, trainer.evaluated, Drawn.now(trainer.here.device), buffers)


def regions(trainer: Trainer, now: Moment, writer: Writer = min) -> list[Region]:
    """What this rank holds; of what several hold, each names all of it."""
    here = trainer.here
    found = [_region(here, "model/", shard, shard.parameter.detach()) for shard in weights(trainer)]
    for shard in trainer.placed.shards:
        kept = trainer.optimizer.state.get(shard.parameter, {})
        found += (each for key, value in kept.items() for each in _of_optimizer(trainer, shard, key, value, writer))
    found += passing(trainer, now)
    if here.rank == writer(tuple(range(here.size))):
        losses, norms = (each[: now.step] for each in (trainer.totals.losses, trainer.totals.grad_norms))
        found.append(_alone("totals/losses", torch.tensor(losses, dtype=torch.float64)))
        found.append(_alone("totals/grad_norms", torch.tensor(norms, dtype=torch.float64)))
    return found


def passing(trainer: Trainer, now: Moment) -> list[Region]:
    """What belongs to this rank alone and is lost with it."""
    here = trainer.here
    found = [_alone(f"rng/{here.rank}/{name}", each) for name, each in now.random.tensors().items()]
    if here.place("tp") == 0 and here.place("cp") == 0:
        found += (_alone(f"buffer/{name}@{here.replica}", each) for name, each in now.buffers.items())
    return found


def weights(trainer: Trainer) -> list[Shard]:
    return [*trainer.placed.shards, *trainer.placed.frozen]


def _region(here: Here, prefix: str, shard: Shard, tensor: Tensor, suffix: str = "") -> Region:
    copy = shard.holders.index(here.rank)
    return Region(f"{prefix}{shard.name}{suffix}", tensor, shard.shape, shard.start, copy, shard.copies)


def _alone(name: str, tensor: Tensor) -> Region:
    """What no other rank holds."""
    return Region(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), 0, 1)


def _of_optimizer(trainer: Trainer, shard: Shard, key: str, value: Any, writer: Writer) -> Iterator[Region]:
    if value is None:
        return
    if isinstance(value, Eight):  # on the host: all of them in fp32 may be more than a GPU has left
        value = value.read(shard.parameter).cpu()
    if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
        yield _region(trainer.here, "optimizer/", shard, value.detach(), f"/{key}")
        return
    kind = type(value).__name__
    if not isinstance(value, Tensor) and kind not in _NUMBERS:
        raise UserError(
            f"the optimizer {type(trainer.optimizer).__name__} keeps {key!r} as a {kind}, which a checkpoint cannot "
            f"hold; use one that keeps tensors and numbers, or train without checkpoints (--checkpoint none)"
        )
    first = not any(shard.start)
    if isinstance(value, Tensor) and value.dim() and shard.parameter.shape != shard.shape:
        raise UserError(
            f"the optimizer {type(trainer.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a part "
            f"of {shard.name}: no other layout could use it; train without checkpoints (--checkpoint none)"
        )
    # The same number on all ranks that hold a part of the parameter: one that holds the first part writes it.
    if first and trainer.here.rank == writer(shard.holders):
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        yield _alone(f"optimizer/{shard.name}/{_key(key, value)}", tensor)


def values(trainer: Trainer, now: Moment) -> dict[str, Any]:
    """What is no tensor."""
    totals = trainer.totals
    return {
        "step": now.step,
        "evaluated": now.evaluated,
        "layout": str(trainer.here.layout),
        "world": trainer.here.size,
        "best": totals.best or None,
        "scores": totals.scores,
        "totals": {name: getattr(totals, name) for name in _SUMS},
        "skipped": totals.skipped,
        "habits": trainer.placed.habits(),
        "optimizer": type(trainer.optimizer).__name__,
        "kept": _kept_keys(trainer),
        "groups": [
            {"made": made, "now": plain(group)}
            for made, group in zip(trainer.made_groups, trainer.optimizer.param_groups, strict=True)
        ],
        "data": _data(trainer),
    }


def _data(trainer: Trainer) -> dict[str, Any]:
    """All that decides which samples a step has, and whether they are the same ones."""
    experiment = trainer.experiment
    fingerprint = getattr(experiment.train, "fingerprint", None)
    return {
        "batch": experiment.batch,
        "seed": experiment.seed,
        "train_samples": len(experiment.train),
        "shuffle": str(trainer.order.shuffle),
        "fingerprint": str(fingerprint) if fingerprint is not None else None,
    }


def _kept_keys(trainer: Trainer) -> dict[str, list[str]]:
    """What the optimizer keeps of a parameter, and those that it keeps nothing of."""
    keys: set[str] = set()
    without: list[str] = []
    for shard in trainer.placed.shards:
        kept = trainer.optimizer.state.get(shard.parameter, {})
        keys |= {_key(key, value) for key, value in kept.items() if value is not None}
        without += [] if kept else [shard.name]
    return {"keys": sorted(keys), "without": without}


def _key(key: str, value: Any) -> str:
    return key if isinstance(value, Tensor | Eight) else f"{key}#{type(value).__name__}"


_SUMS = ("samples", "timed_samples", "seconds", "data_wait")


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an optimizer's group that are numbers and words."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
            found[key] = list(value)
        elif value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found


def check(checkpoint: Checkpoint) -> None:
    """A sentence for a checkpoint that holds something else than a training."""
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("step", "evaluated", "world"), (int,)),
        **dict.fromkeys(("layout", "optimizer"), (str,)),
        **dict.fromkeys(("scores", "totals", "habits", "data", "kept"), (dict,)),
        **dict.fromkeys(("skipped", "groups"), (list,)),
        "best": (dict, type(None)),
        "draws": (bool,),
    }
    wrong = [name for name, kind in kinds.items() if not isinstance(checkpoint.state.get(name, ...), kind)]
    totals, kept = (checkpoint.state.get(name) or {} for name in ("totals", "kept"))
    wrong += [name for name in _SUMS if not wrong and not isinstance(totals.get(name), int | float)]
    wrong += [name for name in ("keys", "without") if not wrong and not isinstance(kept.get(name), list)]
    if wrong:
        raise BadCheckpoint(f"cannot use checkpoint {checkpoint.path}: its state has no {wrong[0]!r} as a training has")


def refuse_other(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """A sentence for a checkpoint of another model, or of another training."""
    names: dict[str, tuple[int, ...]] = {}
    for each in trainer.here.gathered({f"model/{shard.name}": shard.shape for shard in weights(trainer)}):
        names |= each
    saved = {name: tuple(info.shape) for name, info in checkpoint.tensors.items() if name.startswith("model/")}
    wrong = [f"{_own(name)} is not in the checkpoint" for name in names if name not in saved]
    wrong += [f"{_own(name)} is only in the checkpoint" for name in saved if name not in names]
    wrong += [
        f"{_own(name)} is {names[name]} but {saved[name]} in the checkpoint"
        for name in names
        if name in saved and names[name] != saved[name]
    ]
    if wrong:
        shown = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise SharedError(f"{checkpoint.path} is of another model: {shown}")
    saved_data, now = checkpoint.state["data"], _data(trainer)
    _, found = read_from(trainer.experiment.train)
    data = str(found or "the training set")
    if saved_data.get("train_samples") != now["train_samples"]:
        raise SharedError(
            f"{checkpoint.path} was trained on {saved_data.get('train_samples')} samples but {data} has "
            f"{now['train_samples']} now: the samples of its steps would be others; put back what it was trained on, "
            f"or begin a new run"
        )
    for name in ("batch", "seed", "shuffle"):
        # What a checkpoint does not say, of when there was one order only, was the same.
        before = saved_data.get(name, "full" if name == "shuffle" else None)
        if before != now[name]:
            raise SharedError(
                f"{checkpoint.path} was trained with {name} {before} but {name} is {now[name]} now: the samples of "
                f"its steps would be others; resume with {before} (--{name}), or begin a new run"
            )
    before = saved_data.get("fingerprint")
    if before is not None and now["fingerprint"] is not None and before != now["fingerprint"]:
        raise SharedError(
            f"{checkpoint.path} was trained on other data than {data} has now, whose fingerprint is "
            f"{now['fingerprint']} and was {before}; put back what it was trained on, or begin a new run"
        )


def _own(name: str) -> str:
    return name.removeprefix("model/")


def wanted(trainer: Trainer, checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """What `restore` will read: rectangles of tensors, as names, starts and sizes."""
    here, tensors = trainer.here, checkpoint.tensors

    def all_of(name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        shape = tensors[name].shape if name in tensors else (1,)
        return name, (0,) * len(shape), shape

    for shard in weights(trainer):
        yield f"model/{shard.name}", shard.start, tuple(shard.parameter.shape)
    kept = checkpoint.state["kept"]
    for shard in trainer.placed.shards:
        for key in kept["keys"] if shard.name not in kept["without"] else ():
            name = f"optimizer/{shard.name}/{key}"
            split = name in tensors and tensors[name].shape == shard.shape
            yield (name, shard.start, tuple(shard.parameter.shape)) if split else all_of(name)
    yield from (all_of(name) for name in ("totals/losses", "totals/grad_norms"))
    same = same_mesh(here, checkpoint)
    for name in trainer.placed.own_buffers():
        own = f"buffer/{name}@{here.replica}"
        replicas = [each for each in tensors if each.rpartition("@")[0] == f"buffer/{name}"]
        yield from map(all_of, [own] if same or not replicas else replicas)
    if same and (checkpoint.state["draws"] or f"rng/{here.rank}/torch" in tensors):
        names = [each for each in tensors if each.startswith(f"rng/{here.rank}/")]
        yield from map(all_of, names or [f"rng/{here.rank}/torch"])


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put all of a checkpoint into a trainer whose model is of the same shape."""
    here, saved = trainer.here, checkpoint.state
    same = same_mesh(here, checkpoint)
    if same and trainer.placed.take_up(saved["habits"]):
        trainer.try_a_step()
    restore_model(trainer, checkpoint)
    totals = trainer.totals
    totals.losses = checkpoint.whole("totals/losses").tolist()
    totals.grad_norms = checkpoint.whole("totals/grad_norms").tolist()
    for name in _SUMS:
        setattr(totals, name, saved["totals"][name])
    totals.scores, totals.best, totals.skipped = saved["scores"], saved["best"] or {}, list(saved["skipped"])
    trainer.step, trainer.evaluated, trainer.drew = saved["step"], saved["evaluated"], saved["draws"]
    if same:
        drawn = {name.rpartition("/")[2]: name for name in checkpoint.tensors if name.startswith(f"rng/{here.rank}/")}
        if drawn:
            draw_on({name: checkpoint.whole(whole) for name, whole in drawn.items()}, here.device)
    else:
        torch.manual_seed((trainer.experiment.seed * 1_000_003 + 1 + here.replica) * 1_000_003 + trainer.step)


def same_mesh(here: Here, checkpoint: Checkpoint) -> bool:
    return checkpoint.state["layout"] == str(here.layout) and checkpoint.state["world"] == here.size


def restore_model(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Weights, running statistics and the optimizer's state, and nothing of where the training stands."""
    with torch.no_grad():
        for shard in weights(trainer):
            checkpoint.read(_region(trainer.here, "model/", shard, shard.parameter.detach()))
        trainer.placed.spread()
        _restore_buffers(trainer, checkpoint, same_mesh(trainer.here, checkpoint))
    _restore_optimizer(trainer, checkpoint)


def _restore_buffers(trainer: Trainer, checkpoint: Checkpoint, same: bool) -> None:
    for name, buffer in trainer.placed.own_buffers().items():
        if same:
            buffer.copy_(checkpoint.whole(f"buffer/{name}@{trainer.here.replica}"))
            continue
        replicas = [each for each in checkpoint.tensors if each.rpartition("@")[0] == f"buffer/{name}"]
        if not replicas:
            raise SharedError(f"{checkpoint.path} is of another model: it has no buffer {name}")
        everyone = [checkpoint.whole(each) for each in replicas]
        mean = torch.stack(everyone).double().mean(0) if buffer.is_floating_point() else everyone[0]
        buffer.copy_(mean)


def _restore_optimizer(trainer: Trainer, checkpoint: Checkpoint) -> None:
    optimizer, saved = trainer.optimizer, checkpoint.state
    if saved["optimizer"] != type(optimizer).__name__:
        raise SharedError(
            f"{checkpoint.path} has the state of the optimizer {saved['optimizer']} but this training uses "
            f"{type(optimizer).__name__}; resume with the same one"
        )
    keys: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        if name.startswith("optimizer/"):
            keys.setdefault(name.rpartition("/")[0], []).append(name)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for shard in trainer.placed.shards:
        names = keys.get(f"optimizer/{shard.name}", [])
        optimizer.state.pop(shard.parameter, None)
        if names:
            kept = (_kept(trainer.here, checkpoint, name, shard, groups[shard.parameter]) for name in names)
            optimizer.state[shard.parameter] = dict(kept)
    for group, made, before in zip(optimizer.param_groups, trainer.made_groups, saved["groups"], strict=False):
        # What the user has changed since then is what the user wants; all else goes on as it was.
        changes = {key: value for key, value in before["now"].items() if made.get(key) == before["made"].get(key)}
        group.update({key: _like(group.get(key), value) for key, value in changes.items()})


def _kept(here: Here, checkpoint: Checkpoint, name: str, shard: Shard, group: Mapping[str, Any]) -> tuple[str, Any]:
    """One entry of a parameter's optimizer state."""
    parameter, info = shard.parameter, checkpoint.tensors[name]
    key, _, kind = name.rpartition("/")[2].partition("#")
    if kind:
        return key, _NUMBERS[kind](checkpoint.whole(name).item())
    if tuple(info.shape) == shard.shape:
        tensor = torch.empty(parameter.shape, dtype=info.dtype, device=parameter.device)
        checkpoint.read(_region(here, "optimizer/", shard, tensor, f"/{key}"))
        return key, tensor
    tensor = checkpoint.whole(name)
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return key, tensor if on_host else tensor.to(parameter.device)


def _like(now: Any, value: Any) -> Any:
    """A saved value in the form that the group has it in."""
    if isinstance(now, Tensor):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value
