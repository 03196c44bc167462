"""Random numbers that belong to samples, for training loops that users write themselves.

    compute_in(loop, ids)             # the sharded loader says which samples the loop computes from now on
    F.dropout(x, 0.1)                 # drops by sample; so do nn.Dropout and nn.MultiheadAttention, which call it
    randn_like(x)                     # normal numbers by sample
    leave(loop)

Each call draws one 64-bit word from torch's default generator on the CPU, and hashes it with the id of each sample and
the index of each element in its sample. After the same `torch.manual_seed` all ranks draw the same words, however many
rows each of them has, so a sample gets the numbers that it gets in one process. Ranks that were seeded differently draw
different numbers. `torch.utils.checkpoint` puts the generator back before it recomputes, and so gets the same masks.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshrun.data.drawn import Drawn
from meshrun.parallel.composed_dropout import compose_of_dropout
from meshrun.parallel.dropout import SAMPLE, dropped, hashed, keeps, mixed
from meshrun.parallel.functional import PLAIN, attention_weights, values_for_heads

_before: dict[str, Callable[..., Tensor]] = {
    **PLAIN,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
}
"""Functions that the ones of this module have replaced: torch's, or those of an Experiment (`key_functions`)."""
_ids: Tensor | None = None
"""The ids of the samples in the batch that the loop computes; None outside of a loop over a sharded loader."""
_loops: dict[object, tuple[Tensor, int | None, bool]] = {}
"""The loops over sharded loaders that have not ended, with what they said in `compute_in`; last the latest one."""
_said_dim: int | None = None
"""The dim of the batch, where the user says it."""
_uneven = False
"""Whether some ranks have more samples of this batch than others."""
_drawn = 0
"""Words drawn by this module."""
_warned: set[str] = set()


def compute_in(loop: object, ids: Tensor, batch_dim: int | None = None, uneven: bool = False) -> None:
    """Draw for these samples of a loop until it, or another loop, goes on with others."""
    _loops.pop(loop, None)
    _loops[loop] = ids, batch_dim, uneven
    compute_on(*_loops[loop])


def leave(loop: object) -> None:
    """Draw for the loop around the one that has ended; loops that are zipped may end in any order."""
    _loops.pop(loop, None)
    compute_on(*next(reversed(_loops.values()), (None, None, False)))


def compute_on(ids: Tensor | None, batch_dim: int | None = None, uneven: bool = False) -> Tensor | None:
    """Draw for these samples from now on, and return those before; None leaves all random numbers to torch."""
    global _ids, _said_dim, _uneven
    compose_of_dropout()
    for name, function in _FUNCTIONS.items():
        if getattr(F, name) is not function:
            _before[name] = getattr(F, name)
            setattr(F, name, function)
    before, _ids, _said_dim, _uneven = _ids, ids, batch_dim, uneven
    return before


def samples() -> int | None:
    """How many samples of the batch this rank has; None outside of a loop over a sharded loader."""
    return None if _ids is None else len(_ids)


def warn_of_own_loss() -> None:
    """Say that a loss with gradients is that of this rank's part of a batch."""
    if _ids is not None and _on_several_ranks():
        warn(
            "a loss that does not come from mean_over_ranks() is that of a rank's part of the batch, and the mean of "
            "its gradients over the ranks is not what one process computes where it is a sum or the parts are uneven, "
            "so losses depend on the number of ranks: "
            "loss = mean_over_ranks(F.cross_entropy(outputs, targets, reduction='sum'), len(targets))"
        )


def warn_of_uneven_parts() -> None:
    """Say that ranks have more and fewer samples, and none of the losses says of how many it is the mean."""
    if _uneven:
        warn(
            "mean_over_ranks(loss) without a count weighs all ranks alike, but some have more samples of this batch "
            "than others, so losses depend on the number of ranks: give a sum and its count, such as "
            "mean_over_ranks(F.cross_entropy(outputs, targets, reduction='sum'), len(targets))"
        )


