"""The injector of faults: its plans, what it breaks and heals, and ranks that fail at the moment that they are told."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from meshrun import UserError
from meshrun.check.armed import MOMENTS, Control, Order, arm
from meshrun.check.disk import Disk, can_mount
from meshrun.check.faults import DAMAGES, KINDS, plan
from meshrun.data.loader import Loader
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.shards import write_buffers
from meshrun.world.environment import inherited, of_rank, take_over
from tests.state.places import numbers, saved


def test_the_same_seed_gives_the_same_faults():
    assert plan(7, 50, ranks=4) == plan(7, 50, ranks=4)
    assert plan(7, 50, ranks=4) != plan(8, 50, ranks=4)


def test_every_kind_strikes_before_any_strikes_more_often_than_its_weight():
    once = sum(kind.weight for kind in KINDS.values())
    drawn = [fault.kind for fault in plan(1, once, ranks=2)]
    assert {name: drawn.count(name) for name in KINDS} == {name: kind.weight for name, kind in KINDS.items()}


def test_a_plan_has_only_the_kinds_and_ranks_that_there_are():
    faults = plan(1, 30, ranks=3, kinds=["segv", "stop"])
    assert {fault.kind for fault in faults} == {"segv", "stop"}
    assert {fault.rank for fault in faults} == {0, 1, 2}


def test_a_kind_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"there is no fault 'fire'; there are kill-reading, .* \(--kinds\)"):
        plan(1, 3, ranks=2, kinds=["segv", "fire"])


def test_what_a_run_does_not_have_is_not_broken():
    assert {"kill-reader", "kill-evaluating"} <= {fault.kind for fault in plan(1, 100, ranks=2)}
    assert not {"kill-reader", "kill-evaluating"} & {fault.kind for fault in plan(1, 100, ranks=2, has=())}
    with pytest.raises(UserError, match=r"kill-reader needs processes that read .* \(--workers\)"):
        plan(1, 3, ranks=2, kinds=["kill-reader"], has=["evaluation"])
    with pytest.raises(UserError, match=r"kill-evaluating needs a target that is evaluated"):
        plan(1, 3, ranks=2, kinds=["kill-evaluating"], has=["readers"])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_damaged(tmp_path: Path, damage: str, seed: int):
    path = saved(tmp_path, {"a": numbers(300)}).path
    DAMAGES[damage](path, Random(seed))
    with pytest.raises(BadCheckpoint):
        Checkpoint.open(path).whole("a")


@pytest.fixture
def disk(tmp_path: Path):
    if not can_mount():
        pytest.skip("needs the right to mount file systems")
    disk = Disk(tmp_path / "disk")
    disk.mount()
    yield disk
    disk.close()
    assert not os.path.ismount(disk.folder)


def test_a_full_disk_takes_nothing_until_it_is_healed(disk: Disk):
    (disk.folder / "before").write_bytes(b"1" * 10_000)
    disk.fill()
    with pytest.raises(OSError) as error:
        (disk.folder / "now").write_bytes(b"2" * 10_000)
    assert error.value.errno == errno.ENOSPC
    disk.heal()
    (disk.folder / "now").write_bytes(b"2" * 10_000)


def test_a_protected_disk_takes_nothing_until_it_is_healed(disk: Disk):
    disk.protect()
    with pytest.raises(OSError) as error:
        (disk.folder / "now").mkdir()
    assert error.value.errno == errno.EROFS
    disk.heal()
    (disk.folder / "now").mkdir()


def test_what_a_disk_held_is_there_when_it_is_gone(tmp_path: Path):
    if not can_mount():
        pytest.skip("needs the right to mount file systems")
    disk = Disk(tmp_path / "disk")
    disk.mount()
    (disk.folder / "words").write_text("kept")
    disk.close()
    assert (tmp_path / "disk" / "words").read_text() == "kept"
    assert not os.path.ismount(tmp_path / "disk")


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.check.test_faults"])


def as_rank(place: Path, action: Callable[[Path], object]) -> int | None:
    """Do something on an armed rank; returns 0, or minus the signal that killed it.

    A fork of a process that has computed nothing: this one may have threads that a fork would miss.
    """
    rank = _FORKS.Process(target=_be_rank, args=(place, action))
    rank.start()
    rank.join()
    return rank.exitcode


def _be_rank(place: Path, action: Callable[[Path], object]) -> None:
    take_over({**inherited(), **of_rank(0, 2, (0, 2), (0, 1), ("127.0.0.1", 1), 0, "x")})
    # What `arm` wraps, without what these would need.
    Loader.steps, Checkpoint.whole = (lambda *_: iter([0])), (lambda *_: None)  # type: ignore[assignment, method-assign]
    arm(place / "control")
    action(place)


def rename(folder: Path) -> None:
    (folder / ".partial-x").rename(folder / "step-00000005")


def write(folder: Path) -> None:
    write_buffers(folder / ".partial-x" / "rank-00000.safetensors", [memoryview(bytes(1000))])


def prune(folder: Path) -> None:
    (folder / ".partial-x").rename(folder / ".partial-gone-step-00000005")


def replace(name: str, folder: Path) -> None:
    (folder / "beside").touch()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "beside").replace(folder / name)


def words(folder: Path) -> None:
    write_buffers(folder / "words-00000.safetensors", [memoryview(bytes(1000))], sync=False)


def update(_folder: Path) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def forward(_folder: Path) -> None:
    next(Loader.steps(None, 0, 1))
    nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))(torch.ones(2))


def load(_folder: Path) -> None:
    Checkpoint.whole(None, "")  # type: ignore[arg-type]


ACTIONS: dict[str, Callable[[Path], object]] = {
    "forward": forward,
    "update": update,
    "snapshot": partial(replace, "rank-00000.json"),
    "write": write,
    "rename": rename,
    "renamed": rename,
    "prune": prune,
    "words": words,
    "load": load,
    "weights": partial(replace, "weights/best.safetensors"),
    "result": partial(replace, "result.json"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what actions need."""
    (tmp_path / ".partial-x").mkdir()
    for name in ("rank-00001.safetensors", "manifest.json"):
        (tmp_path / ".partial-x" / name).touch()
    (tmp_path / "control").mkdir()
    return tmp_path


