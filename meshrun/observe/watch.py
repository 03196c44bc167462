"""Watches the ranks of a node from their launcher: notices that nothing moves, and finds out why.

    watch = Watcher(memory, run.path, config, host)
    watch.started({0: 4711, 1: 4712}, generation=0)
    finding = watch.look()               # every 0.1 s; a Finding once a hang, else None
    watch.progress()                     # the highest step that any rank has finished
    watch.patience()                     # seconds of the longest step
    watch.takes_long()                   # whether a rank is at something that may take longer: an evaluation
    watch.notes()                        # new sentences on ranks that are slow

A rank is overdue when its last mark is older than its limit, and the run hangs when every rank that is not done is
overdue: while one of them still gets on, the others may be waiting for it in good order. Nothing is asked of a rank
before that, so watching costs the training nothing. Plain scripts mark no progress: `ScriptWatcher` sees from outside
whether they are idle.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from meshrun.config import RunConfig
from meshrun.observe import flight, stacks
from meshrun.observe.hang import DataReader, Finding, Witness, diagnose
from meshrun.observe.idle import Activity
from meshrun.observe.pulse import BEAT_EVERY, LONG_PHASES, PulseView, Reading
from meshrun.observe.stragglers import LOOK_EVERY, Straggling
from meshrun.observe.testimony import all_witnesses

LEAST_LIMIT = 10.0
IDLE_LIMIT = 60.0
"""Seconds that all ranks of a plain script may be idle before a sentence says so."""
TIMES_LONGEST = 10.0
STATE_EVERY = 0.5
"""Seconds between two looks at the pulses."""
OTHER_NODES = 3.0
"""Seconds that other nodes have to show what they see."""


class Watcher:
    """One for the ranks of a node; it lives longer than they do."""

    def __init__(
        self, memory: Path, run: Path, config: RunConfig, host: str, others: bool | None = None, late: float = 0.0
    ) -> None:
        """`others`: whether there are ranks on other nodes, where the configuration does not say it.

        `late`: seconds that it adds to every limit, to leave a hang to another watcher.
        """
        self._late = late
        self._memory, self._run, self._config, self._host = memory, run, config, host
        self._others = (config.nodes != "1" or config.join is not None) if others is None else others
        self._pids: dict[int, int] = {}
        self._views: dict[int, PulseView] = {}
        self._generation, self._best, self._longest, self._due = 0, 0, 0.0, 0.0
        self._stopped: dict[int, float] = {}
        self._reported: dict[int, int] = {}
        self._inquiry: _Inquiry | None = None
        self._straggling = Straggling(host, by_stage="pp=" in config.layout)
        self._straggling_due, self._notes = 0.0, list[str]()

    def started(self, pids: Mapping[int, int], generation: int) -> None:
        """These processes are the node's ranks from now on."""
        self._pids, self._generation = dict(pids), generation
        self._views, self._stopped, self._reported, self._inquiry = {}, {}, {}, None
        self._due, self._straggling_due = 0.0, time.monotonic() + LOOK_EVERY
        self._straggling.restart()

    def look(self) -> Finding | None:
        """What is wrong, told once; None while all is well or not yet known."""
        if self._inquiry is not None:
            return self._result(self._inquiry)
        now = time.monotonic()
        if now < self._due or not self._pids:
            return None
        self._due = now + STATE_EVERY
        pulses = self._read()
        if now >= self._straggling_due and len(pulses) == len(self._pids):
            self._straggling_due = now + LOOK_EVERY
            self._notes += self._straggling.look(pulses)
        if not self._hangs(pulses, now):
            return None
        marks = {pulse.rank: pulse.marks for pulse in pulses}
        if marks == self._reported:
            return None
        self._inquiry = _Inquiry(self._memory, self._host, dict(self._views), dict(self._pids), marks)
        self._inquiry.begin(self._run / "hangs" if self._others else None, self._generation)
        return None

    def progress(self) -> int:
        """The highest step that any rank has finished."""
        self._best = max([self._best, *(pulse.last for pulse in self._read())])
        return self._best

    def patience(self) -> float:
        """Seconds of the longest step; that of ranks before these until one of these has finished one."""
        self._longest = max((pulse.longest for pulse in self._read() if pulse.finished), default=self._longest)
        return self._longest

    def takes_long(self) -> bool:
        """Whether a rank that is not overdue is at its first step, evaluates or saves, or waits for another node."""
        pulses = self._read()
        return any(self._is_at_length(each) and each.silent <= self._limit(each, pulses) for each in pulses)

    def _is_at_length(self, pulse: Reading) -> bool:
        if pulse.phase == "starting" or stacks.state_of(pulse.pid) in ("T", "t", ""):
            return False  # there is nothing to keep yet, or it will not get on
        # A rank of another node that evaluates longer, say, keeps those here waiting.
        return pulse.phase in LONG_PHASES or not pulse.finished or (self._others and bool(pulse.what))

    def notes(self) -> list[str]:
        """Sentences on slow ranks since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _read(self) -> list[Reading]:
        pulses = []
        for rank, pid in self._pids.items():
            view = self._views.get(rank) or PulseView.open(self._memory, rank)
            if view is None:
                continue
            pulse = view.read()
            # A file that the rank of an earlier generation has left counts for nothing.
            if pulse.generation == self._generation and pulse.pid == pid:
                self._views[rank] = view
                pulses.append(pulse)
        return pulses

    def _hangs(self, pulses: list[Reading], now: float) -> bool:
        if len(pulses) < len(self._pids):
            return False
        if self._stopped_too_long(pulses, now):
            return True
        limits = {pulse.rank: self._limit(pulse, pulses) + self._late for pulse in pulses}
        unfinished = [pulse for pulse in pulses if pulse.phase != "done" or pulse.silent > limits[pulse.rank]]
        return bool(unfinished) and all(pulse.silent > limits[pulse.rank] for pulse in unfinished)

    def _limit(self, pulse: Reading, pulses: list[Reading]) -> float:
        return limit_of(pulse, pulses, self._config)

    def _stopped_too_long(self, pulses: list[Reading], now: float) -> bool:
        """A stopped process never gets on, whatever phase it is in."""
        stopped = {pulse.rank for pulse in pulses if stacks.state_of(pulse.pid) in ("T", "t")}
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        limit = (self._config.hang_after or LEAST_LIMIT) + self._late
        return any(now - since > limit for since in self._stopped.values())

    def _result(self, inquiry: _Inquiry) -> Finding | None:
        if inquiry.thread.is_alive():
            return None
        self._inquiry = None
        witnesses = inquiry.witnesses
        if not witnesses:
            return None
        moved = {each.pulse.rank: each.pulse.marks for each in witnesses} != inquiry.marks
        if moved or any(each.state in ("", "Z") for each in witnesses):
            # It goes on after all, or a rank has died: that is the launcher's own to see.
            return None
        self._reported = inquiry.marks
        finding = diagnose(inquiry.everywhere)
        kept = self._keep(finding, inquiry)
        # A rank of another node is for that node's own watcher to tell of.
        if finding.rank not in (-1, *self._pids):
            return None
        where = f"; all stacks are in {kept}" if kept is not None else ""
        return Finding(finding.rank, finding.sentence + where, kept)

    def _keep(self, finding: Finding, inquiry: _Inquiry) -> Path | None:
        """All that was seen, in one file with a section a rank."""
        step = max(each.pulse.step for each in inquiry.witnesses)
        file = self._run / "hangs" / f"step-{step:08d}-{self._generation}-{self._host}.txt"
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text(inquiry.report(finding.sentence))
        except OSError:
            return None
        return file


class ScriptWatcher(Watcher):
    """For the ranks of a plain script, which mark nothing themselves: this marks for them that they are not idle.

    So a long computation is never a hang, whatever it computes.
    """

    def started(self, pids: Mapping[int, int], generation: int) -> None:
        super().started(pids, generation)
        self._activity = Activity()

    def takes_long(self) -> bool:
        return False

    def _read(self) -> list[Reading]:
        # Ranks may end one long after the other: who has ended well keeps nobody from looking at the rest.
        for rank in [rank for rank, pid in self._pids.items() if stacks.state_of(pid) in ("", "Z")]:
            del self._pids[rank]
            self._views.pop(rank, None)
        for rank, view in self._views.items():
            if self._activity.seen(self._pids[rank]):
                view.touch()
        return super()._read()

    def _result(self, inquiry: _Inquiry) -> Finding | None:
        finding = super()._result(inquiry)
        for pid in self._pids.values():
            self._activity.forget(pid)  # to answer was no progress
        return finding

    def _limit(self, pulse: Reading, pulses: list[Reading]) -> float:
        del pulse, pulses  # no step says how long the next one may take
        return self._config.hang_after or IDLE_LIMIT


def limit_of(pulse: Reading, pulses: list[Reading], config: RunConfig) -> float:
    """How long a rank may be silent where it is now."""
    if pulse.phase == "after":
        return math.inf  # all is kept, nobody waits for it, and only the user knows how long that takes
    if pulse.phase == "evaluating" and pulse.evaluations:
        return max(config.hang_after or LEAST_LIMIT, TIMES_LONGEST * pulse.longest_evaluating)
    if pulse.phase in LONG_PHASES or not pulse.finished:
        return max(config.timeout, config.hang_after or 0.0)
    if config.hang_after is not None:
        return config.hang_after
    return max(LEAST_LIMIT, TIMES_LONGEST * max(each.longest for each in pulses))


class _Inquiry:
    """Asks all ranks of the node where they are, beside the launcher's own loop, in about a second."""

    def __init__(
        self, memory: Path, host: str, views: dict[int, PulseView], pids: dict[int, int], marks: dict[int, int]
    ) -> None:
        self._memory, self._host, self._views, self._pids, self.marks = memory, host, views, pids, marks
        self.witnesses: list[Witness] = []
        self.everywhere: list[Witness] = []
        """With those of other nodes."""
        self._texts: dict[int, list[tuple[str, str]]] = {}

    def begin(self, shared: Path | None, generation: int) -> None:
        """`shared` is where nodes show each other what they see."""
        self.thread = threading.Thread(target=self._run, args=(shared, generation), name="inquiry", daemon=True)
        self.thread.start()

    def _run(self, shared: Path | None, generation: int) -> None:
        questions = {rank: view.ask() for rank, view in self._views.items()}
        asked = time.monotonic()
        seen = {rank: self._look_at(rank, pid) for rank, pid in self._pids.items()}
        witnesses = []
        for rank, (state, frames, readers) in seen.items():
            groups = _until(
                lambda rank=rank: flight.read(self._memory, rank, questions[rank]),  # type: ignore[misc]
                asked + (2 * BEAT_EVERY if state not in ("T", "t") else 0),
            )
            pulse = self._views[rank].read()
            witnesses.append(Witness(pulse, self._host, state, frames, readers, groups or []))
        self.everywhere = self.witnesses = witnesses
        if shared is not None and witnesses:
            with contextlib.suppress(OSError):
                self.everywhere = all_witnesses(shared, generation, witnesses, time.monotonic() + OTHER_NODES)
            # Meanwhile the run may have gone on.
            self.witnesses = [replace(each, pulse=self._views[each.rank].read()) for each in witnesses]

    def _look_at(self, rank: int, pid: int) -> tuple[str, list[stacks.Frame], list[DataReader]]:
        state, file = stacks.state_of(pid), stacks.path_of(self._memory, rank)
        thread = self._views[rank].read().thread
        text = stacks.ask(pid, file) if state not in ("T", "t", "") else ""
        self._texts[rank] = [(f"rank {rank}, process {pid}, state {state or 'gone'}", text)]
        readers = []
        for child in stacks.children_of(pid):
            of_child = stacks.state_of(child)
            said = stacks.ask(child, file) if of_child not in ("T", "t") else ""
            self._texts[rank].append((f"process {child} of rank {rank}, state {of_child or 'gone'}", said))
            frames = _out_to_the_loop(stacks.thread_stacks(said).get(thread, []))
            if frames or of_child in ("T", "t"):
                readers.append(DataReader(child, of_child, frames))
        return state, stacks.thread_stacks(text).get(thread, []), readers

    def report(self, sentence: str) -> str:
        parts = [sentence]
        for each in self.witnesses:
            pulse = each.pulse
            parts.append(
                f"=== rank {each.rank} on {each.host}: {pulse.phase}, step {pulse.step}, waits for "
                f"{pulse.what or 'nothing'}, silent for {pulse.silent:.1f} s, last beat {pulse.beat_age:.1f} s ago"
            )
            for group in each.groups:
                last = "; ".join(f"{call} {call.shape}{'' if call.over else ' PENDING'}" for call in group.calls[-3:])
                parts.append(f"collectives of {group.name}, ranks {list(group.ranks)}: {last}")
            parts += [f"--- {title}\n{text or 'gave no answer'}" for title, text in self._texts.get(each.rank, [])]
        return "\n".join(parts) + "\n"


def _out_to_the_loop(frames: list[stacks.Frame]) -> list[stacks.Frame]:
    """A reader's frames without those of the rank that it was forked from; none for a process that is no reader."""
    ends = [index for index, frame in enumerate(frames) if frame.function == "_worker_loop"]
    return frames[: ends[0] + 1] if ends else []


def _until(answer: Callable[[], list[flight.Group] | None], give_up: float) -> list[flight.Group] | None:
    while (found := answer()) is None and time.monotonic() < give_up:
        time.sleep(0.02)
    return found
