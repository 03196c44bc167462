"""The axis dp: every rank holds the whole model, and gradients are averaged over the ranks once a step.

    placed = apply(model, here)
    outcome = placed.step(7, pieces, samples=64, loss=cross_entropy, asked=nobody)

torch's DistributedDataParallel reduces while the backward pass still runs. Two kinds of step it cannot do, and they are
reduced here after the backward pass instead: the first one, which finds out whether the model has parameters that take
no part in the loss (DDP must know before it is made), and one in which a rank has no samples at all.

The sums of a step travel as the gradient of a parameter that is no part of the model (`Cargo`): a collective of their
own would cost more than all else that is done for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshrun.errors import RunFailed
from meshrun.experiment import Loss
from meshrun.kernels.cross_entropy import backward_follows
from meshrun.mesh import Here
from meshrun.parallel import buffers, compress, masters
from meshrun.parallel.dropout import draws
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import (
    Asked,
    Cutting,
    Outcome,
    PersistentBuffers,
    Piece,
    Score,
    Shard,
    as_sums,
    call,
    counted,
    persistent_buffers,
)

# Ranks agree on running statistics before they are used, not in every forward pass. torch 2.13 renamed the switch.
_SWITCHES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SWITCHES else "broadcast_buffers": False
}

Computed = TypeVar("Computed")


def apply(
    model: nn.Module,
    here: Here,
    moment: Moment | None = None,
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compression: str = "none",
    notes: Sequence[str] = (),
    shortened: bool = False,
) -> Replicated:
    """Replicate a model that is already on this rank's device; `shortened` stores its matrices in bf16."""
    if here.mesh is not None:
        _settle_strides(model)
        with here.waiting("the initial weights from rank 0"), torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                values = tensor.detach().contiguous()
                dist.broadcast(values, src=0)
                tensor.copy_(values)
    # What is compressed by matrices is compressed in fp32.
    short = masters.shorten(model) if shortened and compression != "powersgd" else {}
    return Replicated(model, here, moment or Moment(device=here.device), arithmetic, compression, list(notes), short)


def _settle_strides(model: nn.Module) -> None:
    """Give tensors strides that follow from their shape: into others, such as an expanded buffer's, none can be sent.

    Parameters in another memory format, such as channels last, keep it.
    """
    buffers = [buffer for buffer in model.buffers() if not buffer.is_contiguous()]
    usual = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_contiguous()]
    for tensor in (*buffers, *usual):
        if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


