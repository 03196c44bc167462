"""How the ranks of a run are arranged: the text of a layout, its degrees, and which rank sits where.

    layout = parse("fsdp=*,tp=2").resolve(world_size=8, ranks_per_node=4)
    str(layout)                      # "fsdp=4,tp=2"
    layout.coordinates(5)            # {"pp": 0, "dp": 0, "fsdp": 2, "cp": 0, "tp": 1}
    layout.group_of(5, "fsdp")       # (1, 3, 5, 7)

Everything here is arithmetic on numbers and text: a layout that cannot work is refused before any process exists.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshrun.errors import UserError

# Slowest to fastest rank: neighbours in tp are neighbours in rank, so that tp stays inside a node.
AXES = ("pp", "dp", "fsdp", "cp", "tp")

# The first variant of an axis is its default.
VARIANTS: dict[str, tuple[str, ...]] = {
    "fsdp": ("zero3", "zero2", "zero1"),
    "pp": ("1f1b", "gpipe", "interleaved", "zb"),
}

# What a suggestion keeps, most precious first; dp is not listed because it gives way to all of them.
KEPT_FIRST = ("tp", "pp", "cp", "fsdp")

CANDIDATES = 20_000
"""Layouts that suggestions are chosen from, at most: all there are, but for numbers of very many divisors."""


@dataclass(frozen=True)
class Layout:
    """A degree for each axis; equal layouts have equal text.

    One axis may be open (`star`), its own degree then stays 1 until `resolve` fills it.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    fsdp_variant: str = VARIANTS["fsdp"][0]
    pp_variant: str = VARIANTS["pp"][0]
    star: str | None = None

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if degree < 1:
                raise ValueError(f"degree of axis {axis} is {degree}; it must be at least 1")
        if self.star is not None and self.degree(self.star) != 1:
            raise ValueError(f"axis {self.star} is open and has the degree {self.degree(self.star)} at once")
        for axis, variants in VARIANTS.items():
            if self._variant(axis) not in variants:
                raise ValueError(f"axis {axis} has no variant {self._variant(axis)!r}, only {', '.join(variants)}")
            # An axis of one rank does nothing in any variant, so two layouts must not differ by it.
            if self.degree(axis) == 1 and self.star != axis:
                object.__setattr__(self, f"{axis}_variant", variants[0])

    def __str__(self) -> str:
        parts = []
        for axis, degree in self.degrees.items():
            if degree == 1 and axis != self.star:
                continue
            variant = self._variant(axis)
            suffix = f":{variant}" if variant and variant != VARIANTS[axis][0] else ""
            parts.append(f"{axis}={'*' if axis == self.star else degree}{suffix}")
        return ",".join(parts) or "dp=1"

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, from the slowest axis to the fastest."""
        return {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "cp": self.cp, "tp": self.tp}

    @property
    def size(self) -> int:
        """Ranks that the layout needs; with an open axis, the number that the world must be a multiple of."""
        return math.prod(self.degrees.values())

    def degree(self, axis: str) -> int:
        return self.degrees[axis]

    def resolve(
        self, world_size: int, ranks_per_node: int | None = None, allow_tp_across_nodes: bool = False
    ) -> Layout:
        """This layout with its open axis filled, if it can run on `world_size` ranks; a `UserError` otherwise."""
        if world_size < 1:
            raise ValueError(f"world size is {world_size}; it must be at least 1")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ValueError(f"ranks per node is {ranks_per_node}; it must be at least 1")

        # Without a node to stay in, or with leave to cross, the whole world counts as one node.
        node_size = world_size if ranks_per_node is None or allow_tp_across_nodes else ranks_per_node
        resolved = self
        if self.star is not None and world_size % self.size == 0:
            resolved = self._filled({self.star: world_size // self.size})
        if resolved.star is not None or resolved.size != world_size:
            multiple = "a multiple of " if self.star else ""
            raise UserError(
                f"layout '{self}' needs {multiple}{_ranks(self.size)} but this run has {world_size}; "
                f"layouts of {_ranks(world_size)} near it: {_suggestions(self, world_size, node_size)} (--layout)"
            )
        if not _tp_inside_node(resolved, world_size, node_size):
            raise UserError(
                f"layout '{resolved}' has tp groups of {_ranks(resolved.tp)} that do not fit inside nodes of "
                f"{_ranks(node_size)}; layouts of {_ranks(world_size)} that keep tp inside a node: "
                f"{_suggestions(self, world_size, node_size)} (--layout), "
                f"or let tp cross nodes (--allow-tp-across-nodes)"
            )
        return resolved

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> place of this rank along it."""
        strides = self._strides()
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside layout '{self}', whose ranks are 0 to {self.size - 1}")
        return {axis: rank // strides[axis] % degree for axis, degree in self.degrees.items()}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis."""
        strides = self._strides()
        if set(coordinates) != set(AXES):
            raise ValueError(f"coordinates name the axes {', '.join(coordinates)}; they must name {', '.join(AXES)}")
        for axis, degree in self.degrees.items():
            if not 0 <= coordinates[axis] < degree:
                raise ValueError(
                    f"coordinate {coordinates[axis]} is outside axis {axis} of layout '{self}', "
                    f"which goes from 0 to {degree - 1}"
                )
        return sum(coordinates[axis] * strides[axis] for axis in AXES)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of an axis: the ranks that differ in this coordinate only, in its order."""
        stride, degree = self._strides()[axis], self.degree(axis)
        firsts = (rank for rank in range(self.size) if rank // stride % degree == 0)
        return [tuple(range(first, first + degree * stride, stride)) for first in firsts]

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of an axis that this rank is in."""
        stride, degree = self._strides()[axis], self.degree(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(range(first, first + degree * stride, stride))

    def _filled(self, degrees: Mapping[str, int]) -> Layout:
        """These degrees in place of this layout's own, with nothing open."""
        filled = {**self.degrees, **degrees}
        return Layout(**filled, fsdp_variant=self.fsdp_variant, pp_variant=self.pp_variant, star=None)

    def _variant(self, axis: str) -> str | None:
        return getattr(self, f"{axis}_variant") if axis in VARIANTS else None

    def _strides(self) -> dict[str, int]:
        """Axis -> how far apart in rank two neighbours along it are."""
        if self.star is not None:
            raise ValueError(f"layout '{self}' has no ranks until it is resolved for a world size")
        strides, stride = {}, 1
        for axis in reversed(AXES):
            strides[axis] = stride
            stride *= self.degree(axis)
        return strides


def parse(text: str) -> Layout:
    """The layout that a text such as `dp=2,fsdp=4:zero2,tp=*` describes; a `UserError` if it describes none."""
    if text.strip() == "auto":
        raise UserError(
            "layout 'auto' asks for the planner that would choose one, which is not part of this version; "
            '--layout "dp=*" uses every rank'
        )
    if not text.strip():
        raise UserError(
            f"layout {text!r} is empty; write axis=degree parts such as dp=2,tp=2, or dp=* for every rank (--layout)"
        )
    degrees: dict[str, int] = {}
    variants: dict[str, str] = {}
    star: str | None = None
    for part in text.split(","):
        axis, degree, variant = _parse_part(part.strip(), text)
        if axis in degrees:
            raise UserError(f"layout {text!r} gives axis {axis} twice; each axis may appear once (--layout)")
        if degree is None:
            if star is not None:
                raise UserError(
                    f"layout {text!r} gives * to both {star} and {axis}; "
                    f"only one axis may be *, the others need a number (--layout)"
                )
            star = axis
        degrees[axis] = degree or 1
        if variant is not None:
            variants[axis] = variant
    return Layout(
        **degrees,
        fsdp_variant=variants.get("fsdp", VARIANTS["fsdp"][0]),
        pp_variant=variants.get("pp", VARIANTS["pp"][0]),
        star=star,
    )


def nearest(
    layout: Layout, world_size: int, count: int = 3, works: Callable[[Layout], bool] = lambda _: True
) -> list[Layout]:
    """The layouts of `world_size` ranks closest to what was asked, of those that work, best first.

    They use the axes that were asked for, and dp. Keeping tp comes before keeping pp, then cp, then fsdp; among those
    that keep as much, the smallest change of degrees comes first.
    """
    return [near for near in _by_nearness(layout, world_size) if works(near)][:count]


def _parse_part(part: str, text: str) -> tuple[str, int | None, str | None]:
    """Axis, degree (None for `*`) and variant (None if not given) of one part of a layout's text."""
    if "=" not in part:
        raise UserError(
            f"layout {text!r} has the part {part!r} without '='; each part is axis=degree such as dp=2 (--layout)"
        )
    axis, _, value = (piece.strip() for piece in part.partition("="))
    if axis not in AXES:
        close = difflib.get_close_matches(axis.lower(), AXES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"layout {text!r} has no axis {axis!r}{hint}; the axes are {', '.join(AXES)} (--layout)")
    number, colon, variant = (piece.strip() for piece in value.partition(":"))
    if colon and axis not in VARIANTS:
        raise UserError(
            f"layout {text!r} gives axis {axis} the variant {variant!r}, but only {' and '.join(VARIANTS)} "
            f"have variants; write {axis}={number} (--layout)"
        )
    if colon and variant not in VARIANTS[axis]:
        raise UserError(
            f"layout {text!r} gives axis {axis} the unknown variant {variant!r}; "
            f"the variants of {axis} are {', '.join(VARIANTS[axis])} (--layout)"
        )
    return axis, _parse_degree(number, axis, text), variant if colon else None


def _parse_degree(number: str, axis: str, text: str) -> int | None:
    if number == "*":
        return None
    if not re.fullmatch("-?[0-9]{1,9}", number):
        raise UserError(
            f"layout {text!r} gives axis {axis} the degree {number!r}, which is not a whole number "
            f"of up to nine digits; give 1 or more, or * for what is left (--layout)"
        )
    if int(number) < 1:
        raise UserError(
            f"layout {text!r} gives axis {axis} the degree {int(number)}; "
            f"a degree is at least 1, or * for what is left (--layout)"
        )
    return int(number)


def _by_nearness(layout: Layout, world_size: int) -> list[Layout]:
    # An axis that nobody asked for may need something of the model (segments, heads); only dp never does.
    rest = layout.star or "dp"
    others = [axis for axis in AXES if axis != rest and (axis == "dp" or layout.degree(axis) > 1)]
    divisors, most = _divisors(world_size), int(CANDIDATES ** (1 / max(1, len(others))))
    choices = [_near(layout.degree(axis), divisors, most) for axis in others]
    candidates = [
        layout._filled({**dict(zip(others, degrees, strict=True)), rest: world_size // math.prod(degrees)})
        for degrees in itertools.product(*choices)
        if world_size % math.prod(degrees) == 0
    ]
    return sorted(candidates, key=lambda candidate: _distance(layout, candidate))


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _near(degree: int, divisors: list[int], most: int) -> list[int]:
    """Those divisors that are closest to a degree, and 1, which every model can have."""
    return sorted({1, *sorted(divisors, key=lambda each: _change(degree, each))[:most]})


def _change(asked: int, degree: int) -> float:
    """By which factor a degree changes, as a logarithm."""
    return abs(math.log(degree / asked))


def _distance(asked: Layout, candidate: Layout) -> tuple[float, ...]:
    """Sorts candidates: what was given up, then by which factor the degrees changed, then the simpler layout."""
    fixed = [axis for axis in AXES if axis != asked.star]
    given_up = (float(axis in fixed and candidate.degree(axis) != asked.degree(axis)) for axis in KEPT_FIRST)
    change = sum(_change(asked.degree(axis), candidate.degree(axis)) for axis in fixed)
    # Rounded, because equal factors do not give equal sums of logarithms.
    return (*given_up, round(change, 9), *(candidate.degree(axis) for axis in KEPT_FIRST))


def _tp_inside_node(layout: Layout, world_size: int, node_size: int) -> bool:
    return world_size <= node_size or node_size % layout.tp == 0


def _suggestions(layout: Layout, world_size: int, node_size: int) -> str:
    fitting = nearest(layout, world_size, works=lambda near: _tp_inside_node(near, world_size, node_size))
    return "; ".join(map(str, fitting))


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
