"""Cross entropy without a wide copy of its logits: torch's numbers, rows that do not count, and the memory it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from meshrun import cross_entropy, token_cross_entropy
from meshrun.kernels import cross_entropy as kernels
from meshrun.kernels.cross_entropy import backward_follows, lean_cross_entropy


def case(rows: int, classes: int, kind: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    logits = (torch.randn(rows, classes, generator=generator) * 4).to(kind).to(device).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator).to(device)
    targets[::4] = -100
    return logits, targets


def compare(logits: Tensor, targets: Tensor, ignore_index: int = -100, above: float = 0.3) -> None:
    """The value and the gradient with those of torch in fp32, under a gradient from above."""
    plain = logits.detach().clone().requires_grad_()
    mine = lean_cross_entropy(logits, targets, ignore_index)
    its = F.cross_entropy(plain.float(), targets, ignore_index=ignore_index, reduction="sum")
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, its, rtol=2e-6, atol=1e-6)
    (mine * above).backward()
    (its * above).backward()
    assert logits.grad is not None and plain.grad is not None
    assert logits.grad.dtype == logits.dtype
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-2, atol=1e-6)
    assert not logits.grad[targets == ignore_index].any()


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small logits are many chunks, the last one short."""
    monkeypatch.setattr(kernels, "AT_ONCE", 250)


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_taken_some_at_a_time_give_torchs_loss_and_gradient(kind: torch.dtype):
    compare(*case(37, 101, kind))
    compare(*case(3, 999, kind))  # each row is more than is taken at once
    logits, targets = case(20, 33, kind)
    compare(logits, targets.masked_fill(targets == -100, 7), ignore_index=7)


@pytest.mark.usefixtures("few_at_once")
def test_rows_that_do_not_count_have_no_gradient_even_where_their_logits_are_infinite():
    logits, targets = case(8, 101, torch.bfloat16)
    with torch.no_grad():
        logits[0] = torch.inf  # a row that is ignored
        logits[1, :50] = -torch.inf  # and classes that cannot be
        targets[1] = 77
    total = lean_cross_entropy(logits, targets, -100)
    total.backward()
    assert torch.isfinite(total) and logits.grad is not None
    assert torch.isfinite(logits.grad).all() and not logits.grad[0].any() and not logits.grad[1, :50].any()


@pytest.mark.usefixtures("few_at_once")
def test_logits_in_doubles_stay_so():
    logits, targets = case(37, 101, torch.float64)
    its = F.cross_entropy(logits.detach(), targets, reduction="sum")
    torch.testing.assert_close(lean_cross_entropy(logits, targets).detach(), its, rtol=1e-13, atol=0)


@pytest.mark.usefixtures("few_at_once")
def test_a_target_that_is_no_class_makes_the_loss_no_number():
    logits, targets = case(8, 101, torch.bfloat16)
    targets[1] = 101
    assert torch.isnan(lean_cross_entropy(logits, targets, -100))


@pytest.mark.usefixtures("few_at_once")
def test_who_traces_without_values_sees_the_same_shapes_and_types():
    with FakeTensorMode():
        logits = torch.empty(9, 101, dtype=torch.bfloat16, requires_grad=True)
        total = lean_cross_entropy(logits, torch.zeros(9, dtype=torch.int64), -100)
        total.backward()
        assert total.shape == () and total.dtype == torch.float32
        assert logits.grad is not None and logits.grad.shape == (9, 101) and logits.grad.dtype == torch.bfloat16


@pytest.mark.usefixtures("few_at_once")
def test_the_ready_losses_of_logits_in_halves_are_those_in_fp32():
    logits, targets = case(12, 101, torch.bfloat16)
    for outputs in (logits, logits.detach()):
        loss = token_cross_entropy(outputs.reshape(3, 4, 101), targets.reshape(3, 4))
        wanted = F.cross_entropy(logits.float(), targets, reduction="sum")
        torch.testing.assert_close(loss.total, wanted, rtol=2e-6, atol=1e-6)
        assert int(loss.count) == 9
        chosen = targets.clamp(0)
        loss = cross_entropy(outputs, chosen)
        torch.testing.assert_close(
            loss.total, F.cross_entropy(logits.float(), chosen, reduction="sum"), rtol=2e-6, atol=0
        )


