"""From what the user wrote to a model on this rank's device, part of the mesh.

    placed = build(experiment, here, How())

The order of application, which every axis keeps to:

    1. the model without values (meta device), in stages where pp cuts it
    2. random numbers by sample instead of by rank: dropout, also as a function and in attention; statistics over all
       ranks: BatchNorm
    3. tp splits matrices
    4. float8: the layers that compute in it
    5. recomputation of segments
    6. compilation of segments
    7. fsdp shards what is left of each parameter, or dp copies it
    8. values: each rank keeps its part of what the constructor would have drawn, tensor by tensor
    9. bf16, float8: matrices are rounded, and their masters kept (where fsdp does not)

dp alone needs none of it but 2, 4, 5, 6 and 9, and goes through DistributedDataParallel.

What an axis does is in its file. What cannot be is refused in `demands.py` and `how.py`, what is left to us is decided
in `decide.py`, and values come from `values.py`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from meshrun.experiment import Experiment, in_halves
from meshrun.mesh import Here
from meshrun.parallel import (
    choose,
    compiled,
    cp,
    decide,
    dp,
    float8,
    fsdp,
    masters,
    memory,
    pp,
    recompute,
    sdpa,
    segments,
    tp,
    tp_hidden,
    values,
)
from meshrun.parallel.attention import key_attentions
from meshrun.parallel.batch_dim import BatchFinder
from meshrun.parallel.batchnorm import sync_batchnorms
from meshrun.parallel.checkpointed import replay_checkpoints
from meshrun.parallel.choose import Ways
from meshrun.parallel.copied import copied
from meshrun.parallel.demands import Demands, demands_of
from meshrun.parallel.dropout import KEYED, Part, draws, key_dropouts
from meshrun.parallel.functional import key_functions
from meshrun.parallel.held import held_by
from meshrun.parallel.how import How
from meshrun.parallel.later import Later, put_off
from meshrun.parallel.meshed import Meshed
from meshrun.parallel.moment import Moment
from meshrun.parallel.pipeline import Pipeline, Settings
from meshrun.parallel.placed import Cutting, Placed, computing
from meshrun.parallel.schedule import chunks_of
from meshrun.parallel.vocabulary import takes_split


def build(experiment: Experiment, here: Here, how: How) -> Placed:
    """The model on this rank's place in the mesh."""
    moment = Moment(experiment.seed, device=here.device, batch_dim=experiment.batch_dim)
    cudnn = in_halves(experiment.precision) and sdpa.use_cudnn(here.device)
    placed, ways = (
        _replicated(experiment, here, how, moment)
        if here.layout.dp == here.layout.size
        else _meshed(experiment, here, how, moment)
    )
    placed.chosen = decide.chosen(ways, cudnn)
    if ways.compile.compile:
        compiled.hear(placed.chosen, placed.notes.append)
    if ways.auto and ways.twice is not None:
        choose.watch(placed, ways.twice, here, may_repeat=not how.update_in_backward)
    # What the model draws by itself must differ between replicas.
    torch.manual_seed((experiment.seed * 1_000_003 + 1 + here.replica) % (1 << 64))
    return placed


def _replicated(experiment: Experiment, here: Here, how: How, moment: Moment) -> tuple[Placed, Ways]:
    model, plan = values.made(experiment, here.device)
    if plan is not None:
        memory.give_memory(model, here.device)
    finder = BatchFinder.of(model, experiment)
    _same_numbers(model, moment)
    _find_batch(finder, moment, at_once=any(map(draws, model.modules())))
    eight, ways = experiment.precision == "float8", decide.ways(experiment, here, how, model)
    names = segments.find(model, experiment.segments) if ways.by_segment or eight else []
    ways = ways.without_segments() if not names else ways
    notes = float8.apply(model, names, here.device, how.torchao) if eight else []
    with values.filled(model, plan, here.device):
        notes += _on_segments(model, list(enumerate(names)), ways, moment)
    if how.sync_batchnorm and (mesh := here.submesh("dp")) is not None:
        sync_batchnorms(model, mesh.get_group())
    arithmetic = partial(computing, experiment.precision, here.device)
    shortened = in_halves(experiment.precision)
    return dp.apply(model, here, moment, arithmetic, how.compress, notes, shortened=shortened), ways


