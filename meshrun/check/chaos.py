"""Runs into which faults strike, and the proof that each ends as the run without faults does.

    chaos = Chaos("digits", armed, {"steps": 240, "procs": 2}, folder, Place(ranks=2))
    chaos.reference()                                # once, without faults
    outcome = chaos.strike(plan(1, 200, ranks=2), tell)
    outcome.survived, outcome.failures

Several faults strike into one run, one after the other, each once the run has gone on after the one before. A fault is
survived when the run goes on by itself (or, where its launcher was lost, when it is resumed), reaches its end with
weights, losses and scores that are bitwise those of the reference (or as near as another order of sums allows, where
it had fewer ranks for a while), has used every sample as often as that one, and leaves nothing behind: no process, no
memory, no half of a checkpoint.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from meshrun.check.armed import Control
from meshrun.check.disk import can_mount
from meshrun.check.faults import KINDS, Fault
from meshrun.check.reached import Reached, differences, others
from meshrun.check.scene import Life, Missed, NotSurvived, Scene
from meshrun.errors import RunFailed
from meshrun.state.catalog import PARTIAL

AT_ONCE = 16
"""Faults that strike into one run."""
PACE = 0.005
"""Seconds that a step takes longer while there are faults to come, or else a run of short steps would be over."""
MARGIN = 8
"""Steps before the end of a run in which no fault strikes but those of its end."""
TRIES = 4
"""Runs in which the moment for a fault may fail to come."""
GONE_WITHIN = 5.0
"""Seconds after the end of a run in which the last of its processes may go."""


@dataclass(frozen=True)
class Record:
    """What became of a fault."""

    fault: Fault
    seconds: float | None
    """From the fault to the next finished step; None where none was left to finish."""
    how: str
    failure: str = ""
    """Why it was not survived."""


@dataclass
class Outcome:
    """What became of all faults."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ids_lost: int = 0
    ids_repeated: int = 0
    weights_equal: bool = True
    runs: int = 0

    @property
    def survived(self) -> int:
        return sum(not each.failure for each in self.records)

    def document(self) -> dict[str, Any]:
        return {
            "faults": len(self.records),
            "survived": self.survived,
            "ids_lost": self.ids_lost,
            "ids_repeated": self.ids_repeated,
            "weights_equal": self.weights_equal,
            "runs": self.runs,
            "by_kind": {name: self._of_kind(name) for name in KINDS if self._records(name)},
            "failures": self.failures,
        }

    def _records(self, name: str) -> list[Record]:
        return [each for each in self.records if each.fault.kind == name]

    def _of_kind(self, name: str) -> dict[str, Any]:
        records = self._records(name)
        times = [each.seconds for each in records if each.seconds is not None]
        return {
            "faults": len(records),
            "survived": sum(not each.failure for each in records),
            "seconds": round(median(times), 3) if times else None,
            "longest": round(max(times), 3) if times else None,
            "how": ", ".join(sorted({each.how for each in records})),
        }


@dataclass(frozen=True)
class Place:
    """Where runs are, and what that means for faults."""

    ranks: int
    scene: Callable[[Path, Control, dict[str, Any], int], Scene] = Scene
    pace: float = PACE
    at_once: int = AT_ONCE
    tolerance: float = 0.0
    """How far a run may be from the one without faults: by nothing, where it always has the same ranks."""


Tell = Callable[[Outcome], None]


