"""`nn.MultiheadAttention` on any mesh: dropout by key, and heads that ranks share.

    key_attentions(model, moment)                        # those with dropout draw it by sample, as keyed dropouts do
    split_heads(layer.self_attn, mesh["tp"], "layers.0.self_attn")      # each rank computes with its own heads
    layer.self_attn.fused["q_proj_weight"]               # ("in_proj_weight", 0, 3): block 0 of 3 of the model's own

torch's module draws its dropout inside, and keeps queries', keys' and values' weights in one matrix, of which a rank's
rows would be some queries' and no values'. So the module becomes a `KeyedAttention`, in place: the same signature and
the same results.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshrun.errors import UserError
from meshrun.parallel.dropout import Keyed, become_keyed, dropped, keeps
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.moment import Moment

FUSED = {
    "q_proj_weight": ("in_proj_weight", 0, 3),
    "k_proj_weight": ("in_proj_weight", 1, 3),
    "v_proj_weight": ("in_proj_weight", 2, 3),
    "q_proj_bias": ("in_proj_bias", 0, 3),
    "k_proj_bias": ("in_proj_bias", 1, 3),
    "v_proj_bias": ("in_proj_bias", 2, 3),
}
"""Where the parameters of split heads are in the model's own: name there, block of its dim 0, number of blocks."""


def key_attentions(model: nn.Module, moment: Moment) -> list[str]:
    """Let every attention with dropout draw it by key, and name those that were turned.

    One that adds keys of its own (`add_bias_kv`, `add_zero_attn`) stays as it is.
    """
    turned = []
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and module.dropout > 0 and not _adds_keys(module):
            _become(module, moment, name)
            turned.append(name)
    return turned


def split_heads(module: nn.MultiheadAttention, mesh: DeviceMesh, name: str = "") -> None:
    """Leave a rank of a 1-D mesh its share of the heads. All ranks must hold the same values, or none yet (meta)."""
    name, tp = name or getattr(module, "name", "") or "nn.MultiheadAttention", mesh.size()
    if module.num_heads % tp:
        raise UserError(
            f"the attention '{name}' has {module.num_heads} heads, which tp={tp} does not divide; heads must be "
            f"divisible by tp (--layout)"
        )
    if _adds_keys(module):
        raise UserError(
            f"the attention '{name}' adds keys of its own (add_bias_kv, add_zero_attn), which tp={tp} cannot split; "
            f"tp=1 can train it (--layout)"
        )
    keyed = module if isinstance(module, KeyedAttention) else _become(module, Moment(), name)
    for new, (old, block, blocks) in FUSED.items():
        fused = getattr(keyed, old)
        if fused is not None:
            setattr(keyed, new, _shard(fused, fused.chunk(blocks)[block], mesh, 0))
            keyed.fused[new] = old, block, blocks
        elif (own := getattr(keyed, new, None)) is not None:
            setattr(keyed, new, _shard(own, own, mesh, 0))
        else:
            keyed.register_parameter(new, None)
    keyed.register_parameter("in_proj_weight", None)
    keyed.register_parameter("in_proj_bias", None)
    out = keyed.out_proj
    out.weight = _shard(out.weight, out.weight, mesh, 1)
    keyed.heads = mesh
    # nn.TransformerEncoder and its layers have fused kernels for evaluation that read in_proj_weight themselves.
    keyed._qkv_same_embed_dim = False
    torch.backends.mha.set_fastpath_enabled(False)


def _become(module: nn.MultiheadAttention, moment: Moment, name: str) -> KeyedAttention:
    module.__class__ = KeyedAttention
    become_keyed(module, moment, name)
    assert isinstance(module, KeyedAttention)
    module.heads, module.fused = None, {}
    return module


def _adds_keys(module: nn.MultiheadAttention) -> bool:
    return module.bias_k is not None or module.bias_v is not None or module.add_zero_attn


