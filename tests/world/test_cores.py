"""Ranks of a node get disjoint, balanced, neighbouring cores, and hyper-threads stay together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.world import detect
from meshrun.world.cores import granted, lost, mine, quota, read, share, topology, written

TWO_SOCKETS_SMT = {cpu: (cpu % 8 // 4, cpu % 4) for cpu in range(16)}
"""Linux's usual numbers: CPUs 0-7 are the first threads of 2 sockets x 4 cores, 8-15 the second ones."""


def shares(cpus: range | set[int], of: int, siblings: dict[int, tuple[int, int]] | None) -> list[set[int]]:
    return [set(share(cpus, index, of, siblings)) for index in range(of)]


def test_two_ranks_take_a_socket_each_with_its_hyper_threads() -> None:
    assert shares(range(16), 2, TWO_SOCKETS_SMT) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]


def test_hyper_threads_of_a_core_go_to_one_rank() -> None:
    assert shares(range(16), 8, TWO_SOCKETS_SMT) == [{cpu, cpu + 8} for cpu in range(8)]


def test_cores_that_do_not_divide_differ_by_one_between_ranks() -> None:
    assert [len(part) for part in shares(range(16), 3, TWO_SOCKETS_SMT)] == [4, 6, 6]


def test_fewer_physical_cores_than_ranks_leaves_every_rank_all_of_them() -> None:
    assert shares(range(16), 9, TWO_SOCKETS_SMT) == [set(range(16))] * 9
    assert shares({0, 8}, 2, TWO_SOCKETS_SMT) == [{0, 8}] * 2


def test_only_granted_cores_are_shared() -> None:
    assert shares({1, 5, 9, 13}, 2, TWO_SOCKETS_SMT) == [{1, 9}, {5, 13}]


def test_without_a_topology_every_cpu_counts_as_a_core() -> None:
    assert shares(range(4), 2, None) == [{0, 1}, {2, 3}]
    assert shares(range(4), 2, {0: (0, 0), 1: (0, 0)}) == [{0, 1}, {2, 3}]


def test_a_cpu_that_is_not_described_is_no_core_of_another_package() -> None:
    assert share({1, 2}, 0, 2, {2: (1, 0)}) | share({1, 2}, 1, 2, {2: (1, 0)}) == {1, 2}
    assert len(share({1, 2}, 0, 2, {2: (1, 0)})) == 1


def test_a_local_rank_outside_its_node_is_an_error() -> None:
    with pytest.raises(ValueError, match="local rank 2 is not one of 2"):
        share(range(4), 2, 2, None)


@given(
    st.dictionaries(st.integers(0, 63), st.tuples(st.integers(0, 1), st.integers(0, 7)), min_size=1),
    st.integers(1, 8),
)
def test_shares_cover_all_cores_once_and_never_cut_a_physical_core(siblings: dict, of: int) -> None:
    parts = shares(set(siblings), of, siblings)
    cores = [{siblings[cpu] for cpu in part} for part in parts]
    if len(set(siblings.values())) < of:
        assert parts == [set(siblings)] * of
        return
    assert sum(len(part) for part in parts) == len(siblings)
    assert set().union(*parts) == set(siblings)
    assert sum(len(core) for core in cores) == len(set(siblings.values()))
    assert max(map(len, cores)) - min(map(len, cores)) <= 1


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_topology_reads_what_the_kernel_describes_and_passes_over_the_rest(tmp_path: Path) -> None:
    for cpu, (package, core) in {0: (0, 0), 1: (0, 4), 10: (1, 0)}.items():
        write(tmp_path / f"cpu{cpu}/topology/physical_package_id", f"{package}\n")
        write(tmp_path / f"cpu{cpu}/topology/core_id", f"{core}\n")
    write(tmp_path / "cpu11/online", "0\n")
    write(tmp_path / "cpufreq/policy", "x")
    assert topology(tmp_path) == {0: (0, 0), 1: (0, 4), 10: (1, 0)}
    assert topology(tmp_path / "absent") == {}


