"""Causal attention over a sequence that is cut over ranks: keys and values travel around a ring of them.

    mine = positions(length, part=rank, parts=N)             # the tokens that this rank holds
    out = ring_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], group)

equals the rows `mine` of `F.scaled_dot_product_attention(q, k, v, is_causal=True)`, and so do the gradients. No rank
ever holds the keys of the whole sequence, nor scores beyond one block.

The sequence is laid out in zigzag: cut into 2N chunks, of which rank r holds r and 2N-1-r, so that every rank has an
early chunk with little to look at and a late one with much. What rank r needs of the block that came from rank s:

    s = r    all queries, all keys, causal      both chunks in their order
    s < r    all queries, first half of keys    s is before both of r's chunks, 2N-1-s after both
    s > r    second half of queries, all keys   both of s's chunks are before 2N-1-r, and after r

which is the same work for every rank in every step, and nothing that the causal mask would throw away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshrun.errors import UserError

aten = torch.ops.aten

Pair = tuple[Tensor, Tensor]
"""Of keys and of values: they, or their gradients, travel together."""


def positions(length: int, part: int, parts: int) -> Tensor:
    """The places in the whole sequence of the tokens that one part of it holds, in the order in which it holds them."""
    if length % (2 * parts):
        raise UserError(
            f"sequences have {length} tokens, which cp={parts} cannot cut into {2 * parts} equal chunks; "
            f"make the length a multiple of {2 * parts}, or use another layout (--layout)"
        )
    size = length // (2 * parts)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (part, 2 * parts - 1 - part)])


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, scale: float | None = None
) -> Tensor:
    """Causal attention of this rank's queries to all tokens before them, wherever in the group these are.

    Shapes are (batch, heads, local tokens, head size); key and value may have fewer heads, each then serves several.
    """
    tokens, heads = query.shape[2], query.shape[1]
    if tokens % 2:
        raise UserError(
            f"attention met {tokens} tokens on a rank, which cannot be the two equal chunks that cp gives it; "
            f"a model must not add or drop tokens under cp, or use another layout (--layout)"
        )
    if heads % key.shape[1]:
        raise UserError(f"attention has {heads} query heads, which its {key.shape[1]} key heads do not divide")
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # What autocast does to scaled_dot_product_attention; inside, all is computed in the dtypes that it names.
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    return _RingAttention.apply(query, key, value, group, query.shape[-1] ** -0.5 if scale is None else scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        ring = _Ring(group)
        held = key.contiguous(), value.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty((*query.shape[:3], value.shape[-1]), dtype=wide, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        for step in range(ring.size):
            arriving = ring.pass_on(held) if step + 1 < ring.size else None
            rows, columns, causal = needed(ring.rank, ring.source(step), query.shape[2])
            keys, values = (each[:, :, columns] for each in held)
            part = block(query[:, :, rows], keys, values, scale, causal)
            merge(out[:, :, rows], lse[:, :, rows], *part, first=step == 0)
            held = arriving.wait() if arriving else held
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group, ctx.scale = group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        ring = _Ring(ctx.group)
        held = key.contiguous(), value.contiguous()
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        # The gradients of keys and values follow these around the ring, one step behind, and come home after the last.
        # What a rank adds to its own waits at home.
        home = torch.zeros_like(held[0], dtype=lse.dtype), torch.zeros_like(held[1], dtype=lse.dtype)
        following = None
        for step in range(ring.size):
            arriving = ring.pass_on(held) if step + 1 < ring.size else None
            rows, columns, causal = needed(ring.rank, ring.source(step), query.shape[2])
            keys, values = (each[:, :, columns] for each in held)
            result = Result(out[:, :, rows], lse[:, :, rows], grad_out[:, :, rows])
            to_query, to_key, to_value = block_backward(result, query[:, :, rows], keys, values, ctx.scale, causal)
            grads = home
            if step:
                grads = following.wait() if following else (torch.zeros_like(home[0]), torch.zeros_like(home[1]))
            grad_query[:, :, rows] += to_query
            grads[0][:, :, columns] += to_key
            grads[1][:, :, columns] += to_value
            following = ring.pass_on(grads) if step else None
            held = arriving.wait() if arriving else held
        grad_key, grad_value = home
        if following:
            grad_key, grad_value = (own + others for own, others in zip(home, following.wait(), strict=True))
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def needed(rank: int, source: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which of a rank's queries look at which keys of the block from `source`, and whether with a causal mask."""
    everything, half = slice(None), tokens // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(half), False
    return slice(half, None), everything, False


