"""The axis cp: every sequence is cut over the ranks of a group, which compute attention together.

    inputs, targets, positions = split(inputs, targets, part, parts)      # this rank's tokens
    with attention(group):
        outputs = model(**with_positions(model, inputs, positions))
        loss(outputs, targets).total.backward()                           # gradients are sums of the ranks' own

All of a transformer but its attention works token by token, so the model stays as it is: its calls of
`F.scaled_dot_product_attention` become ring attention while the mode is on. It is on in the backward pass too, where
recomputed activations call attention again. A rank's tokens are not 0 … T-1, so the model must take their positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshrun.errors import UserError
from meshrun.parallel import sdpa
from meshrun.parallel.ring import positions as positions_of
from meshrun.parallel.ring import ring_attention

BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What may recompute activations, and so call attention."""


def split(inputs: Any, targets: Any, part: int, parts: int) -> tuple[Any, Any, Tensor]:
    """This part's tokens of the inputs and targets of whole sequences, and their positions in these."""
    tokens = tokens_of(inputs)
    length = tokens.shape[1]
    for target in _tensors(targets):
        if target.dim() < 2 or target.shape[1] != length:
            raise UserError(
                f"targets have the shape {tuple(target.shape)} and sequences {length} tokens; cp needs a target for "
                f"every token, (samples, {length}), or use another layout (--layout)"
            )
    positions = positions_of(length, part, parts).to(tokens.device)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        return tensor.index_select(1, positions.to(tensor.device))

    return _mapped(cut, inputs), _mapped(cut, targets), positions


def attention(group: dist.ProcessGroup) -> TorchFunctionMode:
    """While it is on, `F.scaled_dot_product_attention` is ring attention over the group; it may be nested."""
    return _Attention(group)


class _Attention(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A stage asks its stand-ins for shapes on the meta device: there is nothing to send.
        shapes_only = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if func in (sdpa.PLAIN, sdpa.attention) and not shapes_only:
            return self._causal_self_attention(*args, **(kwargs or {}))
        # A mode is off inside the functions that it sees: attention in there would be of this rank's tokens alone.
        if func is functional.multi_head_attention_forward:
            raise _refused("the model uses nn.MultiheadAttention")
        if func in BACKWARD:
            with self:
                return _unseen(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _causal_self_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        met = {
            "an attn_mask": attn_mask is not None,
            "dropout inside it": dropout_p != 0,
            "is_causal=False": not is_causal and attn_mask is None,
            f"{query.shape[-2]} queries for {key.shape[-2]} keys (cross-attention)": query.shape[-2] != key.shape[-2],
            "queries and keys of different batches": query.shape[:-3] != key.shape[:-3],
            "fewer key heads without enable_gqa": not enable_gqa and query.shape[-3:-2] != key.shape[-3:-2],
        }
        if any(met.values()):
            found = " and ".join(what for what, is_met in met.items() if is_met)
            raise _refused(f"the model calls scaled_dot_product_attention with {found}")
        flat_query, flat_key, flat_value = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
        out = ring_attention(flat_query, flat_key, flat_value, self.group, scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])


@functools.cache
def _unseen(func: FunctionType) -> FunctionType:
    """A function of torch that does not ask whether a mode wants to see it, and so leaves the mode on."""
    answers = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    unseen = FunctionType(func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__)
    unseen.__kwdefaults__ = func.__kwdefaults__
    return unseen


def _refused(what: str) -> UserError:
    return UserError(
        f"{what}, but cp works for causal self-attention through scaled_dot_product_attention "
        f"(is_causal=True, no mask, no dropout): change the model's attention, or use a layout without cp (--layout)"
    )


def positional(model: nn.Module) -> str | None:
    """The argument by which a model takes the positions of its tokens; None if it takes none."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in ("positions", "position_ids") if name in takes), None)


def with_positions(model: nn.Module, inputs: Any, positions: Tensor) -> dict[str, Any]:
    """The inputs by name, with the positions of this rank's tokens among them: `model(**with_positions(…))`."""
    name = positional(model)
    if name is None:
        raise UserError(
            f"{type(model).__name__} takes no positions; under cp a model must take `positions` or `position_ids` "
            f"in its forward, because its tokens are not 0 … T-1 on a rank (--layout)"
        )
    samples = tokens_of(inputs).shape[0]
    named = _named(model, inputs)
    given = named.get(name)
    if given is None:
        named[name] = positions if name == "positions" else positions.expand(samples, -1)
    elif given.shape[-1:] != positions.shape or not torch.equal(given, positions.expand_as(given)):
        return named  # Positions of the user's own, which were cut like the tokens.
    takes_mask = name == "position_ids" and "attention_mask" in inspect.signature(model.forward).parameters
    if takes_mask and named.get("attention_mask") is None:
        # Hugging Face models take a jump in position_ids for the next packed sequence, unless they are given a mask.
        named["attention_mask"] = torch.ones_like(named[name])
    return named


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Inputs as the dict by which the model's forward can be called."""
    if isinstance(inputs, dict):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(values) > len(names):
        raise UserError(
            f"{type(model).__name__} gets {len(values)} inputs, of which its forward names {len(names)}; under cp "
            f"inputs are passed by name: name each of them in its forward"
        )
    return dict(zip(names, values, strict=False))


def tokens_of(inputs: Any) -> Tensor:
    """The tensor whose second dimension is the sequence: token ids if there are any, else the first that has one."""
    wide = [each for each in _tensors(inputs) if each.dim() >= 2]
    whole = [each for each in wide if not (each.is_floating_point() or each.is_complex() or each.dtype == torch.bool)]
    for tensor in (*whole, *wide):
        return tensor
    raise UserError("the inputs have no second dimension, and so no sequences that cp could cut (--layout)")


def _tensors(tree: Any) -> Iterator[Tensor]:
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else (tree,)
    return (each for each in values if isinstance(each, Tensor))


def _mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    def each(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    if isinstance(tree, Mapping):
        return {name: each(value) for name, value in tree.items()}
    return tuple(map(each, tree)) if isinstance(tree, tuple | list) else each(tree)
