"""Saving: every rank writes its part, one rename makes it a checkpoint, and nothing that goes wrong ends a run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshrun import mesh
from meshrun.state import catalog, memory, saver
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.memory import memory_files
from meshrun.state.region import Region
from meshrun.state.saver import Saver

from .places import ALONE, numbers, saved

ROOT = Path(__file__).parents[2]
SHAPE = (1003, 300)
WHOLE = numbers(*SHAPE)
BIAS = numbers(7, seed=1)


def rows(tensor: Tensor, rank: int, ranks: int) -> tuple[int, Tensor]:
    first, end = (len(tensor) * number // ranks for number in (rank, rank + 1))
    return first, tensor[first:end]


def regions(rank: int, ranks: int, change: float = 0.0) -> list[Region]:
    """Rows of a weight, as sharding cuts it; a large and a small tensor that all hold; one that a rank holds alone."""
    first, own = rows(WHOLE + change, rank, ranks)
    return [
        Region("sharded", own, SHAPE, (first, 0)),
        Region.whole("large", WHOLE * 2 + change, rank, ranks),
        Region.whole("small", BIAS + change, rank, ranks),
        Region.whole(f"rng/{rank}", torch.full((3,), rank)),
    ]


@pytest.mark.ranks(3)
def test_three_ranks_write_one_checkpoint_that_any_number_reads(tmp_path: Path):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2)
    kept.snapshot(regions(here.rank, here.size), 7, {"cursor": 12})
    kept.begin()
    kept.wait()
    (outcome,) = kept.finished()
    assert outcome.error is None
    assert outcome.step == 7
    checkpoint = Checkpoint.open(tmp_path / "step-00000007")
    assert (checkpoint.step, checkpoint.world, checkpoint.state) == (7, 3, {"cursor": 12})
    assert checkpoint.layout == str(here.layout)
    names = sorted(path.name for path in checkpoint.path.iterdir())
    assert names == ["manifest.json", *(f"rank-0000{n}.safetensors" for n in range(3))]
    assert torch.equal(checkpoint.whole("sharded"), WHOLE)
    assert torch.equal(checkpoint.whole("large"), WHOLE * 2)
    assert torch.equal(checkpoint.whole("small"), BIAS)
    assert checkpoint.whole("rng/2").tolist() == [2, 2, 2]
    columns = torch.empty(SHAPE[0], 100)
    checkpoint.read(Region("sharded", columns, SHAPE, (0, 150)))
    assert torch.equal(columns, WHOLE[:, 150:250])
    assert checkpoint.verify() == []
    # What all ranks hold is written once, in even parts.
    sizes = [file.bytes for file in checkpoint.manifest.files.values()]
    assert sum(sizes) < WHOLE.nbytes * 2 + 20_000
    assert max(sizes) - min(sizes) < 20_000


@pytest.mark.ranks(2)
def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path):
    here = mesh.start()
    go = threading.Event()
    write = saver.write_buffers
    weight = torch.full((1000,), 1.0)
    kept = Saver(tmp_path, here, None, keep=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saver, "write_buffers", lambda *arguments: go.wait(30) and write(*arguments))
        kept.snapshot([Region("w", weight, (2000,), (1000 * here.rank,))], 1, {})
        kept.begin()
        weight += 1
        assert kept.busy
        assert kept.finished() == []
        for forbidden in (kept.begin, lambda: kept.snapshot([], 2, {})):
            with pytest.raises(RuntimeError, match="under way"):
                forbidden()
        go.set()
        kept.close()
    assert not kept.busy
    assert torch.equal(Checkpoint.open(tmp_path / "step-00000001").whole("w"), torch.ones(2000))


@pytest.mark.ranks(3)
def test_one_rank_s_full_disk_is_an_error_on_all_and_leaves_nothing(tmp_path: Path):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2)
    write = saver.write_buffers

    def full(path: Path, buffers: list[memoryview]) -> list[int]:
        blocks = write(path, buffers)
        if here.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return blocks

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saver, "write_buffers", full)
        kept.snapshot(regions(here.rank, here.size), 7, {})
        kept.begin()
        kept.wait()
    (outcome,) = kept.finished()
    assert outcome.error is not None
    assert outcome.error.startswith("rank 1 on ")
    assert outcome.error.endswith("rank-00001.safetensors: No space left on device")
    assert list(tmp_path.iterdir()) == []
    here.gathered(None)
    kept.snapshot(regions(here.rank, here.size, 1.0), 8, {})
    kept.begin()
    kept.close()
    assert [each.error for each in kept.finished()] == [None]
    assert torch.equal(Checkpoint.open(tmp_path / "step-00000008").whole("sharded"), WHOLE + 1)


@pytest.mark.ranks(2)
def test_a_rank_that_never_reports_is_named(tmp_path: Path):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2, timeout=0.3)
    kept.snapshot(regions(here.rank, here.size), 7, {})
    if here.rank == 0:
        kept.begin()
        kept.close()
        (outcome,) = kept.finished()
        assert outcome.error == "rank 1 did not finish writing step 7 within 0 s"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_parts_that_leave_a_hole_become_no_checkpoint(tmp_path: Path):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2)
    kept.snapshot([Region("w", torch.ones(4), (9,), (4 * here.rank,))], 7, {})
    kept.begin()
    kept.close()
    (outcome,) = kept.finished()
    assert outcome.error == "the parts of step 7 do not fit together: 'w' has 9 elements and pieces of 8"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(3)
def test_a_rank_whose_thread_fails_in_any_way_keeps_nobody_waiting(tmp_path: Path):
    here = mesh.start()
    for guilty in (0, 2):
        kept = Saver(tmp_path, here, None, keep=2)

        def fails(*_: object, rank: int = guilty) -> list[int]:
            if here.rank == rank:
                raise ZeroDivisionError("nobody thought of this")
            return [0]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(saver, "write_buffers", fails)
            kept.snapshot(regions(here.rank, here.size), 7, {})
            kept.begin()
            kept.close()
        (outcome,) = kept.finished()
        assert outcome.seconds < 20
        assert outcome.error == f"rank {guilty} could not save step 7: nobody thought of this"
        here.gathered(None)


def test_a_folder_that_cannot_be_written_is_an_error_and_no_more(tmp_path: Path):
    (tmp_path / "file").write_text("")
    kept = Saver(tmp_path / "file" / "checkpoints", ALONE, None, keep=2)
    kept.snapshot([Region.whole("w", numbers(3))], 1, {})
    kept.begin()
    kept.close()
    (outcome,) = kept.finished()
    assert outcome.error is not None
    assert outcome.error.endswith("Not a directory")


def test_a_folder_that_vanished_is_made_again(tmp_path: Path):
    saved(tmp_path / "c", {"w": numbers(3)})
    for path in sorted((tmp_path / "c").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "c").rmdir()
    assert saved(tmp_path / "c", {"w": numbers(3)}).step == 5


def test_the_same_step_again_is_another_checkpoint_and_the_newer_one(tmp_path: Path):
    first, second = saved(tmp_path, {"w": numbers(3)}), saved(tmp_path, {"w": numbers(3, seed=1)})
    assert [path.name for path in catalog.complete(tmp_path)] == ["step-00000005", "step-00000005.1"]
    assert catalog.newest(tmp_path) == second.path != first.path


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path: Path):
    kept = Saver(tmp_path, ALONE, None, keep=2)
    for step in range(1, 7):
        kept.snapshot([Region.whole("w", numbers(3))], step, {"best": {"step": min(step, 2)}})
        kept.begin()
        kept.wait()
    assert [path.name[-1] for path in catalog.complete(tmp_path)] == ["2", "5", "6"]
    assert not list(tmp_path.glob(".*"))


def test_the_newest_complete_one_is_never_deleted(tmp_path: Path):
    for step in (1, 2, 3):
        saved(tmp_path, {"w": numbers(3)}, step)
    (tmp_path / "step-00000003" / "manifest.json").write_text("{}")
    catalog.prune(tmp_path, 0, None)
    assert [path.name for path in catalog.complete(tmp_path)] == ["step-00000002"]
    assert catalog.newest(tmp_path) == tmp_path / "step-00000002"
    catalog.set_aside(tmp_path / "step-00000003")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".damaged-step-00000003", "step-00000002"]


def test_what_a_dead_run_left_half_written_is_removed(tmp_path: Path):
    (tmp_path / ".partial-0123-step-00000009").mkdir()
    (tmp_path / ".partial-0123-step-00000009" / "rank-00000.safetensors").write_bytes(b"half")
    assert catalog.newest(tmp_path) is None
    Saver(tmp_path, ALONE, None, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_a_read_only_disk_would_not_let_go_is_removed_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = Saver(tmp_path, ALONE, None, keep=2)
    write = saver.write_buffers

    def read_only(path: Path, buffers: list[memoryview]) -> list[int]:
        write(path, buffers)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(saver, "write_buffers", read_only)
        patched.setattr(catalog.shutil, "rmtree", lambda *_, **__: None)
        kept.snapshot([Region.whole("w", BIAS)], 1, {})
        kept.begin()
        kept.wait()
        assert [path.name[:9] for path in tmp_path.iterdir()] == [".partial-"]
    kept.snapshot([Region.whole("w", BIAS)], 2, {})
    kept.begin()
    kept.wait()
    assert [outcome.error is None for outcome in kept.finished()] == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node-0"


DIES = """
import os, signal, sys
from pathlib import Path
from meshrun.state.region import Region
from meshrun.state.saver import Saver
from tests.state.places import ALONE, numbers
saver = Saver(Path(sys.argv[1]) / "c", ALONE, Path(sys.argv[1]) / "node-0", keep=2)
saver.snapshot([Region.whole("w", numbers(1003, 300))], 3, {"cursor": 4})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_snapshot_survives_kill_9(tmp_path: Path, node: Path):
    ended = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (found,) = memory_files(node)
    assert (found.step, found.rank, found.state) == (3, 0, {"cursor": 4})
    assert torch.equal(Checkpoint.from_memory([node], 3).whole("w"), WHOLE)


