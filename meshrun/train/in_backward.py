"""`--update-in-backward`: each weight is updated as soon as its gradient is there, and the gradient is let go at once.

    refuse_in_backward(experiment, layout, how, shown=False, looks_first=False)
    compute = InBackward(here, placed, optimizer, update)      # hooks its parameters
    values = compute(step, pieces, samples, loss, asked, updating)

So at no time are there the gradients of more than a few weights: a model in fp32 with AdamW needs three quarters of its
memory. Gradients of the mean loss need its count before they are used: in one process it is known after the forward
pass, and with fsdp all ranks add theirs up there. The norm is that of all gradients, each taken as it passes; nothing
can be clipped by it any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshrun.errors import SharedError
from meshrun.experiment import Experiment, Loss
from meshrun.layout import Layout
from meshrun.mesh import Here
from meshrun.parallel import fsdp
from meshrun.parallel.choose import Choosing
from meshrun.parallel.how import How
from meshrun.parallel.masters import local
from meshrun.parallel.meshed import Meshed
from meshrun.parallel.placed import Asked, Outcome, Piece, Placed, Score, Shard, norms
from meshrun.train.update import Update


def refuse_in_backward(experiment: Experiment, layout: Layout, how: How, shown: bool, looks_first: bool) -> None:
    """A sentence for what needs all gradients at once, or a weight as it was.

    `shown` says that somebody is shown them, `looks_first` that a bad step is to leave the weights as they are.
    """
    if not how.update_in_backward:
        return
    replicas = layout.dp * layout.fsdp
    a_rank = -(-experiment.batch // replicas)
    if experiment.clip is not None:
        why = f"clip is {experiment.clip:g}, and its norm is that of all gradients; switch it off (--clip inf)"
    elif layout.size > 1 and (layout.fsdp == 1 or replicas < layout.size):
        why = f"layout '{layout}' is neither one process nor fsdp, alone or with dp (--layout fsdp={layout.size})"
    elif experiment.micro is not None and experiment.micro < a_rank:
        why = (
            f"each rank computes {a_rank} samples a step in micro-batches of {experiment.micro}, whose gradients are "
            f"added up; compute them at once (--micro {a_rank}, --recompute), or on more ranks"
        )
    elif how.offload:
        why = "gradients go to the host first (--offload)"
    elif looks_first:
        why = "a bad step is to be left out, but weights have changed before it is known to be (--on-nan, --on-spike)"
    elif shown:
        why = "all gradients of a step are to be shown"
    else:
        return
    raise SharedError(f"--update-in-backward lets go of each gradient at once, but {why}")


@dataclass(eq=False)
class InBackward:
    """One update whose weights change while its gradients are computed."""

    here: Here
    placed: Placed
    optimizer: Optimizer
    update: Update
    _count: int | float | Tensor = 0
    """Of this rank's samples, known after the forward pass."""
    _factor: float | Tensor | None = None
    """From gradients of total / samples to those of the mean; None while no step is computed."""
    _norms: list[tuple[Tensor, int]] = field(default_factory=list)
    """Of each gradient that has passed, and how many ranks hold these very elements."""

    def __post_init__(self) -> None:
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            raise SharedError(
                f"--update-in-backward updates one weight at a time, which is known to be right only of torch's own "
                f"optimizers, but this one is {type(self.optimizer).__name__}"
            )
        groups = {each: group for group in self.optimizer.param_groups for each in group["params"]}
        meshed = self.placed if isinstance(self.placed, Meshed) else None
        computed = (
            [each.parameter for each in meshed.trained] if meshed else [each.computed for each in self.placed.shards]
        )
        for shard, parameter in zip(self.placed.shards, computed, strict=True):
            parameter.register_post_accumulate_grad_hook(self._hook(shard, groups[shard.parameter]))
        self._pass = self.placed.step
        if meshed is not None:
            # Who finds out by the layout's own step what is computed twice has to see this one instead.
            if isinstance(meshed.step, Choosing):
                meshed.step.computes = self._on_mesh
            else:
                self._pass = self._on_mesh
            self._before_backward = meshed.pipeline.settings.before_backward
            meshed.pipeline.settings.before_backward = self._agree

    def __call__(
        self,
        step: int,
        pieces: list[Piece],
        samples: int,
        loss: Score,
        asked: Asked,
        updating: Callable[[], AbstractContextManager[None]],
    ) -> list[float] | Tensor:
        """Do one update; returns `Update.values`, on a GPU as a tensor."""
        if len(pieces) > 1:
            raise SharedError(
                f"--update-in-backward lets go of each gradient at once, but step {step + 1} is computed in "
                f"{len(pieces)} micro-batches, whose gradients are added up (--micro)"
            )

        def counting(outputs: Any, targets: Any) -> Loss:
            found = loss(outputs, targets)
            self._count = found.count
            if not isinstance(self.placed, Meshed):
                self._begin(found.count)
            return found

        self._count, self._norms, self._samples, self._updating = 0, [], samples, updating
        with ExitStack() as self._changing:
            outcome = self._computed(step, pieces, samples, counting, asked)
        factor, self._factor = self._factor, None
        assert factor is not None and outcome.norm is not None
        if isinstance(factor, Tensor):
            return torch.stack([*outcome.sums[:2], outcome.norm * factor, outcome.own[0], outcome.sums[2]])
        total, count, is_asked = outcome.sums.tolist()
        return [total, count, outcome.norm.item() * factor, outcome.own[0].item(), is_asked]

    def _computed(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        """What the layout's own step does, with gradients that are gone when it is done."""
        with self.here.waiting(f"the gradients of step {step + 1}"):
            outcome = self._pass(step, pieces, samples, loss, asked)
            if isinstance(self.placed, Meshed):
                return outcome
            return Outcome(outcome.own, outcome.sums, self._square_sum(outcome.own).sqrt())

    def _on_mesh(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        assert isinstance(self.placed, Meshed)
        layout, pipeline = self.here.layout, self.placed.pipeline
        own = pipeline.train(step, pieces, layout.dp * layout.fsdp / samples, loss)
        for part in pipeline.parts.values():
            fsdp.settle(part)
        everyone = torch.cat([own, own.new_full((1,), asked()), self._square_sum(own).reshape(1)])
        dist.all_reduce(everyone)
        return Outcome(own, everyone[:3], everyone[3].sqrt())

    def _square_sum(self, like: Tensor) -> Tensor:
        """This rank's share in the square of the whole gradient's norm."""
        if not self._norms:
            return like.new_zeros(())
        found, copies = zip(*self._norms, strict=True)
        shares = torch.tensor(copies, dtype=torch.float64).to(like.device, non_blocking=True)
        return (torch.stack(found).double().square() / shares).sum()

    def _agree(self, part: nn.Module, last: bool) -> None:
        """Before the backward pass of ranks that hold parts: add up what they have counted."""
        self._before_backward(part, last)
        count = self._count
        device = self.here.device
        everyone = (
            count.detach().to(device, torch.float64)
            if isinstance(count, Tensor)
            else torch.full((), float(count), dtype=torch.float64, device=device)
        ).clone()
        dist.all_reduce(everyone)
        self._begin(everyone)

    def _begin(self, count: int | float | Tensor) -> None:
        """From here on weights change, by gradients times samples / count: on a GPU a tensor that nobody looks at."""
        self._changing.enter_context(self._updating())
        if self.here.device.type == "cuda":
            if not isinstance(count, Tensor):
                count = torch.full((), float(count), dtype=torch.float64, device=self.here.device)
            self._factor = (self._samples / count.detach().double()).float()
        else:
            self._factor = self._samples / float(count) if float(count) else math.nan

    def _hook(self, shard: Shard, group: dict[str, Any]) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def taken(parameter: Tensor) -> None:
            if self._factor is None:  # a pass whose gradients somebody else wants
                return
            gradient = parameter.grad
            assert gradient is not None
            if parameter is not shard.computed:  # what the optimizer has is this in the same memory, without wrapping
                shard.parameter.grad, parameter.grad = local(gradient), None
                gradient = shard.parameter.grad
            self._norms.append((_norm(gradient), shard.copies))
            self.update.change([shard], group, self._factor)
            shard.parameter.grad = shard.computed.grad = None

        return taken


def _norm(gradient: Tensor) -> Tensor:
    """One kernel on a GPU, since there is one for each weight of the model; elsewhere as all norms are taken."""
    if gradient.is_cuda:
        return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return norms([gradient])[0]
