"""What every layout makes of a model, and the words that the axes share.

    placed = build(...)                                  # a `Placed`
    outcome = placed.step(7, pieces, samples=64, loss=cross_entropy, asked=nobody)
    for shard in placed.shards: shard.parameter.grad     # what the optimizer works on: this rank's part, a plain tensor

A rank computes `Piece`s, its micro-batches. Where ranks must go in step with each other (all layouts but dp alone),
each has the same number of them, and some rows may only fill one up: they are computed and never counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshrun.errors import RunFailed, WrongTarget
from meshrun.experiment import Loss, in_halves
from meshrun.parallel.moment import Place

Score = Callable[[Any, Any], Loss]
Asked = Callable[[], float]
"""Whether this rank is asked to stop, 1 or 0: looked at just before the sums of a step are added up."""

TYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Of tensors that travel between ranks: a message says by number which it is."""


def as_real(tensor: Tensor) -> Tensor:
    """The same memory without complex numbers, which gloo neither sends nor receives."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Piece:
    """A micro-batch: the first `real` rows belong to this rank, the others only fill it up."""

    inputs: Any
    targets: Any
    ids: list[int]
    real: int
    positions: Tensor | None = None
    """Where this rank's tokens stand in the sequence, where that is split over ranks."""
    length: int | None = None
    """How long the sequence then is."""
    sent: Tensor | None = None
    """The ids on the model's device, where somebody has sent them there."""

    def ids_on(self, device: torch.device) -> Tensor:
        """The ids as a tensor; sending them does not make the host wait."""
        return self.id_tensor().to(device, non_blocking=True) if self.sent is None else self.sent

    def id_tensor(self) -> Tensor:
        return torch.tensor(self.ids, dtype=torch.int64)


@dataclass(frozen=True)
class Shard:
    """This rank's part of one of the model's parameters, as a plain tensor that shares its memory."""

    name: str
    """As the model itself calls it."""
    parameter: nn.Parameter
    holders: tuple[int, ...]
    """The ranks that hold these very elements."""
    shape: tuple[int, ...]
    """Of the whole parameter, as the model itself has it."""
    start: tuple[int, ...]
    """Where in it this part begins."""
    copy: nn.Parameter | None = None
    """What the model computes with, where that is not `parameter` itself but this in bf16 (`masters`)."""

    @property
    def copies(self) -> int:
        return len(self.holders)

    @property
    def computed(self) -> nn.Parameter:
        """What the model computes with."""
        return self.parameter if self.copy is None else self.copy

    @property
    def gradient(self) -> Tensor | None:
        """As it was computed last: of the copy, unless it was collected from there."""
        if self.parameter.grad is None and self.copy is not None:
            return self.copy.grad
        return self.parameter.grad


@dataclass(frozen=True)
class Outcome:
    """What a step has computed; gradients are in the shards."""

    own: Tensor
    """(total, count) of this rank's samples."""
    sums: Tensor
    """(total, count) of the global batch, and how many ranks are asked to stop: all know it after the same step."""
    norm: Tensor | None
    """The norm of the whole gradient, where a rank cannot find it from its own shards alone."""


@dataclass(frozen=True)
class Cutting:
    """How the trainer must cut a replica's samples into pieces, so that ranks stay in step."""

    in_step: bool = False
    """Every replica has the same number of pieces."""
    equal: bool = False
    """Every piece has the same number of rows."""
    pieces: int = 1
    """How many pieces at least, if there are samples for them."""
    multiple_of: int = 1


