"""The axis pp: where a model is cut into stages, and a stage of it.

    trace = follow(model, segments, sample)           # model on the meta device: what is called when, at what cost
    cuts = trace.cuts(stages=4)                       # each stage's first segment, so that the slowest is fastest
    part = Part(model, trace, cuts, stage=1)          # a copy of the model that holds and computes this stage only

A stage runs the model's own forward function from its beginning. Modules that are not on it give placeholders of the
right shape at no cost, until its first segment is called: there the placeholders among the arguments are replaced by
what the stage before has computed. When the first segment of the next stage is called, its arguments are what is to be
sent, and the forward pass ends there. So what the model computes outside of its segments from its inputs alone (masks,
positions) is there on every stage, and any tensors may cross a cut that are arguments of the segment after it.

Buffers outside of segments (tables of positions) are on every stage. A module outside of segments that changes its own
buffers (running statistics) is on the stage that calls it, as one with parameters is.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from meshrun.errors import UserError
from meshrun.experiment import Loss
from meshrun.parallel.copied import copied
from meshrun.parallel.placed import call
from meshrun.parallel.placeholder import Uses, Writable, Writes, has_nan, placeholder


@dataclass(frozen=True)
class Trace:
    """What happened when one sample went through the model. Segments are in the order in which they were called."""

    segments: list[str]
    costs: list[float]
    """Of each segment, with what is computed between it and the next."""
    crossing: list[list[int]]
    """Which leaves of each segment's arguments depend on parameters: what has to be sent if the model is cut there."""
    outside: dict[str, set[int]]
    """Module outside of segments with parameters, or with buffers that it changes -> after how many segments it was
    called, or its weights were used."""
    changing: dict[str, str] = field(default_factory=dict)
    """Those of them that change a buffer in the forward pass -> one such buffer."""
    overwritten: set[str] = field(default_factory=set)
    """Modules whose outputs the model's own code writes into, as in-place ReLU does."""
    lent: dict[str, set[int]] = field(default_factory=dict)
    """Segment whose weights other code uses, such as `F.linear(x, self.embed.weight)` -> after how many segments."""

    def cuts(self, stages: int) -> list[int]:
        """The number of each stage's first segment: contiguous stages, the most expensive one as cheap as can be."""
        count = len(self.costs)
        upto = [0.0]
        for cost in self.costs:
            upto.append(upto[-1] + cost)
        # best[k][n]: the cost of the dearest of k stages made of the first n segments, and where the last one begins.
        best = [[(upto[n], 0) for n in range(count + 1)]]
        for k in range(1, stages):
            row = [(float("inf"), 0)] * (count + 1)
            for n in range(k + 1, count + 1):
                row[n] = min((max(best[k - 1][first][0], upto[n] - upto[first]), first) for first in range(k, n))
            best.append(row)
        cuts, n = [], count
        for k in range(stages - 1, -1, -1):
            n = best[k][n][1]
            cuts.append(n)
        return cuts[::-1]

    def owner(self, place: int, cuts: Sequence[int]) -> int:
        """The stage that computes what comes after `place` segments were called."""
        segment = max(place - 1, 0)
        return max(stage for stage, first in enumerate(cuts) if first <= segment)


def follow(model: nn.Module, segments: Sequence[str], sample: tuple[Any, Any]) -> Trace:
    """Send a batch through a model on the meta device, and see what is called when.

    The model's own code runs on real tensors: only modules with parameters give placeholders, so that code that looks
    at the values of masks or positions works.
    """
    outside = _outside(model, segments)
    trace, observed = _followed(model, segments, outside, sample)
    # A module that changes its buffers is followed as one with parameters is, since only one stage has its inputs.
    changing = {buffer.rpartition(".")[0] for buffer in observed.changed}
    alone = [name for name in changing if not _inside(name, outside) and not _around(name, segments)]
    if alone:
        outside = [*outside, *alone]
        trace, observed = _followed(model, segments, outside, sample)
    around = sorted(buffer for buffer in observed.changed if not _inside(buffer.rpartition(".")[0], outside))
    if around:
        _refuse_spoiled(model, segments, outside, sample)
    return trace


