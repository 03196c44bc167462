"""Values for a model that was laid out without them: those that its constructor draws, tensor by tensor.

    model, plan = made(experiment, here.device)          # dp alone: all of it
    with filled(model, plan, here.device): ...           # drawn beside what is done in here

    with laid_out(here, experiment) as plan:             # any other mesh: this rank's parts of it
        model = without_values(plan)
        ...                                              # axes cut `model` into `parts`
        allocate(parts, here.device)
        fill(plan, parts, held, here)

No rank holds more than its own part, unless the constructor can only build the whole: then ranks of a node take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshrun.errors import UserError
from meshrun.experiment import Experiment
from meshrun.mesh import Here
from meshrun.parallel import memory
from meshrun.parallel.construct import Blueprint, blueprint
from meshrun.parallel.copied import copied
from meshrun.parallel.held import Held
from meshrun.parallel.masters import local


def made(experiment: Experiment, device: torch.device) -> tuple[nn.Module, Blueprint | None]:
    """The model with its values; or without them, and the way to them, which several threads go at once for a GPU."""
    if device.type == "cuda":
        plan = blueprint(experiment.model, experiment.seed, objection=memory.cannot_stay)
        refuse_other(plan.model, has_values=plan.reason is not None)
        return plan.model, plan if plan.reason is None else None
    torch.manual_seed(experiment.seed)
    model = experiment.model()
    refuse_other(model, has_values=True)
    return model, None


@contextmanager
def filled(model: nn.Module, plan: Blueprint | None, device: torch.device) -> Iterator[None]:
    """The model is on the device, with its values, after this; they are drawn beside what is done in here."""
    if plan is None:
        yield
        model.to(device)
        return
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    # Meanwhile torch's compiler is loaded, which takes seconds too.
    with ThreadPoolExecutor(1) as beside:
        filling = beside.submit(plan.fill, partial(_give, own))
        yield
        filling.result()
    model.to(device)  # what a module moves by itself, beside its parameters


def _give(own: Mapping[str, Tensor], name: str, values: Tensor) -> None:
    own[name].copy_(values)


@contextmanager
def laid_out(here: Here, experiment: Experiment) -> Iterator[Blueprint]:
    """The model's blueprint. One that can only be built whole is built, and let go of, by one rank of a node at a time.

    So nothing in here may wait for another rank.
    """
    with ExitStack() as turn:
        plan = blueprint(experiment.model, experiment.seed, partial(_kept, turn, here))
        refuse_other(plan.model, has_values=plan.reason is not None)
        yield plan


@contextmanager
def _kept(turn: ExitStack, here: Here) -> Iterator[None]:
    """Begin this rank's turn, which ends with `turn`."""
    turn.enter_context(_turn(here))
    yield


@contextmanager
def _turn(here: Here) -> Iterator[None]:
    for number in range(here.world.local_size):
        if number == here.world.local_rank:
            yield
        with here.waiting("the other ranks of this node to build the model"):
            dist.all_reduce(torch.zeros(1))


def refuse_other(model: object, has_values: bool) -> None:
    """Say what the user's function returned, where that is no model that can be trained, or that checkpoints can hold.

    One that `has_values` was built on a device; another one was recorded, and is still without its values.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"Experiment(model=…) returned {type(model).__name__}; it must return a torch nn.Module")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            f"Experiment(model=…) returned {type(model).__name__}, of torch.jit, whose modules cannot be laid out on a "
            f"mesh; return the nn.Module that it was scripted or traced from (--compile compiles it)"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"{name!r} of the model has no shape yet, since its module is lazy; give its sizes, such as "
                f"nn.Linear(64, 10) in place of nn.LazyLinear(10)"
            )
        if has_values and parameter.is_meta:
            raise UserError(
                f"{name!r} of the model is on the meta device, so that it has no values to begin with; "
                f"Experiment(model=…) must build a model with values (meshrun itself builds large ones in parts)"
            )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.dtype in (torch.complex128, torch.complex32):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{name!r} of the model is of type {kind}, which checkpoints cannot hold; make it complex64, "
                f"or leave it out of the state (register_buffer(…, persistent=False))"
            )


def without_values(plan: Blueprint) -> nn.Module:
    """The model on the meta device, also where the blueprint is a model that had to be built."""
    return plan.model if plan.reason is None else copied(plan.model).to("meta")


def allocate(parts: dict[int, nn.Module], device: torch.device) -> None:
    """Give all that is still on the meta device memory of its own; what is one tensor under two names stays one."""
    for part in parts.values():
        names: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in part.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        names.setdefault(id(tensor), []).append((tensors, name))
        part.to_empty(device=device)
        for (first, known), *others in names.values():
            for tensors, name in others:
                tensors[name] = first[known]


def fill(plan: Blueprint, parts: dict[int, nn.Module], held: list[Held], here: Here) -> None:
    """Copy into this rank's parts what the constructor draws."""
    mesh = here.submesh("fsdp", "cp") if here.layout.fsdp > 1 else None
    sharded = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    split = (here.place("tp"), here.layout.tp)
    wanted: dict[str, list[Held]] = {}
    for each in held:
        wanted.setdefault(each.name, []).append(each)
    # A buffer that has several names is given by the first of them, which may be on another stage.
    first: dict[int, str] = {}
    known = {name: first.setdefault(id(each), name) for name, each in plan.model.named_buffers(remove_duplicate=False)}
    buffers: dict[str, list[Tensor]] = {}
    for part in parts.values():
        for name, buffer in part.named_buffers():
            name = name.removeprefix("model.")
            buffers.setdefault(known.get(name, name), []).append(buffer)

    def take(name: str, values: Tensor) -> None:
        for one in wanted.get(name, ()):
            one.local.copy_(one.cut(values, split, sharded))
        for buffer in buffers.get(name, ()):
            local(buffer).copy_(values)

    plan.fill(take)


@torch.no_grad()
def make_up(parts: dict[int, nn.Module]) -> None:
    """Any values, of the usual size: drawing a large model's own takes minutes, and nobody looks at the numbers."""
    for part in parts.values():
        for parameter in part.parameters():
            local(parameter).normal_(std=0.02)
        for buffer in part.buffers():
            local(buffer).zero_()
