"""The sentence on waiting for data: said when it matters, with the advice that fits what is known."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.train.data_wait import Facts, Tally, Wait, facts_of, sentence, waited_for_data
from meshrun.train.totals import Update
from tests.train.small import start_on_cpu

MENDED = "write 'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK' before srun"
MOUNTS = "/dev/sda1 / ext4 rw 0 0\nfs1 /p gpfs rw 0 0\n"


def wait(
    share: float,
    rank: int = 0,
    cores: int = 1,
    workers: int = 0,
    first: int = 0,
    seconds: float = 100.0,
    busy: float = 0.9,
) -> Wait:
    return Wait(rank, "n7", seconds, share * seconds, workers, frozenset(range(first, first + cores)), busy=busy)


def said(worst: Wait, facts: Facts, *others: Wait) -> str:
    found = sentence(worst, [worst, *others], facts, worst.share)
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
    assert "--workers" not in text and "4 cores and 3 reader processes; give each rank more cores" in text


@pytest.mark.parametrize(("cores", "workers", "more"), [(1, 0, 2), (2, 1, 2), (2, 4, 8), (64, 12, 16)])
def test_readers_that_wait_themselves_need_others_beside_them_and_no_cores(cores: int, workers: int, more: int):
    text = said(wait(0.9, cores=cores, workers=workers, busy=0.03), Facts(128, MENDED))
    assert text.endswith(
        f"computes 3 % of its time but waits for the rest; let more processes wait at once (--workers {more})"
    )


def test_more_readers_than_help_are_not_advised():
    assert "--workers" not in said(wait(0.9, workers=16, busy=0.03), Facts())


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
    "quick",
    [
        wait(0.1),
        wait(0.0),
        wait(0.9, seconds=0.1),
        Wait(0, "n7", 4.0, 3.0, 0, frozenset(), 49),
        Wait(0, "n7", 0.0, 0.0, 0, frozenset()),
    ],
)
def test_little_waiting_is_not_worth_a_word(quick: Wait):
    assert sentence(quick, [quick], Facts(48, MENDED), quick.share) is None


def test_the_start_of_the_readers_is_no_waiting_and_what_they_do_is_known():
    class Slow:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, number: int) -> Tensor:
            time.sleep(0.015)  # longer than others on this machine keep it from a core
            return torch.zeros(1)

    class Busy(Slow):
        def __getitem__(self, number: int) -> Tensor:
            until = time.thread_time() + 0.005
            while time.thread_time() < until:
                pass
            return torch.zeros(1)

    def share(data: Slow, workers: int) -> float:
        loader = Loader(data, Order.of(data, 8, 0, "full"), 0, 1, Reading(workers=workers))
        tally = Tally(3)
        for step in loader.steps(0, 6):
            tally.add(Update(step.step, 8, 0.1, step.waited, [], [], None, seconds=1.0, effort=step.effort))
        assert tally.steps == 3 and tally.seconds == 3.0
        return tally.wait(0, "n7", workers, frozenset()).busy

    assert all(share(Slow(), workers) < 0.5 for workers in (0, 1))
    assert all(share(Busy(), workers) > 0.7 for workers in (0, 2))


def test_what_a_dataset_shows_of_its_place_is_found_also_inside_others(tmp_path: Path):
    file = SimpleNamespace(path=Path("/p/train.h5"))
    assert facts_of(Subset(file, [0]), "full", False, 8, MENDED, MOUNTS) == Facts(
        8, MENDED, "/p/train.h5", 0, "gpfs", False, "full"
    )
    folder = SimpleNamespace(folder=tmp_path, files=["a", "b"])
    assert facts_of(folder, "full", True, None, "", MOUNTS) == Facts(None, "", str(tmp_path), 2, "ext4", True, "full")
    assert facts_of([1, 2], "none", False, None, "", MOUNTS) == Facts(shuffle="none")


@pytest.mark.ranks(2)
def test_the_rank_that_waits_is_the_one_that_is_named():
    here = start_on_cpu(2)
    waited = 40.0 * here.rank
    notes: list[str] = []
    trainer = SimpleNamespace(
        here=here,
        tally=Tally(0, steps=100, seconds=100.0, waited=waited),
        totals=SimpleNamespace(seconds=100.0, data_wait=waited),
        reading=SimpleNamespace(workers=0),
        experiment=SimpleNamespace(train=[], shuffle="full"),
        tell=lambda _kind, text: notes.append(text),
    )
    assert waited_for_data(trainer, cached=False) == {"data_wait": 0.4, "data_waits": [0.0, 0.4]}  # type: ignore[arg-type]
    assert [note.partition(":")[0] for note in notes] == (
        [f"40 % of the time waited for data, on rank 1 of {here.world.host}"] if here.rank == 0 else []
    )