class Cargo(nn.Module):
    """The model, and beside it a parameter whose gradient carries (total, count, asked) to all replicas.

    Gradients may be fp32, so a count goes as two digits, which stay whole numbers.
    """

    DIGIT = 4096

    def __init__(self, model: nn.Module, like: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.hold = nn.Parameter(torch.zeros(4, dtype=dtype, device=like.device))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def load(self, sums: Tensor, asked: float, replicas: int) -> Tensor:
        """The gradient to send; multiplied so that it is the sum and not the mean that arrives."""
        if sums.is_cuda:
            upper = torch.floor(sums[1] / self.DIGIT)
            # Filled on the device: copying a number from the host would make the host wait.
            word = torch.full_like(upper, asked)
            return torch.stack([sums[0], upper, sums[1] - upper * self.DIGIT, word]).to(self.hold) * replicas
        # The same with plain numbers: on a CPU six small operations cost more than sending them.
        total, count = sums.tolist()
        upper, lower = divmod(count, self.DIGIT)
        sent = [total * replicas, upper * replicas, lower * replicas, asked * replicas]
        return torch.tensor(sent, dtype=self.hold.dtype)

    def unload(self) -> Tensor:
        """The sums over all replicas; the hold is empty after it."""
        arrived, self.hold.grad = self.hold.grad, None
        assert arrived is not None
        if arrived.is_cuda:
            total, upper, lower, asked = arrived.double().unbind()
            return torch.stack([total, upper * self.DIGIT + lower, asked])
        total, upper, lower, asked = arrived.tolist()
        return torch.tensor([total, upper * self.DIGIT + lower, asked], dtype=torch.float64)


class Replicated:
    """A model whose gradients are the mean over all replicas after a step."""

    def __init__(
        self,
        model: nn.Module,
        here: Here,
        moment: Moment,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        compression: str,
        notes: list[str],
        short: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        """`short` has the master of each parameter that is bf16."""
        self.model = self.whole = model
        self.here, self.moment, self.notes = here, moment, notes
        self.cutting = Cutting()
        self._arithmetic, self._compression = arithmetic, compression
        self._draws, self._buffers = any(draws(each) for each in model.modules()), PersistentBuffers(model)
        everyone = tuple(range(here.size))
        held = [_held(name, each, everyone, short.get(each)) for name, each in model.named_parameters()]
        self.chosen: dict[str, Any] = {}
        self.shards = [each for each in held if each.parameter.requires_grad]
        self.frozen = [each for each in held if not each.parameter.requires_grad]
        self.parameters = [each.parameter for each in self.shards]
        self._copied = [each for each in self.shards if each.copy is not None]
        self._copies_work = not short
        """Whether the model is known to compute with matrices in bf16, or has none."""
        self._ddp: DistributedDataParallel | None = None
        self._cargo: Cargo | None = None
        self._by_hand = False
        self._always_used = {each.computed for each in self.shards}
        self._all_used: bool | None = None
        self._steps_through_ddp = 0
        self._sums: Tensor | None = None
        self._summing: dist.Work | None = None

    def step(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        """One update's gradients: those of sum(total) / samples over all replicas."""
        self._begin_step(every_rank_has_samples=samples >= self.here.replicas)
        own: Tensor | None = None
        share = self.here.replicas / samples
        if not pieces:
            own = torch.zeros(2, dtype=torch.float64, device=self.here.device)
            self._backward(None, own, asked)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            with self._accumulating(reduce=last):
                with backward_follows(share):
                    found = self._loss(step, piece, loss)
                own = as_sums(found) if own is None else own + as_sums(found)
                self._backward(found.total * share, own if last else None, asked)
            if not last:
                self._collect_earlier()
        assert own is not None
        sums = self._finish_reduction()
        if len(pieces) > 1:
            self.collect()
        return Outcome(own, sums, None)

    def _loss(self, step: int, piece: Piece, loss: Score) -> Loss:
        self.moment.step = step
        # A model that draws by them wants them on its device.
        draws = self._draws or self.moment.draws_in_functions
        self.moment.ids = piece.ids_on(self.here.device) if draws else piece.id_tensor()
        found = self._computed(lambda: counted(self._forward(piece.inputs), piece, loss))
        self._copies_work = True
        return found

    def _computed(self, compute: Callable[[], Computed]) -> Computed:
        """What a forward pass gives; if it cannot be done with matrices in bf16, with matrices in fp32."""
        try:
            with self._arithmetic():
                return compute()
        except RuntimeError as error:
            if self._copies_work or not masters.is_about_types(error):
                raise
        self._compute_in_fp32()
        return self._computed(compute)

    def _collect_earlier(self) -> None:
        """After a micro-batch that is not the last one."""
        self.collect()
        if self._ddp is not None and not self._by_hand and not self._all_used:
            # DDP takes a parameter for used where it once was, and then wants it to have a gradient.
            for shard in self._copied:
                if shard.copy is not None and shard.parameter.grad is not None:
                    shard.copy.grad = torch.zeros_like(shard.copy)

    def _compute_in_fp32(self) -> None:
        """For a model that computes with its matrices in ways that autocast does not know of."""
        masters.lengthen([*self.shards, *self.frozen])
        self._copies_work = True
        self.notes.append("the model computes with its matrices in a way that wants them in fp32: they are stored so")

    @torch.no_grad()
    def scores(self, pieces: Iterable[Piece], functions: Mapping[str, Score]) -> Tensor:
        sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=self.here.device)
        for piece in pieces:
            sums += self._computed(partial(self._scores, piece, functions))
        return sums

    def _scores(self, piece: Piece, functions: Mapping[str, Score]) -> Tensor:
        outputs = call(self.model, piece.inputs)
        return torch.stack([as_sums(counted(outputs, piece, each)) for each in functions.values()])

    def collect(self) -> None:
        masters.collect(self._copied)

    def spread(self) -> None:
        masters.spread(self._copied)
        masters.spread(self.frozen)

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def own_buffers(self) -> dict[str, Tensor]:
        return self._buffers.now()

    def stages_with(self, buffer: str) -> tuple[int, ...]:
        del buffer
        return (0,)

    def habits(self) -> dict[str, Any]:
        """Whether matrices must be fp32, and how gradients are reduced.

        DDP lays them out anew after its first step, and the order of sums with them.
        """
        found: dict[str, Any] = {}
        if any(each.computed.dtype == each.parameter.dtype for each in self._copied):
            found["wide"] = True
        if self._all_used is not None:
            found |= {"all_used": self._all_used, "settled": self._steps_through_ddp > 0}
        return found

    def take_up(self, habits: Mapping[str, Any]) -> bool:
        if habits.get("wide") and not self._copies_work:
            self._compute_in_fp32()
        if "all_used" not in habits or self._ddp is not None:
            return False
        self._make_ddp(habits["all_used"])
        # Two numbers have but one sum; of three and more the order matters.
        return bool(habits["settled"]) and self.here.size > 2

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Rank 0 has them all."""
        if self.here.rank == 0:
            for shard in (*self.shards, *self.frozen):
                yield shard.name, shard.parameter.detach()
            for name, buffer in persistent_buffers(self.model):
                yield name, buffer.detach()

    def _begin_step(self, every_rank_has_samples: bool) -> None:
        """Decide how the gradients of this step are reduced; all ranks decide the same."""
        self._by_hand = self.here.mesh is not None and (self._ddp is None or not every_rank_has_samples)

    def _forward(self, inputs: Any) -> Any:
        """Call the model as its inputs ask for: a tuple is spread, a dict is passed by name."""
        return call(self._ddp if self._ddp is not None and not self._by_hand else self.model, inputs)

    @contextmanager
    def _accumulating(self, reduce: bool) -> Iterator[None]:
        """Forward and backward of one micro-batch; only the last one of a step sends gradients."""
        if self._ddp is None and self._by_hand:
            with self._noting_uses():
                yield
        elif self._ddp is None or self._by_hand or reduce:
            yield
        else:
            with self._ddp.no_sync():
                yield

    def _backward(self, loss: Tensor | None, sums: Tensor | None, asked: Asked) -> None:
        """Add the gradients of a loss; `sums`, given with the last one of a step, are added over all replicas."""
        if loss is not None and sums is not None and self._cargo is not None and not self._by_hand:
            cargo = self._cargo.load(sums, asked(), self.here.replicas)
            torch.autograd.backward([loss, self._cargo.hold], [None, cargo])
            return
        if sums is not None:
            self._sums = torch.cat([sums, sums.new_full((1,), asked())])
            self._summing = self.here.sum(self._sums)
        if loss is not None:
            loss.backward()

    def _finish_reduction(self) -> Tensor:
        """After the last backward pass of a step: every gradient is the mean over the replicas; returns the sums."""
        if self._by_hand:
            self.collect()
            used_by_all = self._reduce_by_hand()
            if self._ddp is None:
                self._make_ddp(used_by_all)
        else:
            self._refuse_missing()
            if self._ddp is not None:
                self._steps_through_ddp += 1
                self._let_go_of_reduced()
            if self._cargo is not None:
                return self._cargo.unload()
        if self._summing is not None:
            self._summing.wait()
        assert self._sums is not None
        return self._sums

    def _make_ddp(self, all_are_used: bool) -> None:
        """Gradients must not live in DDP's buckets before it is made, so it is made for the next step on."""
        # What is not part of the outputs' graph would pass for an unused parameter, and what is compressed is no exact
        # sum any more: then sums travel on their own.
        self._all_used = all_are_used
        alone = not all_are_used or self._compression != "none"
        self._cargo = None if alone else Cargo(self.model, self.parameters[0])
        self._ddp = DistributedDataParallel(
            self._cargo or self.model,
            process_group=self._group(),
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=not all_are_used,
            **_KEEP_BUFFERS,
        )
        compress.register(self._ddp, self._compression, {each.computed: each.parameter for each in self._copied})

    def agree_on_buffers(self) -> None:
        """Give all ranks the same running statistics: the mean of theirs, or rank 0's where a mean has no sense."""
        if self.here.mesh is not None:
            with self.here.waiting("the running statistics of the other ranks"):
                buffers.average(self.model.buffers(), self._group())

    def _group(self) -> dist.ProcessGroup:
        assert self.here.mesh is not None
        return self.here.mesh["dp"].get_group()

    def _refuse_missing(self) -> None:
        """DDP waits for gradients that it was not told to do without: end here, with the names of their parameters."""
        if self._ddp is None:
            return
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError as error:
            missing = [each.name for each in self.shards if each.gradient is None]
            named = f": {', '.join(missing[:4])}{', …' * (len(missing) > 4)}" if missing else " in a micro-batch"
            raise RunFailed(
                f"the loss on rank {self.here.rank} did not use all parameters as it did in the first step{named}; "
                f"add 0 times their sum to the loss where they are not used"
            ) from error

    def _let_go_of_reduced(self) -> None:
        """What DDP has reduced lies with the masters; one that nobody has used must stay without."""
        for shard in self._copied:
            assert shard.copy is not None
            if shard.copy.grad is None:
                shard.parameter.grad = None
            shard.copy.grad = None

    @contextmanager
    def _noting_uses(self) -> Iterator[None]:
        """Find the parameters that take part in every micro-batch, which is what DDP expects of all of them."""
        used: set[nn.Parameter] = set()
        hooks = [each.computed.register_post_accumulate_grad_hook(used.add) for each in self.shards]
        yield
        for hook in hooks:
            hook.remove()
        self._always_used &= used

    def _reduce_by_hand(self) -> bool:
        """Average gradients over ranks that may lack some; returns whether every micro-batch of all ranks had all."""
        uses = [[each.parameter.grad is not None, each.computed in self._always_used] for each in self.shards]
        ranks = torch.tensor(uses, dtype=torch.int32, device=self.here.device)
        dist.all_reduce(ranks, group=self._group())
        for parameter, (users, _) in zip(self.parameters, ranks.tolist(), strict=True):
            if users:
                mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                mine = mine.contiguous()
                dist.all_reduce(mine, group=self._group())
                parameter.grad = mine.div_(self.here.replicas)
        return int(ranks.min()) == self.here.replicas


def _held(name: str, parameter: nn.Parameter, ranks: tuple[int, ...], master: nn.Parameter | None) -> Shard:
    shape, start = tuple(parameter.shape), (0,) * parameter.dim()
    if master is None:
        return Shard(name, parameter, ranks, shape, start)
    return Shard(name, master, ranks, shape, start, copy=parameter)