def randn_like(tensor: Tensor) -> Tensor:
    """Like `torch.randn_like`, but rows belong to samples: in a loop over `shard(loader)` any number of ranks draws
    what one process draws. A tensor without a dim for the batch gets torch's own numbers.
    """
    dim = _batch_dim(tensor)
    if dim is None:
        return torch.randn_like(tensor)
    shape = tensor.transpose(0, dim).shape
    # Box-Muller: two uniform numbers, neither of them 0, make a normal one.
    first, second = ((_uniform(shape, tensor.device) + 0.5) / (1 << 32) for _ in range(2))
    normal = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    return normal.to(tensor.dtype).view(shape).transpose(0, dim)


def _uniform(shape: torch.Size, device: torch.device) -> Tensor:
    """Whole numbers from 0 up to 2^32, as float64: (samples, rows of a sample, columns)."""
    return hashed(_words(device), *_rows_and_columns(shape, device)).double() + (1 << 31)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return _before["dropout"](input, p, training, inplace)
    dim = _batch_dim(input)
    if dim is None:
        _warn_of_rank_dropout(input, "dropout")
        return _before["dropout"](input, p, training, inplace)
    output = _dropped_at(dim, input, p)
    return input.copy_(output) if inplace else output


def _dropped_at(dim: int, input: Tensor, p: float) -> Tensor:
    shape = input.transpose(0, dim).shape
    kept = keeps(_words(input.device), *_rows_and_columns(shape, input.device), p)
    return dropped(input, kept.view(shape).transpose(0, dim), p)


def _channel_dropout(name: str, *dims: int) -> Callable[..., Tensor]:
    """Dropout of whole channels, for inputs of (batch, channels, …) with so many dims."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        drops = training and 0 < p < 1 and input.dim() in dims
        if not drops or not _batch_is_first(input):
            if drops:
                _warn_of_rank_dropout(input, name)
            return _before[name](input, p, training, inplace)
        _warn_of_several_rows(input.shape)
        channels = input.shape[:2]
        kept = keeps(_words(input.device), *_rows_and_columns(channels, input.device), p)
        output = dropped(input, kept.view(*channels, *[1] * (input.dim() - 2)), p)
        return input.copy_(output) if inplace else output

    return dropout


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout by sample, from its parts: no kernel draws by sample."""
    if not 0 < dropout_p < 1 or not _batch_is_first(query):
        if dropout_p > 0:
            _warn_of_rank_dropout(query, "scaled_dot_product_attention")
        return _before["scaled_dot_product_attention"](
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _warn_of_several_rows(query.shape)
    weights = attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
    return _dropped_at(0, weights, dropout_p) @ values_for_heads(value, query, enable_gqa)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "dropout1d": _channel_dropout("dropout1d", 3),
    "dropout2d": _channel_dropout("dropout2d", 3, 4),  # torch takes three dims for (batch, channels, length)
    "dropout3d": _channel_dropout("dropout3d", 5),
    "scaled_dot_product_attention": _attention,
}


def _batch_dim(tensor: Tensor) -> int | None:
    """Which dim of a tensor is the batch, 0 or 1; None where neither fits, or where nobody draws by sample.

    Dim 0 may hold several entries of each sample, such as its attention heads.
    """
    if _ids is None or tensor.dim() == 0 or torch.compiler.is_compiling():
        return None
    samples, shape = len(_ids), tensor.shape
    several = samples > 0 and shape[0] % samples == 0 and shape[0] != samples
    attention = several and len(shape) == 3 and shape[1] == shape[2]  # (batch * heads, queries, keys)
    attention = attention and (shape[1] != samples or _are_weights(tensor))
    if _said_dim == 1 and attention:
        return 0
    if _said_dim is not None:
        fits = len(shape) > _said_dim and (shape[_said_dim] == samples or (_said_dim == 0 and _batch_is_first(tensor)))
        return _said_dim if fits else 0 if shape[0] == samples else None
    if shape[0] == samples:
        if samples > 1 and len(shape) > 2 and shape[1] == samples:
            warn(
                f"random numbers by sample for a tensor of shape {tuple(shape)} and {samples} samples: dim 0 is taken "
                f"for the batch, but dim 1 may be it; say which it is, so that losses are the same on any number of "
                f"ranks: shard(loader, batch_dim=0), or batch_dim=1 for (time, batch, …)"
            )
        return 0
    if len(shape) > 1 and shape[1] == samples and not attention:
        return 1  # (time, batch, …)
    if several:
        _warn_of_several_rows(shape)
    return 0 if several else None


