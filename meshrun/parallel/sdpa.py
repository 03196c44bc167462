"""Attention by cuDNN, where that is fastest and right: long, without mask or dropout, on GPUs from Hopper on.

    use_cudnn(here.device)          # F.scaled_dot_product_attention asks from now on who computes a call

Flash attention takes half as long again there. torch 2.11 prefers cuDNN by itself, but with a mask too, and then its
gradients may be no numbers (pytorch #196678): so torch is told to leave cuDNN alone, and the calls that are safe go to
it from here. The function is replaced once, for all of the process: a segment that is computed again in the backward
pass must meet what it met in the forward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

PLAIN = functional.scaled_dot_product_attention
"""torch's own."""
HOPPER = (9, 0)
LONG, WIDEST = 512, 128
_capable: dict[int | None, tuple[int, int]] = {}
"""Compute capability of the GPUs that were asked for, by their index: looked up in compiled code too."""


def cudnn_is_best(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: torch.dtype,
    mask: bool,
    dropout: float,
    capability: tuple[int, int],
) -> bool:
    """Whether attention of these shapes, (samples, heads, tokens, size of a head), is for cuDNN."""
    if capability < HOPPER or mask or dropout or dtype not in (torch.bfloat16, torch.float16):
        return False
    if len(query) != 4 or len(key) != 4 or key != value or query[0] != key[0] or query[2:] != key[2:]:
        return False
    # The number of samples may be anything, but not none: nothing is what cuDNN cannot compute.
    shared = key[1] > 0 and query[1] % key[1] == 0
    return shared and query[0] > 0 and query[2] >= LONG and query[3] <= WIDEST and query[3] % 8 == 0


def use_cudnn(device: torch.device) -> bool:
    """Replace torch's function by one that asks, where cuDNN can be used; returns whether it can."""
    if device.type != "cuda":
        return False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not _works(device):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index  # tensors know it in any case
    _capable[index] = torch.cuda.get_device_capability(index)
    functional.scaled_dot_product_attention = attention
    return True


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, by whoever computes it fastest."""
    if has_torch_function((query, key, value, attn_mask)):
        return handle_torch_function(
            attention,
            (query, key, value, attn_mask),
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    capability = _capable.get(query.device.index)
    if capability is not None and query.is_cuda and attn_mask is None and type(query) is Tensor:
        if torch.is_autocast_enabled("cuda"):  # which knows torch's own function, and casts for it
            kind = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
        same = query.dtype == key.dtype == value.dtype and (enable_gqa or query.shape[1] == key.shape[1])
        if same and cudnn_is_best(query.shape, key.shape, value.shape, query.dtype, False, dropout_p, capability):
            return by_cudnn(query, key, value, is_causal, scale)
    return PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def by_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    """Attention without a mask; heads of queries may share those of keys and values."""
    found: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, torch.is_grad_enabled(), 0.0, causal, False, scale=scale
    )
    out: Tensor = found[0]
    return out


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether this cuDNN computes attention, with heads that are shared, and its gradients: tried once, on little."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < HOPPER:
        return False
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 4, LONG, 64), (1, 2, LONG, 64), (1, 2, LONG, 64))
    q, k, v = (torch.randn(each, generator=generator, device=device, dtype=torch.bfloat16) for each in shapes)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    pairs: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            for causal in (True, False):
                out = by_cudnn(q, k, v, causal)
                found = torch.autograd.grad(out.float().square().sum(), inputs)
                plain = PLAIN(q, k, v, is_causal=causal, enable_gqa=True)
                wanted = torch.autograd.grad(plain.float().square().sum(), inputs)
                pairs += zip((out, *found), (plain, *wanted), strict=True)
    except RuntimeError:
        return False
    return all(float((a - b).detach().abs().max()) <= 0.05 * float(b.detach().abs().max()) for a, b in pairs)
