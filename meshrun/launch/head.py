"""Who decides: when ranks are started, what the end of one of them means, and whether they are started anew.

    head = Head(restarts=3, wanted=Wanted(), tell=tell)
    head.join(Member("a", "node7", ranks=2), now)
    head.tick(now)                           # -> head.orders: [("a", Seat(…))]
    head.hear("a", Ended(1, -9, own=True))   # -> head.orders: [("a", Stop(dead=(1,)))]

A generation is one life of all ranks. All of them end when one is lost, and all are started again: processes are cheap,
and state survives outside of them. Nothing here waits, starts or sends: what comes in are facts, what goes out are
orders for nodes, so that one node and many are the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshrun.launch.job import Failure, Seat, Tell, Verdict
from meshrun.launch.ranks import Ended, Gone, Stop

LAST_CALL = 1.0
"""Seconds that are waited for one more node after the last one came."""
LATE = 15.0
"""Seconds after which the user is told which nodes are still expected."""
COMPLETE = 120.0
"""Seconds after the last node came in which others are still expected, where those that are here could begin."""
BLIND = 3.0
"""Seconds in which a node that could not see the run's directory may still come."""


@dataclass(frozen=True)
class Wanted:
    """How many nodes a run takes, and which sizes of the world suit its layout."""

    least: int = 1
    most: int = 1
    fits: Callable[[int], bool] = lambda _size: True
    patience: float = 600.0
    """Seconds to wait for nodes when there are too few."""
    expected: int = 0
    """Nodes that another launcher starts at the same time: the run begins with all of them."""
    hosts: tuple[str, ...] = ()
    """Their names, where they are known."""
    layout: str = "the layout"
    folder: str = ""
    """The run's directory, which all of them must see."""


@dataclass
class Member:
    """A node that takes part, or waits to."""

    id: str
    host: str
    ranks: int
    seat: Seat | None = None
    gone: bool = True
    """Whether no rank of the generation is left on it."""

    @property
    def own(self) -> range:
        assert self.seat is not None
        return range(self.seat.first, self.seat.first + self.ranks)


@dataclass(frozen=True)
class Outcome:
    """How the run ended: well without failures and without a sentence."""

    failures: tuple[Failure, ...] = ()
    sentence: str = ""
    """Why it ended, where no rank's failure says so."""
    by_user: bool = False
    """Whether what the user gave cannot work."""
    cut_off: bool = False
    """Whether another start may cure it: nodes are missing, or there is no time left."""

    @property
    def is_cut_off(self) -> bool:
        """The same where failures alone say it: ranks and nodes were lost, and nobody has made an error."""
        return self.cut_off or (not self.sentence and all(each.is_lost for each in self.failures))


