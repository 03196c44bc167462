"""The sentence on waiting for data: said when it matters, with the advice that fits what is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import Subset

from meshrun.train.data_wait import Facts, Wait, facts_of, sentence

MENDED = "write 'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK' before srun"
MOUNTS = "/dev/sda1 / ext4 rw 0 0\nfs1 /p gpfs rw 0 0\n"


def wait(share: float, rank: int = 0, cores: int = 1, workers: int = 0, first: int = 0, seconds: float = 100.0) -> Wait:
    return Wait(rank, "n7", seconds, share * seconds, workers, frozenset(range(first, first + cores)))


def said(worst: Wait, facts: Facts, *others: Wait) -> str:
    found = sentence(worst, [worst, *others], facts)
    assert found is not None
    return found


def test_a_rank_bound_to_one_of_many_cores_is_told_how_to_get_them():
    assert said(wait(0.41), Facts(48, MENDED)) == (
        "41 % of the time waited for data: reading has 1 core (48 granted to the job on this node) and no process of "
        f"its own; {MENDED}"
    )


def test_the_worst_rank_is_named_where_there_are_several():
    text = said(wait(0.3, rank=1), Facts(), wait(0.1))
    assert text.startswith("30 % of the time waited for data, on rank 1 of n7: reading has 1 core and no process")
    assert "give each rank more cores" in text


@pytest.mark.parametrize(("cores", "workers", "readers"), [(12, 0, 8), (4, 1, 3), (2, 0, 1)])
def test_idle_cores_are_for_readers(cores: int, workers: int, readers: int):
    assert f"(--workers {readers})" in said(wait(0.2, cores=cores, workers=workers), Facts())


def test_who_has_a_reader_a_core_needs_more_cores():
    text = said(wait(0.2, cores=4, workers=3), Facts())
    assert "4 cores and 3 reader processes; give each rank more cores, or more readers if these wait " in text
    assert "(--workers 6)" in text


def test_ranks_that_have_all_of_a_node_between_them_have_lost_none():
    two = [wait(0.5, rank=rank, cores=2, first=2 * rank) for rank in (0, 1)]
    assert "granted" not in said(two[0], Facts(4, MENDED), two[1])


def test_cores_that_a_site_keeps_for_the_system_are_not_lost():
    eight = [wait(0.5, rank=rank, cores=7, first=8 * rank) for rank in range(8)]
    assert MENDED not in said(eight[0], Facts(64, MENDED), *eight[1:])


@pytest.mark.parametrize(
    ("facts", "advice"),
    {
        Facts(path="/p/train.h5", file_system="gpfs", shuffle="none"): "--cache auto",
        Facts(path="/p/train.h5", file_system="ext4"): "--shuffle window",
        Facts(path="/p/pictures", files=12_345, file_system="gpfs"): "of its 12,345 (meshrun convert-data /p/pictures",
    }.items(),
)
def test_the_advice_fits_the_data(facts: Facts, advice: str):
    assert advice in said(wait(0.2), facts)


@pytest.mark.parametrize(
    "facts",
    [
        Facts(path="/p/train.h5", file_system="gpfs", shuffle="window", cached=True),
        Facts(path="/data/words.tokens", file_system="xfs"),
        Facts(path="/data/few", files=244, file_system="gpfs"),
        Facts(),
    ],
)
def test_what_would_not_help_is_not_advised(facts: Facts):
    text = said(wait(0.2), facts)
    assert not any(word in text for word in ("--cache", "--shuffle", "convert-data"))


@pytest.mark.parametrize(
    "quick", [wait(0.1), wait(0.0), wait(0.9, seconds=0.1), Wait(0, "n7", 0.0, 0.0, 0, frozenset())]
)
def test_little_waiting_is_not_worth_a_word(quick: Wait):
    assert sentence(quick, [quick], Facts(48, MENDED)) is None


def test_what_a_dataset_shows_of_its_place_is_found_also_inside_others(tmp_path: Path):
    file = SimpleNamespace(path=Path("/p/train.h5"))
    assert facts_of(Subset(file, [0]), "full", False, 8, MENDED, MOUNTS) == Facts(
        8, MENDED, "/p/train.h5", 0, "gpfs", False, "full"
    )
    folder = SimpleNamespace(folder=tmp_path, files=["a", "b"])
    assert facts_of(folder, "full", True, None, "", MOUNTS) == Facts(None, "", str(tmp_path), 2, "ext4", True, "full")
    assert facts_of([1, 2], "none", False, None, "", MOUNTS) == Facts(shuffle="none")
