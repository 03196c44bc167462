"""Faults that a run must survive: each knows when it can strike, strikes, and heals what it broke.

    with KINDS["disk-full"].strike(scene, fault) as struck:
        …                                                     # the run must go on; `struck` says what that means

`plans` says how kinds are drawn, and how others are added.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrun.check import armed
from meshrun.check.armed import DISK_ERRORS, Order
from meshrun.check.plans import KINDS, Fault, Struck, kind, plan
from meshrun.check.scene import CLOSE, Missed, NotSurvived, Scene, parent_of
from meshrun.observe.stacks import children_of
from meshrun.state import catalog

__all__ = ["DAMAGES", "KINDS", "Fault", "Struck", "kind", "plan"]

MOMENT = 20.0
"""Seconds in which a moment that an armed rank waits for must come."""
DISK_STEPS = 12
"""Steps that come to a checkpoint at least, as chaos saves by itself."""
END = 3600.0
"""The same for one at the end of a run."""


def _kill_in(phase: str) -> Callable[[Scene, Fault], Iterator[Struck]]:
    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        scene.control.pace(0.0)  # not to wait long for what comes once in a while
        found = scene.until(lambda: scene.at(fault.rank, phase), every=CLOSE)
        yield Struck(scene.kill(found.pid))

    return strike


kind("kill-reading", "kill -9 of a rank that is reading")(_kill_in("reading"))
kind("kill-computing", "kill -9 of a rank that is computing")(_kill_in("computing"))
kind("kill-evaluating", "kill -9 of a rank that is evaluating", needs="evaluation")(_kill_in("evaluating"))


@kind("kill-anytime", "kill -9 of a rank at any time", weight=4)
def kill_anytime(scene: Scene, fault: Fault) -> Iterator[Struck]:
    time.sleep(fault.random.uniform(0.0, 0.2))
    yield Struck(scene.kill(_pid(scene, fault.rank)))


@kind("kill-collective", "kill -9 of a rank that waits in a collective for another one")
def kill_collective(scene: Scene, fault: Fault) -> Iterator[Struck]:
    others = [_pid(scene, rank) for rank in range(scene.ranks) if rank != fault.rank]
    if not others:
        raise Missed("a single rank waits for nobody")
    with _held(scene, others[0]):
        pid = _pid(scene, fault.rank)
        time.sleep(0.05)
        when = scene.kill(pid)
    yield Struck(when)


@kind("kill-two", "kill -9 of two ranks at once")
def kill_two(scene: Scene, fault: Fault) -> Iterator[Struck]:
    ranks = fault.random.sample(range(scene.ranks), min(2, scene.ranks))
    pids = [_pid(scene, rank) for rank in ranks]
    when = [scene.kill(pid) for pid in pids]
    yield Struck(when[0])


@kind("kill-again", "kill -9 of a rank, and of one that has just been started anew")
def kill_again(scene: Scene, fault: Fault) -> Iterator[Struck]:
    first = scene.reading(fault.rank)
    if first is None:
        raise Missed("the rank is not there")
    scene.kill(first.pid)
    rank = fault.random.randrange(scene.ranks)
    before = first.generation

    def anew() -> int | None:
        found = scene.reading(rank)
        return found.pid if found is not None and found.generation > before else None

    pid = scene.until(anew, every=CLOSE)
    time.sleep(fault.random.choice((0.0, 0.0, 0.02, 0.1)))
    yield Struck(scene.kill(pid))


def _self_made(moment: str) -> Callable[[Scene, Fault], Iterator[Struck]]:
    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        # What only one rank does is that rank's to fail in.
        rank = fault.rank if moment in ("forward", "update", "snapshot", "write") else 0
        patience = MOMENT
        if moment in armed.AT_THE_END:
            patience = END
            scene.control.pace(0.0)
        with _ordered(scene, rank, Order(fault.number, moment, fault.random.randrange(6))):
            yield Struck(_fired(scene, fault.number, patience), how="armed")

    return strike


for _moment, _does in {
    "forward": "inside of the model",
    "update": "between two operations of the optimizer",
    "snapshot": "whose copy in memory is there but not marked as whole",
    "write": "in the middle of a checkpoint's file",
    "rename": "before a checkpoint gets its name",
    "renamed": "just after a checkpoint got its name",
    "prune": "in the middle of deleting an old checkpoint",
}.items():
    kind(f"kill-{_moment}", f"kill -9 of a rank {_does}")(_self_made(_moment))

for _moment in armed.AT_THE_END:
    kind(f"kill-{_moment}", f"kill -9 of a rank that writes its {_moment}", 1, at_the_end=True)(_self_made(_moment))


@kind("kill-words", "kill -9 of a rank, and of another in the middle of its last words")
def kill_words(scene: Scene, fault: Fault) -> Iterator[Struck]:
    other = (fault.rank + 1) % scene.ranks
    with _ordered(scene, other, Order(fault.number, "words")):
        when = scene.kill(_pid(scene, fault.rank))
        # Words are only spoken where all of a step's weights are whole: else there is nothing to be cut short.
        give_up = time.monotonic() + 1.0
        while scene.control.fired(fault.number) is None and time.monotonic() < give_up:
            time.sleep(0.002)
        yield Struck(when, how="armed")


@kind("kill-loading", "kill -9 of a rank, and of one that loads the state after that")
def kill_loading(scene: Scene, fault: Fault) -> Iterator[Struck]:
    with _ordered(scene, fault.random.randrange(scene.ranks), Order(fault.number, "load")):
        scene.kill(_pid(scene, fault.rank))
        yield Struck(_fired(scene, fault.number), how="armed")


@kind("segv", "a segmentation fault of a rank")
def segv(scene: Scene, fault: Fault) -> Iterator[Struck]:
    yield Struck(scene.kill(_pid(scene, fault.rank), signal.SIGSEGV))


@kind("term", "SIGTERM to a rank, from somebody else than its launcher")
def term(scene: Scene, fault: Fault) -> Iterator[Struck]:
    yield Struck(scene.kill(_pid(scene, fault.rank), signal.SIGTERM))


@kind("stop", "SIGSTOP of a rank: it is there, and does nothing", weight=1)
def stop(scene: Scene, fault: Fault) -> Iterator[Struck]:
    yield Struck(scene.kill(_pid(scene, fault.rank), signal.SIGSTOP))


@kind("pause", "SIGSTOP of a rank, which goes on half a second later")
def pause(scene: Scene, fault: Fault) -> Iterator[Struck]:
    pid = _pid(scene, fault.rank)
    with _held(scene, pid):
        when = time.monotonic()
        time.sleep(0.5)
    yield Struck(when, new_life=False)


@kind("kill-reader", "kill -9 of a process that reads data for a rank", needs="readers")
def kill_reader(scene: Scene, fault: Fault) -> Iterator[Struck]:
    readers = children_of(_pid(scene, fault.rank))
    if not readers:
        raise Missed("the rank has no readers (--workers)")
    yield Struck(scene.kill(fault.random.choice(readers)))


@kind("oom", "a rank that the kernel kills, since it has no memory left", weight=1)
def oom(scene: Scene, fault: Fault) -> Iterator[Struck]:
    pid = _pid(scene, fault.rank)
    group = _memory_group(f"meshrun-chaos-{os.getpid()}-{fault.number}")
    if group is None:
        yield Struck(scene.kill(pid), how="armed")
        return
    try:
        (group / "cgroup.procs").write_text(str(pid))
        when = time.monotonic()
        scene.until(lambda: _is_gone(pid), MOMENT)
        yield Struck(when)
    finally:
        _remove_group(group)


@kind("nursery", "kill -9 of the process that ranks are forked from", weight=1)
def nursery(scene: Scene, fault: Fault) -> Iterator[Struck]:
    parent = parent_of(_pid(scene, fault.rank))
    if parent is None or scene.launcher is None or parent in (1, scene.launcher.pid):
        raise Missed("the rank has no nursery")
    scene.seen.add(parent)
    yield Struck(scene.kill(parent))


@kind("launcher", "kill -9 of the launcher, sometimes of the next one too, before its first step", weight=1)
def launcher(scene: Scene, fault: Fault) -> Iterator[Struck]:
    source = fault.random
    time.sleep(source.uniform(0.0, 0.1))
    when = scene.kill_launcher()
    if source.random() < 0.3:
        scene.resume()
        scene.until(lambda: scene.at(fault.rank, "starting"), every=CLOSE)
        time.sleep(source.uniform(0.0, 0.05))
        when = scene.kill_launcher()
    yield Struck(when, launcher=True)


@kind("launcher-term", "SIGTERM to the launcher, as a batch system sends it", weight=1)
def launcher_term(scene: Scene, fault: Fault) -> Iterator[Struck]:
    time.sleep(fault.random.uniform(0.0, 0.1))
    assert scene.launcher is not None
    when = scene.kill(scene.launcher.pid, signal.SIGTERM)
    if scene.launcher.wait(60) == 0:
        raise Missed("the run had ended already")
    yield Struck(when, launcher=True)


def _truncated(folder: Path, source: random.Random) -> None:
    path = source.choice(sorted(folder.glob("rank-*")))
    os.truncate(path, source.randrange(path.stat().st_size))


def _flipped(folder: Path, source: random.Random) -> None:
    path = source.choice(sorted(folder.glob("rank-*")))
    data = bytearray(path.read_bytes())
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    path.write_bytes(data)


def _deleted(folder: Path, source: random.Random) -> None:
    source.choice(sorted(folder.iterdir())).unlink()


def _garbled(folder: Path, source: random.Random) -> None:
    path = folder / "manifest.json"
    data = bytearray(path.read_bytes())
    start = source.randrange(len(data))
    data[start : start + 40] = source.randbytes(40)
    path.write_bytes(data)


DAMAGES = {"truncated": _truncated, "flipped": _flipped, "deleted": _deleted, "garbled": _garbled}
"""What can happen to the files of a checkpoint."""


def _damaged(damage: Callable[[Path, random.Random], None]) -> Callable[[Scene, Fault], Iterator[Struck]]:
    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        scene.until(lambda: len(scene.checkpoints()) > 1)
        when = scene.kill_launcher()
        found = scene.checkpoints()
        damage(found[-1], fault.random)
        yield Struck(when, launcher=True)
        resumed = [event for event in scene.events(0) if event["kind"] == "resumed"]
        step, newest = resumed[-1]["step"] if resumed else 0, (catalog.number(found[-1]) or (0, 0))[0]
        if step >= newest:
            raise NotSurvived(f"the run went on from step {step}, whose checkpoint is damaged")

    return strike


for _name, _damage in DAMAGES.items():
    kind(f"checkpoint-{_name}", f"the newest checkpoint is {_name}, and the launcher killed", 1)(_damaged(_damage))


def _disk(which: str) -> Callable[[Scene, Fault], Iterator[Struck]]:
    """The run directory's disk fails; where this process may not mount one, ranks refuse to write checkpoints."""

    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        if not scene.disk.mounted:
            yield from _armed_disk(which)(scene, fault)
            return
        # As long as it takes to come to a checkpoint and an evaluation, whose weights are to be written.
        first = _last_step(scene)
        last = first + scene.eval_every + DISK_STEPS
        if last > scene.total_steps() - DISK_STEPS:
            raise Missed("too few steps are left for a disk that fails for a while")
        scene.control.pace(0.0)
        when = time.monotonic()
        try:
            (scene.disk.fill if which == "full" else scene.disk.protect)()
            scene.until(lambda: _last_step(scene) >= last)
            yield Struck(when, new_life=False)
        finally:
            scene.disk.heal()
        _await_save(scene)

    return strike


