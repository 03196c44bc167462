"""Large matrix products, each by the kernel that is fastest for it on this GPU.

    torch.ops.meshrun.product(left, right, plus)                          # of bfloat16: as torch.mm, or torch.addmm
    torch.ops.meshrun.product8(left, right, scale, other, kind, fast)     # of float8: as torch._scaled_mm

torch calls the kernel that cuBLAS thinks best. Where a training keeps a card at its limit of power, which cuBLAS does
not think of, another one of its kernels is often faster. So in a long training, the first time that a large product of
some form is computed, each of the library's kernels that come into question computes it until the card runs at the pace
that it can keep up; the fastest one does so from then on, in later runs too: the choice is kept beside what was
compiled. These are operators for compiled code, which has them in place of torch's (`parallel/inductor.py`).
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun.kernels import _cublaslt
from meshrun.kernels._cublaslt import ALIGNED, Form, LibraryError, Product

log = logging.getLogger(__name__)

LOAD, BRIEF, SETTLE, LASTING = 250.0, 10.0, 150.0, 200.0
"""Milliseconds: of a product before any is timed, so that the card is at its limit; of each kernel at first; and of
each that is left, until the card runs at the pace that it can keep up with this one, and from then on. What a kernel
does at the pace of the one before says nothing: the fastest ones are often those that slow the card down."""
NEAR = 1.06
"""Kernels that take so much longer than the fastest are not tried again."""
GAIN = 1.01
"""By how much one must be faster than the first, which mostly is torch's, to be taken."""
LARGE = 100_000_000_000
"""Multiplications of a product from which on it is timed: a third of a millisecond of a large GPU."""
FILE = "products.json"

Multiply = Callable[[Product], None]


def fastest(count: int, timed: Callable[[int, float], float]) -> int:
    """Which of `count` ways is fastest; the first one, unless others are so by more than chance.

    `timed(which, ms)` has one of them compute for about that long, and says what once takes.
    """
    timed(0, LOAD)
    brief = [timed(which, BRIEF) for which in range(count)]
    left = [which for which, taken in enumerate(brief) if not which or taken <= NEAR * min(brief)]
    found = {which: (timed(which, SETTLE), timed(which, LASTING))[1] for which in left}
    best = min(left, key=found.__getitem__)
    return best if found[best] * GAIN < found[0] else 0


class Kept:
    """What was chosen before on GPUs like this one, by earlier runs too."""

    def __init__(self, folder: Path, card: str) -> None:
        self.path, self.card = folder / FILE, card
        self.choices = self._read().get(card, {})

    def _read(self) -> dict[str, dict[str, int]]:
        """What is there; a file that cannot be read is as none."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        whole = isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())
        return found if whole else {}

    def get(self, key: str, count: int) -> int | None:
        """The one chosen of `count`."""
        found = self.choices.get(key)
        return found if type(found) is int and 0 <= found < count else None

    def put(self, key: str, count: int, which: int) -> int:
        """Keep a choice, unless another process has kept one meanwhile; returns the one that counts."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                everyone = self._read()
                self.choices |= everyone.get(self.card, {})
                if (kept := self.get(key, count)) is not None:
                    return kept
                self.choices[key] = which
                with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                    json.dump({**everyone, self.card: self.choices}, file, indent=1, sort_keys=True)
                Path(file.name).replace(self.path)
        except OSError as error:
            log.info("choices of kernels are not kept: %s", error)
            self.choices[key] = which
        return which


@functools.cache
def _kept(device: int) -> Kept:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # there already: compiled code is what calls

    card = f"{torch.cuda.get_device_name(device)}, cuBLASLt {_cublaslt.version()}"
    return Kept(Path(cache_dir()), card)


def form_of(product: Product, fast: bool) -> Form | None:
    """What is to be computed, or None where only torch can."""
    left, right, out, plus = product.left, product.right, product.out, product.plus
    by_columns = []
    for each in (left, right):
        if each.stride() == (each.shape[1], 1):
            by_columns.append(False)
        elif each.stride() == (1, each.shape[0]):
            by_columns.append(True)
        else:
            return None
    if left.dtype != right.dtype or not {left.dtype, out.dtype} <= _cublaslt.KINDS.keys():
        return None
    if plus is not None and not (plus.shape == out.shape and plus.dtype == out.dtype and plus.is_contiguous()):
        return None
    (rows, summed), columns = left.shape, right.shape[1]
    kinds = left.dtype, out.dtype
    return Form(rows, summed, columns, *kinds, by_columns[0], by_columns[1], fast, plus is not None)


_chosen: dict[Any, Multiply] = {}
"""By all that a form is made of, which is there without asking for much."""
_times_them = False