def test_a_snapshot_that_was_cut_off_is_none(tmp_path: Path, node: Path):
    kept = Saver(tmp_path / "c", ALONE, node, keep=2)
    kept.snapshot([Region.whole("w", WHOLE)], 3, {})

    class Dies(Exception):
        pass

    class Torn(torch.Tensor):
        def detach(self) -> Tensor:
            raise Dies

    with pytest.raises(Dies):
        kept.snapshot([Region.whole("w", WHOLE.as_subclass(Torn))], 4, {})
    assert memory_files(node) == []
    with pytest.raises(BadCheckpoint, match="nothing of step 3"):
        Checkpoint.from_memory([node], 3)
    with pytest.raises(RuntimeError, match="no snapshot"):
        kept.begin()


def test_the_same_memory_is_used_for_the_next_snapshot(tmp_path: Path, node: Path):
    kept = Saver(tmp_path / "c", ALONE, node, keep=2)
    kept.prepare([Region.whole("w", WHOLE)])
    before = (node / "rank-00000.safetensors").stat()
    for step in (1, 2):
        kept.snapshot([Region.whole("w", WHOLE + step)], step, {})
        kept.begin()
        kept.wait()
    after = (node / "rank-00000.safetensors").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert [each.step for each in memory_files(node)] == [2]
    assert torch.equal(Checkpoint.open(tmp_path / "c" / "step-00000001").whole("w"), WHOLE + 1)