def _armed_disk(which: str) -> Callable[[Scene, Fault], Iterator[Struck]]:
    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        before = len(_saves(scene))
        when = time.monotonic()
        with contextlib.ExitStack() as broken:
            for rank in range(scene.ranks):
                broken.enter_context(_ordered(scene, rank, Order(fault.number, "disk", DISK_ERRORS[which])))
            scene.until(lambda: any(each["error"] for each in _saves(scene)[before:]))
            yield Struck(when, new_life=False, how="armed")
        _await_save(scene)

    return strike


def _await_save(scene: Scene) -> None:
    """Wait for a checkpoint of a disk that is well again; the run may be at its end."""
    healed = len(_saves(scene))
    with contextlib.suppress(Missed):
        scene.until(lambda: any(not each["error"] for each in _saves(scene)[healed:]))


def _last_step(scene: Scene) -> int:
    life = scene.life()
    return life.last if life is not None else 0


for _name in ("full", "read-only"):
    kind(f"disk-{_name}", f"the disk under the run directory is {_name} for a while", 1, needs_disk=True)(_disk(_name))
kind("disk-error", "the disk under checkpoints answers with errors for a while", 1)(_armed_disk("error"))


def _clock(seconds: int) -> Callable[[Scene, Fault], Iterator[Struck]]:
    def strike(scene: Scene, fault: Fault) -> Iterator[Struck]:
        with _ordered(scene, fault.rank, Order(fault.number, "clock", seconds)):
            when = _fired(scene, fault.number)
            # A rank that is lost while clocks differ must not be mistaken for one of another time.
            if fault.random.random() < 0.5:
                scene.kill(_pid(scene, fault.random.randrange(scene.ranks)))
                yield Struck(when, how="armed")
            else:
                yield Struck(when, new_life=False, how="armed")

    return strike