class _Ring:
    """This rank's place among the ranks of a group, who all send to the next and receive from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def source(self, step: int) -> int:
        """The rank whose keys and values are here after so many steps."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Pair) -> _Arriving:
        """Begin to send tensors to the next rank and to receive those of the one before; they must be contiguous."""
        arriving = torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sends = [dist.P2POp(dist.isend, each, group=self.group, group_peer=after) for each in tensors]
        receives = [dist.P2POp(dist.irecv, each, group=self.group, group_peer=before) for each in arriving]
        # As one batch, which NCCL needs: a ring of separate sends would wait for each other's receives.
        return _Arriving(tensors, arriving, dist.batch_isend_irecv([*sends, *receives]))


@dataclass(frozen=True)
class _Arriving:
    """Tensors on their way; those that are sent are held until they are away."""

    sent: Pair
    tensors: Pair
    works: list[dist.Work]

    def wait(self) -> Pair:
        for work in self.works:
            work.wait()
        return self.tensors


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, first: bool) -> None:
    """Add, in place, the attention to one more block of keys; lse is the logarithm of what it was divided by."""
    if first:
        out.copy_(block_out)
        lse.copy_(block_lse)
        return
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(block_out, (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def block(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log-sum-exp of its scores: by a fused kernel where torch has one."""
    key, value = _for_each_query_head(key, query), _for_each_query_head(value, query)
    if not _fused(query, value):
        return _plain(query, key, value, scale, causal)
    if query.is_cuda:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


@dataclass(frozen=True)
class Result:
    """What attention to all blocks gave, and the gradient that came back for it."""

    out: Tensor
    lse: Tensor
    grad: Tensor


def block_backward(
    result: Result, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of its query, key and value."""
    heads = key.shape[1]
    key, value = _for_each_query_head(key, query), _for_each_query_head(value, query)
    if not _fused(query, value):
        grads = _plain_backward(result, query, key, value, scale, causal)
    elif query.is_cuda:
        # The kernel takes the layout of lse for granted. Ragged lengths and dropout's random state are not used here.
        lse, no_lengths, sizes = result.lse.contiguous(), (None, None), (query.shape[2], key.shape[2])
        no_state = (torch.empty(2, dtype=torch.uint64, device=query.device),) * 2
        blocks = result.grad, query, key, value, result.out, lse
        grads = aten._scaled_dot_product_flash_attention_backward(
            *blocks, *no_lengths, *sizes, 0.0, causal, *no_state, scale=scale
        )
    else:
        blocks = result.grad, query, key, value, result.out, result.lse
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*blocks, 0.0, causal, scale=scale)
    grad_query, grad_key, grad_value = grads
    return grad_query, _over_query_heads(grad_key, heads), _over_query_heads(grad_value, heads)


def _fused(query: Tensor, value: Tensor) -> bool:
    """Whether torch has an attention kernel for these tensors that also gives the log-sum-exp."""
    size = query.shape[-1]
    if size != value.shape[-1]:
        return False
    if query.is_cuda:
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return query.device.type == "cpu"


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def _over_query_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum a gradient over the query heads that a key head served."""
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=torch.promote_types(grad.dtype, torch.float32))


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = _wide(query, key, value)
        scores = _scores(query, key, scale, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp_() @ value, lse


def _plain_backward(
    result: Result, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(query.device.type, enabled=False):
        grad_out, out, query, key, value = _wide(result.grad, result.out, query, key, value)
        weights = (_scores(query, key, scale, causal) - result.lse.unsqueeze(-1)).exp_()
        through_softmax = grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True)
        grad_scores = through_softmax.mul_(weights).mul_(scale)
        return grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad_out


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.to(torch.promote_types(each.dtype, torch.float32)) for each in tensors)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    scores = (query @ key.mT).mul_(scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores
