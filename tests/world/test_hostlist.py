"""Slurm's short forms are written out as `scontrol show hostnames` does, and bad ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import UserError
from meshrun.world import expand_hosts
from meshrun.world.hostlist import expand_tasks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n5", "n5"),
        ("n1,n2", "n1 n2"),
        ("jwb[0001-0004,0010],n5", "jwb0001 jwb0002 jwb0003 jwb0004 jwb0010 n5"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[3]", "n3"),
        ("r[0-1]n[01-03]", "r0n01 r0n02 r0n03 r1n01 r1n02 r1n03"),
        ("n[1-2,1[0-3]]", "n1 n2 n10 n11 n12 n13"),
        ("jwb[0001-0002]i", "jwb0001i jwb0002i"),
        ("gpu-a_[1-2].site.example,login", "gpu-a_1.site.example gpu-a_2.site.example login"),
        ("[1-2]", "1 2"),
    ],
)
def test_host_list_is_written_out_in_order(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an empty part, at character 1"),
        ("n1,", "an empty part, at character 4"),
        (",n1", "an empty part, at character 1"),
        ("n[]", "an empty part, at character 3"),
        ("n[1,]", "an empty part, at character 5"),
        ("n[1-2", "a '[' that is never closed, at character 2"),
        ("n[1,n[2]", "'n' in brackets"),
        ("n[1[2]", "a '[' that is never closed, at character 2"),
        ("n1]", "a ']' without its '[', at character 3"),
        ("n[1]],m", "a ']' without its '[', at character 5"),
        ("n[4-1]", "the descending range '4-1', at character 3"),
        ("n[1-b]", "'1-b' in brackets"),
        ("n[1-]", "'1-' in brackets"),
        ("n[1-2-3]", "'1-2-3' in brackets"),
        ("n1, n2", "' ', which no host name has, at character 4"),
        ("n1\n", "which no host name has, at character 3"),
        ("n[\u00b2]", "which no host name has, at character 3"),
        ("n[0-200000]", "more than 200000 hosts, at character 3"),
        ("n[0-199999],m", "more than 200000 hosts, at character 13"),
        ("r[0-9999]n[0-9999]", "more than 200000 hosts, at character 11"),
        ("n[1-" + "9" * 5000 + "]", "in brackets"),
        ("n" + "[" * 5000, "brackets nested deeper than 8, at character 10"),
    ],
)
def test_bad_host_list_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(UserError) as refusal:
        expand_hosts(text)
    assert repr(text) in str(refusal.value)
    assert why in str(refusal.value)


def test_a_million_hosts_are_still_a_list() -> None:
    assert len(expand_hosts("n[000000-199999]")) == 200_000


ranges = st.tuples(st.integers(0, 2000), st.integers(0, 30), st.integers(1, 5))
groups = st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True), st.lists(ranges, max_size=3))


@given(st.lists(groups, min_size=1, max_size=4), st.sampled_from(["", "i", ".site"]))
def test_what_is_shortened_is_written_out_again(parts: list, suffix: str) -> None:
    shorts, hosts = [], []
    for prefix, numbers in parts:
        spans = [(f"{first:0{width}d}", first, first + more, width) for first, more, width in numbers]
        inside = ",".join(f"{text}-{last:0{width}d}" if last > first else text for text, first, last, width in spans)
        shorts.append(f"{prefix}[{inside}]{suffix}" if spans else prefix + suffix)
        hosts += [
            f"{prefix}{number:0{width}d}{suffix}"
            for _, first, last, width in spans
            for number in range(first, last + 1)
        ] or [prefix + suffix]
    assert expand_hosts(",".join(shorts)) == hosts


@given(st.text("n019[],-x. ", max_size=12))
def test_any_text_is_a_list_of_hosts_or_a_refusal(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except UserError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)


def test_tasks_per_node_are_written_out() -> None:
    assert expand_tasks("4(x2),3") == [4, 4, 3]
    assert expand_tasks("1") == [1]
    assert expand_tasks("2,1(x3),12") == [2, 1, 1, 1, 12]


@pytest.mark.parametrize("part", ["", "4(x)", "(x2)", "4x2", "4 ", "a", "4(x0)", "4(x2", "-1"])
def test_bad_tasks_per_node_are_refused_with_their_part(part: str) -> None:
    with pytest.raises(UserError) as refusal:
        expand_tasks(f"2,{part}")
    assert f"tasks per node {f'2,{part}'!r} cannot be read at {part!r}" in str(refusal.value)


def test_tasks_on_more_nodes_than_any_machine_has_are_refused() -> None:
    with pytest.raises(UserError, match="names more than 200000 nodes"):
        expand_tasks("1(x1000001)")
