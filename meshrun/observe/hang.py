"""Who keeps a run from going on: one sentence from what all of its ranks show while nothing moves.

    finding = diagnose(witnesses)
    finding.rank, finding.sentence      # 1, "rank 1 on node7 has been in model.py:40 forward (time.sleep(1000)) for …"

Most ranks of a run that hangs do what they should: they wait in a collective. The one to name is, in this order: a rank
that is stopped, one that waits for its own data reader, one whose main thread is anywhere but in a collective, and,
where all of them are in collectives, the one that never came to the collective in which others have waited longest.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshrun.observe.flight import Call, Group, familiar
from meshrun.observe.pulse import SCRIPT_PHASES, Reading
from meshrun.observe.stacks import Frame

_OURS = str(Path(__file__).parents[1]) + "/"
_RECIPES = _OURS + "recipes/"
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{Path(os.__file__).parent}/", "<frozen")


@dataclass(frozen=True)
class Finding:
    """What is wrong with which rank; -1 where it cannot be told."""

    rank: int
    sentence: str
    stacks: Path | None = None
    """Where all that was seen is kept."""


@dataclass(frozen=True)
class DataReader:
    """A process that reads samples for a rank."""

    pid: int
    state: str
    frames: Sequence[Frame] = ()
    """Innermost first, out to the reader's own loop."""


@dataclass(frozen=True)
class Witness:
    """All that is seen of one rank from outside."""

    pulse: Reading
    host: str
    state: str = "S"
    frames: Sequence[Frame] = ()
    """The main thread, innermost first."""
    readers: Sequence[DataReader] = ()
    groups: Sequence[Group] = ()

    @property
    def rank(self) -> int:
        return self.pulse.rank

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def is_script(self) -> bool:
        """Whether it runs a plain script, of which no steps are known."""
        return self.pulse.phase in SCRIPT_PHASES

    @property
    def at_step(self) -> str:
        return "" if self.is_script else f" at step {self.pulse.step}"

    @property
    def waits_in(self) -> str:
        """What it would say that it waits for; of a script the user's own line."""
        if self.is_script and self.frames:
            return _named(self.frames)
        pending = [call for group in self.groups for call in group.pending]
        return self.pulse.what or (str(pending[0]) if pending else "a collective")


Kind = Literal["stopped", "reader", "code", "done", "others"]


@dataclass(frozen=True)
class Place:
    """Where a rank is, and whether it is the others that it waits for."""

    kind: Kind
    text: str = ""


def diagnose(witnesses: Sequence[Witness]) -> Finding:
    """The rank that all others wait for, and what it does instead."""
    places = {each.rank: place_of(each) for each in witnesses}
    by_rank = {each.rank: each for each in witnesses}
    for kind in ("stopped", "reader", "code"):
        there = [by_rank[rank] for rank, place in places.items() if place.kind == kind]
        if there:
            guilty = max(there, key=lambda each: each.pulse.silent)
            return Finding(guilty.rank, _sentence(guilty, places, witnesses))
    gone = [by_rank[rank] for rank, place in places.items() if place.kind == "done"]
    waiting = [each for each in witnesses if places[each.rank].kind == "others"]
    if gone and waiting and gone[0].is_script:
        return Finding(
            gone[0].rank,
            f"{gone[0].name} has finished, while {_waits(waiting)}; all ranks must call the model, barrier() and other "
            f"collectives equally often",
        )
    absent = missing(witnesses)
    if absent is not None:
        return absent
    if gone and waiting:
        return Finding(
            gone[0].rank,
            f"{gone[0].name} has finished{gone[0].at_step}, while {_waits(waiting)}",
        )
    if gone and gone[0].is_script:
        where = f", which is in {_line(gone[0])}" if gone[0].frames else ""
        return Finding(
            gone[0].rank,
            f"{gone[0].name} has come to the end of its script, but its process has not ended for "
            f"{gone[0].pulse.silent:.0f} s{where}",
        )
    longest = max(witnesses, key=lambda each: each.pulse.silent)
    return Finding(
        -1,
        f"no rank on {longest.host} has got on for {longest.pulse.silent:.0f} s{longest.at_step}: "
        f"{_waits(witnesses, 'others')}",
    )


def place_of(witness: Witness) -> Place:
    """Where the main thread is, told from its innermost frames."""
    if witness.state in ("T", "t"):
        return Place("stopped", "has been stopped (SIGSTOP)")
    ended = witness.pulse.phase == "ended"  # what it waits for then is that all ranks have come so far
    if ended or (witness.pulse.phase == "done" and not witness.pulse.what):
        return Place("done")
    frames = witness.frames
    inner = list(itertools.takewhile(_is_library, frames))
    own = frames[len(inner)] if len(inner) < len(frames) else None
    pending = any(group.pending for group in witness.groups)
    if any("/torch/utils/data/dataloader.py" in frame.file for frame in inner):
        return Place("reader", _reader(witness.readers))
    if any("/torch/distributed/" in frame.file for frame in inner):
        return Place("others")
    if not frames:
        # It gave no stack: what it said itself is all there is.
        what = witness.pulse.what
        return Place("others") if what or pending else Place("code", f"has been {witness.pulse.phase}")
    if any(frame.function == "_engine_run_backward" for frame in inner):
        return Place("others") if pending else Place("code", f"has been in {_named(frames)}")
    code = own.code if own is not None else ""
    if own is not None and (".wait(" in code or (pending and _reads_a_number(code))):
        return Place("others")
    return Place("code", f"has been in {_named(frames)}" + _disk(witness.state))