def test_memory_that_is_full_is_a_note_and_the_save_goes_on(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    kept = Saver(tmp_path / "c", ALONE, node, keep=2)
    kept.snapshot([Region.whole("w", WHOLE)], 1, {})
    kept.begin()
    kept.close()
    assert [each.error for each in kept.finished()] == [None]
    kept.snapshot([Region.whole("w", WHOLE)], 2, {})
    assert len(kept.notes) == 1, "it is told once, and not with every snapshot"
    assert "no room for 0.00 GB: No space left on device (--no-spare)" in kept.notes[0]
    assert list(node.iterdir()) == []
    assert torch.equal(Checkpoint.open(tmp_path / "c" / "step-00000001").whole("w"), WHOLE)


@pytest.mark.ranks(3)
def test_survivors_leave_what_a_lost_rank_held_too(tmp_path: Path):
    here = mesh.start()
    node = tmp_path / "node-0"
    kept = Saver(tmp_path / "c", here, node, keep=2)
    kept.snapshot(regions(here.rank, here.size), 3, {"from": "snapshot"})
    here.gathered(None)
    if here.rank != 1:
        assert kept.put("words", [Region.whole("w", WHOLE), Region.whole("e", numbers(0))], 9, {"from": "words"})
    here.gathered(None)
    assert [(each.step, each.rank) for each in memory_files(node)] == [(9, 0), (9, 2), (3, 0), (3, 1), (3, 2)]
    last = Checkpoint.from_memory([node], 9)
    assert last.state == {"from": "words"}
    assert torch.equal(last.whole("w"), WHOLE)
    before = Checkpoint.from_memory([node], 3)
    assert torch.equal(before.whole("sharded"), WHOLE)
    assert torch.equal(before.whole("large"), WHOLE * 2)
    here.gathered(None)
    kept.snapshot(regions(here.rank, here.size), 10, {})
    here.gathered(None)
    assert [each.step for each in memory_files(node)] == [10, 10, 10]


def test_a_step_of_two_meshes_is_never_mixed(tmp_path: Path, node: Path):
    """A run that went on from step 3 on another mesh has left a little of its own at that step."""
    del tmp_path
    for size, rank, value in ((2, 0, 1.0), (2, 1, 2.0), (3, 2, 9.0)):
        here = mesh.Here(
            mesh.World(rank, size, rank, size, 0, 1, "here", "none"),
            mesh.parse(f"dp={size}").resolve(size),
            torch.device("cpu"),
            None,
        )
        kept = Saver(node / "c", here, node, keep=2)
        kept.put(
            "words", [Region("w", torch.full((100 if size == 2 else 1,), value), (200,), (100 * (rank % 2),))], 3, {}
        )
    found = Checkpoint.from_memory([node], 3)
    assert found.world == 2
    assert found.whole("w").tolist() == [1.0] * 100 + [2.0] * 100
    assert not Checkpoint.from_memory([node], 3).covers("w", (0,), (201,))


def test_files_of_ranks_that_are_no_more_are_removed(tmp_path: Path, node: Path):
    node.mkdir(parents=True)
    for name in ("rank-00003", "words-00000", "words-00002", "passing-1-00000"):
        (node / f"{name}.safetensors").write_bytes(b"x")
        (node / f"{name}.json").write_text("{}")
    Saver(tmp_path / "c", ALONE, node, keep=2).snapshot([Region.whole("w", WHOLE)], 1, {})
    assert sorted(path.name for path in node.glob("*.safetensors")) == [
        "passing-1-00000.safetensors",
        "rank-00000.safetensors",
    ]


def test_a_save_tells_how_long_it_took(tmp_path: Path):
    kept = Saver(tmp_path, ALONE, None, keep=2)
    began = time.perf_counter()
    stall = kept.snapshot([Region.whole("w", WHOLE)], 1, {})
    kept.begin()
    kept.close()
    (outcome,) = kept.finished()
    assert 0 < stall + outcome.seconds < time.perf_counter() - began
    assert outcome.bytes == (tmp_path / "step-00000001" / "rank-00000.safetensors").stat().st_size


def test_every_file_is_on_the_disk_before_the_rename_shows_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A power cut after the rename must not find a checkpoint whose files were still in memory."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(file: int) -> None:
        done.append(Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def renamed(path: Path, to: Path) -> Path:
        done.append("rename")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    checkpoint = saved(tmp_path, {"w": WHOLE})
    before, after = done[: done.index("rename")], done[done.index("rename") + 1 :]
    assert before[:2] == ["rank-00000.safetensors", "manifest.json"]
    assert before[2].startswith(catalog.PARTIAL) and len(before) == 3, "the folder that holds the two names"
    assert after == [tmp_path.name] and checkpoint.path.parent == tmp_path


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_is_shorter_or_longer_than_its_rank_says_becomes_no_checkpoint(tmp_path: Path, change: int):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2)
    write = saver.write_buffers

    def damaged(path: Path, buffers: list[memoryview]) -> list[int]:
        blocks = write(path, buffers)
        if here.rank == 1:
            os.truncate(path, path.stat().st_size + change)
        return blocks

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saver, "write_buffers", damaged)
        kept.snapshot(regions(here.rank, here.size), 7, {})
        kept.begin()
        kept.wait()
    (outcome,) = kept.finished()
    assert outcome.error is not None and "rank-00001.safetensors is not as it was written" in outcome.error
    assert catalog.complete(tmp_path) == []


