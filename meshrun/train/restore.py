"""From a checkpoint of any layout back to a training.

    check(checkpoint)                        # it holds a training at all
    refuse_other(trainer, checkpoint)        # it is of this model and of this data
    wanted(trainer, checkpoint)              # which rectangles of tensors this rank will read
    restore(trainer, checkpoint)

What names there are, and to whom a tensor belongs, is said in `state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshrun.data.drawn import draw_on
from meshrun.errors import SharedError
from meshrun.mesh import Here
from meshrun.parallel.placed import Shard
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.train.data_wait import read_from
from meshrun.train.state import NUMBERS, SUMS, data_of, region_of, weights

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer


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
    wrong += [name for name in SUMS if not wrong and not isinstance(totals.get(name), int | float)]
    wrong += [name for name in ("keys", "without") if not wrong and not isinstance(kept.get(name), list)]
    if wrong:
        raise BadCheckpoint(f"cannot use checkpoint {checkpoint.path}: its state has no {wrong[0]!r} as a training has")


def refuse_other(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """A sentence for a checkpoint of another model, or of another training."""
    names: dict[str, tuple[int, ...]] = {}
    for each in trainer.here.gathered(
        {f"model/{each.name}": each.shape for each in weights(trainer) if _is_kept(each)}
    ):
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
    saved_data, now = checkpoint.state["data"], data_of(trainer)
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
    for name in SUMS:
        setattr(totals, name, saved["totals"][name])
    totals.scores, totals.best, totals.skipped = saved["scores"], saved["best"] or {}, list(saved["skipped"])
    trainer.step, trainer.evaluated, trainer.drew = saved["step"], saved["evaluated"], saved["draws"]
    if same:
        drawn = {name.rpartition("/")[2]: name for name in checkpoint.tensors if name.startswith(f"rng/{here.rank}/")}
        if drawn:
            draw_on({name: checkpoint.whole(whole) for name, whole in drawn.items()}, here.device)
    else:
        seed = (trainer.experiment.seed * 1_000_003 + 1 + here.replica) * 1_000_003 + trainer.step
        torch.manual_seed(seed % (1 << 64))


def same_mesh(here: Here, checkpoint: Checkpoint) -> bool:
    return checkpoint.state["layout"] == str(here.layout) and checkpoint.state["world"] == here.size


def restore_model(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Weights, running statistics and the optimizer's state, and nothing of where the training stands."""
    with torch.no_grad():
        for shard in weights(trainer):
            checkpoint.read(region_of(trainer.here, "model/", shard, shard.parameter.detach()))
        trainer.placed.spread()
        _restore_buffers(trainer, checkpoint, same_mesh(trainer.here, checkpoint))
    _restore_optimizer(trainer, checkpoint)


def _restore_buffers(trainer: Trainer, checkpoint: Checkpoint, same: bool) -> None:
    for name, buffer in trainer.placed.own_buffers().items():
        if not buffer.numel():
            continue  # a checkpoint holds no tensors without elements
        if torch._debug_has_internal_overlap(buffer):  # an expanded one, into which nothing can be copied
            buffer.data = buffer.data.clone(memory_format=torch.contiguous_format)
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
        if names and _is_kept(shard):
            kept = (_kept(trainer.here, checkpoint, name, shard, groups[shard.parameter]) for name in names)
            optimizer.state[shard.parameter] = dict(kept)
    for group, made, before in zip(optimizer.param_groups, trainer.made_groups, saved["groups"], strict=False):
        # What the user has changed since then is what the user wants; all else goes on as it was.
        changes = {key: value for key, value in before["now"].items() if made.get(key) == before["made"].get(key)}
        group.update({key: _like(group.get(key), value) for key, value in changes.items()})


def _is_kept(shard: Shard) -> bool:
    """Whether a checkpoint holds it: a tensor without elements it does not."""
    return math.prod(shard.shape) > 0


def _kept(here: Here, checkpoint: Checkpoint, name: str, shard: Shard, group: Mapping[str, Any]) -> tuple[str, Any]:
    """One entry of a parameter's optimizer state."""
    parameter, info = shard.parameter, checkpoint.tensors[name]
    key, _, kind = name.rpartition("/")[2].partition("#")
    if kind:
        return key, NUMBERS[kind](checkpoint.whole(name).item())
    if tuple(info.shape) == shard.shape:
        tensor = torch.empty(parameter.shape, dtype=info.dtype, device=parameter.device)
        checkpoint.read(region_of(here, "optimizer/", shard, tensor, f"/{key}"))
        return key, tensor
    tensor = checkpoint.whole(name)
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return key, tensor if on_host else tensor.to(parameter.device)


def _like(now: Any, value: Any) -> Any:
    """A saved value in the form that the group has it in."""
    if isinstance(now, Tensor):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value