def _followed(
    model: nn.Module, segments: Sequence[str], outside: Sequence[str], sample: tuple[Any, Any]
) -> tuple[Trace, _Observed]:
    seen = _Seen()
    observed = _send_through(model, segments, outside, sample, seen.called, seen.spark, seen.writes, seen.used)
    missed = [name for name in segments if name not in seen.order]
    if missed:
        raise UserError(f"segment {missed[0]!r} was not called in the model's forward pass; leave it out of segments")
    changing = {name: buffer for buffer in sorted(observed.changed) for name in outside if _inside(buffer, [name])}
    overwritten = seen.writes.seen - observed.changed
    lent = {name: seen.outside.pop(name) for name in segments if name in seen.outside}
    return Trace(seen.order, seen.costs, seen.crossing, seen.outside, changing, overwritten, lent), observed


def _refuse_spoiled(model: nn.Module, segments: Sequence[str], outside: Sequence[str], sample: tuple[Any, Any]) -> None:
    """Refuse a model whose own code changes a buffer by activations: all stages would do so, with placeholders."""
    seen = _Seen(value=float("nan"))
    observed = _send_through(model, segments, outside, sample, seen.called, seen.spark, seen.writes, seen.used)
    if observed.spoiled:
        raise UserError(
            f"the model changes its buffer {min(observed.spoiled)!r} outside of segments by values that only one stage "
            f"of the pipeline has; change it in a module of its own, or inside a segment"
        )


Called = Callable[..., Any]
"""(name, whether it is a segment, its forward function, arguments) -> what to return in its place."""


@dataclass(frozen=True)
class _Observed:
    """What a pass through a model without values has shown."""

    outputs: Any
    changed: set[str]
    """Buffers outside of segments that the forward pass changes."""
    spoiled: set[str]
    """Those of them into which it has put a NaN."""


def _send_through(
    model: nn.Module,
    segments: Sequence[str],
    outside: Sequence[str],
    sample: tuple[Any, Any],
    called: Called,
    spark: Tensor,
    writes: Writes,
    used: Callable[[str], None] = lambda _: None,
) -> _Observed:
    """Run a model's own code, with `called` in place of its modules; parameters between them depend on `spark`.

    `used` is told of a module whose weights are used by other code.
    """
    model = copied(model)
    buffers: dict[str, tuple[nn.Module, str, Tensor]] = {}
    uses = Uses(used)
    for name in (*segments, *outside):
        module = model.get_submodule(name)
        uses.watch(name, module)
        module.forward = partial(called, name, name in segments, module.forward)
    for name, module in model.named_modules():
        if _inside(name, segments):
            continue
        stays = _inside(name, outside)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in [(key, tensor) for key, tensor in tensors.items() if tensor is not None]:
                if not stays:
                    # What the model's own code uses directly must be there, if only in shape.
                    from_parameter = tensors is module._parameters
                    module.__dict__[key] = placeholder(spark if from_parameter else spark.detach(), tensor)
                    del tensors[key]
                if tensors is module._buffers:
                    buffers[f"{name}.{key}" if name else key] = module, key, getattr(module, key)
    for name, (_, _, tensor) in buffers.items():
        writes.watch(tensor, name)
    try:
        with torch.enable_grad(), uses, writes:
            outputs = call(model, sample[0])
    except (UserError, _Reached):
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"pp cannot follow the model's forward pass without its weights ({_users_line(error)}"
            f"{type(error).__name__}: {text}); between segments it must not depend on the values of activations"
        ) from error
    replaced = {name: getattr(module, key) for name, (module, key, _) in buffers.items()}
    replaced = {name: now for name, now in replaced.items() if now is not buffers[name][2]}
    spoiled = {name for name, now in replaced.items() if isinstance(now, Tensor) and has_nan(now)}
    changed = writes.seen & buffers.keys() | replaced.keys()
    return _Observed(outputs, changed, writes.spoiled & buffers.keys() | spoiled)


