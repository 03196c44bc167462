"""From what the user wrote to a model on this rank's device, part of the mesh.

    placed = build(experiment, here, How())
    demands = demands_of(experiment)             # what the model asks of a layout, before any process exists
    demands.refuse(layout)

The order of application, which every axis keeps to:

    1. the model without values (meta device), in stages where pp cuts it
    2. random numbers by sample instead of by rank: dropout, attention dropout; statistics over all ranks: BatchNorm
    3. tp splits matrices
    4. float8: the layers that compute in it
    5. recomputation of segments
    6. compilation of segments
    7. fsdp shards what is left of each parameter, or dp copies it
    8. values: each rank keeps its part of what the constructor would have drawn, tensor by tensor
    9. bf16, float8: matrices are rounded, and their masters kept (where fsdp does not)

dp alone needs none of it but 2, 4, 5, 6 and 9, and goes through DistributedDataParallel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from meshrun.errors import SharedError, UserError
from meshrun.experiment import Experiment
from meshrun.layout import Layout, nearest
from meshrun.mesh import Here
from meshrun.parallel import (
    choose,
    compiled,
    cp,
    dp,
    float8,
    float8_fsdp,
    fsdp,
    masters,
    memory,
    pp,
    recompute,
    sdpa,
    segments,
    tp,
    tp_hidden,
)
from meshrun.parallel.attention import KeyedAttention, key_attentions
from meshrun.parallel.batchnorm import sync_batchnorms
from meshrun.parallel.choose import Ways
from meshrun.parallel.construct import Blueprint, blueprint
from meshrun.parallel.dropout import Moment, key_dropouts
from meshrun.parallel.later import Later, put_off
from meshrun.parallel.masters import local
from meshrun.parallel.meshed import Held, Meshed
from meshrun.parallel.pipeline import Pipeline, Settings
from meshrun.parallel.placed import Cutting, Placed, computing
from meshrun.parallel.vocabulary import takes_split


def chunks_of(layout: Layout) -> int:
    """How many stages a rank has."""
    return 2 if layout.pp_variant == "interleaved" else 1


@dataclass(frozen=True)
class How:
    """What changes how a step is computed, never what."""

    recompute: str = "none"
    compile: bool | None = False
    """None leaves it to what the model and the device are."""
    graphs: bool | None = False
    states: str = "fp32"
    update_in_backward: bool = False
    offload: bool = False
    sync_batchnorm: bool = False
    compress: str = "none"
    torchao: bool = True
    """Whether float8 may be left to it, where it is installed and the layout is one that it can do; no option of a run,
    but who compares layouts wants one arithmetic."""


@dataclass
class Demands:
    """What a model asks of a layout."""

    experiment: Experiment
    model: nn.Module
    """On the meta device."""
    segments: list[str]
    plan: tp.Plan
    _traces: list[pp.Trace] = field(default_factory=list)

    def objection(self, layout: Layout) -> str | None:
        """Why this layout cannot work, or None."""
        try:
            self._check(layout)
        except UserError as error:
            return str(error)
        return None

    def refuse(self, layout: Layout) -> None:
        """A `UserError` for a layout that cannot work, with the nearest that can."""
        text = self.objection(layout)
        if text is not None:
            fitting = nearest(layout, layout.size, works=lambda near: self.objection(near) is None)
            near = f"; layouts of {layout.size} ranks that work: {'; '.join(map(str, fitting))}" if fitting else ""
            raise SharedError(f"{text.removesuffix(' (--layout)')}{near} (--layout)")

    def trace(self) -> pp.Trace:
        if not self._traces:
            self._traces.append(pp.follow(self.model, self.segments, self.sample()))
        return self._traces[0]

    def sample(self) -> tuple[Any, Any]:
        inputs, targets = (self.experiment.collate or default_collate)([self.experiment.train[0]])
        return inputs, targets

    def _check(self, layout: Layout) -> None:
        stages = layout.pp * chunks_of(layout)
        if layout.pp > 1 and not self.segments:
            raise UserError(
                f"layout '{layout}' cuts the model into {stages} stages, but the model has no segments: it is one "
                f"piece; name them with Experiment(segments=lambda model: [model.embed, *model.blocks, model.head])"
            )
        if layout.pp > 1 and stages > len(self.segments):
            raise UserError(
                f"layout '{layout}' needs {stages} stages, but the model has only {len(self.segments)} segments"
            )
        if layout.tp > 1:
            tp.check(self.model, self.plan, layout.tp)
            self._check_sequence(layout)
        if layout.cp > 1:
            inputs, targets = self.sample()
            inputs, _, positions = cp.split(inputs, targets, 0, layout.cp)
            cp.with_positions(self.model, inputs, positions)
        if layout.pp > 1:
            pp.refuse_hidden(self.model, self.trace(), self.trace().cuts(stages), self.sample(), self.experiment.loss)

    def _check_sequence(self, layout: Layout) -> None:
        """Where the plan keeps activations in parts along the sequence, these must be equal."""
        if not any(style in tp.ALONG_SEQUENCE for style in self.plan.styles.values()):
            return
        tokens = cp.tokens_of(self.sample()[0]).shape[1]
        if tokens % (layout.tp * layout.cp):
            parts = f"tp={layout.tp}" + (f" and cp={layout.cp}" if layout.cp > 1 else "")
            raise UserError(
                f"sequences have {tokens} tokens, which {parts} cannot cut into {layout.tp * layout.cp} equal parts; "
                f"make the length a multiple of that"
            )


def demands_of(experiment: Experiment, model: nn.Module | None = None) -> Demands:
    """What the experiment's model asks of a layout; the model is built without values, unless it is given."""
    if model is None:
        made = blueprint(experiment.model, experiment.seed)
        _refuse_other(made.model)
        model = _without_values(made)
    try:
        found = segments.find(model, experiment.segments)
        plan = tp.plan_for(model, experiment.tensor_plan)
    except UserError as error:
        raise SharedError(str(error)) from error
    return Demands(experiment, model, found, plan)


