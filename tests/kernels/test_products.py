"""Large products are computed by the kernel that is fastest, and are what torch gives."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshrun.kernels import _cublaslt, products
from meshrun.kernels._cublaslt import Form, Product
from meshrun.kernels.products import OPERATION, OPERATION8, Kept, fastest

FLOAT8 = torch.float8_e4m3fn


def test_the_fastest_is_the_one_that_a_busy_card_keeps_up():
    asked: list[tuple[int, float]] = []

    def timed(which: int, ms: float) -> float:
        asked.append((which, ms))
        settled = ms == products.LASTING and asked[-2] == (which, products.SETTLE)
        return [1.0, 0.97, 0.94, 2.0][which] if settled else [1.2, 1.05, 1.0, 1.5][which]

    assert fastest(4, timed) == 2
    assert asked[0] == (0, products.LOAD)
    assert [which for which, ms in asked if ms == products.LASTING] == [0, 1, 2], "what is far off is not tried again"


@pytest.mark.parametrize(("other", "found"), [(0.999, 0), (0.98, 1), (1.02, 0), (float("inf"), 0)])
def test_another_than_torchs_must_be_faster_by_more_than_chance(other: float, found: int):
    assert fastest(2, lambda which, _: (1.0, other)[which]) == found


def test_choices_are_kept_beside_those_of_other_cards_and_the_first_one_counts(tmp_path: Path):
    one, other = Kept(tmp_path / "new", "H200"), Kept(tmp_path / "new", "H200")
    assert one.put("a", 4, 3) == 3
    assert other.put("b", 4, 0) == 0
    assert other.put("a", 4, 2) == 3 == other.get("a", 4), "it was not there when this one has looked, and is now"
    Kept(tmp_path / "new", "A100").put("a", 4, 1)
    later = Kept(tmp_path / "new", "H200")
    assert (later.get("a", 4), later.get("b", 4), later.get("c", 4)) == (3, 0, None)
    assert later.get("a", 3) is None, "there is no such kernel any more"
    assert later.put("a", 3, 1) == 1 == Kept(tmp_path / "new", "H200").get("a", 3)


def keep(folder: Path, number: int) -> None:
    for place in range(20):
        Kept(folder, "H200").put(f"{number} {place}", 4, number)


def test_processes_that_keep_choices_at_once_lose_none(tmp_path: Path):
    others = [multiprocessing.get_context("fork").Process(target=keep, args=(tmp_path, number)) for number in range(4)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert len(Kept(tmp_path, "H200").choices) == 80


@pytest.mark.parametrize("text", ["", "[]", "{", '{"H200": 3}', '{"H200": {"a": "3"}}', '{"H200": {"a": true}}'])
def test_a_file_that_makes_no_sense_is_as_none(text: str, tmp_path: Path):
    (tmp_path / products.FILE).write_text(text)
    kept = Kept(tmp_path, "H200")
    assert kept.get("a", 9) is None
    assert kept.put("a", 9, 2) == 2
    assert json.loads((tmp_path / products.FILE).read_text())["H200"] == {"a": 2}


def test_a_folder_that_cannot_be_written_to_ends_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    kept = Kept(tmp_path / "file" / "folder", "H200")
    assert kept.put("a", 9, 2) == 2 == kept.get("a", 9)


def halves(rows: int, columns: int, by_columns: bool = False, device: str = "cpu") -> Tensor:
    sizes = (columns, rows) if by_columns else (rows, columns)
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(rows + columns)).bfloat16().to(device)
    return made.t() if by_columns else made


def eighths(rows: int, columns: int, by_columns: bool, device: str = "cpu") -> Tensor:
    return halves(rows, columns, by_columns, device).to(FLOAT8)


def product(left: Tensor, right: Tensor, plus: Tensor | None = None, kind: torch.dtype = torch.bfloat16) -> Product:
    """One whose result is nothing yet."""
    out = torch.full((left.shape[0], right.shape[1]), torch.nan, dtype=kind, device=left.device)
    return Product(left, right, out, plus=plus)


def test_what_lies_otherwise_in_memory_is_left_to_torch():
    left, right, plus = halves(64, 32), halves(32, 48, by_columns=True), halves(64, 48)
    found = products.form_of(product(left, right, plus), False)
    assert found == Form(64, 32, 48, torch.bfloat16, torch.bfloat16, right_by_columns=True, plus=True)
    assert products.form_of(product(halves(64, 64)[:, :32], right), False) is None
    assert products.form_of(product(left, halves(48, 64)[:, :32].t()), False) is None
    assert products.form_of(product(left, right, plus[:1]), False) is None
    assert products.form_of(product(left, right, halves(64, 48, by_columns=True)), False) is None
    assert products.form_of(product(left, right, plus.float()), False) is None


@pytest.mark.parametrize("right", [torch.float8_e5m2, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("left", [torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_numbers_of_other_kinds_are_left_to_torch(left: torch.dtype, right: torch.dtype, kind: torch.dtype):
    given = product(halves(64, 32).to(left), halves(32, 48).to(right), kind=kind)
    known = left == right == torch.float8_e4m3fn and kind == torch.bfloat16
    assert (products.form_of(given, False) is not None) == known


def test_a_compiler_knows_what_they_give():
    halved = halves(64, 32), halves(32, 48)
    for given in (halved, (*halved, halves(64, 48))):
        torch.library.opcheck(OPERATION, given, test_utils=("test_schema", "test_faketensor"))
    one = torch.ones(())
    given = eighths(64, 32, False), eighths(32, 48, True), one, one, torch.bfloat16, False
    torch.library.opcheck(OPERATION8, given, test_utils=("test_faketensor",))


@pytest.mark.gpu
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("plus", [False, True])
def test_every_kernel_of_the_library_gives_what_torch_gives(left: bool, right: bool, plus: bool):
    one, other = halves(512, 256, left, "cuda"), halves(256, 384, right, "cuda")
    begin = halves(512, 384, False, "cuda") if plus else None
    wanted = one.double() @ other.double() + (0 if begin is None else begin.double())
    form = products.form_of(product(one, other, begin), False)
    assert form is not None and form.plus == plus
    kernels = _cublaslt.kernels(form, 0)
    assert len(kernels) > 1
    for kernel in kernels:
        given = product(one, other, begin)
        kernel(given)
        torch.testing.assert_close(given.out.double(), wanted, rtol=2**-8, atol=1e-3)
    assert begin is None or torch.equal(begin, halves(512, 384, False, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_every_kernel_for_float8_gives_what_torch_gives(fast: bool, kind: torch.dtype):
    one, other = eighths(512, 256, False, "cuda"), eighths(256, 384, True, "cuda")
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(4.0, device="cuda")
    wanted = torch._scaled_mm(one, other, *scales, out_dtype=kind, use_fast_accum=fast)
    form = products.form_of(product(one, other, kind=kind), fast)
    assert form is not None
    kernels = _cublaslt.kernels(form, 0)
    assert len(kernels) > 1
    for kernel in kernels:
        given = product(one, other, kind=kind)._replace(scale=scales[0], other=scales[1])
        kernel(given)
        torch.testing.assert_close(given.out, wanted, rtol=2**-6, atol=2e-2)


@pytest.mark.gpu
def test_a_product_is_timed_once_and_is_then_the_same_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "_times_them", True)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "_kept", lambda _: Kept(tmp_path, "this"))
    left, right = halves(4096, 4096, False, "cuda"), halves(4096, 4096, True, "cuda")
    out = OPERATION(left, right)
    torch.testing.assert_close(out, left @ right, rtol=2**-7, atol=1e-2)
    assert len(Kept(tmp_path, "this").choices) == 1
    monkeypatch.setattr(products, "fastest", lambda *_: pytest.fail("it was timed already"))
    assert torch.equal(OPERATION(left, right), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = OPERATION(left, right)
    graph.replay()
    assert torch.equal(replayed, out)
    monkeypatch.setattr(products, "_chosen", {})
    assert torch.equal(OPERATION(left, right), out), "a later process has the same choice"


@pytest.mark.gpu
def test_what_was_never_timed_is_left_to_torch_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_chosen", {})
    left, right = halves(256, 128, False, "cuda"), halves(128, 512, True, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPERATION(left, right)
    graph.replay()
    assert torch.equal(out, left @ right) and not products._chosen


@pytest.mark.gpu
def test_what_is_not_timed_is_left_to_torch_but_for_what_begins_with_something(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "fastest", lambda *_: pytest.fail("it is not to be timed"))
    left, right, plus = (halves(*sizes, device="cuda") for sizes in ((384, 128), (128, 512), (384, 512)))
    assert torch.equal(OPERATION(left, right), left @ right)
    torch.testing.assert_close(OPERATION(left, right, plus), plus + left @ right, rtol=2**-6, atol=2e-2)
    assert [type(each) is _cublaslt.Kernel for each in products._chosen.values()] == [False, True]
