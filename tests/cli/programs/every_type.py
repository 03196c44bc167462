"""An experiment with a parameter of every type that an option can give; it needs no torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

from meshrun import Experiment


class Mode(enum.Enum):
    FAST = "quick"
    SLOW = "thorough"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


def experiment(
    width: int = 128,
    rate: Annotated[float, "how fast it learns"] = 1e-3,
    title: str = "plain",
    bias: bool = True,
    dark: bool = False,
    folder: Path = Path("data"),
    mode: Mode = Mode.FAST,
    level: Level = Level.LOW,
    kind: Literal["small", "large"] = "small",
    depth: Literal[1, 2, 3] = 1,
    limit: int | None = None,
    sizes: list[int] = [1, 2],  # noqa: B006
    names: tuple[str, ...] = (),
    modes: list[Mode] | None = None,
    guess=0.5,
    context: int = 16,
    of_no_option: dict[str, Any] | None = None,
) -> Experiment:
    """Takes everything.

    width: channels of the hidden layer
    :param title: what is written on top
    """
    given = dict(locals())
    return Experiment(model=dict, train=[0, 1], loss=print, optimizer=print, batch=1, steps=1, stage_data=lambda: given)