def refuse_how(experiment: Experiment, layout: Layout, how: How) -> None:
    """Say which ways of computing a step this layout does not have."""
    try:
        recompute.every(how.recompute)
    except UserError as error:
        raise SharedError(str(error)) from error
    if how.compress != "none" and layout.dp < layout.size:
        raise SharedError(
            f"compress is {how.compress!r}, which is for gradients of whole models, but the layout is '{layout}'; "
            f"use dp={layout.size} (--layout), or leave --compress away"
        )
    if how.offload and layout.fsdp == 1:
        raise SharedError(f"offload keeps fsdp's shards on the host, but layout '{layout}' has no fsdp (--layout)")
    replicas = layout.dp * layout.fsdp
    pieces = experiment.micro is not None and experiment.micro < -(-experiment.batch // replicas)
    if how.sync_batchnorm and (layout.pp > 1 or pieces):
        raise SharedError(
            f"sync_batchnorm needs the global batch at once, but each of the {replicas} replicas computes its part in "
            f"several micro-batches; leave --micro and pp away, or --sync-batchnorm"
        )


def build(experiment: Experiment, here: Here, how: How) -> Placed:
    """The model on this rank's place in the mesh."""
    moment = Moment(experiment.seed)
    cudnn = experiment.precision != "fp32" and sdpa.use_cudnn(here.device)
    placed, ways = (
        _replicated(experiment, here, how, moment)
        if here.layout.dp == here.layout.size
        else _meshed(experiment, here, how, moment)
    )
    placed.chosen = {
        "compile": ways.compile.compile,
        "compile_why": ways.compile.why,
        "recompute": "auto" if ways.auto and ways.twice is not None else ways.twice.level if ways.twice else "none",
        "channels_last": ways.channels_last,
        "attention": "cudnn" if cudnn else "torch",
    }
    if ways.compile.compile:
        compiled.hear(placed.chosen, placed.notes.append)
    if ways.auto and ways.twice is not None:
        choose.watch(placed, ways.twice, here, may_repeat=not how.update_in_backward)
    # What the model draws by itself must differ between replicas.
    torch.manual_seed(experiment.seed * 1_000_003 + 1 + here.replica)
    return placed


def _replicated(experiment: Experiment, here: Here, how: How, moment: Moment) -> tuple[Placed, Ways]:
    model, plan = _made(experiment, here.device)
    _refuse_other(model)
    if plan is not None:
        memory.give_memory(model, here.device)
    _same_numbers(model, moment)
    eight, ways = experiment.precision == "float8", _ways(experiment, here, how, model)
    names = segments.find(model, experiment.segments) if ways.by_segment or eight else []
    ways = ways.without_segments() if not names else ways
    notes = float8.apply(model, names, here.device, how.torchao) if eight else []
    with _filled(model, plan, here.device):
        notes += _on_segments(model, list(enumerate(names)), ways, moment)
    if how.sync_batchnorm and (mesh := here.submesh("dp")) is not None:
        sync_batchnorms(model, mesh.get_group())
    arithmetic = partial(computing, experiment.precision, here.device)
    shortened = experiment.precision != "fp32"
    return dp.apply(model, here, moment, arithmetic, how.compress, notes, shortened=shortened), ways


def _made(experiment: Experiment, device: torch.device) -> tuple[nn.Module, Blueprint | None]:
    """The model with its values; or without them, and the way to them, which several threads go at once for a GPU."""
    if device.type == "cuda":
        plan = blueprint(experiment.model, experiment.seed, objection=memory.cannot_stay)
        return plan.model, plan if plan.reason is None else None
    torch.manual_seed(experiment.seed)
    return experiment.model(), None


@contextmanager
def _filled(model: nn.Module, plan: Blueprint | None, device: torch.device) -> Iterator[None]:
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


def _meshed(experiment: Experiment, here: Here, how: How, moment: Moment) -> tuple[Placed, Ways]:
    layout = here.layout
    for axes in (("fsdp", "cp"), ("dp", "cp"), ("dp", "fsdp")):
        here.submesh(*axes)  # all ranks form groups together, so before they take turns
    with _laid_out(here, experiment) as plan:
        demands = demands_of(experiment, _without_values(plan))
        demands.refuse(layout)
        notes = []
        if plan.reason is not None:
            notes.append(f"the model is built whole on the host, one rank of a node at a time: {plan.reason}")
        ways = _ways(experiment, here, how, demands.model)
        ways = ways.without_segments() if not demands.segments else ways
        parts, later = _parts(demands, here, how, ways, moment, notes)
        _allocate(parts, torch.device("cpu") if how.offload else here.device)
        held = _held(demands, parts)
        if here.alone:
            _make_up(parts)
        else:
            _fill(plan, parts, held, here)
    notes += _hidden(demands, here, ways.compile.compile)
    if experiment.precision == "float8" and layout.fsdp > 1:
        for part in parts.values():
            float8_fsdp.gather_in_float8(part)
    if experiment.precision != "fp32" and layout.fsdp == 1:
        kept = masters.shorten(*parts.values())
        held = [replace(each, master=kept.get(each.parameter)) for each in held]
    chunks = chunks_of(layout)
    mesh = here.submesh("cp")
    settings = Settings(
        variant=layout.pp_variant,
        chunks=chunks,
        arithmetic=partial(computing, experiment.precision, here.device),
        attention=partial(cp.attention, mesh.get_group()) if mesh is not None else nullcontext,
        before_backward=partial(_before_backward, layout) if layout.fsdp > 1 else _nothing,
        later=later,
        whole_last=layout.fsdp > 1,
    )
    pipeline = Pipeline(here, parts, moment, settings)
    cutting = Cutting(
        in_step=True,
        equal=layout.pp > 1,
        pieces=4 * layout.pp if layout.pp > 1 else 1,
        multiple_of=layout.pp if chunks > 1 else 1,
    )
    model = next(iter(parts.values())).model
    assert isinstance(model, nn.Module)
    return Meshed(here, pipeline, held, model, cutting, notes), ways


def _parts(
    demands: Demands, here: Here, how: How, ways: Ways, moment: Moment, notes: list[str]
) -> tuple[dict[int, nn.Module], Later | None]:
    """This rank's stages of the model, laid out but without values."""
    layout, experiment = here.layout, demands.experiment
    later = Later() if layout.pp > 1 and layout.pp_variant == "zb" else None
    stages = layout.pp * chunks_of(layout)
    order = demands.trace().segments if stages > 1 else demands.segments
    cuts = demands.trace().cuts(stages) if stages > 1 else [0]
    mesh = here.submesh("tp")
    if mesh is not None:
        notes += _tp_notes(demands)
    parts: dict[int, nn.Module] = {}
    for stage in range(here.place("pp"), stages, layout.pp):
        part = (
            pp.Part(demands.model, demands.trace(), cuts, stage, here.device)
            if stages > 1
            else pp.Whole(copy.deepcopy(demands.model))
        )
        model = part.model
        _same_numbers(model, moment)
        end = cuts[stage + 1] if stage + 1 < stages else len(order)
        own = [(number, order[number]) for number in range(cuts[stage], end)]
        if mesh is not None:
            functions = (experiment.loss, *experiment.metrics.values())
            tp.apply(model, demands.plan, mesh, here.place("tp"), all(map(takes_split, functions)))
        if how.sync_batchnorm and (replicas := here.submesh("dp", "fsdp")) is not None:
            sync_batchnorms(model, replicas.get_group())
        said = []
        if experiment.precision == "float8":
            said = float8.apply(model, order, here.device)
        if later is not None:
            put_off(model, later)
        said += _on_segments(model, own, ways, moment)
        notes += [each for each in said if each not in notes]
        if layout.fsdp > 1:
            _shard(part, [model.get_submodule(name) for _, name in own], here, experiment, how)
        parts[stage] = part
    return parts, later


def _same_numbers(model: nn.Module, moment: Moment) -> None:
    key_dropouts(model, moment)
    key_attentions(model, moment)
    if any(isinstance(each, nn.TransformerEncoderLayer) for each in model.modules()):
        # Its kernel for evaluation rounds differently and bypasses what axes do to its modules.
        torch.backends.mha.set_fastpath_enabled(False)


def _ways(experiment: Experiment, here: Here, how: How, model: nn.Module) -> Ways:
    parameters = sum(each.numel() for each in model.parameters())
    steps = compiled.steps_of(experiment)
    choice = compiled.chosen(how.compile, here.layout, here.device, parameters, steps)
    if how.compile is None and choice.compile:
        choice = compiled.if_much(choice, parameters, steps * experiment.batch)
    found = choose.ways(choice, how.recompute, here.device, model)
    if found.channels_last and experiment.precision == "fp32":
        # Convolutions that round nothing have their kernels for channels that come first.
        torch.backends.cudnn.benchmark = True
        return replace(found, channels_last=False)
    return found


def _on_segments(model: nn.Module, own: list[tuple[int, str]], ways: Ways, moment: Moment) -> list[str]:
    """Recompute and compile segments, or all of a model that has none; returns what to tell the user."""
    modules = [(number, model.get_submodule(name)) for number, name in own] or [(0, model)]
    if ways.channels_last:
        compiled.channels_last(model)
    if ways.compile.compile:
        compiled.apply([module for _, module in modules], ways.compile.asked)
    if ways.twice is None:
        return []
    recompute.apply(modules, ways.twice, moment)
    level = ways.twice.level
    if level == "selective" and ways.compile.compile:
        return ["compiled code computes again by itself what is cheap: recompute selective adds nothing to that"]
    if not own and level != "full":
        return [f"the model has no segments: recompute {level} is for all of it (Experiment(segments=…))"]
    return []


def _shard(part: nn.Module, own: list[nn.Module], here: Here, experiment: Experiment, how: How) -> None:
    layout = here.layout
    sharded = here.submesh("fsdp", "cp")
    assert sharded is not None and here.mesh is not None
    names = sharded.mesh_dim_names
    assert names is not None
    mesh = here.mesh["dp", names[0]] if layout.dp > 1 else sharded
    # Weights' gradients that are computed late need the parameters to be as they were.
    variant = "zero2" if layout.pp_variant == "zb" and layout.fsdp_variant == "zero3" else layout.fsdp_variant
    fsdp.apply(part, own, mesh, variant, experiment.precision, how.offload)


def _tp_notes(demands: Demands) -> list[str]:
    whole = demands.plan.whole(demands.model)
    if not demands.plan.styles:
        return ["tp: no plan covers this model, so every rank holds and computes all of it (Experiment(tensor_plan=…))"]
    if whole:
        named = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
        return [f"tp by {demands.plan.source}: whole on every rank are {named}"]
    return [f"tp by {demands.plan.source}"]


def _hidden(demands: Demands, here: Here, compile_: bool) -> list[str]:
    """Have tp's messages travel beside its products where that can be; returns what to tell of it."""
    mesh = here.submesh("tp")
    if mesh is None or here.device.type != "cuda":
        return []
    ranks, backend = here.layout.tp, dist.get_backend(mesh.get_group())
    reason = tp_hidden.cannot_hide(demands.plan, backend, compile_, ranks, here.world.local_size)
    if reason is None and not tp_hidden.hide(mesh, here.device):
        reason = "the GPUs do not reach each other's memory"
    if reason is None:
        return ["tp: messages travel in pieces beside the matrix products that need them"]
    return [f"tp: every layer waits for its messages: {reason}"]


def _before_backward(layout: Layout, part: nn.Module, last: bool) -> None:
    # Pipelines have many micro-batches: their gradients are reduced once a step.
    fsdp.accumulating(part, "zero1" if layout.pp > 1 else layout.fsdp_variant, last)


def _nothing(part: nn.Module, last: bool) -> None:
    """Nobody needs to be told."""


def _held(demands: Demands, parts: dict[int, nn.Module]) -> list[Held]:
    """What this rank holds, under the model's own names; a parameter with several names goes by its first."""
    first: dict[int, str] = {}
    own: dict[str, str] = {}
    for name, parameter in demands.model.named_parameters(remove_duplicate=False):
        own[name] = first.setdefault(id(parameter), name)
    held: list[Held] = []
    for part in parts.values():
        model = part.model
        assert isinstance(model, nn.Module)
        for prefix, module in model.named_modules():
            fused = module.fused if isinstance(module, KeyedAttention) else {}
            for name, parameter in module.named_parameters(prefix, recurse=False):
                last = name.rpartition(".")[2]
                source, block, blocks = fused.get(last, (last, 0, 1))
                whole = f"{prefix}.{source}" if prefix else source
                if any(each.parameter is parameter for each in held):
                    continue
                held.append(Held(own.get(whole, whole), parameter, (block, blocks), _split_dim(parameter)))
    return held


def _split_dim(parameter: Tensor) -> int | None:
    """The dimension along which tp has split a parameter: the last axis of its mesh is tp's."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    placement = parameter.placements[-1]
    return placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]


def _allocate(parts: dict[int, nn.Module], device: torch.device) -> None:
    """Give all that is still on the meta device memory of its own; what is one parameter under two names stays one."""
    for part in parts.values():
        names: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), []).append((module, name))
        part.to_empty(device=device)
        for (first, known), *others in names.values():
            for module, name in others:
                module._parameters[name] = first._parameters[known]


def _fill(plan: Blueprint, parts: dict[int, nn.Module], held: list[Held], here: Here) -> None:
    """Copy into this rank's parts what the constructor draws."""
    mesh = here.submesh("fsdp", "cp") if here.layout.fsdp > 1 else None
    sharded = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    split = (here.place("tp"), here.layout.tp)
    wanted: dict[str, list[Held]] = {}
    for each in held:
        wanted.setdefault(each.name, []).append(each)
    buffers: dict[str, list[Tensor]] = {}
    for part in parts.values():
        for name, buffer in part.named_buffers():
            buffers.setdefault(name.removeprefix("model."), []).append(buffer)

    def take(name: str, values: Tensor) -> None:
        for one in wanted.get(name, ()):
            one.local.copy_(one.cut(values, split, sharded))
        for buffer in buffers.get(name, ()):
            local(buffer).copy_(values)

    plan.fill(take)


@torch.no_grad()
def _make_up(parts: dict[int, nn.Module]) -> None:
    """Any values, of the usual size: drawing a large model's own takes minutes, and nobody looks at the numbers."""
    for part in parts.values():
        for parameter in part.parameters():
            local(parameter).normal_(std=0.02)
        for buffer in part.buffers():
            local(buffer).zero_()


@contextmanager
def _laid_out(here: Here, experiment: Experiment) -> Iterator[Blueprint]:
    """The model's blueprint. One that can only be built whole is built, and let go of, by one rank of a node at a time.

    So nothing in here may wait for another rank.
    """
    with ExitStack() as turn:
        plan = blueprint(experiment.model, experiment.seed, partial(_kept, turn, here))
        _refuse_other(plan.model)
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


def _refuse_other(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"Experiment(model=…) returned {type(model).__name__}; it must return a torch nn.Module")


def _without_values(plan: Blueprint) -> nn.Module:
    return plan.model if plan.reason is None else copy.deepcopy(plan.model).to("meta")