def time_them(yes: bool) -> None:
    """Whether what has never been timed on such a GPU is timed from now on: it takes two seconds a form.

    In a first step, that is, which may take long; after it, so long a silence looks like a rank that hangs.
    """
    global _times_them
    if yes:
        _chosen.clear()
    _times_them = yes


def _multiplied(product: Product, fast: bool, by_torch: Multiply) -> Tensor:
    """What is computed, by what is fastest, which is found now if it never was."""
    left, right, out, _, _, plus = product
    sizes = (left.shape, left.stride(), right.shape, right.stride(), None if plus is None else plus.stride())
    key = (sizes, left.dtype, out.dtype, fast, out.device)
    places = left.data_ptr() | right.data_ptr() | (0 if plus is None else plus.data_ptr())
    multiply = by_torch if places % ALIGNED else _chosen.get(key)
    if multiply is None and (not out.is_cuda or torch.cuda.is_current_stream_capturing()):
        multiply = by_torch  # while a graph is recorded, nothing can be timed
    elif multiply is None:
        multiply = _chosen[key] = _choose(product, fast, by_torch)
    multiply(product)
    return out


def _choose(product: Product, fast: bool, by_torch: Multiply) -> Multiply:
    form = form_of(product, fast)
    if form is None or _cublaslt.library() is None:
        return by_torch
    device = product.out.device.index
    try:
        offered = _cublaslt.kernels(form, device)
        # Where something is added to a product, torch would copy that before.
        ways: list[Multiply] = [*offered] if form.plus and offered else [by_torch, *offered]
        kept, name = _kept(device), str(form)
        which = kept.get(name, len(ways))
        if which is None and _times_them and form.rows * form.summed * form.columns >= LARGE:
            which = fastest(len(ways), lambda one, ms: _taken(lambda: ways[one](product), ms))
            which = kept.put(name, len(ways), which)
        chosen = ways[which or 0]
        chosen(product)
    except LibraryError as error:
        log.warning("torch multiplies in place of cuBLASLt: %s (%s)", error, form)
        return by_torch
    return chosen


def _taken(compute: Callable[[], None], ms: float) -> float:
    """What once takes, in milliseconds, if it is computed for about `ms`; for ever, if it cannot be."""
    try:
        compute()
    except LibraryError:
        return math.inf
    first, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    first.record()
    compute()
    begin.record()
    begin.synchronize()
    once = first.elapsed_time(begin)
    times = max(2, min(1000, round(ms / once)))
    begin.record()
    for _ in range(times):
        compute()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def _product(left: Tensor, right: Tensor, plus: Tensor | None = None) -> Tensor:
    product = Product(left, right, _shape(left, right), plus=plus)
    return _multiplied(product, False, _mm if plus is None else _addmm)


def _mm(product: Product) -> None:
    torch.mm(product.left, product.right, out=product.out)


def _addmm(product: Product) -> None:
    assert product.plus is not None
    torch.addmm(product.plus, product.left, product.right, out=product.out)


def _product8(left: Tensor, right: Tensor, scale: Tensor, other: Tensor, kind: torch.dtype, fast: bool) -> Tensor:
    product = Product(left, right, _shape8(left, right, scale, other, kind, fast), scale, other)
    return _multiplied(product, fast, functools.partial(_scaled_mm, fast))


def _scaled_mm(fast: bool, product: Product) -> None:
    left, right, out, scale, other, _ = product
    assert scale is not None and other is not None
    torch._scaled_mm(left, right, scale, other, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _shape(left: Tensor, right: Tensor, _: Tensor | None = None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _shape8(left: Tensor, right: Tensor, _: Tensor, __: Tensor, kind: torch.dtype, ___: bool) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=kind)


_LIBRARY = torch.library.Library("meshrun", "FRAGMENT")
# In whatever order factors lie: compiled code would else make copies for these beside what others read.
_ANY_ORDER = (torch.Tag.flexible_layout,)
_LIBRARY.define("product(Tensor left, Tensor right, Tensor? plus=None) -> Tensor", tags=_ANY_ORDER)
_LIBRARY.define(
    "product8(Tensor left, Tensor right, Tensor scale, Tensor other, ScalarType kind, bool fast) -> Tensor",
    tags=_ANY_ORDER,
)
_LIBRARY.impl("product", _product, "CompositeExplicitAutograd")
_LIBRARY.impl("product8", _product8, "CompositeExplicitAutograd")
torch.library.register_fake("meshrun::product", _shape, lib=_LIBRARY)
torch.library.register_fake("meshrun::product8", _shape8, lib=_LIBRARY)
OPERATION, OPERATION8 = torch.ops.meshrun.product.default, torch.ops.meshrun.product8.default