kind("clock-forward", "a rank's clock jumps an hour ahead", 1)(_clock(3600))
kind("clock-back", "a rank's clock jumps a day back", 1)(_clock(-86_400))


def _saves(scene: Scene) -> list[dict[str, object]]:
    return [event for event in scene.events(0) if event["kind"] == "checkpoint"]


def _pid(scene: Scene, rank: int) -> int:
    reading = scene.reading(rank)
    if reading is None:
        raise Missed(f"rank {rank} is not there")
    return reading.pid


def _fired(scene: Scene, number: int, patience: float = MOMENT) -> float:
    return scene.until(lambda: scene.control.fired(number), patience)


@contextmanager
def _ordered(scene: Scene, rank: int, order: Order) -> Iterator[None]:
    scene.control.order(rank, order)
    try:
        yield
    finally:
        scene.control.take_back(rank)


@contextmanager
def _held(scene: Scene, pid: int) -> Iterator[None]:
    """A process that does nothing for a while."""
    scene.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _memory_group(name: str) -> Path | None:
    """A control group whose processes get no more memory; None where this process may not make one."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text("65536")
        except OSError:
            _remove_group(group)
            continue
        return group
    return None


def _remove_group(group: Path) -> None:
    for _ in range(200):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.01)
        else:
            return