class Head:
    """The state of a run as its first launcher sees it."""

    def __init__(self, restarts: int, wanted: Wanted, tell: Tell) -> None:
        self._restarts, self._wanted, self._tell = restarts, wanted, tell
        self.members: dict[str, Member] = {}
        self.orders: list[tuple[str, Seat | Stop]] = []
        self.outcome: Outcome | None = None
        self.generation = -1
        self.progress = 0
        self._job = uuid.uuid4().hex
        self._phase = "gathering"
        self._since: float | None = None
        """When this phase, or the last change of members in it, began."""
        self._ended: list[Failure] = []
        self._first: str = ""
        """What ended this generation, in a sentence."""
        self._by_verdict = False
        self._final: Outcome | None = None
        self._in_a_row, self._progress_then = 0, -1
        self._told_to_wait = False
        self._blind: dict[str, float] = {}
        self._unfit: dict[str, str] = {}
        """Nodes that were started and cannot take part -> why."""

    @property
    def seated(self) -> list[Member]:
        return [each for each in self.members.values() if each.seat is not None]

    def join(self, member: Member, now: float) -> None:
        self.members[member.id] = member
        self._since = now

    def blind(self, host: str, now: float) -> None:
        """A node of this user says that it cannot see the run's directory; one of another job does not matter."""
        if not self._wanted.hosts or host.partition(".")[0] in self._wanted.hosts:
            self._blind[host] = now

    def unfit(self, host: str, why: str) -> None:
        """A node that was started says that it will not come."""
        if host not in self._unfit:
            self._unfit[host] = why
            self._tell("note", text=f"{host} cannot take part: {why}")

    @property
    def is_waiting(self) -> bool:
        """Whether there are no ranks, who would look at the clock and for who asks them to stop."""
        return self._phase == "gathering" and self.outcome is None

    def leave(self, member_id: str, now: float) -> None:
        """A node is lost, and all of its ranks with it."""
        member = self.members.pop(member_id)
        if member.seat is None or member.gone:
            self._since = now
            return
        lost = tuple(member.own)
        some = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost[0]} to {lost[-1]}"
        self._ended += [Failure(rank, -9, now) for rank in lost]
        self._end_generation(f"node {member.host} with {some} was lost", Stop(dead=lost))

    def hear(self, member_id: str, what: Ended | Gone | Verdict, now: float) -> None:
        """What a node tells of its ranks."""
        member = self.members[member_id]
        match what:
            case Ended(rank, code, own):
                if code != 0:
                    self._failed(member, Failure(rank, code, now), own)
            case Gone(generation):
                member.gone = member.gone or generation == self.generation
            case Verdict(rank, sentence, "restart") if self._phase == "running":
                self._by_verdict = True
                self._end_generation(sentence, Stop(dead=(rank,) if rank >= 0 else ()))  # -1: nobody can be named
            case Verdict(_, sentence, "end") if self._phase == "running":
                self.end(Outcome(sentence=sentence))
            case Verdict(_, sentence, "report"):
                self._tell("hang", sentence=sentence)

    def end(self, outcome: Outcome) -> None:
        """End all ranks, for good."""
        self._final = outcome
        if self._phase == "gathering":
            self.outcome = outcome
        else:
            self._end_generation(outcome.sentence, Stop(final=True))

    def tick(self, now: float) -> None:
        """Do what is due: to be called after every change, and now and then."""
        if self.outcome is not None:
            return
        if self._since is None:
            self._since = now
        if self._phase == "running":
            self._look_for_the_end(now)
        if self._phase == "stopping" and all(member.gone for member in self.seated):
            self._decide(now)
        if self._phase == "gathering" and self.outcome is None:
            self._gather(now)

    def _failed(self, member: Member, failure: Failure, own: bool) -> None:
        killed = own and failure.code < 0
        self._ended.append(failure)
        sentence = f"rank {failure.rank} on {member.host} {failure.how}"
        if self._phase == "running":
            dead = (failure.rank,) if killed else ()
            self._end_generation(sentence, Stop(dead=dead, hurried=not failure.is_lost))
        elif killed and not self._by_verdict and not any(each.code < 0 for each in self._ended[:-1]):
            # Others noticed its death before it could be reported: they were the consequence.
            self._first = sentence

    def _end_generation(self, sentence: str, stop: Stop) -> None:
        if self._phase == "running":
            self._phase, self._first = "stopping", sentence
        self.orders += [(member.id, stop) for member in self.seated if not member.gone]

    def _look_for_the_end(self, now: float) -> None:
        assert self._since is not None
        if all(member.gone for member in self.seated):
            self.outcome = Outcome()
        elif self._can_grow() and now - self._since > LAST_CALL:
            self._end_generation("", Stop(patient=True))

    def _can_grow(self) -> bool:
        return len(self.seated) < len(self._chosen())

    def _chosen(self) -> list[Member]:
        """As many of the nodes, those that came first, as the layout takes; none if that is fewer than wanted."""
        first = list(self.members.values())[: self._wanted.most]
        while len(first) >= self._wanted.least and first:
            if self._wanted.fits(sum(member.ranks for member in first)):
                return first
            first.pop()
        return []

    def _decide(self, now: float) -> None:
        """All ranks of a generation are gone: start anew, or give up."""
        self._phase, self._since = "gathering", now if self._first else self._since
        failures = tuple(self._ended)
        if self._final is not None:
            self.outcome = replace(self._final, failures=failures)
        elif any(not each.is_lost for each in failures):
            self.outcome = Outcome(failures)
        elif self._first:
            self._in_a_row = 0 if self.progress > self._progress_then else self._in_a_row
            self._in_a_row, self._progress_then = self._in_a_row + 1, self.progress
            if self._in_a_row > self._restarts:
                if self._restarts:
                    times = f"{self._restarts} restart{'s' * (self._restarts > 1)}"
                    self._tell("note", text=f"gave up after {times} without a finished step between (--restarts)")
                self.outcome = Outcome(failures, self._first if self._by_verdict else "")
                return
            again = f"start {self._in_a_row} of {self._restarts} without progress" if self._in_a_row > 1 else ""
            sentence = f"{self._first}; all ranks are started again{f' ({again})' if again else ''}"
            self._tell("restart", generation=self.generation + 1, sentence=sentence)

    def _gather(self, now: float) -> None:
        assert self._since is not None
        chosen = self._chosen()
        waited = now - self._since
        patience = min(self._wanted.patience, COMPLETE) if chosen else self._wanted.patience
        missing = self._wanted.expected - len(self.members) - len(self._unfit)
        if self.generation < 0 and missing > 0 and waited <= patience:
            self._await_all(waited, now)
            return
        if not chosen and self._unfit and missing <= 0 and self.generation < 0:
            host, why = next(iter(self._unfit.items()))
            self.outcome = Outcome(sentence=f"{host} cannot take part, and the others are too few: {why}")
            return
        full = len(chosen) == self._wanted.most or (self._first and chosen)
        if chosen and (full or waited > LAST_CALL):
            self._begin(chosen)
        elif waited > LAST_CALL and self.generation >= 0 and not self._told_to_wait:
            self._told_to_wait = True
            least, left = self._wanted.least, len(self.members)
            why = f"{left} of at least {least} nodes are left"
            if left >= least:
                why = (
                    f"the {left} node{'s that are' if left > 1 else ' that is'} left cannot hold {self._wanted.layout}"
                )
            self._tell("note", text=f"{why}: waiting for others")
        elif waited > self._wanted.patience:
            some = f"{len(self.members)} node{'s' * (len(self.members) != 1)}"
            self.outcome = Outcome(
                tuple(self._ended),
                f"{some} came within {self._wanted.patience:.0f} s, but {self._wanted.least} are needed "
                f"in numbers that suit the layout (--nodes, --layout, --timeout)",
                cut_off=self.generation >= 0 or self._wanted.expected > 0,
            )

    def _await_all(self, waited: float, now: float) -> None:
        """The first start: other nodes were started with this one, and are on their way."""
        here = {member.host for member in self.members.values()}
        blind = [host for host, since in self._blind.items() if host not in here and now - since > BLIND]
        if blind:
            some = f"{blind[0]}{f' and {len(blind) - 1} more' * (len(blind) > 1)}"
            sentence = f"{some} cannot see {self._wanted.folder}; runs must be on a disk that all nodes share (--runs)"
            self.outcome = Outcome(sentence=sentence, by_user=True)
        elif waited > LATE and not self._told_to_wait:
            self._told_to_wait = True
            short = {host.partition(".")[0] for host in here}
            short |= {host.partition(".")[0] for host in self._unfit}
            missing = [host for host in self._wanted.hosts if host.partition(".")[0] not in short]
            names = f" ({', '.join(missing[:4])}{', …' * (len(missing) > 4)})" if missing else ""
            left = self._wanted.expected - len(self.members) - len(self._unfit)
            more = f"{left} more node{'s' * (left > 1)}{names}"
            self._tell("note", text=f"waiting for {more}; all nodes must see {self._wanted.folder} (--runs, --timeout)")

    def _begin(self, chosen: list[Member]) -> None:
        before = self.generation
        self.generation += 1
        grown = before >= 0 and not self._first
        self._told_to_wait = False
        self._phase, self._ended, self._first, self._by_verdict = "running", [], "", False
        size, first = sum(member.ranks for member in chosen), 0
        for member in self.members.values():
            member.seat, member.gone = None, True
        for number, member in enumerate(chosen):
            member.seat = Seat(self._job, self.generation, number, len(chosen), first, size, "", 0)
            member.gone = False
            first += member.ranks
            self.orders.append((member.id, member.seat))
        if grown:
            hosts = ", ".join(member.host for member in chosen)
            self._tell(
                "restart",
                generation=self.generation,
                sentence=f"now {len(chosen)} nodes ({hosts}) with {size} ranks take part",
            )
