"""The segments of a model: the modules that it applies in order, where it may be cut, sharded, recomputed and compiled.

    names = find(model, experiment.segments)       # ["embed", "blocks.0", …, "head"]

They are what the user says, or the children of an `nn.Sequential`, or the elements of every outermost list of like
blocks, which is how Hugging Face models and nn.TransformerEncoder are built. Anything else is one segment: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from meshrun.errors import UserError


def find(model: nn.Module, said: Callable[[nn.Module], Sequence[nn.Module]] | None) -> list[str]:
    """The names of the model's segments, in the order in which they stand there; empty if it is all one."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = _as_said(model, said, names) if said is not None else _found(model)
    found = [names[id(module)] for module in modules]
    for name in found:
        for other in found:
            if other.startswith(f"{name}."):
                raise UserError(f"segments must not lie inside each other, but {other!r} is part of {name!r}")
    return found


def _as_said(
    model: nn.Module, said: Callable[[nn.Module], Sequence[nn.Module]], names: dict[int, str]
) -> list[nn.Module]:
    returned = said(model)
    if not isinstance(returned, Iterable):
        raise UserError(f"segments(model) returned {type(returned).__name__}; it must return a list of modules")
    modules = list(returned)
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module) or id(module) not in names or module is model:
            kind = type(module).__name__
            raise UserError(f"segments(model)[{number}] is a {kind} that is not a part of the model; each must be one")
        if any(module is other for other in modules[:number]):
            raise UserError(f"segments(model) names {names[id(module)]!r} twice; each module may be there once")
    return modules


def _found(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return [child for child in model if not isinstance(child, nn.Identity)]
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if len({type(child) for child in module}) == 1 and any(True for _ in module[0].parameters()):
            # A list of plain layers is the inside of something; blocks are modules of modules.
            if all(next(child.children(), None) is None for child in module):
                continue
            found += list(module)
            inside |= {id(each) for each in module.modules()}
    return found