def missing(witnesses: Sequence[Witness]) -> Finding | None:
    """Who never issued the collective that others of its group wait in, or issued another one.

    Two ranks may each wait in a collective that the other has not come to: then it is the one whose calls are not in
    the order of the steps before. So it is where one rank's word stands against another's; else most of them decide.
    """
    by_rank = {each.rank: each for each in witnesses}
    usual = {each.rank: familiar(each.groups) for each in witnesses}
    absent, odd = [], []
    stuck = [(each, group, call) for each in witnesses for group in each.groups for call in group.pending]
    for first, group, call in stuck:
        made = {rank: _call_of(by_rank[rank], group.name, call.number) for rank in group.ranks if rank in by_rank}
        late = [rank for rank, theirs in made.items() if theirs is None]
        absent += [(usual[rank], -call.age, rank, first, call) for rank in late]
        kinds = Counter(theirs.kind for theirs in made.values() if theirs is not None)
        if len(kinds) > 1:
            odd += [
                (kinds[theirs.kind], usual[rank], rank, made) for rank, theirs in made.items() if theirs is not None
            ]
    if absent:
        *_, rank, first, call = min(absent, key=lambda each: each[:3])
        return Finding(rank, _never_came(by_rank[rank], witnesses, first, call))
    if odd:
        *_, rank, made = min(odd, key=lambda each: each[:3])
        return Finding(rank, _other_call(by_rank[rank], made, by_rank))
    return None


def _call_of(witness: Witness, group: str, number: int) -> Call | None:
    """What a rank has issued as this number of a group, or after it where that one is forgotten."""
    calls = [call for each in witness.groups if each.name == group for call in each.calls if call.number >= number]
    return min(calls, key=lambda call: call.number, default=None)


def _sentence(guilty: Witness, places: dict[int, Place], witnesses: Sequence[Witness]) -> str:
    waiting = [each for each in witnesses if each is not guilty and places[each.rank].kind == "others"]
    end = f", while {_waits(waiting)}" if waiting else ""
    since = f"for {guilty.pulse.silent:.0f} s{guilty.at_step}"
    place = places[guilty.rank]
    if place.kind == "reader":
        return f"{guilty.name} has waited {since} for {place.text}{end}"
    return f"{guilty.name} {place.text} {since}{end}"


def _waits(waiting: Sequence[Witness], whom: str = "it") -> str:
    ranks = [str(each.rank) for each in waiting]
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_listed(ranks)} wait"
    where = Counter(each.waits_in for each in waiting).most_common(1)[0][0]
    return f"{who} for {whom} in {where}"


def _never_came(guilty: Witness, witnesses: Sequence[Witness], first: Witness, call: Call) -> str:
    waiting = [
        each
        for each in witnesses
        if any(
            theirs.number == call.number and theirs.kind == call.kind
            for group in each.groups
            for theirs in group.pending
        )
    ]
    return (
        f"{guilty.name} never came to {call}, in which {_have(waiting)} waited for {call.age:.0f} s{first.at_step} "
        f"({_line(first)}): it is already in {guilty.waits_in}"
    )


def _other_call(guilty: Witness, made: Mapping[int, Call | None], by_rank: Mapping[int, Witness]) -> str:
    own = made[guilty.rank]
    others = {
        rank: call for rank, call in made.items() if call is not None and own is not None and call.kind != own.kind
    }
    rank, theirs = next(iter(others.items()))
    have = _have([by_rank[each] for each in others])
    return (
        f"{guilty.name} left a collective out or made one too many{guilty.at_step}: its number "
        f"{theirs.number} is {own.kind if own else 'none'}, where {have} waited for "
        f"{theirs.age:.0f} s in {theirs.kind} ({_line(by_rank[rank])})"
    )


def _have(waiting: Sequence[Witness]) -> str:
    ranks = _listed([str(each.rank) for each in waiting])
    return f"rank {ranks} has" if len(waiting) == 1 else f"ranks {ranks} have"


def _line(witness: Witness) -> str:
    return _named(witness.frames) if witness.frames else witness.waits_in


def _reader(readers: Sequence[DataReader]) -> str:
    """What the reader does that is most to blame."""
    if not readers:
        return "its data reader, of which no process is left"
    worst = min(readers, key=lambda each: (each.state not in "Tt", _is_idle(each), each.pid))
    who = f"its data reader (process {worst.pid})"
    if worst.state in ("T", "t"):
        return f"{who}, which is stopped (SIGSTOP)"
    if worst.frames:
        return f"{who}, which is in {_named(worst.frames)}{_disk(worst.state)}"
    return f"{who}, which gives no answer"


def _is_idle(reader: DataReader) -> bool:
    """Whether a reader only waits to be told what to read: nothing but libraries between its loop and where it is."""
    return bool(reader.frames) and all(map(_is_library, reader.frames))


def _named(frames: Sequence[Frame]) -> str:
    """The user's innermost line, or ours, or the library's."""
    own = [frame for frame in frames if not _is_library(frame)]
    users = [frame for frame in own if not frame.file.startswith(_OURS) or frame.file.startswith(_RECIPES)]
    return str((users or own or list(frames))[0])


def _is_library(frame: Frame) -> bool:
    return not frame.file.startswith(_OURS) and any(part in frame.file for part in _LIBRARIES)


def _reads_a_number(code: str) -> bool:
    """On a GPU it is here that the host waits for the collectives that it has queued."""
    return any(word in code for word in (".item(", ".tolist(", ".synchronize(", ".cpu("))


def _disk(state: str) -> str:
    return ", where it waits for a disk or a network file system," if state == "D" else ""


def _listed(names: Sequence[str], most: int = 6) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
