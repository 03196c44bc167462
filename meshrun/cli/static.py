"""Options of a target, read from its text: nothing of it is imported, so that `submit --dry-run` is instant.

    static_options(find("digits"))       # --width INT, --lr FLOAT, as options_of finds them on the imported function

A type that cannot be known from the text alone is taken as text; ranks convert it, and refuse it if it is not valid.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from meshrun.cli.options import REQUIRED, Option
from meshrun.cli.target import Target
from meshrun.errors import UserError

_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "Path": Path}


def static_options(target: Target) -> list[Option] | None:
    """An option for each parameter; None where the function is not written down in the file itself."""
    tree = ast.parse(target.path.read_bytes())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == target.entry]
    if not functions:
        return None
    arguments = functions[-1].args
    named = [*arguments.posonlyargs, *arguments.args]
    # Defaults belong to the last of the parameters that may be given by place.
    defaults: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults))
    defaults += [*arguments.defaults, *arguments.kw_defaults]
    return [_option(each, default) for each, default in zip([*named, *arguments.kwonlyargs], defaults, strict=True)]


def _option(parameter: ast.arg, written: ast.expr | None) -> Option:
    default = REQUIRED if written is None else _literal(written)
    if parameter.annotation is None:
        kind = type(default) if isinstance(default, bool | int | float | str) else str
        return Option(parameter.arg, kind, default)
    hint = _inner(parameter.annotation)
    container = _name(hint.value) if isinstance(hint, ast.Subscript) else _name(hint)
    if container in ("list", "tuple", "List", "Tuple"):
        inner = _arguments(hint)[0] if isinstance(hint, ast.Subscript) else None
        made = list if container.lower() == "list" else tuple
        return Option(parameter.arg, _kind(inner), default, many=True, container=made)
    return Option(parameter.arg, _kind(hint), default)


def _kind(hint: ast.expr | None) -> Any:
    if isinstance(hint, ast.Subscript) and _name(hint.value) == "Literal":
        return tuple(each.value for each in _arguments(hint) if isinstance(each, ast.Constant)) or str
    return _KINDS.get(_name(hint), str)


def _inner(hint: ast.expr) -> ast.expr:
    """The type itself, without quotes, help and `| None` around it."""
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        try:
            return _inner(ast.parse(hint.value, mode="eval").body)
        except SyntaxError:
            raise UserError(f"annotation {hint.value!r} is not valid Python; correct it in the target") from None
    if isinstance(hint, ast.Subscript) and _name(hint.value) in ("Annotated", "Optional"):
        return _inner(_arguments(hint)[0])
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        sides = [
            side for side in (hint.left, hint.right) if not (isinstance(side, ast.Constant) and side.value is None)
        ]
        return _inner(sides[0]) if len(sides) == 1 else hint
    return hint


def _arguments(hint: ast.Subscript) -> list[ast.expr]:
    return list(hint.slice.elts) if isinstance(hint.slice, ast.Tuple) else [hint.slice]


def _name(hint: ast.expr | None) -> str:
    """`Path` of both Path and pathlib.Path."""
    return hint.id if isinstance(hint, ast.Name) else hint.attr if isinstance(hint, ast.Attribute) else ""


def _literal(written: ast.expr) -> Any:
    """The default, if it is written as a value; else its text."""
    try:
        return ast.literal_eval(written)
    except ValueError:
        return ast.unparse(written)