def _are_weights(tensor: Tensor) -> bool:
    """Whether these are weights of attention: those of a query add up to 1."""
    return bool(((tensor.detach().float().sum(-1) - 1).abs() < 1e-2).all())


def _batch_is_first(tensor: Tensor) -> bool:
    """Whether dim 0 can hold the samples, as many entries of each, where numbers are drawn by sample."""
    if _ids is None or torch.compiler.is_compiling():
        return False
    samples = len(_ids)
    return tensor.shape[0] % samples == 0 if samples else tensor.shape[0] == 0


def _warn_of_several_rows(shape: torch.Size) -> None:
    """Say that dim 0 has more entries than there are samples, which the sizes alone take for several of each."""
    assert _ids is not None
    if shape[0] <= len(_ids) or not _on_several_ranks() or _in_torchs_attention(sys._getframe(1)):
        return
    warn(
        f"dropout by sample takes dim 0 of a tensor for the batch, each sample with several rows next to each other: "
        f"the shape is {tuple(shape)} for {len(_ids)} samples. Where that is not so, as of (time * batch, …), of two "
        f"views in one batch, or of a table without a batch, losses depend on the number of ranks; "
        f"shard(loader, batch_dim=0) says that it is so, or batch_dim=1 for a model of (time, batch, …)"
    )


def _in_torchs_attention(frame: FrameType | None) -> bool:
    """Whether it is torch's own code that has put the heads next to each sample."""
    while frame is not None:
        if frame.f_code is F.multi_head_attention_forward.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def telling_of_other_draws(device: torch.device) -> Iterator[None]:
    """Inside, the model computes; afterwards say so if it has drawn random numbers that no sample decides."""
    global _drawn
    before, _drawn = Drawn.now(device), 0
    yield
    own = torch.Generator()
    own.set_state(before.generator)
    for _ in range(_drawn):
        torch.randint(1 << 62, (), generator=own)
    if not Drawn.now(device).same(replace(before, generator=own.get_state())):
        warn(
            "the model draws random numbers that do not belong to samples, so losses depend on the number of ranks: "
            "dropout that is called as F.dropout, and meshrun.randn_like, draw by sample in a loop over shard(loader)"
        )


def _on_several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _warn_of_rank_dropout(input: Tensor, name: str) -> None:
    """Say that a dropout of several ranks is not drawn by sample."""
    if torch.compiler.is_compiling() or not _on_several_ranks():
        return
    if _before[name] is not PLAIN.get(name, _before[name]):  # an Experiment's, which draws by sample itself
        return
    if _ids is None:
        why = "it is not inside a loop over shard(loader); itertools.cycle() and list() hide which samples a batch has"
    else:
        why = f"no dim of its input, {tuple(input.shape)}, is the batch of {len(_ids)} samples"
    warn(f"F.{name} does not draw by sample here, so losses depend on the number of ranks: {why}")


def warn(sentence: str) -> None:
    """Once for each sentence without its figures."""
    kind = sentence.split(":")[0].split("(")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(sentence, stacklevel=2)


def _words(device: torch.device) -> Tensor:
    """A 64-bit word for each sample, different words at each call."""
    global _drawn
    assert _ids is not None
    _drawn += 1
    word = int(torch.randint(1 << 62, (), device="cpu"))
    return mixed(_ids.to(device, non_blocking=True) * SAMPLE + word)


def _rows_and_columns(shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers for the rows (all dims but the last) and the columns (the last dim) of one sample."""
    assert _ids is not None
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(1, len(_ids) * columns)
    return torch.arange(rows, device=device), torch.arange(columns, device=device)
