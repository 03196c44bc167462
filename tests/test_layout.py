"""The arithmetic of layouts, over all of them up to 64 ranks, and the sentence of every refusal."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import UserError
from meshrun.layout import AXES, VARIANTS, Layout, nearest, parse

LARGEST = 64


def all_degrees(largest: int, count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(first, *rest) for first in range(1, largest + 1) for rest in all_degrees(largest // first, count - 1)]


EVERY_LAYOUT = [Layout(**dict(zip(AXES, degrees, strict=True))) for degrees in all_degrees(LARGEST, len(AXES))]

layouts = st.builds(
    lambda degrees, fsdp_variant, pp_variant: Layout(
        **dict(zip(AXES, degrees, strict=True)), fsdp_variant=fsdp_variant, pp_variant=pp_variant
    ),
    st.sampled_from(all_degrees(LARGEST, len(AXES))),
    st.sampled_from(VARIANTS["fsdp"]),
    st.sampled_from(VARIANTS["pp"]),
)
axes = st.sampled_from(AXES)
world_sizes = st.integers(1, LARGEST)


def open_axis(layout: Layout, axis: str) -> Layout:
    """The layout with one degree replaced by a star."""
    variants = {f"{name}_variant": getattr(layout, f"{name}_variant") for name in VARIANTS}
    return Layout(**{**layout.degrees, axis: 1}, **variants, star=axis)


def refusal_of(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(text)
    return one_sentence(caught.value)


def refusal_to_resolve(text: str, world_size: int, **where: int | bool) -> str:
    with pytest.raises(UserError) as caught:
        parse(text).resolve(world_size, **where)
    return one_sentence(caught.value)


def one_sentence(error: UserError) -> str:
    message = str(error)
    assert "\n" not in message
    assert ". " not in message
    assert "--layout" in message
    return message


def suggested(message: str) -> list[str]:
    """The layouts that a refusal lists."""
    return message.split(": ")[-1].split(" (--layout)")[0].split("; ")


def test_every_part_of_the_text_is_read():
    assert parse("dp=2,fsdp=4:zero2,tp=2,pp=2:gpipe,cp=1") == Layout(
        pp=2, dp=2, fsdp=4, cp=1, tp=2, fsdp_variant="zero2", pp_variant="gpipe"
    )


def test_order_and_spaces_do_not_matter():
    assert parse("  tp = 2 ,pp=3 : zb,  fsdp=*:zero1 ") == parse("pp=3:zb,fsdp=*:zero1,tp=2")


def test_variants_that_are_not_given_are_zero3_and_1f1b():
    layout = parse("fsdp=2,pp=2")
    assert (layout.fsdp_variant, layout.pp_variant) == ("zero3", "1f1b")
    assert parse("fsdp=2:zero3,pp=2:1f1b") == layout


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp=2,pp=2:1f1b,dp=1", "pp=2,tp=2"),
        ("fsdp=4:zero2,dp=2", "dp=2,fsdp=4:zero2"),
        ("tp=1", "dp=1"),
        ("tp=2,dp=*", "dp=*,tp=2"),
        ("fsdp=*:zero2", "fsdp=*:zero2"),
        ("pp=*:1f1b", "pp=*"),
        ("fsdp=1:zero1,tp=2", "tp=2"),
    ],
)
def test_canonical_text_is_ordered_and_leaves_out_what_says_nothing(text: str, canonical: str):
    assert str(parse(text)) == canonical


@given(layouts)
def test_a_layout_survives_its_own_text(layout: Layout):
    assert parse(str(layout)) == layout


@given(layouts, axes)
def test_an_open_layout_survives_its_own_text(layout: Layout, axis: str):
    layout = open_axis(layout, axis)
    assert parse(str(layout)) == layout


def test_all_layouts_have_different_texts():
    assert len({str(layout) for layout in EVERY_LAYOUT}) == len(EVERY_LAYOUT)


@given(layouts, st.randoms())
def test_parts_mean_the_same_in_any_order(layout: Layout, random):
    parts = str(layout).split(",")
    random.shuffle(parts)
    assert parse(",".join(parts)) == layout


@given(st.text(alphabet="dpfsctz=*,:0123- \n", max_size=20))
def test_any_text_is_a_layout_or_one_sentence(text: str):
    try:
        assert parse(str(parse(text))) == parse(text)
    except UserError as error:
        one_sentence(error)


def test_auto_is_refused_because_this_version_has_no_planner():
    message = refusal_of("auto")
    assert "planner" in message
    assert "not part of this version" in message
    assert '--layout "dp=*" uses every rank' in message


@pytest.mark.parametrize("text", ["", "   "])
def test_empty_text_is_refused(text: str):
    assert refusal_of(text).startswith(f"layout {text!r} is empty; write axis=degree")


@pytest.mark.parametrize(("text", "part"), [("dp", "dp"), ("*", "*"), ("dp=2,tp2", "tp2"), ("dp=2,", "")])
def test_a_part_without_equals_is_refused(text: str, part: str):
    assert f"layout {text!r} has the part {part!r} without '='; each part is axis=degree" in refusal_of(text)


@pytest.mark.parametrize(("name", "meant"), [("ddp", "dp"), ("fdsp", "fsdp"), ("TP", "tp")])
def test_an_unknown_axis_is_refused_with_the_one_that_was_meant(name: str, meant: str):
    assert refusal_of(f"{name}=2") == (
        f"layout '{name}=2' has no axis '{name}' (did you mean {meant}?); the axes are pp, dp, fsdp, cp, tp (--layout)"
    )


def test_an_axis_like_none_is_refused_with_the_list_alone():
    assert refusal_of("width=2") == "layout 'width=2' has no axis 'width'; the axes are pp, dp, fsdp, cp, tp (--layout)"


@pytest.mark.parametrize("degree", ["two", "", "1.5", "1e3", "2x", "**", "1_0", "²", "9999999999"])
def test_a_degree_that_is_not_a_number_is_refused(degree: str):
    message = refusal_of(f"tp=2,dp={degree}")
    assert f"gives axis dp the degree {degree!r}, which is not a whole number" in message
    assert "give 1 or more, or * for what is left" in message


@pytest.mark.parametrize("degree", [0, -1, -64])
def test_a_degree_below_one_is_refused(degree: int):
    message = refusal_of(f"dp={degree}")
    assert f"gives axis dp the degree {degree}; a degree is at least 1, or * for what is left" in message


@pytest.mark.parametrize(
    ("text", "axis", "variant", "valid"),
    [
        ("fsdp=2:zero9", "fsdp", "zero9", "zero3, zero2, zero1"),
        ("fsdp=2:", "fsdp", "", "zero3, zero2, zero1"),
        ("pp=*:zero2", "pp", "zero2", "1f1b, gpipe, interleaved, zb"),
        ("pp=2:gpipe:zb", "pp", "gpipe:zb", "1f1b, gpipe, interleaved, zb"),
    ],
)
def test_an_unknown_variant_is_refused_with_the_valid_ones(text: str, axis: str, variant: str, valid: str):
    assert refusal_of(text) == (
        f"layout {text!r} gives axis {axis} the unknown variant {variant!r}; "
        f"the variants of {axis} are {valid} (--layout)"
    )


def test_a_variant_of_an_axis_without_variants_is_refused():
    message = refusal_of("tp=2:zero2")
    assert "gives axis tp the variant 'zero2', but only fsdp and pp have variants; write tp=2" in message


@pytest.mark.parametrize("text", ["dp=2,tp=2,dp=2", "tp=2,dp=1,dp=*", "dp=*,dp=*"])
def test_an_axis_given_twice_is_refused(text: str):
    assert f"layout {text!r} gives axis dp twice; each axis may appear once" in refusal_of(text)


def test_two_stars_are_refused():
    message = refusal_of("fsdp=*,tp=2,dp=*")
    assert "gives * to both fsdp and dp; only one axis may be *" in message


def test_a_layout_of_the_right_size_resolves_to_itself():
    for layout in EVERY_LAYOUT:
        assert layout.resolve(layout.size) == layout


def test_star_becomes_what_is_left_on_every_axis_of_every_layout():
    for layout in EVERY_LAYOUT:
        for axis in AXES:
            assert open_axis(layout, axis).resolve(layout.size) == layout


@given(layouts, axes)
def test_star_keeps_its_variant(layout: Layout, axis: str):
    assert open_axis(layout, axis).resolve(layout.size) == layout


@given(layouts, axes, world_sizes)
def test_star_resolves_exactly_when_the_rest_divides_the_world(layout: Layout, axis: str, world_size: int):
    layout = open_axis(layout, axis)
    rest = math.prod(layout.degrees.values())
    if world_size % rest == 0:
        assert layout.resolve(world_size).degree(axis) * rest == world_size
        assert layout.resolve(world_size).star is None
    else:
        refusal_to_resolve(str(layout), world_size)


def test_a_product_that_is_not_the_world_is_refused_with_the_nearest_layouts():
    assert refusal_to_resolve("dp=2,tp=3", 4) == (
        "layout 'dp=2,tp=3' needs 6 ranks but this run has 4; "
        "layouts of 4 ranks near it: dp=2,tp=2; tp=4; dp=4 (--layout)"
    )


def test_one_rank_is_not_called_ranks():
    assert refusal_to_resolve("tp=2", 1) == (
        "layout 'tp=2' needs 2 ranks but this run has 1; layouts of 1 rank near it: dp=1 (--layout)"
    )


def test_a_star_that_nothing_fills_is_refused_with_the_nearest_layouts():
    message = refusal_to_resolve("fsdp=*:zero2,tp=3", 4)
    assert "layout 'fsdp=*:zero2,tp=3' needs a multiple of 3 ranks but this run has 4" in message
    assert suggested(message)[0] == "tp=4"
    assert "fsdp=2:zero2,tp=2" in suggested(message)


def test_tp_across_nodes_is_refused_unless_allowed():
    message = refusal_to_resolve("tp=8", 8, ranks_per_node=4)
    assert message == (
        "layout 'tp=8' has tp groups of 8 ranks that do not fit inside nodes of 4 ranks; "
        "layouts of 8 ranks that keep tp inside a node: dp=2,tp=4; dp=4,tp=2; dp=8 (--layout), "
        "or let tp cross nodes (--allow-tp-across-nodes)"
    )
    assert parse("tp=8").resolve(8, ranks_per_node=4, allow_tp_across_nodes=True) == Layout(tp=8)


def test_tp_that_straddles_a_node_boundary_is_refused_though_smaller_than_a_node():
    assert "tp groups of 3 ranks" in refusal_to_resolve("dp=*,tp=3", 12, ranks_per_node=4)


def test_a_star_on_tp_is_held_to_the_node_as_well():
    assert "layout 'tp=8' has tp groups of 8 ranks" in refusal_to_resolve("tp=*", 8, ranks_per_node=4)


def test_tp_fills_a_single_node_that_has_more_room_than_ranks():
    assert parse("tp=6").resolve(6, ranks_per_node=8) == Layout(tp=6)


def test_other_axes_may_cross_nodes():
    layout = parse("pp=2,dp=2,fsdp=2,cp=2,tp=2")
    assert layout.resolve(32, ranks_per_node=2) == layout


def test_layouts_suggested_for_a_wrong_size_keep_tp_inside_a_node():
    message = refusal_to_resolve("dp=3,tp=8", 16, ranks_per_node=4)
    sizes = [parse(text).tp for text in suggested(message)]
    assert sizes and max(sizes) <= 4


@given(layouts, st.none() | axes, world_sizes, st.integers(1, 8))
def test_every_suggested_layout_would_be_accepted(
    layout: Layout, star: str | None, world_size: int, ranks_per_node: int
):
    layout = open_axis(layout, star) if star else layout
    try:
        layout.resolve(world_size, ranks_per_node)
    except UserError as error:
        texts = suggested(one_sentence(error).replace(", or let tp cross nodes (--allow-tp-across-nodes)", ""))
        assert 1 <= len(texts) <= 3
        for text in texts:
            parse(text).resolve(world_size, ranks_per_node)


@pytest.mark.parametrize("where", [{"world_size": 0}, {"world_size": 4, "ranks_per_node": 0}])
def test_a_world_without_ranks_is_a_caller_error(where: dict[str, int]):
    with pytest.raises(ValueError, match="must be at least 1"):
        parse("dp=*").resolve(**where)


@given(layouts, world_sizes, st.integers(1, 5))
def test_nearest_layouts_have_the_asked_size_and_differ(layout: Layout, world_size: int, count: int):
    found = nearest(layout, world_size, count)
    assert 1 <= len(found) <= count
    assert len(set(found)) == len(found)
    assert all(near.size == world_size and near.star is None for near in found)


@given(layouts, world_sizes)
def test_nearest_layouts_use_no_axis_that_was_not_asked_for(layout: Layout, world_size: int):
    for near in nearest(layout, world_size):
        assert all(near.degree(axis) == 1 for axis in AXES if axis != "dp" and layout.degree(axis) == 1)


@given(layouts, st.integers(1, 8))
def test_dp_gives_way_first(layout: Layout, dp: int):
    other = Layout(**{**layout.degrees, "dp": dp}, fsdp_variant=layout.fsdp_variant, pp_variant=layout.pp_variant)
    assert nearest(layout, other.size, 1) == [other]


@pytest.mark.parametrize(
    ("text", "world_size", "best"),
    [
        ("pp=2,dp=1,fsdp=2,cp=2,tp=2", 8, "pp=2,cp=2,tp=2"),
        ("pp=2,cp=2,tp=2", 4, "pp=2,tp=2"),
        ("pp=2,tp=2", 2, "tp=2"),
        ("fsdp=2,tp=2", 2, "tp=2"),
        ("fsdp=4:zero2,tp=2", 12, "fsdp=6:zero2,tp=2"),
        ("fsdp=4:zero1", 8, "dp=2,fsdp=4:zero1"),
        ("tp=4", 3, "tp=3"),
        ("fsdp=*,tp=4", 6, "fsdp=2,tp=3"),
    ],
)
def test_tp_is_kept_before_pp_before_cp_before_fsdp(text: str, world_size: int, best: str):
    assert str(nearest(parse(text), world_size)[0]) == best


def test_ranks_count_through_the_coordinates_from_the_fastest_axis():
    for layout in EVERY_LAYOUT:
        places = itertools.product(*(range(layout.degree(axis)) for axis in AXES))
        for rank, place in enumerate(places):
            coordinates = layout.coordinates(rank)
            assert tuple(coordinates[axis] for axis in AXES) == place
            assert layout.rank_of(coordinates) == rank
        assert layout.size == rank + 1


def test_every_rank_is_in_exactly_one_group_of_each_axis():
    for layout in EVERY_LAYOUT:
        for axis in AXES:
            groups = layout.groups(axis)
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.size))
            assert {len(group) for group in groups} == {layout.degree(axis)}
            assert groups == sorted(groups)


def test_tp_groups_are_contiguous_ranks():
    for layout in EVERY_LAYOUT:
        assert all(group == tuple(range(group[0], group[0] + layout.tp)) for group in layout.groups("tp"))


@given(layouts, axes)
def test_a_group_differs_in_its_own_coordinate_only(layout: Layout, axis: str):
    for group in layout.groups(axis):
        places = [layout.coordinates(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(layout.degree(axis)))
        assert all(place == places[0] for place in places)


@given(layouts, axes, st.data())
def test_group_of_a_rank_is_the_group_that_holds_it(layout: Layout, axis: str, data: st.DataObject):
    rank = data.draw(st.integers(0, layout.size - 1))
    assert [group for group in layout.groups(axis) if rank in group] == [layout.group_of(rank, axis)]


def test_a_small_mesh_by_hand():
    layout = parse("pp=2,fsdp=2,tp=2")
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("fsdp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.group_of(6, "pp") == (2, 6)
    assert layout.coordinates(5) == {"pp": 1, "dp": 0, "fsdp": 0, "cp": 0, "tp": 1}
    assert list(layout.degrees) == list(AXES)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_has_no_place(rank: int):
    with pytest.raises(ValueError, match=rf"rank {rank} is outside layout 'dp=2,tp=2', whose ranks are 0 to 3"):
        Layout(dp=2, tp=2).coordinates(rank)
    with pytest.raises(ValueError, match=rf"rank {rank} is outside"):
        Layout(dp=2, tp=2).group_of(rank, "tp")


def test_coordinates_outside_the_layout_have_no_rank():
    inside = {"pp": 0, "dp": 0, "fsdp": 0, "cp": 0, "tp": 1}
    with pytest.raises(ValueError, match="coordinate 2 is outside axis tp of layout 'tp=2'"):
        Layout(tp=2).rank_of({**inside, "tp": 2})
    with pytest.raises(ValueError, match="coordinate -1 is outside axis dp"):
        Layout(tp=2).rank_of({**inside, "dp": -1})
    with pytest.raises(ValueError, match="must name pp, dp, fsdp, cp, tp"):
        Layout(tp=2).rank_of({"tp": 1})


def test_an_open_layout_has_no_ranks_yet():
    layout = parse("dp=*,tp=2")
    for ask in (lambda: layout.coordinates(0), lambda: layout.groups("tp"), lambda: layout.group_of(0, "tp")):
        with pytest.raises(ValueError, match="until it is resolved"):
            ask()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "degree of axis tp is 0"),
        ({"fsdp": 2, "fsdp_variant": "zero9"}, "axis fsdp has no variant 'zero9'"),
        ({"dp": 2, "star": "dp"}, "axis dp is open and has the degree 2"),
    ],
)
def test_a_layout_that_means_nothing_cannot_be_built(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Layout(**fields)


def test_importing_layout_does_not_import_torch():
    program = "import sys, meshrun.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_where_degrees_have_no_room_together_some_are_given_up():
    assert str(nearest(parse("pp=500,fsdp=500,cp=500,tp=500"), 1_000_000)[0]) == "pp=500,dp=4,tp=500"


@pytest.mark.parametrize("size", [999_999_999, 999_999_937, 7_207_200, 735_134_400])
@pytest.mark.parametrize(
    "text", ["tp=2", "dp=*,fsdp=7,tp=4", "pp=2,fsdp=3,cp=5,tp=7", "pp=2:zb,dp=11,fsdp=3,cp=5,tp=7"]
)
def test_the_nearest_layouts_of_very_many_ranks_are_soon_found(text: str, size: int):
    began = time.process_time()
    found = nearest(parse(text), size)
    assert time.process_time() - began < 5, "about 0.3 s on a quiet machine"
    assert all(near.size == size for near in found) and found
