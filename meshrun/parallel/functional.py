"""Dropout that a model calls as a function, drawn by sample as `nn.Dropout` modules draw it.

    key_functions(model, moment)                # F.dropout and its like, and dropout inside of attention
    with recording(model, seen): model(inputs)  # which modules call a dropout, and with tensors of which shape

torch's functions are replaced once, for all of the process, also where a module has them under a name of its own (`from
torch.nn.functional import dropout`): a segment that is computed again in the backward pass must
meet what it met in the forward pass. A call without dropout goes to torch's own function at once. With dropout, the
innermost module of the model whose code is running gives the draw its name. Attention with dropout is computed from
its parts, since no kernel draws by sample: that takes the memory of all attention weights.

Compiled code does not know whose code is running: a function that calls a dropout is computed as it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshrun.errors import RunFailed
from meshrun.parallel import sdpa
from meshrun.parallel.composed_dropout import PLAIN_ALPHA, compose_of_dropout
from meshrun.parallel.dropout import (
    Keyed,
    KeyedDropout,
    KeyedDropout1d,
    KeyedDropout2d,
    KeyedDropout3d,
    Part,
    become_keyed,
)
from meshrun.parallel.moment import Moment

Seen = list[tuple[str, tuple[int, ...]]]
"""The name of the module and the shape of the input, for each call of a dropout."""

PLAIN: dict[str, Callable[..., Tensor]] = {
    name: getattr(functional, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")
}
"""torch's own functions."""
_KINDS: dict[str, type[Keyed]] = {
    "dropout": KeyedDropout,
    "dropout1d": KeyedDropout1d,
    "dropout2d": KeyedDropout2d,
    "dropout3d": KeyedDropout3d,
}
_attention_without_dropout: Callable[..., Tensor] = functional.scaled_dot_product_attention


class Site:
    """A module whose own code may call a dropout as a function."""

    def __init__(self, moment: Moment, name: str, part: Part | None) -> None:
        self.moment, self.name, self.part = moment, name, part
        self._keyed: dict[str, Any] = {}

    def drop(self, kind: str, input: Tensor, p: float) -> Tensor:
        keyed = self._module(kind)
        if self.part is not None:
            self._refuse_part(input, keyed, self.part)
        return keyed.drop(input, p)

    def drop_weights(self, weights: Tensor, p: float) -> Tensor:
        """Weights of attention, of which a rank may have those of its heads."""
        keyed = self._module("dropout")
        keyed.part_of_sequence = None
        if self.part is not None and weights.dim() == 4 and keyed.turn.now.place is not None:
            heads = keyed.turn.now.place.shape[1]
            if weights.shape[1] * self.part[1] == heads:
                keyed.part_of_sequence = self.part
                return keyed.drop(weights, p)
        return self.drop("dropout", weights, p)

    def _module(self, kind: str) -> Any:
        moment = self.moment
        moment.draws_in_functions = True
        if moment.locate is not None:
            locate, moment.locate = moment.locate, None
            locate()
        if kind not in self._keyed:
            self._keyed[kind] = _KINDS[kind](0.5)
            # A module's own calls and those of functions in its code are counted together.
            become_keyed(self._keyed[kind], moment, self.name)
        return self._keyed[kind]

    def _refuse_part(self, input: Tensor, keyed: Keyed, part: Part) -> None:
        """Refuse a tensor of which this rank may have a part, without anybody saying which."""
        place, own = keyed.turn.now.place, list(input.shape)
        if place is not None and place.dim is not None and self.moment.ids is not None:
            own[place.dim] //= max(1, len(self.moment.ids))
        if place is None or any(here * part[1] == whole for here, whole in zip(own, place.shape, strict=False)):
            raise RunFailed(
                f"'{self.name or 'the model'}' calls a dropout as a function on a tensor of shape "
                f"{tuple(input.shape)}, of which tp={part[1]} may have given this rank a part; make it an nn.Dropout "
                f"module that the tensor_plan names, or use a layout without tp (--layout)"
            )


_SITES: WeakKeyDictionary[nn.Module, Site] = WeakKeyDictionary()
_recorder: tuple[WeakKeyDictionary[nn.Module, str], Seen, list[Tensor] | None] | None = None
_again_in: Site | None = None
"""The module whose code is computed again, in a backward pass: no frame leads to it."""


def key_functions(model: nn.Module, moment: Moment, part: Part | None = None) -> None:
    """Let dropouts that the code of a model's modules calls draw by key; `part` is this rank's of its tp group."""
    global _attention_without_dropout
    compose_of_dropout()
    for name, module in model.named_modules():
        _SITES[module] = Site(moment, name, part)
    for name in PLAIN:
        setattr(functional, name, _REPLACED[name])
    for name in _TORCHS:
        setattr(torch, name, _TORCHS[name])
    if functional.scaled_dot_product_attention is not attention:
        _attention_without_dropout = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = attention
    _replace_imported()


def _under_torchs_name(name: str) -> Callable[[Tensor, float, bool], Tensor]:
    """`torch.dropout(input, p, train)`, which is `F.dropout` under another name."""

    def function(input: Tensor, p: float, train: bool) -> Tensor:
        output: Tensor = getattr(functional, name)(input, p, train)
        return output

    return function


