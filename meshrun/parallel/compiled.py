"""Compilation of segments, and what else a GPU needs to be told to be fast.

    choice = chosen(how.compile, layout, here.device, parameters=1_100_000_000, steps=600)       # Choice(True, "…")
    if choice.compile:
        apply(segments, choice.asked)
        hear(placed.chosen, placed.notes.append)      # should something not be compiled that nobody asked for
    channels_last(model)                     # images on a GPU: the order of memory that its convolutions want

What a segment's `forward` does is compiled and nothing around it, so what axes do before and after a segment (gathering
its parameters, receiving its inputs, computing it twice) stays as it is. Blocks that are alike share one graph:
parameters, and what dropout is keyed by, are inputs of it. There is another one for evaluation, and one for batches of
another size.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from meshrun.experiment import Experiment
from meshrun.layout import Layout
from meshrun.parallel.functional import leave_uncompiled, replacements

if TYPE_CHECKING:
    from meshrun.parallel.inductor import Ample

ENOUGH_PARAMETERS, ENOUGH_STEPS, ENOUGH_WORK = 5_000_000, 100, 400_000_000_000
"""Compiling takes up to half a minute: for less it does not pay. Work is parameters times samples."""
AN_HOUR = 100_000_000_000_000
"""Parameters times samples that a large GPU needs about an hour for, if samples are texts of some thousand tokens."""
GRAPHS = 64
"""Graphs of one function. torch would stop at 8, but all blocks of a convolutional network are one function, and each
width, with and without a shortcut, in training and in evaluation, is a graph of its own."""
SHAPES = {True: 2, False: 1}
"""How many shapes of what it is given a segment is compiled for one by one, in training and in evaluation: that of a
batch, and in training that of an epoch's last one. Where there are more, lengths vary, and each would take as long."""


_CACHEABLE = (
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.nn.attention._backend_from_string",
    "torch.nn.attention._sdpa_kernel",
)
"""What norms and attention switch around their arithmetic, which torch takes for something unknown: what is compiled of
it would not be kept as a whole."""


@dataclass(frozen=True)
class Choice:
    """Whether segments are compiled, and why."""

    compile: bool
    why: str
    asked: bool = False
    """Whether the user wants it, and so wants to hear where it cannot be."""


def chosen(asked: bool | None, layout: Layout, device: torch.device, parameters: int, steps: int) -> Choice:
    """What is asked for, or what pays."""
    if (reason := _cannot(layout)) is not None:
        return Choice(False, reason)
    if asked is not None:
        return Choice(asked, "asked for (--compile)" if asked else "asked for (--no-compile)", asked=True)
    if device.type != "cuda":
        return Choice(False, f"the device is {device.type}")
    if importlib.util.find_spec("triton") is None:
        return Choice(False, "triton is not installed")
    if parameters < ENOUGH_PARAMETERS:
        return Choice(False, f"the model has {parameters:,} parameters; from {ENOUGH_PARAMETERS:,} on it pays")
    if steps < ENOUGH_STEPS:
        return Choice(False, f"the run has {steps:,} steps; from {ENOUGH_STEPS:,} on it pays")
    return Choice(True, f"{parameters:,} parameters and {steps:,} steps on a GPU")


def is_much(parameters: int, samples: int) -> bool:
    """Whether so many samples are enough work for what takes seconds to be prepared."""
    return parameters * samples >= ENOUGH_WORK


def is_long(parameters: int, samples: float) -> bool:
    """Whether a rank that shares in so many samples will be busy for about an hour or more."""
    return parameters * samples >= AN_HOUR


def if_much(choice: Choice, parameters: int, samples: int) -> Choice:
    """The same where so many samples are much work; many small steps are soon done, and are replayed as graphs."""
    if is_much(parameters, samples):
        return choice
    return Choice(False, f"{samples:,} samples are too little work for {parameters:,} parameters to be compiled")


def _cannot(layout: Layout) -> str | None:
    if layout.pp > 1 and layout.pp_variant == "zb":
        return "pp:zb puts gradients of weights off, which compiled code cannot"
    if layout.cp > 1:
        return "cp's ranks compute attention together, which compiled code cannot"
    return None


def steps_of(experiment: Experiment) -> int:
    """About how many updates a run makes."""
    return experiment.steps or round((experiment.epochs or 0) * len(experiment.train) / experiment.batch)


