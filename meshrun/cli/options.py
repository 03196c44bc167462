"""Options made from a function's parameters, and from the fields of the configuration.

    def experiment(width: int = 128, mode: Mode = Mode.FAST, sizes: list[int] = [1, 2]): …

    for option in options_of(experiment): …         # --width INT, --mode fast|slow, --sizes INT,…
    option.convert("256")                           # 256, or a UserError that says what would be valid

A parameter's help is the string in `Annotated[int, "help"]`, or the line `width: help` of the docstring.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshrun.config import RunConfig, option_fields
from meshrun.errors import UserError, described

REQUIRED = object()
"""The default of a parameter that has none."""

_WORDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


@dataclass(frozen=True)
class Option:
    """One option of the command line."""

    name: str
    kind: Any
    """int, float, str, bool, Path, an Enum class, or a tuple of allowed values."""
    default: Any
    help: str = ""
    many: bool = False
    """A list: given several times, or once with commas."""
    container: type = list
    """What the function gets them in: a list or a tuple."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shape(self) -> str:
        """What stands for the value in the help."""
        if isinstance(self.kind, tuple):
            return "|".join(str(value) for value in self.kind)
        if isinstance(self.kind, type) and issubclass(self.kind, enum.Enum):
            return "|".join(_texts_of(self.kind))
        return {int: "INT", float: "FLOAT", Path: "PATH"}.get(self.kind, "TEXT") + (",…" if self.many else "")

    @property
    def shown_default(self) -> str:
        if self.default is None or self.default is REQUIRED:
            return ""
        values = self.default if self.many else [self.default]
        return ",".join(_text_of(value) for value in values)

    def convert(self, text: str) -> Any:
        """The value of a text from the command line."""
        if self.many:
            return [self._one(part.strip()) for part in text.split(",") if part.strip()]
        return self._one(text)

    def from_document(self, value: Any) -> Any:
        """The value of what stands in a JSON or TOML file."""
        if self.many:
            values = value if isinstance(value, list) else [value]
            return self.container(self._one(each if isinstance(each, str) else str(each)) for each in values)
        if value is None or (self.kind is bool and isinstance(value, bool)):
            return value
        if isinstance(value, bool | list | dict):
            raise self._refusal(value)
        return self._one(value if isinstance(value, str) else repr(value))

    def _one(self, text: str) -> Any:
        if self.kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise self._refusal(text)
        if isinstance(self.kind, tuple):
            for value in self.kind:
                if text == str(value):
                    return value
            raise self._refusal(text)
        if issubclass(self.kind, enum.Enum):
            for text_of, member in zip(_texts_of(self.kind), self.kind, strict=True):
                if text.lower() in (text_of.lower(), member.name.lower()):
                    return member
            raise self._refusal(text)
        try:
            if self.kind in (str, Path) and b"\0" in os.fsencode(text):
                raise self._refusal(text)
            return self.kind(text)
        except ValueError:  # of text: halves of characters, which JSON can hold
            raise self._refusal(text) from None

    def _refusal(self, value: object) -> UserError:
        if isinstance(self.kind, tuple) or (isinstance(self.kind, type) and issubclass(self.kind, enum.Enum)):
            valid = "one of " + ", ".join(self.shape.split("|"))
        else:
            valid = _WORDS.get(self.kind, "true or false")
        return UserError(f"{self.name} is {value!r}; it must be {valid} ({self.flag})")


def options_of(function: Callable[..., Any], but: Collection[str] = ()) -> list[Option]:
    """An option for each parameter that the command line can give; those of `but` are given otherwise."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(_annotated_part(function), include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except NameError as error:
        raise UserError(f"an annotation of {name}() cannot be read: {error}; import it there") from None
    except Exception as error:  # annotations are programs
        raise UserError(f"the parameters of {name}() cannot be read: {described(error)}; mend them there") from None
    found = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in but:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"parameter {parameter.name!r} of {name}() cannot be given by its name; take the '/' out")
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        hint = hints.get(parameter.name, str if default in (REQUIRED, None) else type(default))
        help, hint = _annotated(hint)
        option = _option(parameter.name, hint, default, help or _documented(function, parameter.name))
        if option is not None:
            found.append(option)
        elif default is REQUIRED:
            raise UserError(
                f"parameter {parameter.name!r} of {name}() has the type {hint}, which no option can give; "
                f"give it a default, or a type of int, float, str, bool, Path, Enum, Literal or a list of these"
            )
    return found


def _annotated_part(function: Callable[..., Any]) -> Any:
    """What holds the annotations of a function, also with some arguments given, or of an object that is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def run_options() -> list[Option]:
    """The options of a run itself: the fields of RunConfig."""
    hints = typing.get_type_hints(RunConfig)
    made = [_option(each.name, hints[each.name], each.default, each.metadata["help"]) for each in option_fields()]
    return [option for option in made if option is not None]


def to_document(value: Any) -> Any:
    """A value as config.json holds it; `Option.from_document` reads it back."""
    if isinstance(value, list | tuple):
        return [to_document(each) for each in value]
    return value if isinstance(value, bool | int | float | str) or value is None else _text_of(value)


def _option(name: str, hint: Any, default: Any, help: str) -> Option | None:
    hint = _without_none(hint)
    container = typing.get_origin(hint) or hint
    if container in (list, tuple):
        inner = [each for each in typing.get_args(hint) if each is not Ellipsis]
        inner = inner or [type(each) for each in (default if isinstance(default, list | tuple) else ())] or [str]
        kind = _kind(inner[0])
        return None if kind is None else Option(name, kind, default, help, many=True, container=container)
    kind = _kind(hint)
    return None if kind is None else Option(name, kind, default, help)


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if isinstance(hint, type) and (hint in (int, float, str, bool) or issubclass(hint, enum.Enum | Path)):
        return Path if issubclass(hint, Path) else hint
    return None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [each for each in typing.get_args(hint) if each is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _annotated(hint: Any) -> tuple[str, Any]:
    if typing.get_origin(hint) is not typing.Annotated:
        return "", hint
    hint, *notes = typing.get_args(hint)
    return next((str(getattr(note, "help", note)) for note in notes if getattr(note, "help", note)), ""), hint


def _documented(function: Callable[..., Any], name: str) -> str:
    found = re.search(
        rf"^\s*(?::param )?{re.escape(name)}\s*(?:\([^)]*\))?:\s*(.+)$", inspect.getdoc(function) or "", re.M
    )
    return found[1].strip() if found else ""


def _texts_of(kind: type[enum.Enum]) -> list[str]:
    return [_text_of(member) for member in kind]


def _text_of(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    return str(value).lower() if isinstance(value, bool) else str(value)