class Chaos:
    """A target with its options, and what it reaches without faults."""

    def __init__(
        self, target: str, armed: str, document: dict[str, Any], folder: Path, place: Place, keep: bool = False
    ) -> None:
        """`armed` is the text of a file with the same experiment, which arms ranks from the folder `control` beside it.

        `document` holds options as a file for --config does.
        """
        self.target, self.armed, self.document, self.folder, self.keep = target, armed, document, folder.resolve(), keep
        self.place = place
        self._reference: Reached | None = None
        self._can_mount = can_mount()

    def reference(self) -> None:
        """Train without faults, and without anything in the ranks that could make some."""
        with self._scene("reference") as scene:
            scene.begin(self.target)
            try:
                scene.completes()
            except NotSurvived as failure:
                raise RunFailed(f"without any fault, {failure}") from None
            self._reference = Reached.read(scene.run)

    @property
    def evaluates(self) -> bool:
        """Whether its runs evaluate, as the reference has shown."""
        return self._reference is not None and bool(self._reference.result["eval"])

    def strike(self, faults: list[Fault], tell: Tell) -> Outcome:
        """Strike all faults, in as many runs as that takes."""
        outcome, queue, missed = Outcome(), deque(faults), Counter[int]()
        while queue:
            batch = self._batch(queue)
            batch.sort(key=lambda fault: (KINDS[fault.kind].at_the_end, KINDS[fault.kind].last))
            outcome.runs += 1
            one = _Run(batch)
            name = f"run-{outcome.runs:04d}"
            with self._scene(name) as scene:
                self._run(scene, one)
                if not one.failure:
                    self._judge(scene, one, outcome)
            if not one.failure:
                one.failure = scene.left_behind(GONE_WITHIN)
            self._account(one, scene, outcome, queue, missed)
            tell(outcome)
        return outcome

    def _batch(self, queue: deque[Fault]) -> list[Fault]:
        """The next faults for one run: after one that is the last of a run none can follow."""
        batch: list[Fault] = []
        while queue and len(batch) < self.place.at_once and not any(KINDS[fault.kind].last for fault in batch):
            batch.append(queue.popleft())
        return batch

    @contextmanager
    def _scene(self, name: str) -> Iterator[Scene]:
        folder = self.folder / name
        (folder / "control").mkdir(parents=True)
        with self.place.scene(folder, Control(folder / "control"), self.document, self.place.ranks) as scene:
            yield scene

    def _run(self, scene: Scene, one: _Run) -> None:
        """One run, with as many of the faults as it takes."""
        control = scene.control
        control.pace(self.place.pace)
        target = scene.folder / "armed_target.py"
        target.write_text(self.armed)
        if self._can_mount and any(KINDS[fault.kind].needs_disk for fault in one.waiting):
            scene.disk.mount()
        scene.begin(target)
        try:
            while one.waiting:
                self._next(scene, one)
            control.pace(0.0)
            scene.completes()
        except NotSurvived as failure:
            one.failure = str(failure)
        except Missed as ended:
            # It ended between two faults, which is well only if that was its end.
            if scene.status != 0:
                one.failure = f"{ended}: {scene.last_words()}"

    def _next(self, scene: Scene, one: _Run) -> None:
        fault = one.waiting[0]
        kind = KINDS[fault.kind]
        life = scene.until(scene.life)
        if not kind.at_the_end:
            enough = life.last + fault.gap
            life = scene.until(lambda: _if_past(scene.life(), enough))
            if life.last > scene.total_steps() - MARGIN:
                one.put_off()
                return
        one.waiting.pop(0)
        one.last = fault
        try:
            with kind.strike(scene, fault) as struck:
                if struck.launcher:
                    scene.resume()
                on = scene.goes_on(struck.before or life, struck.new_life)
        except Missed:
            one.missed.append(fault)
            scene.control.pace(self.place.pace)
            return
        scene.control.pace(self.place.pace)
        one.records.append(Record(fault, None if on is None else on - struck.when, struck.how))

    def _judge(self, scene: Scene, one: _Run, outcome: Outcome) -> None:
        """Compare what a run has reached with what it would have reached without faults."""
        reference = self._reference
        assert reference is not None
        try:
            reached = Reached.read(scene.run)
        except (OSError, ValueError) as error:
            one.failure = f"what it reached cannot be read: {error}"
            return
        lost, repeated = differences(reached.ids, reference.ids)
        outcome.ids_lost += lost
        outcome.ids_repeated += repeated
        wrong = others(reached, reference, self.place.tolerance)
        outcome.weights_equal = outcome.weights_equal and not any(name in reference.weights for name in wrong)
        if wrong:
            one.failure = f"the run came to other {', '.join(wrong)} than the one without faults"
        elif lost or repeated:
            one.failure = f"{lost} samples were lost and {repeated} used twice"
        elif halves := sorted(path.name for path in scene.run.checkpoints.glob(f"{PARTIAL}*")):
            one.failure = f"{halves[0]} was left in {scene.run.checkpoints}"

    def _account(self, one: _Run, scene: Scene, outcome: Outcome, queue: deque[Fault], missed: Counter[int]) -> None:
        again = [*one.missed, *one.waiting, *one.put_offs]
        fell = one.fell_with()
        if one.failure:
            kinds = ", ".join([*(each.fault.kind for each in one.records), *([fell.kind] if fell else [])])
            outcome.failures.append(f"{one.failure} (after {kinds or 'no fault'}; {scene.run.path})")
        elif not self.keep:
            shutil.rmtree(scene.folder, ignore_errors=True)
        if fell is not None:
            # Those before it get another run, which shows what they come to.
            outcome.records.append(Record(fell, None, "", one.failure))
            again += [each.fault for each in one.records]
        elif one.failure and not one.records:
            outcome.records.append(Record(again.pop(0), None, "", one.failure))
        else:
            outcome.records += [replace(each, failure=one.failure) for each in one.records]
        for fault in one.missed:
            missed[fault.number] += 1
            if missed[fault.number] >= TRIES and fault in again:
                again.remove(fault)
                outcome.records.append(Record(fault, None, "", "its moment never came"))
                outcome.failures.append(f"{fault.kind}: its moment did not come in {TRIES} runs")
        queue.extendleft(sorted(again, key=lambda fault: -fault.number))


@dataclass
class _Run:
    """One run's faults."""

    waiting: list[Fault]
    records: list[Record] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    put_offs: list[Fault] = field(default_factory=list)
    last: Fault | None = None
    """The last one that struck."""
    failure: str = ""

    def fell_with(self) -> Fault | None:
        """The fault that struck last, if the run did not go on after it."""
        over = [*(each.fault for each in self.records), *self.missed]
        return self.last if self.failure and self.last not in over else None

    def put_off(self) -> None:
        """The run is at its end: what is of its end can still strike."""
        self.put_offs += [fault for fault in self.waiting if not KINDS[fault.kind].at_the_end]
        self.waiting = [fault for fault in self.waiting if KINDS[fault.kind].at_the_end]


def _if_past(life: Life | None, step: int) -> Life | None:
    return life if life is not None and life.last >= step else None
