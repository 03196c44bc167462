"""Attention goes to cuDNN where that is fastest, and to torch everywhere else; its values stay what they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshrun.parallel import sdpa
from meshrun.parallel.sdpa import attention, by_cudnn, cudnn_is_best, use_cudnn
from meshrun.recipes.llama import Llama, Shape

GOOD: dict[str, Any] = {
    "query": (4, 32, 2048, 64),
    "key": (4, 8, 2048, 64),
    "value": (4, 8, 2048, 64),
    "dtype": torch.bfloat16,
    "mask": False,
    "dropout": 0.0,
    "capability": (9, 0),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a test replaces is torch's own again after it."""
    yield
    F.scaled_dot_product_attention = sdpa.PLAIN
    torch.backends.cuda.enable_cudnn_sdp(True)
    sdpa._capable.clear()


def sized(tokens: int, width: int) -> dict[str, Any]:
    return {"query": (4, 32, tokens, width), "key": (4, 8, tokens, width), "value": (4, 8, tokens, width)}


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": torch.float16}, {"capability": (10, 0)}, sized(512, 128), sized(1000, 72)]
)
def test_long_causal_attention_is_for_cudnn(changes: dict[str, Any]):
    assert cudnn_is_best(**{**GOOD, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"capability": (8, 0)},
        {"mask": True},
        {"dropout": 0.1},
        sized(511, 64),
        sized(1, 64),
        sized(2048, 136),
        sized(2048, 60),
        {"query": (4, 30, 2048, 64)},
        {"query": (4, 32, 1024, 64)},
        {"value": (4, 8, 2048, 128)},
        {"query": (0, 32, 2048, 64), "key": (0, 8, 2048, 64), "value": (0, 8, 2048, 64)},
        {"query": (32, 2048, 64), "key": (8, 2048, 64), "value": (8, 2048, 64)},
    ],
)
def test_all_else_is_for_torch(changes: dict[str, Any]):
    assert not cudnn_is_best(**{**GOOD, **changes})


def test_on_a_cpu_nothing_is_replaced():
    assert not use_cudnn(torch.device("cpu")) and F.scaled_dot_product_attention is sdpa.PLAIN


def test_what_is_not_for_cudnn_is_what_torch_computes():
    sdpa._capable[None] = (9, 0)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    wanted = sdpa.PLAIN(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True), wanted)
    mask = torch.rand(16, 16) > 0.3
    assert torch.equal(attention(q, q, q, mask), sdpa.PLAIN(q, q, q, mask))


def test_gradients_of_heads_that_are_shared_have_their_shapes():
    """torch knows the operation's derivative also where it cannot compute it."""
    q, k, v = (
        torch.empty(2, heads, 512, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    )
    found = torch.autograd.grad(by_cudnn(q, k, v, True).sum(), (q, k, v))
    assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens, width", [(512, 64), (1000, 128), (2048, 64)])
def test_on_a_gpu_values_and_gradients_are_those_of_plain_arithmetic(tokens: int, width: int, causal: bool):
    device = torch.device("cuda", 0)
    if not use_cudnn(device):
        pytest.skip("cuDNN computes no attention here")
    generator = torch.Generator(device).manual_seed(0)

    def made(heads: int) -> Tensor:
        # As a model has them: the heads of a token lie beside each other.
        x = torch.randn(2, tokens, heads, width, generator=generator, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    inputs = made(32), made(8), made(8)
    weights = torch.randn(2, 32, tokens, width, generator=generator, device=device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
        found = torch.autograd.grad((out * weights).sum(), inputs)
    assert any("cudnn_attention" in event.key for event in seen.key_averages())
    exact = [each.detach().float().requires_grad_() for each in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = sdpa.PLAIN(*exact, is_causal=causal, enable_gqa=True)
    wanted = torch.autograd.grad((plain * weights).sum(), exact)
    for a, b in zip((out, *found), (plain, *wanted), strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).abs().max()) <= 0.03 * float(b.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_on_a_gpu_the_llama_recipe_takes_it(compiles: bool):
    device = torch.device("cuda", 0)
    if not use_cudnn(device):
        pytest.skip("cuDNN computes no attention here")
    torch._dynamo.reset()
    model = Llama(Shape(64, 256, layers=1, heads=4, kv_heads=2, ffn=256, context=512)).to(device)
    block = model.blocks[0]
    if compiles:
        block.forward = torch.compile(block.forward, fullgraph=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen, torch.autocast("cuda", torch.bfloat16):
        model(torch.zeros(2, 512, dtype=torch.long, device=device)).float().sum().backward()
    assert any("cudnn_attention_backward" in event.key for event in seen.key_averages())


@pytest.mark.gpu
def test_on_a_gpu_a_mask_is_never_for_cudnn():
    """At 64 tokens more than a multiple of 128 its gradients of queries are no numbers where a row's scores are low."""
    device = torch.device("cuda", 0)
    if not use_cudnn(device):
        pytest.skip("cuDNN computes no attention here")
    q, k, v = (torch.randn(2, 4, 576, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    mask = torch.full((576, 576), -100.0, device=device, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(q, k, v, mask).float().sum().backward()
    assert not any("cudnn" in event.key for event in seen.key_averages())
    assert q.grad is not None and torch.isfinite(q.grad).all()