@pytest.mark.ranks(3)
def test_of_several_ranks_that_fail_the_lowest_is_told_and_the_next_save_of_the_step_is_heard_anew(tmp_path: Path):
    here = mesh.start()
    kept = Saver(tmp_path, here, None, keep=2)

    def full(path: Path, buffers: list[memoryview]) -> list[int]:
        del path, buffers
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        if here.rank:
            patched.setattr(saver, "write_buffers", full)
        kept.snapshot(regions(here.rank, here.size), 7, {})
        kept.begin()
        kept.wait()
    (outcome,) = kept.finished()
    assert outcome.error is not None and outcome.error.startswith("rank 1 on ")
    here.gathered(None)
    kept.begin()  # the same step again, where there is room now
    kept.wait()
    (outcome,) = kept.finished()
    assert outcome.error is None
    here.gathered(None)
    assert [path.name for path in catalog.complete(tmp_path)] == ["step-00000007"]


def test_a_neighbours_copy_and_other_ranks_of_this_node_stay_when_a_snapshot_is_marked(tmp_path: Path):
    kept = Saver(tmp_path / "run", ALONE, tmp_path / "memory", keep=2)
    (tmp_path / "memory").mkdir(exist_ok=True)
    names = ["spare-00000", "spare-00007", "words-00000", "rank-00001", "rank-00003", "passing-00000"]
    for name in names:
        (tmp_path / "memory" / f"{name}.safetensors").write_bytes(b"x")
        (tmp_path / "memory" / f"{name}.json").write_text("{}")
    kept.snapshot([Region.whole("w", BIAS)], 3, {})
    left = sorted(path.stem for path in (tmp_path / "memory").glob("*.safetensors"))
    # Of a world of one rank: 7, 3 and 1 are no more, and its own last words are older than this snapshot.
    assert left == ["passing-00000", "rank-00000", "spare-00000"]