def _prepare(asked: bool) -> None:
    """Set torch up for all that is compiled in this process."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    leave_draws()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    # What nobody has asked for must not end a training: what cannot be compiled is computed as it is written.
    torch._dynamo.config.suppress_errors = not asked
    # What is kept from an earlier run is looked for, both as a graph and as its forward and backward passes.
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    if hasattr(torch._functorch.config, "autograd_cache_allow_custom_autograd_functions"):
        # Such as float8's products, which are traced like all else.
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    for name in _CACHEABLE:
        torch._inductor.config.unsafe_marked_cacheable_functions.setdefault(name, torch.__version__)


def leave_draws() -> None:
    """Have torch's compiler leave draws by sample alone, also where a model's own code asks it to compile something."""
    import torch._dynamo

    # torch notes which of its functions are part of graphs as they are; what stands in their place is compiled like
    # any other code.
    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()
    for replacement, own in replacements().items():
        if replacement in rules:
            rules[own] = rules.pop(replacement)
    leave_uncompiled(torch._dynamo.disable)


def apply(segments: Sequence[nn.Module], asked: bool) -> Code:
    """Compile what segments do, in place. Single layers of torch are kernels already; alone they are compiled too."""
    _prepare(asked)
    worth = [each for each in segments if not _is_kernel(each)] or segments
    for segment in worth:
        if not isinstance(segment.forward, Compiled):
            segment.forward = Compiled(segment.forward)
    return Code([each.forward for each in worth])  # type: ignore[misc]


def remove(module: nn.Module) -> None:
    """Let a module compute as before `apply`, if it was given to that."""
    if isinstance(vars(module).get("forward"), Compiled):
        del module.forward


class Compiled:
    """What a segment does, compiled for the very shapes that it meets; if they are many, once for all others.

    torch would make the second one already for all, and of segments that share their code: those of a convolutional
    network, each of another width, and of an encoder and a decoder would all be slow.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        from meshrun.parallel.inductor import backend

        self._forward = forward
        self.compile(backend)

    def compile(self, backend: Callable[..., Any]) -> None:
        """Do so by this backend, from the next call on."""
        self._exact = torch.compile(self._forward, backend=backend, dynamic=False)
        self._any = torch.compile(self._forward, backend=backend)
        self._met: dict[bool, set[Any]] = {True: set(), False: set()}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        given = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor)]
        # Compiled code takes what is still on its way from other ranks for something else, and gives wrong gradients.
        if any(isinstance(each, AsyncCollectiveTensor) for each in given):
            inputs, named = tree_map_only(AsyncCollectiveTensor, lambda each: each * 1, (inputs, named))
        training, shapes = torch.is_grad_enabled(), tuple(each.shape for each in given)
        met = self._met[training]
        if shapes not in met:
            if len(met) == SHAPES[training]:
                return self._any(*inputs, **named)
            met.add(shapes)
        return self._exact(*inputs, **named)


@dataclass
class Code:
    """What segments of a model do, compiled, and how much of it is kept for the backward pass."""

    segments: list[Compiled]
    _ample: Ample | None = None

    @property
    def keeps_more(self) -> bool:
        """Whether what is quicker kept than made again is kept, and there is some."""
        return self._ample is not None and self._ample.finds

    def keep_more(self) -> None:
        """Keep it, from the next step on."""
        from meshrun.parallel.inductor import Ample

        self._ample = Ample()
        self._compile(self._ample)

    def keep_less(self) -> None:
        """Keep what must be kept; that is how it begins."""
        from meshrun.parallel.inductor import backend

        self._ample = None
        self._compile(backend)

    def _compile(self, backend: Callable[..., Any]) -> None:
        for each in self.segments:
            each.compile(backend)


def hear(chosen: dict[str, Any], tell: Callable[[str], None]) -> None:
    """From now on, have `chosen` say so where torch cannot compile something; `tell` is told the first such thing.

    Whoever has heard of it before no longer does: models of a process come one after the other.
    """
    log = logging.getLogger("torch._dynamo.convert_frame")  # torch says it nowhere else
    for each in [each for each in log.handlers if isinstance(each, _Hearing)]:
        log.removeHandler(each)
    log.addHandler(_Hearing(chosen, tell))


class _Hearing(logging.Handler):
    def __init__(self, chosen: dict[str, Any], tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.chosen, self.tell = chosen, tell

    def emit(self, record: logging.LogRecord) -> None:
        error: Any = record.exc_info[1] if record.exc_info else None
        if error is None or self.chosen["compile"] == "tried":
            return
        error = getattr(error, "inner_exception", error)  # a compiler's own words
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        why = f"could not be compiled: {type(error).__name__}: {first}"
        self.chosen.update(compile="tried", compile_why=why)
        self.tell(f"{why}; it is computed as it is written (--no-compile)")


def _is_kernel(module: nn.Module) -> bool:
    single = next(module.children(), None) is None
    return single and type(module).forward.__module__.startswith("torch.nn.")


def convolves(model: nn.Module) -> bool:
    """Whether a model has convolutions over images."""
    return any(isinstance(each, nn.Conv2d | nn.ConvTranspose2d) for each in model.modules())


def channels_last(model: nn.Module) -> None:
    """Let images come with their channels last, which is how a GPU convolves.

    Weights stay as they are, so that nobody who saves, cuts or sends them needs to know: cuDNN turns them around, which
    is little beside a batch of images.
    """
    model.register_forward_pre_hook(_ordered, with_kwargs=True)


def _ordered(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tree_map_only(Tensor, _with_channels_last, (inputs, named))


def _with_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