def test_this_machines_cores_are_granted_and_shared() -> None:
    assert granted() == os.sched_getaffinity(0)
    assert share(granted(), 0, 1, topology()) == granted()


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "max 100000"}, 2.5),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "3:memory:/x\n1:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (
            "1:cpuset:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("", {}, None),
    ],
)
def test_quota_is_the_tightest_limit_of_the_groups_above(
    tmp_path: Path, own: str, files: dict[str, str], cpus: float | None
) -> None:
    write(tmp_path / "own", own)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text + "\n")
    assert quota(tmp_path / "groups", tmp_path / "own") == cpus


def test_no_cgroups_mean_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path, tmp_path / "absent") is None


def test_cores_are_told_and_read() -> None:
    assert written({8, 0, 3}) == "0,3,8" and read("0,3,8") == {0, 3, 8} and read(written(())) == frozenset()


LUMI = ["fe000000000000", "fe00000000000000", "fe0000", "fe000000", "fe", "fe00", "fe00000000", "fe0000000000"]


def test_a_sites_masks_put_ranks_near_their_gpus() -> None:
    usable = {core for core in range(64) if core % 8}
    assert mine(usable, 0, 8, LUMI) == set(range(49, 56))
    assert mine(usable, 4, 8, LUMI) == set(range(1, 8))
    every = [mine(usable, rank, 8, LUMI) for rank in range(8)]
    assert set.union(*map(set, every)) == usable and sum(map(len, every)) == 56


def test_masks_that_do_not_fit_are_passed_over() -> None:
    assert [len(mine(range(32), rank, 8, LUMI)) for rank in range(8)] == [4] * 8, "a part of the node was granted"
    usable = set(range(4, 16))
    assert mine(usable, 0, 2, ["ff", "ff00"]) <= usable, "a mask with some cores that were not granted"
    assert len(mine(range(64), 0, 4, LUMI)) == 16, "fewer ranks than masks"


TRAP = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "32(x2)"}
RANK = replace(detect({}, "n1"), source="slurm", size=8, local_size=4, nodes=2)


def test_one_core_where_the_node_was_granted_more_is_said_with_the_line_that_mends_it() -> None:
    said = lost(TRAP, RANK, [{0}, {1}, {2}, {3}], existing=64)
    assert said is not None and "n1 was granted 32 cores" in said and "of its 4 ranks one has 1 core" in said
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in said
    alone = lost(TRAP, replace(RANK, local_size=1), [{5}], existing=64)
    assert alone is not None and "its rank has 1 core and all have 1" in alone
    by_mpirun = lost({}, replace(RANK, source="openmpi", local_size=2), [{0}, {1}], existing=64)
    assert by_mpirun is not None and by_mpirun.endswith("start with mpirun --bind-to none")


@pytest.mark.parametrize(
    "env, source, seen",
    [
        (TRAP, "slurm", [set(range(8)), set(range(8, 16))]),
        ({**TRAP, "SLURM_JOB_CPUS_PER_NODE": "4"}, "slurm", [{0}, {1}, {2}, {3}]),
        ({**TRAP, "SLURM_JOB_CPUS_PER_NODE": "many"}, "slurm", [{0}]),
        ({"SLURM_JOB_ID": "7"}, "slurm", [{0}]),
        ({}, "none", [{0}]),
        ({}, "torchrun", [{0}, {0}]),
        ({}, "openmpi", [set(range(32)), set(range(32, 64))]),
    ],
)
def test_nothing_is_said_where_nothing_is_lost(env: dict[str, str], source: str, seen: list[set[int]]) -> None:
    assert lost(env, replace(RANK, source=source, local_size=len(seen)), seen, existing=64) is None


def test_virtual_nodes_that_claim_more_cores_than_there_are_lose_none_and_one_rank_speaks_for_its_node() -> None:
    assert lost(TRAP, replace(RANK, local_size=2), [{0}, {1}], existing=2) is None
    assert lost(TRAP, replace(RANK, local_rank=1), [{0}, {1}, {2}, {3}], existing=64) is None


def test_of_two_quotas_the_tighter_one_counts(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/job/step\n")
    write(tmp_path / "groups/job/cpu.max", "200000 100000\n")
    write(tmp_path / "groups/job/step/cpu.max", "800000 100000\n")
    assert quota(tmp_path / "groups", tmp_path / "own") == 2.0