def test_every_moment_has_a_test():
    assert set(ACTIONS) == set(MOMENTS) - {"disk", "clock"}


@pytest.mark.parametrize("moment", ACTIONS)
def test_a_rank_dies_once_at_the_moment_that_it_was_told(place: Path, moment: str):
    control = Control(place / "control")
    assert as_rank(place, write) == 0  # no order yet
    control.order(0, Order(3, moment, 1))
    assert control.fired(3) is None
    before = time.monotonic()
    assert as_rank(place, ACTIONS[moment]) == -9
    when = control.fired(3)
    assert when is not None and before < when < time.monotonic()
    if moment in ("write", "words"):
        (half,) = place.rglob("words-00000*" if moment == "words" else "rank-00000.safetensors")
        assert half.stat().st_size == 500
    if moment in ("rename", "renamed"):
        assert (place / "step-00000005").exists() == (moment == "renamed")
        (place / ".partial-x").mkdir(exist_ok=True)
    if moment == "prune":
        assert len(list((place / ".partial-gone-step-00000005").iterdir())) == 2  # of three
        (place / ".partial-gone-step-00000005").rename(place / ".partial-x")
    if moment == "renamed":
        (place / "step-00000005").rename(place / "of-before")
    assert as_rank(place, ACTIONS[moment]) == 0  # the next one lives


def test_a_rank_does_not_die_at_another_moment_or_by_the_order_of_another_rank(place: Path):
    control = Control(place / "control")
    control.order(0, Order(1, "words"))
    control.order(1, Order(2, "write"))
    assert as_rank(place, write) == 0
    assert control.fired(1) is control.fired(2) is None


def refused(place: Path) -> None:
    with pytest.raises(OSError) as error:
        write(place)
    assert error.value.errno == errno.ENOSPC
    (place / "elsewhere").write_text("there is room")
    words(place)


def test_a_disk_answers_with_an_error_until_the_order_is_taken_back(place: Path):
    control = Control(place / "control")
    control.order(0, Order(1, "disk", errno.ENOSPC))
    assert as_rank(place, refused) == 0
    assert control.fired(1) is not None
    control.take_back(0)
    assert as_rank(place, write) == 0


def jumps(place: Path) -> None:
    control, now = Control(place / "control"), time.time()
    control.order(0, Order(1, "clock", -3600))
    assert -3600.5 < time.time() - now < -3590
    control.take_back(0)
    assert abs(time.time() - now) < 10


def test_a_clock_jumps_and_comes_back(place: Path):
    assert as_rank(place, jumps) == 0


def test_a_process_that_is_no_rank_is_not_armed(place: Path):
    write, steps = os.write, Loader.steps
    arm(place / "control")
    assert os.write is write
    assert Loader.steps is steps


def test_faults_that_a_run_cannot_have_are_not_drawn_and_the_seed_decides_the_others():
    drawn = plan(3, 200, 2, has=())
    assert drawn == plan(3, 200, 2, has=()) != plan(4, 200, 2, has=())
    assert all(KINDS[fault.kind].needs is None for fault in drawn)