def _shard(parameter: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard of a parameter, or of a block of it, cut along a dimension."""
    from torch.distributed.tensor import DTensor, Shard  # slow to import, and only for tp

    mine = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    mine = mine.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False), parameter.requires_grad)


class KeyedAttention(Keyed, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with dropout by key, and with all heads or a rank's share of them.

    Under context parallelism, keys that were gathered from other ranks must be in the order of the sequence.
    """

    heads: DeviceMesh | None
    """The ranks that share the heads, or None where all are here. `num_heads` and `embed_dim` are always the whole."""
    fused: dict[str, tuple[str, int, int]]
    """Those of this module's parameters that are blocks of the model's own ones: see `FUSED`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        p = self.dropout if self.training else 0.0
        if self.heads is None and (p == 0 or self.moment.key is None):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says of which kind attn_mask is, so that must be given too")
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, batched)
        scores_shape = (*q.shape[:3], k.shape[2])
        only_causal = is_causal and key_padding_mask is None
        mask = self._mask(attn_mask, key_padding_mask, scores_shape, q.dtype)
        if p == 0 and not need_weights:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if only_causal else mask, is_causal=only_causal
            )
            weights = None
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = self._drop(weights, p)
            attended = weights @ v
        output = self._join(attended)
        output = output if self.batch_first and batched else output.transpose(0, 1)
        given = self._given(weights, average_attn_weights) if need_weights and weights is not None else None
        if not batched:
            output, given = output.squeeze(1), None if given is None else given.squeeze(0)
        return output, given

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: (batch, heads, tokens, width)."""
        inputs = (query, key, value)
        if self.heads is not None:
            # What is one tensor stays one: its gradient is then summed over the ranks once.
            shared = {id(each): _Shared.apply(each, self.heads) for each in inputs}
            inputs = tuple(shared[id(each)] for each in inputs)
        if self.in_proj_weight is not None and query is key and key is value:
            projected = F.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(
                F.linear(each, weight, bias)
                for each, weight, bias in zip(inputs, self._weights(), self._biases(), strict=True)
            )
        split = [each.unflatten(-1, (-1, self.head_dim)) for each in projected]
        if not batched:
            return [each.unsqueeze(0).transpose(1, 2) for each in split]
        return [each.transpose(1, 2) if self.batch_first else each.permute(1, 2, 0, 3) for each in split]

    def _weights(self) -> list[Tensor]:
        if self.in_proj_weight is not None:
            return list(self.in_proj_weight.chunk(3))
        return [_local(each) for each in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]

    def _biases(self) -> list[Tensor | None]:
        if self.in_proj_bias is not None:
            return list(self.in_proj_bias.chunk(3))
        if self.heads is None or self.q_proj_bias is None:
            return [None] * 3
        return [_local(each) for each in (self.q_proj_bias, self.k_proj_bias, self.v_proj_bias)]

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to the scores of this rank's heads."""
        samples, heads, queries, keys = shape
        if attn_mask is not None:
            attn_mask = _added(attn_mask, dtype)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(samples, self.num_heads, queries, keys)
                attn_mask = attn_mask[:, self._first_head(heads) :][:, :heads]
        if padding is None:
            return attn_mask
        padding = _added(padding, dtype).view(samples, 1, 1, keys)
        return padding if attn_mask is None else attn_mask + padding

    def _first_head(self, heads: int) -> int:
        return 0 if self.heads is None else self.heads.get_local_rank() * heads

    def _drop(self, weights: Tensor, p: float) -> Tensor:
        """Dropout by (head, query, key) in the unsplit tensor."""
        if p in (0, 1) or self.moment.key is None:
            return F.dropout(weights, p)
        call = self.next_call()
        words = self.words_of(call, weights)
        entries, heads, queries, keys = weights.shape
        each = entries // max(1, len(words))
        if entries != each * len(words) or (each > 1 and call.place is not None and call.place.together is not None):
            raise self.misfit(weights, "dim 0 of (batch, heads, queries, keys)")
        places, length = self._places(queries, weights.device)
        columns, _ = self._places(keys, weights.device)
        first = self._first_head(heads)
        own = torch.arange(first, first + heads, device=weights.device)
        own = (torch.arange(max(1, each), device=weights.device)[:, None] * self.num_heads + own).flatten()
        rows = own[:, None] * length + places
        return dropped(weights, keeps(words, rows.flatten(), columns, p).view(weights.shape), p)

    def _places(self, tokens: int, device: torch.device) -> tuple[Tensor, int]:
        """Where in their sequence these tokens stand, and the sequence's length."""
        positions, length = self.moment.positions, self.moment.length
        if positions is None or length is None or len(positions) != tokens:
            return torch.arange(tokens, device=device), tokens
        return positions.to(device), length

    def _join(self, attended: Tensor) -> Tensor:
        """(batch, heads, queries, width) of this rank's heads to (batch, queries, features) of all."""
        joined = attended.transpose(1, 2).flatten(2)
        if self.heads is None:
            return self.out_proj(joined)
        output: Tensor = _Summed.apply(F.linear(joined, _local(self.out_proj.weight)), self.heads)
        return output if self.out_proj.bias is None else output + self.out_proj.bias

    def _given(self, weights: Tensor, average: bool) -> Tensor:
        """The weights that the caller asked for, of all heads."""
        if average:
            share = weights.sum(1) / self.num_heads
        else:
            first = self._first_head(heads := weights.shape[1])
            share = F.pad(weights, (0, 0, 0, 0, first, self.num_heads - first - heads))
        return share if self.heads is None else _Summed.apply(share, self.heads)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if is_dtensor(parameter) else parameter


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as torch means it (True: do not look there) to be added to scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    # gloo corrupts what is not contiguous.
    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", mesh))
    return summed


class _Shared(torch.autograd.Function):
    """The same tensor on all ranks, used by each for its own part: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.mesh), None


class _Summed(torch.autograd.Function):
    """The sum over all ranks, used by each in the same way: every rank's part gets its gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum(x, mesh)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