_TORCHS = {name: _under_torchs_name(name) for name in ("dropout", *PLAIN_ALPHA)}


def _replace_imported() -> None:
    """Replace torch's functions where other modules than torch's have imported them by name."""
    replaced = {id(PLAIN[name]): _REPLACED[name] for name in PLAIN}
    replaced |= {id(plain): getattr(functional, name) for name, plain in PLAIN_ALPHA.items()}
    replaced[id(sdpa.PLAIN)] = attention
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "meshrun"):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                setattr(module, key, replaced[id(value)])


def replacements() -> dict[Callable[..., Tensor], Callable[..., Tensor]]:
    """Each function that stands in the place of torch's -> the one that it calls where nothing is dropped."""
    return {**{_REPLACED[name]: plain for name, plain in PLAIN.items()}, attention: _attention_without_dropout}


def leave_uncompiled(disable: Callable[[Any], Any]) -> None:
    """Have torch's compiler leave draws alone: each module would be compiled for itself, as its name is its own."""
    for name in ("drop", "drop_weights"):
        method = getattr(Site, name)
        if not hasattr(method, "__wrapped__"):
            setattr(Site, name, disable(method))


@contextmanager
def recording(model: nn.Module, seen: Seen, values: list[Tensor] | None = None) -> Iterator[None]:
    """Inside, dropouts that are called in the model's code drop nothing, and what they get is written down.

    `values` receives the tensors themselves; of attention those of the queries, to which the weights belong.
    """
    global _recorder
    names = WeakKeyDictionary({module: name for name, module in model.named_modules()})
    before, _recorder = _recorder, (names, seen, values)
    try:
        yield
    finally:
        _recorder = before


def returning() -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts, inside of which calls without a module belong to the module whose code is running now."""
    site = _innermost(sys._getframe(1), _SITES) or _again_in

    @contextmanager
    def inside() -> Iterator[None]:
        global _again_in
        before, _again_in = _again_in, site
        try:
            yield
        finally:
            _again_in = before

    return inside


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout`, by sample."""
    return _dropped("dropout", input, p, training, inplace)


def dropout1d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout1d`, by sample."""
    return _dropped("dropout1d", input, p, training, inplace)


def dropout2d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout2d`, by sample."""
    return _dropped("dropout2d", input, p, training, inplace)


def dropout3d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout3d`, by sample."""
    return _dropped("dropout3d", input, p, training, inplace)


_REPLACED: dict[str, Callable[..., Tensor]] = {
    "dropout": dropout,
    "dropout1d": dropout1d,
    "dropout2d": dropout2d,
    "dropout3d": dropout3d,
}


def _dropped(kind: str, input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    if not training or not 0 < p < 1 or input.is_meta:
        return PLAIN[kind](input, p, training, inplace)
    site = _site(tuple(input.shape), input)
    if site is None:
        return PLAIN[kind](input, p, training, inplace)
    if isinstance(site, Site):
        output = site.drop(kind, input, p)
        return input.copy_(output) if inplace else output
    return input


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
    """`F.scaled_dot_product_attention`, with dropout by sample."""
    site = None
    if 0 < dropout_p < 1 and not query.is_meta:
        site = _site((*query.shape[:-1], key.shape[-2]), query)
    if isinstance(site, Site) and site.moment.positions is None:  # cp refuses dropout in attention, in its own words
        weights = attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
        return site.drop_weights(weights, dropout_p) @ values_for_heads(value, query, enable_gqa)
    if site is _WRITTEN_DOWN:
        dropout_p = 0.0
    return _attention_without_dropout(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """(…, heads, queries, keys), as torch documents them."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ values_for_heads(key, query, enable_gqa).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    # A query that may look nowhere gets zeros, as from torch's own kernels.
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores.float(), -1)
    return weights.to(scores.dtype)


def values_for_heads(tensor: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """Keys or values, repeated for all heads of the query that share them."""
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) if enable_gqa else tensor


_WRITTEN_DOWN = object()


def _site(shape: tuple[int, ...], values: Tensor) -> Any:
    """The module whose code calls a dropout now, if it draws by key; `_WRITTEN_DOWN` where calls are only recorded."""
    if torch.compiler.is_compiling():
        raise RunFailed("a dropout that is called as a function is not compiled")  # torch computes it as it is written
    frame: FrameType | None = sys._getframe(2)
    if _recorder is not None:
        names, seen, kept = _recorder
        seen.append((_innermost(frame, names) or "", shape))
        if kept is not None:
            kept.append(values.detach().clone())
        return _WRITTEN_DOWN
    site = _innermost(frame, _SITES) or _again_in
    return site if site is not None and site.moment.key is not None else None


def _innermost(frame: FrameType | None, known: WeakKeyDictionary[nn.Module, Any]) -> Any:
    """What is known of the innermost module whose method is running."""
    while frame is not None:
        if frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, nn.Module) and (found := known.get(owner)) is not None:
                return found
        frame = frame.f_back
    return None