def test_gradients_are_made_in_advance_only_where_a_backward_pass_follows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_in_kernels", lambda _: True)
    monkeypatch.setattr(kernels._Trained, "apply", lambda *given: given[-1])
    monkeypatch.setattr(kernels._CrossEntropy, "apply", lambda *_: None)
    given = case(8, 101, torch.bfloat16)
    with backward_follows(0.5):
        with backward_follows(0.25):
            assert lean_cross_entropy(*given) == 0.25
        assert lean_cross_entropy(*given) == 0.5
        with torch.no_grad():
            assert lean_cross_entropy(*given) is None
    assert lean_cross_entropy(*given) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_give_torchs_loss_and_gradient(kind: torch.dtype):
    for rows, classes in ((1, 2), (7, 10), (65, 1000), (33, 32003), (9, 300_001)):
        compare(*case(rows, classes, kind, "cuda"))
    wide, targets = case(16, 128, kind, "cuda")
    compare(wide.detach()[:, :100].requires_grad_(), targets.clamp(max=99))


@pytest.mark.gpu
def test_the_kernels_ignore_rows_and_show_wrong_targets():
    logits, targets = case(8, 101, torch.bfloat16, "cuda")
    with torch.no_grad():
        logits[0] = torch.inf
        logits[1, :50] = -torch.inf
        targets[1] = 77
    total = lean_cross_entropy(logits, targets, -100)
    total.backward()
    assert torch.isfinite(total) and logits.grad is not None
    assert torch.isfinite(logits.grad).all() and not logits.grad[0].any() and not logits.grad[1, :50].any()
    targets[2] = 101
    assert torch.isnan(lean_cross_entropy(logits, targets, -100))


@pytest.mark.gpu
def test_a_loss_on_the_gpu_takes_the_memory_of_logits_and_their_gradient():
    logits, targets = case(2048, 50_001, torch.bfloat16, "cuda")
    lean_cross_entropy(logits, targets).backward()
    logits.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lean_cross_entropy(logits, targets).backward()
    size = logits.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < 1.1 * size  # the gradient; the logits were there before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("above", [0.3, 1 / 24, 1.0])
def test_a_gradient_that_is_made_with_the_loss_is_torchs(kind: torch.dtype, above: float):
    with backward_follows(1 / 24):
        for rows, classes in ((1, 2), (65, 1000), (33, 32003)):
            compare(*case(rows, classes, kind, "cuda"), above=above)
        wide, targets = case(16, 128, kind, "cuda")
        compare(wide.detach()[:, :100].requires_grad_(), targets.clamp(max=99), above=above)
        logits, targets = case(8, 101, kind, "cuda")
        with torch.no_grad():
            logits[0] = torch.inf
        total = lean_cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(total * above, logits)
        assert torch.isfinite(total) and torch.isfinite(gradient).all() and not gradient[0].any()


@pytest.mark.gpu
def test_a_gradient_can_be_asked_for_again():
    logits, targets = case(9, 1001, torch.bfloat16, "cuda")
    with backward_follows(3.0):
        total = lean_cross_entropy(logits, targets)
    plain = lean_cross_entropy(logits, targets)
    for above in (3.0, 1.0, 3.0):
        found, wanted = (torch.autograd.grad(each * above, logits, retain_graph=True)[0] for each in (total, plain))
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_the_kernels_are_one_graph_for_the_compiler():
    logits, targets = case(9, 101, torch.bfloat16, "cuda")
    compiled = torch.compile(lean_cross_entropy, fullgraph=True)
    total = compiled(logits, targets, -100)
    total.backward()
    gradient, logits.grad = logits.grad, None
    plain = lean_cross_entropy(logits, targets, -100)
    plain.backward()
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(gradient, logits.grad)
