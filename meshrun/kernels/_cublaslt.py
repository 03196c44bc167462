"""cuBLASLt by its C interface: all kernels that it offers for a product, where torch calls the first of them.

    ways = kernels(Form(32768, 2048, 8192, torch.bfloat16, torch.bfloat16), device=0)
    ways[3](Product(left, right, out))              # computes it, on the current stream

The library is the one that torch has loaded; its functions and numbers are those of cublasLt.h, and the same in
CUDA 12 and 13. It thinks in columns, so a product of rows is given to it as that of both factors transposed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKSPACE = 32 << 20
"""Bytes that a kernel may ask for beside the factors: as many as torch gives on large GPUs."""
MOST = 16
"""Kernels of one product; the library has seldom more than eight."""
ALIGNED = 256
"""What addresses must be a multiple of: what the library takes for granted."""
KINDS = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_IN_FP32 = 68
_TURN_A, _TURN_B, _SCALE_A, _SCALE_B, _FAST = 3, 4, 17, 18, 25
_MOST_WORKSPACE, _PARTIAL_SUMS = 1, 3
_ONE, _ZERO = c_float(1.0), c_float(0.0)
_lock = threading.Lock()
"""What a form is described by has its scales too: nobody else may set them before a product is started."""


class LibraryError(Exception):
    """What the library cannot do."""


@dataclass(frozen=True)
class Form:
    """All of a product but its numbers: (rows, summed) by (summed, columns), each factor whole in memory."""

    rows: int
    summed: int
    columns: int
    kind: torch.dtype
    result: torch.dtype
    left_by_columns: bool = False
    right_by_columns: bool = False
    fast: bool = False
    """Whether it is added up with fewer bits, in float8."""
    plus: bool = False
    """Whether something is added to it."""


class Product(NamedTuple):
    """Numbers that are to be multiplied, and where the result goes."""

    left: Tensor
    right: Tensor
    out: Tensor
    scale: Tensor | None = None
    other: Tensor | None = None
    """One number each, that the factors, in float8, are to be multiplied with."""
    plus: Tensor | None = None
    """What is added, of the result's form."""


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The one that torch has loaded, if it has."""
    if torch.version.cuda is None:
        return None
    try:
        name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
        found = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None
    found.cublasLtGetVersion.restype = c_size_t
    found.cublasLtMatrixLayoutCreate.argtypes = [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64]
    found.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    found.cublasLtMatmulPreferenceSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    found.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
    return found


def version() -> int:
    """The library's, where there is one."""
    return int(library().cublasLtGetVersion())  # type: ignore[union-attr]


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise LibraryError(f"{name} ended with {status}")


def _made(name: str, *arguments: Any) -> c_void_p:
    """What the library makes and keeps: there are as many as a training has forms of products."""
    made = c_void_p()
    _call(name, byref(made), *arguments)
    return made


@functools.cache
def _handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return _made("cublasLtCreate")


def _matrix(kind: torch.dtype, rows: int, columns: int) -> c_void_p:
    """One whose columns are whole in memory."""
    return _made("cublasLtMatrixLayoutCreate", KINDS[kind], rows, columns, rows)


def _set(described: c_void_p, attribute: int, value: Any) -> None:
    _call("cublasLtMatmulDescSetAttribute", described, attribute, byref(value), sizeof(value))


@functools.cache
def kernels(form: Form, device: int) -> list[Kernel]:
    """What the library offers for a product, its own favourite first; none of them adds up parts of a sum in an order
    that is up to chance.
    """
    described = _made("cublasLtMatmulDescCreate", _IN_FP32, KINDS[torch.float32])
    # The first factor of the library is the right one here.
    _set(described, _TURN_A, c_int(form.right_by_columns))
    _set(described, _TURN_B, c_int(form.left_by_columns))
    if form.fast:
        _set(described, _FAST, ctypes.c_int8(1))
    right, left = (form.columns, form.summed), (form.summed, form.rows)
    layouts = (
        _matrix(form.kind, *(right[::-1] if form.right_by_columns else right)),
        _matrix(form.kind, *(left[::-1] if form.left_by_columns else left)),
        _matrix(form.result, form.columns, form.rows),
    )
    if form.kind == torch.float8_e4m3fn:
        for attribute in (_SCALE_A, _SCALE_B):
            _set(described, attribute, c_void_p(ALIGNED))  # any: it only says that there will be one
    preference = _made("cublasLtMatmulPreferenceCreate")
    _call("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, byref(c_size_t(WORKSPACE)), 8)
    _call("cublasLtMatmulPreferenceSetAttribute", preference, _PARTIAL_SUMS, byref(c_int(0)), 4)
    found, count = (_Found * MOST)(), c_int(0)
    matrices = (*layouts, layouts[2])
    search = (_handle(device), described, *matrices, preference, MOST, found, byref(count))
    _call("cublasLtMatmulAlgoGetHeuristic", *search)
    _call("cublasLtMatmulPreferenceDestroy", preference)
    offered = [each for each in found[: count.value] if each.status == 0]
    return [Kernel(_handle(device), described, layouts, each) for each in offered]


class Kernel:
    """One of the library's for one form of product."""

    def __init__(self, handle: c_void_p, described: c_void_p, layouts: tuple[c_void_p, ...], found: _Found) -> None:
        self._handle, self._described, self._layouts, self._found = handle, described, layouts, found
        self._run = library().cublasLtMatmul  # type: ignore[union-attr]

    def __call__(self, product: Product) -> None:
        left, right, out, scale, other, plus = product
        size = self._found.workspace
        space = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None  # until it is started
        a, b, c = self._layouts
        with _lock:
            if scale is not None and other is not None:
                _set(self._described, _SCALE_A, c_void_p(other.data_ptr()))
                _set(self._described, _SCALE_B, c_void_p(scale.data_ptr()))
            status = self._run(
                self._handle,
                self._described,
                byref(_ONE),
                right.data_ptr(),
                a,
                left.data_ptr(),
                b,
                byref(_ZERO if plus is None else _ONE),
                (out if plus is None else plus).data_ptr(),
                c,
                out.data_ptr(),
                c,
                byref(self._found),
                None if space is None else space.data_ptr(),
                size,
                torch.cuda.current_stream(out.device).cuda_stream,
            )
        if status:
            raise LibraryError(f"cublasLtMatmul ended with {status}")