_NOT_THE_USERS = tuple(str(Path(each).parent) for each in (str(torch.__file__), str(Path(__file__).parent)))


def _users_line(error: Exception) -> str:
    """The innermost line of the user's program that an error went through, ahead of its text."""
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_THE_USERS)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


class _Seen:
    def __init__(self, value: float = 0.0) -> None:
        self.order: list[str] = []
        self.costs: list[float] = []
        self.crossing: list[list[int]] = []
        self.outside: dict[str, set[int]] = {}
        self.spark = torch.tensor(value, requires_grad=True)
        self.writes = Writes()
        self._before = 0.0

    def called(self, name: str, is_segment: bool, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if is_segment:
            if name in self.order:
                raise UserError(f"segment {name!r} is called twice in one forward pass, so pp cannot cut the model")
            self.order.append(name)
            self.crossing.append(_crossing((inputs, named)))
            self.costs.append(0.0)
        else:
            self.used(name)
        outputs, cost = _shaped(forward, inputs, named)
        if self.costs:
            self.costs[-1] += cost + self._before
            self._before = 0.0
        else:
            self._before += cost
        return tree_map_only(Tensor, partial(self._given_by, name), outputs)

    def used(self, name: str) -> None:
        self.outside.setdefault(name, set()).add(len(self.order))

    def _given_by(self, name: str, like: Tensor) -> Tensor:
        given = placeholder(self.spark, like)
        self.writes.watch(given, name)
        return given


_MOST_OUTPUTS = 50_000_000
"""Numbers in a model's outputs for the batch of a trace up to which its loss is tried on the host."""


def refuse_hidden(
    model: nn.Module,
    trace: Trace,
    cuts: Sequence[int],
    sample: tuple[Any, Any],
    loss: Callable[[Any, Any], Loss],
) -> None:
    """Refuse a model in which something crosses a cut that is no argument of the segment after it."""
    for name, buffer in trace.changing.items():
        if len({trace.owner(place, cuts) for place in trace.outside.get(name, ())}) > 1:
            raise UserError(
                f"module {name!r} changes its buffer {buffer!r} in the forward pass, and several stages of the "
                f"pipeline call it: each would change its own; give each call a module of its own"
            )
    for name, places in trace.lent.items():
        owner = trace.owner(trace.segments.index(name) + 1, cuts)
        if any(trace.owner(place, cuts) != owner for place in places):
            raise UserError(
                f"the model cannot be cut: its code uses weights of segment {name!r} outside of it, on another stage "
                f"of the pipeline; leave {name!r} out of Experiment(segments=…), so that both stages have it"
            )
    for first in cuts[1:]:
        before = torch.zeros((), requires_grad=True)
        crossed = torch.zeros((), requires_grad=True)
        called = partial(_tell_apart, trace.segments[first], trace.crossing[first], before, crossed, [])
        outputs = _send_through(model, trace.segments, list(trace.outside), sample, called, crossed, Writes()).outputs
        leaves = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        if sum(each.numel() for each in leaves) > _MOST_OUTPUTS:
            return
        with Writes():
            total = loss(outputs, sample[1]).total
        if _depends_on(total, before):
            raise UserError(
                f"the model cannot be cut before segment {trace.segments[first]!r}: what comes after it also uses "
                f"results from before it that are no arguments of that segment; pass them through the segments"
            )


def _depends_on(result: Tensor, leaf: Tensor) -> bool:
    """Whether the autograd graph of a result reaches a leaf. No gradient is computed: placeholders have none."""
    nodes, known = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        known.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _tell_apart(
    first: str,
    crossing: list[int],
    before: Tensor,
    crossed: Tensor,
    brought: list[Any],
    name: str,
    _: bool,
    forward: Callable[..., Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    """Placeholders that depend on `before` up to a segment, and after it on what its arguments brought across."""
    leaves = tree_leaves((inputs, named))
    if name == first:
        brought += [leaves[number] for number in crossing]
    outputs, _cost = _shaped(forward, inputs, named)
    if not brought:
        return tree_map_only(Tensor, partial(placeholder, before), outputs)
    used = [
        crossed if any(leaf is each for each in brought) else leaf.reshape(-1)[0].float()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel()
    ]
    # What a module outside of segments gives depends on its own weights, which are there.
    return tree_map_only(Tensor, partial(placeholder, torch.stack([crossed, *used]).sum()), outputs)


def _shaped(forward: Callable[..., Any], inputs: Any, named: Any) -> tuple[Any, float]:
    """What a module on the meta device would return, and its cost: floating-point operations, and memory touched."""
    inputs, named = tree_map_only(Tensor, lambda each: each.to("meta"), (inputs, named))
    with FlopCounterMode(display=False) as counter:
        outputs = forward(*inputs, **named)
    touched = sum(each.numel() for each in tree_leaves(outputs) if isinstance(each, Tensor))
    # A number that is only moved costs about as much time as some tens of operations in a matrix product.
    return outputs, counter.get_total_flops() + 50.0 * touched


def _crossing(arguments: Any) -> list[int]:
    return [
        number
        for number, leaf in enumerate(tree_leaves(arguments))
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
    ]


def _outside(model: nn.Module, segments: Sequence[str]) -> list[str]:
    """Outermost modules with parameters that neither lie in a segment nor contain one."""
    found: list[str] = []
    for name, module in model.named_modules():
        if _inside(name, [*segments, *found]) or _around(name, segments):
            continue
        if any(True for _ in module.parameters(recurse=False)):
            found.append(name)
    return found


def _inside(name: str, outer: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in outer)


def _around(name: str, segments: Sequence[str]) -> bool:
    """Whether a module is the model, or contains a segment."""
    return not name or any(each.startswith(f"{name}.") for each in segments)


class Whole(nn.Module):
    """All of a model as the only stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, _: tuple[Tensor, ...], inputs: Any) -> Any:
        return call(self.model, inputs)


class _Reached(Exception):
    """The end of a stage, thrown through the model's own forward function."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


class Part(nn.Module):
    """One stage: `part(received, inputs)` gives what is to be sent, or the model's outputs on the last stage."""

    def __init__(self, model: nn.Module, trace: Trace, cuts: Sequence[int], stage: int, device: torch.device) -> None:
        """`model` is on the meta device, and is copied."""
        super().__init__()
        # Copied twice: one gets weights, the other stays without, to know the shapes of what is elsewhere.
        self.model = copied(model)
        self._shapes = [copied(model)]
        self._received: tuple[Tensor, ...] = ()
        self._brought: dict[int, tuple[Tensor, Tensor]] = {}
        self._spark = torch.zeros((), device=device)
        first = cuts[stage]
        end = cuts[stage + 1] if stage + 1 < len(cuts) else len(trace.segments)
        own = [*trace.segments[first:end], *(name for name in trace.outside if self._is_here(name, trace, cuts, stage))]
        self._kept = {part for name in own for part in self.model.get_submodule(name).modules()}
        for number, name in enumerate(trace.segments):
            if first <= number < end:
                self._bring_across(name, trace.crossing[number] if number == first and stage else [])
            elif number == end:
                self._end_at(name, trace.crossing[number])
            else:
                self._stand_in(name, name in trace.overwritten)
        for name in trace.outside:
            if not self._is_here(name, trace, cuts, stage):
                self._stand_in(name, name in trace.overwritten)
            else:
                self._bring_across(name, [])

    @staticmethod
    def _is_here(outside: str, trace: Trace, cuts: Sequence[int], stage: int) -> bool:
        """Whether a module outside of segments is called by this stage."""
        return stage in {trace.owner(place, cuts) for place in trace.outside[outside]}

    def forward(self, received: tuple[Tensor, ...], inputs: Any) -> Any:
        # A stage may change what it has received in place, which a leaf that requires a gradient does not allow.
        self._received = tuple(Writable.apply(each) if each.requires_grad else each for each in received)
        try:
            return call(self.model, inputs)
        except _Reached as reached:
            return reached.tensors
        finally:
            self._received = ()
            self._brought.clear()

    def returning(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts, inside of which the stage has received what it has received now."""
        received, brought = self._received, dict(self._brought)

        @contextmanager
        def there() -> Iterator[None]:
            now = self._received, self._brought
            self._received, self._brought = received, dict(brought)
            try:
                yield
            finally:
                self._received, self._brought = now

        return there

    def _stand_in(self, name: str, overwritten: bool) -> None:
        """Let go of a module's parameters, and answer its calls with placeholders.

        Those that the model's own code writes into have memory of their own.
        """
        module, twin = self.model.get_submodule(name), self._shapes[0].get_submodule(name)
        _forget(module, self._kept)
        known: dict[Any, Any] = {}
        anew = Tensor.clone if overwritten else Tensor.detach

        def forward(*inputs: Any, **named: Any) -> Any:
            leaves = (*inputs, *named.values())
            leaves = leaves if all(map(_is_plain, leaves)) else tuple(tree_leaves(leaves))
            shown = ((each.shape, each.dtype) if isinstance(each, Tensor) else str(each) for each in leaves)
            looks = module.training, *shown
            if looks not in known:
                twin.train(module.training)  # batch norm refuses one sample in training only
                with torch.no_grad():
                    shapes = _shaped(twin.forward, inputs, named)[0]
                known[looks] = tree_map_only(Tensor, partial(placeholder, self._spark), shapes)
            # Another object each time, since placeholders are told apart by identity.
            found = known[looks]
            return anew(found) if isinstance(found, Tensor) else tree_map_only(Tensor, anew, found)

        module.forward = forward

    def _bring_across(self, name: str, crossing: list[int]) -> None:
        """Replace placeholders among a module's arguments by what was received.

        `crossing` says which they are at the stage's first segment. The model's code may hold on to them and pass them
        to later modules too (a decoder's blocks all get the encoder's output), so they are known again by identity.
        """
        module = self.model.get_submodule(name)

        def replace(_: nn.Module, inputs: Any, named: Any) -> Any:
            values = (*inputs, *named.values())
            if not crossing and all(map(_is_plain, values)) and not any(id(each) in self._brought for each in values):
                return None
            leaves, form = tree_flatten((inputs, named))
            if crossing:
                for number, tensor in zip(crossing, self._received, strict=True):
                    # The placeholder is kept: while it lives, no other tensor can have its identity.
                    self._brought[id(leaves[number])] = leaves[number], tensor
            return tree_unflatten([self._known(leaf) for leaf in leaves], form)

        module.register_forward_pre_hook(replace, with_kwargs=True, prepend=True)

    def _known(self, leaf: Any) -> Any:
        return self._brought[id(leaf)][1] if id(leaf) in self._brought else leaf

    def _end_at(self, name: str, crossing: list[int]) -> None:
        module = self.model.get_submodule(name)
        _forget(module, self._kept)

        def forward(*inputs: Any, **named: Any) -> Any:
            leaves = tree_leaves((inputs, named))
            raise _Reached(tuple(self._known(leaves[number]) for number in crossing))

        module.forward = forward


def _is_plain(value: Any) -> bool:
    """Whether there is no tensor inside of a value, unless it is one."""
    return value is None or isinstance(value, Tensor | int | float | str)


def _forget(module: nn.Module, kept_here: set[nn.Module]) -> None:
    """Take parameters and buffers away; code that asks for a weight's type or shape still finds it, without values.

    Not those of modules that are parts of what this stage computes too.
    """
    for each in module.modules():
        if each in kept_here:
            continue
        kept = {
            name: tensor for name, tensor in (*each._parameters.items(), *each._buffers.items()) if tensor is not None
        }
        for name in kept:
            each._parameters.pop(name, None)
            each._buffers.pop(name, None)
        for name, tensor in kept.items():
            each.__dict__[name] = tensor.detach()