def test_the_copy_for_a_rank_of_another_node_stays_when_a_snapshot_is_marked(tmp_path: Path):
    of_two_nodes = replace(ALONE, world=mesh.World(0, 2, 0, 1, 0, 2, "here", "none"))
    kept = Saver(tmp_path / "run", of_two_nodes, tmp_path / "memory", keep=2)
    (tmp_path / "memory").mkdir(exist_ok=True)
    for name in ("spare-00001", "spare-00002"):
        (tmp_path / "memory" / f"{name}.safetensors").write_bytes(b"x")
    kept.snapshot([Region.whole("w", BIAS)], 3, {})
    assert sorted(path.stem for path in (tmp_path / "memory").glob("spare-*.safetensors")) == ["spare-00001"]


def test_other_ranks_of_the_second_node_stay_when_a_snapshot_is_marked(tmp_path: Path):
    of_second = replace(ALONE, world=mesh.World(2, 4, 0, 2, 1, 2, "there", "none"))
    kept = Saver(tmp_path / "run", of_second, tmp_path / "memory", keep=2)
    (tmp_path / "memory").mkdir()
    for name in ("rank-00001", "rank-00003", "words-00003", "rank-00004"):
        (tmp_path / "memory" / f"{name}.safetensors").write_bytes(b"x")
    kept.snapshot([Region.whole("w", BIAS)], 3, {})
    left = sorted(path.stem for path in (tmp_path / "memory").glob("*.safetensors"))
    assert left == ["rank-00002", "rank-00003", "words-00003"]