class Placed(Protocol):
    """A model on this rank's place in the mesh."""

    model: nn.Module
    whole: nn.Module
    """All of the model, whose names and structure are the constructor's; without values where this rank has a part."""
    shards: list[Shard]
    """What is trained."""
    frozen: list[Shard]
    """What is not."""
    cutting: Cutting
    notes: list[str]
    """What the user should know about how the model was laid out."""
    chosen: dict[str, Any]
    """What was left to us, and what came out: whether segments are compiled and why, what is computed twice, …

    "compile" is "tried" where some of it could not be compiled.
    """

    def step(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        """Forward, backward and reduction of one update: gradients of sum(total) / samples."""

    def scores(self, pieces: Iterable[Piece], functions: Mapping[str, Score]) -> Tensor:
        """Rows of (total, count) of these pieces, a row a function; zeros on ranks that do not see the outputs."""

    def collect(self) -> None:
        """Make gradients of copies those of the parameters that they are copies of."""

    def spread(self) -> None:
        """Bring copies up to date with parameters, trained and frozen, that were changed."""

    def train(self, mode: bool) -> None:
        """Switch what is on this rank to training, or to evaluation."""

    def agree_on_buffers(self) -> None:
        """Give all ranks the same running statistics."""

    def own_buffers(self) -> dict[str, Tensor]:
        """The persistent buffers that are on this rank, under the model's own names."""

    def stages_with(self, buffer: str) -> tuple[int, ...]:
        """The places along pp whose ranks have this buffer, all with the same values."""

    def habits(self) -> dict[str, Any]:
        """What past steps have settled about how the next ones are computed, as plain values."""

    def take_up(self, habits: Mapping[str, Any]) -> bool:
        """Go on as a model on the same layout did; whether a step must be tried first, its gradients thrown away."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the state dict, whole, on the host of rank 0; nothing on other ranks."""


def nobody() -> float:
    """An `Asked` of a rank that goes on."""
    return 0.0


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a model as its inputs ask for: a tuple is spread, a dict is passed by name."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model's state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


class PersistentBuffers:
    """The same, for who asks after every step: where they are is looked for once, and what is there each time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()

    def now(self) -> dict[str, Tensor]:
        if sum(map(len, self._all)) != self._count:
            self._find()
        return {name: found for name, buffers, key in self._places if (found := buffers[key]) is not None}

    def _find(self) -> None:
        modules = dict(self._model.named_modules())
        self._all = [each._buffers for each in modules.values()]
        self._count = sum(map(len, self._all))
        self._places = [
            (f"{prefix}.{name}" if prefix else name, each._buffers, name)
            for prefix, each in modules.items()
            for name in each._buffers
            if name not in each._non_persistent_buffers_set
        ]


Places = Sequence[Place] | None
"""Where the batch is in each tensor among a model's outputs, or among the targets, where that is known."""


def counted(outputs: Any, piece: Piece, loss: Score, in_outputs: Places = None, in_targets: Places = None) -> Loss:
    """The loss of a piece's real rows."""
    try:
        return _counted(outputs, piece, loss, in_outputs, in_targets)
    except WrongTarget as wrong:
        if wrong.row < len(piece.ids):
            raise WrongTarget(wrong.what, wrong.row, f"sample {piece.ids[wrong.row]}") from None
        raise


def _counted(outputs: Any, piece: Piece, loss: Score, in_outputs: Places, in_targets: Places) -> Loss:
    rows = len(piece.ids)
    if piece.real == rows:
        return loss(outputs, piece.targets)
    if piece.real == 0:
        # Nothing to count, but the backward pass must reach all that other ranks' does.
        floats = [each.sum() for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
        total = torch.stack([each.full_tensor() if hasattr(each, "full_tensor") else each for each in floats]).sum()
        return Loss(total * 0.0, 0)
    targets = _first_samples(piece.targets, in_targets, piece.real, rows)
    return loss(_first_samples(outputs, in_outputs, piece.real, rows), targets)


def refuse_unclear(outputs: Any, piece: Piece, why: str) -> None:
    """Refuse to count some rows of a piece where dim 1 may be the batch, and `why` the model does not tell."""
    rows = len(piece.ids)
    if piece.real in (0, rows):
        return
    for tensor in tree_leaves((outputs, piece.targets)):
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[1] == rows:
            raise RunFailed(
                f"of a micro-batch of {rows} samples {piece.real} count, and of a tensor of shape "
                f"{tuple(tensor.shape)} among the outputs or targets dim 1 may be the batch; the model does not tell, "
                f"because {why}: choose a --batch that leaves no micro-batch with fewer samples, or say with "
                f"Experiment(batch_dim=0) that it is dim 0"
            )


def _first_samples(values: Any, places: Places, real: int, rows: int) -> Any:
    leaves, structure = tree_flatten(values)
    tensors = [number for number, each in enumerate(leaves) if isinstance(each, Tensor)]
    known = places if places is not None and len(places) == len(tensors) else [None] * len(tensors)
    for place, number in zip(known, tensors, strict=True):
        leaves[number] = _first(leaves[number], place, real, rows)
    return tree_unflatten(leaves, structure)


def _first(tensor: Tensor, place: Place | None, real: int, rows: int) -> Tensor:
    """The entries of the first samples; of a tensor without a place, dim 0 is the batch if it has that many rows."""
    dim, order = (0, None) if place is None else (place.dim, place.together)
    if dim is None or (place is None and (not tensor.dim() or tensor.shape[0] != rows)):
        return tensor
    if order == 0 or dim >= tensor.dim() or tensor.shape[dim] % (rows * (order or 1)):
        raise RunFailed(
            f"of a micro-batch of {rows} samples {real} count, and a tensor of shape {tuple(tensor.shape)} among the "
            f"outputs or targets does not tell which entries are theirs; let the batch be a dimension of its own, or "
            f"choose a --batch that leaves no micro-batch with fewer samples"
        )
    if tensor.shape[dim] != rows:
        apart = tensor.unflatten(dim, (-1, rows, order or tensor.shape[dim] // rows))
        return apart.narrow(dim + 1, 0, real).flatten(dim, dim + 2)
    # Losses take views of what they are given, which wants it in one piece.
    return tensor.narrow(dim, 0, real).contiguous() if dim else tensor[:real]


def as_sums(loss: Loss) -> Tensor:
    """A loss as a tensor of two: total and count."""
    if not loss.total.is_cuda:
        # One small tensor instead of four: on a CPU looking at a number costs nothing.
        return torch.tensor([loss.total.item(), float(loss.count)], dtype=torch.float64)
    total = loss.total.detach().double()
    if isinstance(loss.count, Tensor):
        return torch.stack([total, loss.count.detach().to(total)])
    # Filled on the device: copying a number from the host would make the host wait.
    return torch.stack([total, torch.full_like(total, loss.count)])


def norms(gradients: list[Tensor]) -> Tensor:
    """The norm of each, in doubles."""
    if gradients[0].is_cuda:
        return torch.stack(_norms_on_device(gradients)).double()
    # On a CPU norms are added up in the order of memory: that of a large gradient would be off by 1e-5, and otherwise
    # on shards. Sums are added up in pairs.
    real = map(as_real, gradients)
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in real]
    return torch.stack([each.square().sum() for each in wide]).double().sqrt()


def _norms_on_device(gradients: list[Tensor]) -> list[Tensor]:
    """Those in bf16 have norms in fp32; a kernel takes many tensors of one type at once."""
    found: dict[int, Tensor] = {}
    for kind in {each.dtype for each in gradients}:
        places = [place for place, each in enumerate(gradients) if each.dtype == kind]
        wide = torch.promote_types(kind, torch.float32)
        found |= zip(places, torch._foreach_norm([gradients[place] for place in places], 2, wide), strict=True)
    return [found[place] for place in range(len(gradients))]


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of forward passes."""
    return torch.autocast(device.type, torch.bfloat16) if in_halves(precision) else nullcontext()