def _meshed(experiment: Experiment, here: Here, how: How, moment: Moment) -> tuple[Placed, Ways]:
    layout = here.layout
    for axes in (("fsdp", "cp"), ("dp", "cp"), ("dp", "fsdp"), ("dp", "fsdp", "cp")):
        here.submesh(*axes)  # all ranks form groups together, so before they take turns
    with values.laid_out(here, experiment) as plan:
        demands = demands_of(experiment, values.without_values(plan))
        demands.refuse(layout)
        notes = []
        if plan.reason is not None:
            notes.append(f"the model is built whole on the host, one rank of a node at a time: {plan.reason}")
        may_draw = any(isinstance(each, (*KEYED, nn.MultiheadAttention)) for each in demands.model.modules())
        _find_batch(BatchFinder.of(demands.model, experiment), moment, at_once=may_draw or layout.pp > 1)
        ways = decide.ways(experiment, here, how, demands.model)
        ways = ways.without_segments() if not demands.segments else ways
        parts, later = _parts(demands, here, how, ways, moment, notes)
        values.allocate(parts, torch.device("cpu") if how.offload else here.device)
        held = held_by(demands.model, parts)
        if here.alone:
            values.make_up(parts)
        else:
            values.fill(plan, parts, held, here)
    notes += tp_hidden.hide_if_possible(demands.plan, here, ways.compile.compile)
    if experiment.precision == "float8" and layout.fsdp > 1:
        from meshrun.parallel import float8_fsdp  # torch's fsdp comes with it, which is slow to import

        for part in parts.values():
            float8_fsdp.gather_in_float8(part)
    if in_halves(experiment.precision) and layout.fsdp == 1:
        kept = masters.shorten(*parts.values())
        held = [replace(each, master=kept.get(each.parameter)) for each in held]
    pipeline, cutting = _pipeline(experiment, here, parts, later, moment)
    model = next(iter(parts.values())).model
    assert isinstance(model, nn.Module)
    return Meshed(here, pipeline, held, model, demands.model, cutting, notes), ways


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
        notes.append(demands.plan.note(demands.model))
    parts: dict[int, nn.Module] = {}
    for stage in range(here.place("pp"), stages, layout.pp):
        part = (
            pp.Part(demands.model, demands.trace(), cuts, stage, here.device)
            if stages > 1
            else pp.Whole(copied(demands.model))
        )
        model = part.model
        if isinstance(part, pp.Part):
            replay_checkpoints(part)
        _same_numbers(model, moment, None if mesh is None or not demands.plan.styles else (here.place("tp"), layout.tp))
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
            units = [model.get_submodule(name) for _, name in own]
            variant = fsdp.variant_of(layout)
            fsdp.apply(part, units, fsdp.mesh_of(here), variant, experiment.precision, how.offload)
        parts[stage] = part
    return parts, later


def _pipeline(
    experiment: Experiment, here: Here, parts: dict[int, nn.Module], later: Later | None, moment: Moment
) -> tuple[Pipeline, Cutting]:
    """What runs these stages, and how a replica's samples are to be cut for it."""
    layout = here.layout
    chunks = chunks_of(layout)
    mesh = here.submesh("cp")
    settings = Settings(
        variant=layout.pp_variant,
        chunks=chunks,
        arithmetic=partial(computing, experiment.precision, here.device),
        attention=partial(cp.attention, mesh.get_group()) if mesh is not None else nullcontext,
        before_backward=partial(fsdp.before_backward, layout) if layout.fsdp > 1 else _nothing,
        later=later,
        whole_last=layout.fsdp > 1,
    )
    cutting = Cutting(
        in_step=True,
        equal=layout.pp > 1,
        pieces=4 * layout.pp if layout.pp > 1 else 1,
        multiple_of=layout.pp if chunks > 1 else 1,
    )
    return Pipeline(here, parts, moment, settings), cutting


def _same_numbers(model: nn.Module, moment: Moment, part: Part | None = None) -> None:
    """Random numbers by sample instead of by rank; `part` is this rank's of what tp splits."""
    key_dropouts(model, moment)
    key_attentions(model, moment)
    key_functions(model, moment, part)
    if "torch._dynamo" in sys.modules:  # the model's own code may have asked torch to compile parts of it
        compiled.leave_draws()
    replay_checkpoints(moment)
    if any(isinstance(each, nn.TransformerEncoderLayer) for each in model.modules()):
        # Its kernel for evaluation rounds differently and bypasses what axes do to its modules.
        torch.backends.mha.set_fastpath_enabled(False)


def _find_batch(finder: BatchFinder, moment: Moment, at_once: bool) -> None:
    """Find out where the batch is in what dropouts get; not at once where it may be that nothing is dropped."""

    def locate() -> None:
        found = finder.find()
        moment.unplaced, moment.alone = finder.failure, finder.alone
        if found is not None:
            moment.place(found.calls)
            moment.outputs, moment.targets = found.outputs, found.targets

    if at_once:
        key_functions(nn.Module(), moment)  # dropouts are seen where torch's functions are replaced
        locate()
    else:
        moment.locate = locate


def _on_segments(model: nn.Module, own: list[tuple[int, str]], ways: Ways, moment: Moment) -> list[str]:
    """Recompute and compile segments, or all of a model that has none; returns what to tell the user."""
    modules = [(number, model.get_submodule(name)) for number, name in own] or [(0, model)]
    if ways.channels_last:
        compiled.channels_last(model)
    at_once = ways.whole and (ways.twice is None or ways.auto)
    if at_once and ways.twice is not None:
        ways.twice.settled = partial(_compile_now, model, modules, ways, moment)
    elif ways.compile.compile:
        code = compiled.apply([model] if at_once else [module for _, module in modules], ways.compile.asked)
        if ways.twice is not None:
            ways.twice.code.append(code)
    if ways.twice is None:
        return []
    recompute.apply(modules, ways.twice, moment)
    level = ways.twice.level
    if level == "selective" and ways.compile.compile:
        return ["compiled code computes again by itself what is cheap: recompute selective adds nothing to that"]
    if not own and level != "full":
        return [f"the model has no segments: recompute {level} is for all of it (Experiment(segments=…))"]
    return []


def _compile_now(
    model: nn.Module, modules: list[tuple[int, nn.Module]], ways: Ways, moment: Moment, level: str
) -> None:
    """Compile a model, which was computed as it is written until it was known which segments are computed twice."""
    assert ways.twice is not None
    compiled.remove(model)
    recompute.remove(modules)
    compiled.apply([model] if level == "none" else [module for _, module in modules], ways.compile.asked)
    if level != "none":
        recompute.apply(modules, ways.twice, moment)


def _nothing(part: nn.Module, last: bool) -> None:
    """Nobody needs to be told."""