class Shelf(dict[str, bytes]):
    """The part of a store that rank 0 hears the others through."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> None:
        del self[key]

    def set(self, key: str, text: str) -> None:
        self[key] = text.encode()


def test_words_of_a_save_that_were_heard_do_not_stay_in_the_store():
    shelf, made = Shelf(), Saver.__new__(Saver)
    made.here = SimpleNamespace(size=3, store=shelf)  # type: ignore[assignment]
    made.token, made.timeout, made._begun = "t", 0.0, {3: 0}
    index: Any = SimpleNamespace(step=3)
    shelf[made._key(index, 1)] = b"rank 1 has no room"
    assert made._heard(index) == ["rank 1 has no room", "rank 2 did not finish writing step 3 within 0 s"]
    assert shelf == {}


def test_ranks_wait_for_the_outcome_longer_than_rank_0_waits_for_them():
    made, until = Saver.__new__(Saver), list[float]()
    made.here = SimpleNamespace(rank=1, store=Shelf())  # type: ignore[assignment]
    made.token, made.timeout, made._begun = "t", 600.0, {3: 0}
    made._appears = lambda _, give_up: until.append(give_up)  # type: ignore[assignment,method-assign,func-returns-value]
    index: Any = SimpleNamespace(step=3)
    assert made._outcome(index, "no room") == "rank 0 did not say within 600 s what became of step 3"
    assert 600 < until[0] - time.monotonic() < 700


def test_a_state_that_the_memory_has_no_room_for_leaves_nothing_there_and_a_note(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
):
    def half(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = Saver(tmp_path / "c", ALONE, node, keep=2)
    node.mkdir(exist_ok=True)
    monkeypatch.setattr(saver, "write_image", half)
    assert kept.put("words", [Region.whole("w", WHOLE)], 4, {}) is False
    assert list(node.iterdir()) == []
    assert kept.notes == [f"the state of step 4 could not be left in {node}: No space left on device"]


def test_with_two_images_the_snapshot_before_the_last_one_stays_in_memory(tmp_path: Path, node: Path):
    kept = Saver(tmp_path / "c", ALONE, node, keep=2, images=2)
    for step in (1, 2, 3):
        kept.snapshot([Region.whole("w", WHOLE + step)], step, {})
    assert [(file.step, file.path.name) for file in memory_files(node)] == [
        (3, "other-00000.safetensors"),
        (2, "rank-00000.safetensors"),
    ]
    kept.begin()
    kept.wait()
    checkpoint = Checkpoint.open(tmp_path / "c" / "step-00000003")
    assert torch.equal(checkpoint.whole("w"), WHOLE + 3)
    assert list(checkpoint.manifest.files) == ["rank-00000.safetensors"], "whatever its image is called"
