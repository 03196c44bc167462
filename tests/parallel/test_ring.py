"""Ring attention equals attention of one process, with the same work on every rank, whatever the heads and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrun import UserError
from meshrun.parallel import ring
from meshrun.parallel.ring import positions, ring_attention
from tests.compare import largest


def drawn(tokens: int, heads: int = 4, kv_heads: int = 4, size: int = 8, value_size: int = 8) -> list[Tensor]:
    """The same query, key, value and gradient of the output on every rank, as views that are not contiguous."""
    torch.manual_seed(tokens)
    sizes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    return [torch.randn(2, tokens, *each).transpose(1, 2) for each in sizes]


def in_one_process(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients of the whole sequence."""
    query, key, value = (each.clone().requires_grad_() for each in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa, **options)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def on_the_ring(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, group: dist.ProcessGroup, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """This rank's positions, and its part of output and gradients."""
    mine = positions(query.shape[2], dist.get_rank(group), dist.get_world_size(group)).to(query.device)
    # Cut so that the views stay views of (batch, tokens, heads, size), which is how models come by their heads.
    query, key, value, grad = (each.transpose(1, 2)[:, mine].transpose(1, 2) for each in (query, key, value, grad))
    query, key, value = (each.requires_grad_() for each in (query, key, value))
    out = ring_attention(query, key, value, group, **options)
    return mine, [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def off(here: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, as a share of the norm."""
    return float((here.double() - wanted.double()).norm() / wanted.double().norm())


def differences(whole: list[Tensor], mine: Tensor, parts: list[Tensor]) -> list[float]:
    return [off(part, one[:, :, mine]) for part, one in zip(parts, whole, strict=True)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_token_is_held_once(parts: int):
    held = torch.cat([positions(24 * parts, part, parts) for part in range(parts)])
    assert held.dtype == torch.int64
    assert sorted(held.tolist()) == list(range(24 * parts))


def test_a_part_holds_an_early_and_a_late_chunk():
    assert positions(12, 0, 3).tolist() == [0, 1, 10, 11]
    assert positions(12, 1, 3).tolist() == [2, 3, 8, 9]
    assert positions(12, 2, 3).tolist() == [4, 5, 6, 7]


def test_a_length_that_cannot_be_cut_is_refused():
    with pytest.raises(UserError) as error:
        positions(129, 0, 2)
    assert str(error.value) == (
        "sequences have 129 tokens, which cp=2 cannot cut into 4 equal chunks; "
        "make the length a multiple of 4, or use another layout (--layout)"
    )


RANKS = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)]
HEADS = {"as many": {}, "grouped": {"kv_heads": 2}, "one for all": {"kv_heads": 1}, "wider values": {"value_size": 12}}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("n", RANKS)
def test_output_and_gradients_equal_those_of_one_process(n: int, dtype: torch.dtype, within: float, heads: str):
    tensors = [each.to(dtype) for each in drawn(24 * n, **HEADS[heads])]
    mine, parts = on_the_ring(*tensors, dist.group.WORLD)
    found = differences(in_one_process(*tensors), mine, parts)
    assert largest(found) < within, found


@pytest.mark.ranks(3)
def test_one_token_a_chunk_is_enough():
    tensors = drawn(6)
    mine, parts = on_the_ring(*tensors, dist.group.WORLD)
    assert largest(differences(in_one_process(*tensors), mine, parts)) < 1e-6


@pytest.mark.ranks(2)
def test_the_scale_is_the_one_asked_for():
    tensors = drawn(16)
    mine, parts = on_the_ring(*tensors, dist.group.WORLD, scale=0.7)
    assert largest(differences(in_one_process(*tensors, scale=0.7), mine, parts)) < 1e-6


@pytest.mark.ranks(3)
def test_large_scores_do_not_overflow():
    """Scores of some hundreds: without their largest taken out first, the sums would be infinite."""
    query, key, value, grad = drawn(24)
    tensors = (query * 40, key * 40, value, grad)
    mine, (out, *grads) = on_the_ring(*tensors, dist.group.WORLD)
    wanted = in_one_process(*(each.double() for each in tensors))[0]
    assert off(out, wanted[:, :, mine]) < 1e-4
    assert all(each.isfinite().all() for each in grads)


@pytest.mark.ranks(4)
def test_two_rings_in_one_world_keep_to_themselves():
    rank = dist.get_rank()
    rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    query, key, value, grad = drawn(16)
    tensors = (query + rank % 2, key, value, grad)
    mine, parts = on_the_ring(*tensors, rings[rank % 2])
    assert largest(differences(in_one_process(*tensors), mine, parts)) < 1e-6


@pytest.mark.ranks(2)
def test_half_precision_is_summed_in_single_precision():
    tensors = drawn(64, kv_heads=2)
    mine, parts = on_the_ring(*(each.bfloat16() for each in tensors), dist.group.WORLD)
    assert {each.dtype for each in parts} == {torch.bfloat16}
    assert largest(differences(in_one_process(*tensors), mine, parts)) < 2e-2


@pytest.mark.ranks(2)
def test_autocast_decides_the_precision_as_it_does_for_attention():
    tensors = drawn(16, value_size=12)
    with torch.autocast("cpu", torch.bfloat16):
        mine, parts = on_the_ring(*tensors[:3], tensors[3].bfloat16(), dist.group.WORLD)
    assert [each.dtype for each in parts] == [torch.bfloat16, *[torch.float32] * 3]
    assert largest(differences(in_one_process(*tensors), mine, parts)) < 2e-2


@pytest.mark.ranks(2)
def test_tokens_that_are_not_two_chunks_are_refused():
    query, key, value, _ = drawn(5)
    with pytest.raises(UserError, match=r"attention met 5 tokens on a rank, .*must not add or drop tokens under cp"):
        ring_attention(query, key, value, dist.group.WORLD)


@pytest.mark.ranks(4)
def test_every_rank_computes_the_same_number_of_scores_and_none_in_vain():
    n, tokens = 4, 48
    scores: dict[str, int] = {}
    widest = 0

    def counted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            nonlocal widest
            query, key, _, _, causal = arguments[-5:]
            rows, columns = query.shape[2], key.shape[2]
            scores[name] = scores.get(name, 0) + (rows * (rows + 1) // 2 if causal else rows * columns)
            widest = max(widest, columns)
            return compute(*arguments)

        return count

    ring.block = counted("forward", ring.block)
    ring.block_backward = counted("backward", ring.block_backward)
    on_the_ring(*drawn(tokens), dist.group.WORLD)
    of_all: list[Any] = [None] * n
    dist.all_gather_object(of_all, scores)
    one = tokens * (tokens + 1) // 2 // n
    assert of_all == [{"forward": one, "backward": one}] * n
    assert widest == tokens // n


class Staged:
    """Sends and receives of a GPU's tensors by gloo, which takes only the host's."""

    def __init__(self, ops: list[dist.P2POp]) -> None:
        self.host = [each.tensor.cpu() for each in ops]
        self.ops = ops
        self.works = [
            each.op(host, group=each.group, **{"group_dst" if each.op is dist.isend else "group_src": each.group_peer})
            for each, host in zip(ops, self.host, strict=True)
        ]

    def wait(self) -> None:
        for each, host, work in zip(self.ops, self.host, self.works, strict=True):
            work.wait()
            each.tensor.copy_(host)


@pytest.mark.gpu
@pytest.mark.ranks(3, timeout=120)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "dtype, within", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_a_gpu_gives_what_one_process_gives(heads: str, dtype: torch.dtype, within: float):
    torch.cuda.set_device(0)
    ring.dist.batch_isend_irecv = lambda ops: [Staged(ops)]
    tensors = [each.cuda() for each in drawn(96, size=16, **{"value_size": 16, **HEADS[heads]})]
    whole = in_one_process(*(each.double() for each in tensors))
    mine, parts = on_the_ring(*(each.to(dtype) for each in tensors), dist.group.WORLD)
    found = differences(whole, mine, parts)
    assert largest(found) < within, found
