"""What the first launcher decides, as facts in and orders out: no process runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshrun.launch.head import BLIND, COMPLETE, LAST_CALL, LATE, Head, Member, Outcome, Wanted
from meshrun.launch.job import Failure, Seat, Verdict
from meshrun.launch.ranks import Ended, Gone, Stop


class Run:
    """A head, nodes that do as they are told, and a clock."""

    def __init__(self, *, nodes: int = 1, ranks: int = 2, restarts: int = 3, wanted: Wanted | None = None) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0
        self.head = Head(restarts, wanted or Wanted(nodes, nodes), self.tell)
        self.seats: dict[str, Seat] = {}
        self.stops: list[tuple[str, Stop]] = []
        for name in "abcd"[:nodes]:
            self.join(name, ranks)
        self.tick()

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def join(self, name: str, ranks: int = 2) -> None:
        self.head.join(Member(name, f"host-{name}", ranks), self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.head.tick(self.now)
        for name, order in self.head.orders:
            if isinstance(order, Seat):
                self.seats[name] = order
            else:
                self.stops.append((name, order))
        self.head.orders.clear()

    def ended(self, name: str, rank: int, code: int, own: bool = True) -> None:
        self.head.hear(name, Ended(rank, code, own), self.now)
        self.tick()

    def gone(self, *names: str) -> None:
        for name in names:
            self.head.hear(name, Gone(self.head.generation), self.now)
        self.tick()

    @property
    def sentences(self) -> list[str]:
        return [fields["sentence"] for kind, fields in self.told if kind == "restart"]


def test_where_more_nodes_may_come_they_are_waited_for_a_moment():
    run = Run(nodes=1, wanted=Wanted(1, 4))
    run.tick(LAST_CALL / 2)
    assert not run.seats
    run.tick(LAST_CALL)
    assert run.seats["a"].nodes == 1


def test_ranks_are_numbered_node_after_node():
    run = Run(nodes=3, ranks=2)
    assert [(seat.node, seat.nodes, seat.first, seat.size) for seat in run.seats.values()] == [
        (0, 3, 0, 6),
        (1, 3, 2, 6),
        (2, 3, 4, 6),
    ]
    assert len({seat.job for seat in run.seats.values()}) == 1


def test_nodes_may_have_different_numbers_of_ranks():
    run = Run(wanted=Wanted(3, 3), ranks=2)
    run.join("b", 1)
    run.join("c", 3)
    run.tick()
    assert [(seat.first, seat.size) for seat in run.seats.values()] == [(0, 6), (2, 6), (3, 6)]


def test_a_run_whose_ranks_all_end_well_is_over():
    run = Run(nodes=2)
    run.gone("a")
    assert run.head.outcome is None
    run.gone("b")
    assert run.head.outcome is not None and not run.head.outcome.failures
    assert not run.stops


def test_a_lost_rank_ends_all_others_on_all_nodes_and_then_all_begin_again():
    run = Run(nodes=2)
    run.ended("b", 3, -9)
    assert run.stops == [("a", Stop(dead=(3,))), ("b", Stop(dead=(3,)))]
    run.ended("a", 0, 75)
    run.gone("a")
    assert run.head.generation == 0
    run.gone("b")
    assert run.head.generation == 1 and run.seats["a"].generation == 1
    assert run.sentences == ["rank 3 on host-b was killed by SIGKILL; all ranks are started again"]


def test_the_killed_rank_is_named_though_another_one_noticed_before_it_was_reported():
    run = Run()
    run.ended("a", 0, 75)
    run.ended("a", 1, -9)
    run.gone("a")
    assert run.sentences == ["rank 1 on host-a was killed by SIGKILL; all ranks are started again"]


def test_a_rank_that_the_launcher_itself_killed_is_not_named():
    run = Run()
    run.ended("a", 0, 75)
    run.ended("a", 1, -9, own=False)
    run.gone("a")
    assert run.sentences == ["rank 0 on host-a ended with exit status 75; all ranks are started again"]


@pytest.mark.parametrize("code", [1, 2, 134])
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_of_the_program_or_of_the_user_is_final_whoever_is_seen_first(code: int, first: bool):
    run = Run()
    for rank, status in ((1, code), (0, 75)) if first else ((0, 75), (1, code)):
        run.ended("a", rank, status)
    run.gone("a")
    assert run.head.outcome is not None
    assert {(each.rank, each.code) for each in run.head.outcome.failures} == {(0, 75), (1, code)}
    assert not run.sentences


def lose_a_rank(run: Run) -> None:
    run.ended("a", 1, -9)
    run.gone("a")


def test_restarts_count_only_without_progress_between():
    run = Run(restarts=2)
    for step in (0, 0, 5, 5, 9, 9):
        run.head.progress = step
        lose_a_rank(run)
        assert run.head.outcome is None
    lose_a_rank(run)
    assert run.head.outcome is not None
    assert run.told[-1][1]["text"] == "gave up after 2 restarts without a finished step between (--restarts)"


def test_no_restarts_are_made_where_none_are_allowed():
    run = Run(restarts=0)
    lose_a_rank(run)
    assert run.head.outcome is not None and [each.rank for each in run.head.outcome.failures] == [1]
    assert not run.told


@pytest.mark.parametrize("lost", ["b", "c"])
def test_when_a_node_is_lost_the_others_go_on_without_it(lost: str):
    run = Run(nodes=3, wanted=Wanted(1, 3))
    run.tick(LAST_CALL + 1)
    run.head.leave(lost, run.now)
    run.tick()
    dead = (2, 3) if lost == "b" else (4, 5)
    others = [name for name in "abc" if name != lost]
    assert run.stops == [(name, Stop(dead=dead)) for name in others]
    run.gone(*others)
    assert [(run.seats[name].first, run.seats[name].size) for name in others] == [(0, 4), (2, 4)]
    assert run.sentences == [
        f"node host-{lost} with ranks {dead[0]} to {dead[1]} was lost; all ranks are started again"
    ]


def test_with_fewer_nodes_than_the_least_the_run_waits_for_another_one_and_says_so():
    run = Run(nodes=2)
    run.head.leave("b", run.now)
    run.tick()
    run.gone("a")
    run.tick(LAST_CALL + 1)
    assert run.head.generation == 0
    assert run.told[-1] == ("note", {"text": "1 of at least 2 nodes are left: waiting for others"})
    run.join("c")
    run.tick()
    assert run.head.generation == 1 and run.seats["c"].node == 1


def test_whether_another_start_may_cure_it_is_known_from_how_ranks_ended():
    lost, program = Run(restarts=0), Run(restarts=0)
    lost.ended("a", 1, -9)
    for run, code in ((lost, 75), (program, 1)):
        run.ended("a", 0, code)
        run.gone("a")
    assert lost.head.outcome is not None and lost.head.outcome.is_cut_off
    assert program.head.outcome is not None and not program.head.outcome.is_cut_off


@pytest.mark.parametrize("expected", [0, 2])
def test_nodes_that_are_lost_or_were_started_and_never_came_may_come_another_time(expected: int):
    never, lost = Run(nodes=1, wanted=Wanted(2, 2, patience=60, expected=expected)), Run(nodes=2)
    lost.head.leave("b", lost.now)
    lost.tick()
    lost.gone("a")
    for run in (never, lost):
        run.tick(601)
        run.tick(601)
    assert never.head.outcome is not None and never.head.outcome.cut_off == (expected > 0)
    assert lost.head.outcome is not None and lost.head.outcome.cut_off


def test_a_wait_for_nodes_ends_with_a_sentence():
    run = Run(nodes=1, wanted=Wanted(2, 2, patience=60))
    run.tick(61)
    assert run.head.outcome is not None
    assert run.head.outcome.sentence.startswith("1 node came within 60 s, but 2 are needed")


def test_a_node_that_comes_later_lets_the_others_finish_their_step_and_makes_the_world_larger():
    run = Run(nodes=1, wanted=Wanted(1, 2))
    run.tick(LAST_CALL + 1)
    assert run.seats["a"].size == 2
    run.join("b")
    run.tick()
    assert not run.stops
    run.tick(LAST_CALL + 1)
    assert run.stops == [("a", Stop(patient=True))]
    for rank in (0, 1):
        run.ended("a", rank, 75)
    run.gone("a")
    assert {name: (seat.generation, seat.size) for name, seat in run.seats.items()} == {"a": (1, 4), "b": (1, 4)}
    assert run.sentences == ["now 2 nodes (host-a, host-b) with 4 ranks take part"]


def test_growing_is_no_failure_that_counts():
    run = Run(nodes=1, restarts=0, wanted=Wanted(1, 2))
    run.tick(LAST_CALL + 1)
    run.join("b")
    run.tick(LAST_CALL + 1)
    run.ended("a", 0, 75)
    run.gone("a")
    assert run.head.outcome is None and run.head.generation == 1


def test_nodes_beyond_the_most_wait_until_one_is_lost():
    run = Run(nodes=2)
    run.join("c")
    run.tick(LAST_CALL + 1)
    assert "c" not in run.seats and not run.stops
    run.head.leave("b", run.now)
    run.tick()
    run.gone("a")
    assert run.seats["c"].first == 2


def even(size: int) -> bool:
    return size % 4 == 0


def test_only_as_many_nodes_take_part_as_suit_the_layout():
    run = Run(nodes=3, ranks=2, wanted=Wanted(1, 4, fits=even))
    run.tick(LAST_CALL + 1)
    assert set(run.seats) == {"a", "b"} and run.seats["a"].size == 4


@pytest.mark.parametrize("action", ["restart", "end", "report"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_watch_has_found_is_acted_on(action: Any, rank: int):
    run = Run()
    run.head.hear("a", Verdict(rank, "a rank hangs", action), run.now)
    run.tick()
    check: dict[str, Callable[[], bool]] = {
        "restart": lambda: run.stops == [("a", Stop(dead=(rank,)))],
        "end": lambda: run.stops == [("a", Stop(final=True))],
        "report": lambda: not run.stops and run.told == [("hang", {"sentence": "a rank hangs"})],
    }
    assert check[action]()


def test_a_hang_that_is_found_when_ranks_are_ending_already_is_not_why_they_end():
    run = Run(restarts=0)
    run.ended("a", 1, -9)
    run.head.hear("a", Verdict(0, "rank 0 hangs", "restart"), run.now)
    run.gone("a")
    assert run.stops == [("a", Stop(dead=(1,)))]
    assert run.head.outcome is not None and run.head.outcome.sentence == "" and run.head.outcome.failures


def test_where_nobody_can_be_named_all_start_anew_and_nobody_counts_as_dead():
    run = Run(nodes=2)
    run.head.hear("b", Verdict(-1, "nothing moves", "restart"), run.now)
    run.tick()
    assert run.stops == [("a", Stop()), ("b", Stop())]
    run.gone("a", "b")
    assert run.sentences == ["nothing moves; all ranks are started again"] and run.head.generation == 1


def test_after_an_error_of_the_program_nobody_waits_for_what_the_others_hold():
    run = Run()
    run.ended("a", 1, 1)
    assert run.stops == [("a", Stop(hurried=True))]


@pytest.mark.parametrize(
    ("before", "later", "both"),
    [
        (Stop(final=True), Stop(dead=(1,)), Stop(dead=(1,), final=True)),
        (Stop(dead=(1,)), Stop(dead=(2,)), Stop(dead=(1, 2))),
        (Stop(patient=True), Stop(dead=(1,)), Stop(dead=(1,))),
        (Stop(hurried=True), Stop(final=True), Stop(final=True, hurried=True)),
    ],
)
def test_what_is_said_later_only_adds_to_what_was_said_before(before: Stop, later: Stop, both: Stop):
    assert later.after(before) == both


def test_a_hang_that_comes_again_and_again_is_what_the_user_reads():
    run = Run(restarts=0)
    run.head.hear("a", Verdict(1, "rank 1 hangs", "restart"), run.now)
    run.tick()
    run.ended("a", 1, -9, own=False)
    run.gone("a")
    assert run.head.outcome is not None and run.head.outcome.sentence == "rank 1 hangs"


def expecting(**more: Any) -> Run:
    wanted = Wanted(1, 2, patience=60, expected=2, hosts=("host-a", "host-b"), folder="runs/x-1", **more)
    return Run(nodes=1, wanted=wanted)


def test_nodes_that_were_started_together_begin_together_and_the_late_one_is_named():
    run = expecting()
    run.tick(LATE + 1)
    assert not run.seats
    assert run.told == [
        ("note", {"text": "waiting for 1 more node (host-b); all nodes must see runs/x-1 (--runs, --timeout)"})
    ]
    run.join("b")
    run.tick()
    assert {seat.size for seat in run.seats.values()} == {4}


def test_a_node_that_says_it_cannot_take_part_is_not_waited_for():
    run = expecting()
    run.head.unfit("host-b", "no disk")
    run.tick(LAST_CALL + 1)
    assert run.seats["a"].size == 2
    assert run.told == [("note", {"text": "host-b cannot take part: no disk"})]


def test_where_the_others_are_too_few_without_a_node_that_cannot_take_part_its_reason_ends_the_run():
    run = expecting(fits=even)
    run.head.unfit("host-b", "no disk")
    run.tick()
    assert run.head.outcome is not None
    assert run.head.outcome.sentence == "host-b cannot take part, and the others are too few: no disk"


@pytest.mark.parametrize("fits", [True, False])
def test_nodes_that_can_begin_wait_for_a_silent_one_for_minutes_and_not_for_the_whole_patience(fits: bool):
    run = Run(nodes=1, wanted=Wanted(1, 2, patience=600, expected=2, fits=lambda _: fits))
    run.tick(COMPLETE - 1)
    assert not run.seats
    run.tick(2)
    assert bool(run.seats) == fits and run.head.outcome is None


def test_after_the_patience_those_begin_that_came():
    run = expecting()
    run.tick(61)
    assert run.seats["a"].size == 2


@pytest.mark.parametrize("name", ["host-b", "host-b.cluster.site"])
def test_a_node_that_cannot_see_the_run_ends_it_before_it_begins(name: str):
    run = expecting()
    run.head.blind(name, run.now)
    run.tick(BLIND / 2)
    assert run.head.outcome is None, "it may still come"
    run.tick(BLIND / 2 + 0.1)
    assert run.head.outcome is not None and run.head.outcome.by_user
    assert run.head.outcome.sentence == (
        f"{name} cannot see runs/x-1; runs must be on a disk that all nodes share (--runs)"
    )


@pytest.mark.parametrize("host", ["stranger", "host-a"])
def test_whoever_only_claims_to_be_a_node_that_cannot_see_it_is_not_believed(host: str):
    run = expecting()
    run.head.blind(host, run.now)
    run.tick(BLIND + 1)
    assert run.head.outcome is None


def test_a_node_that_came_after_all_is_forgiven():
    run = expecting()
    run.head.blind("host-b", run.now)
    run.join("b")
    run.tick(BLIND + 1)
    assert run.head.outcome is None and set(run.seats) == {"a", "b"}


def test_the_run_grows_again_when_a_lost_node_comes_back():
    run = expecting()
    run.join("b")
    run.tick()
    run.head.leave("b", run.now)
    run.tick()
    run.gone("a")
    assert run.seats["a"].size == 2
    run.head.join(Member("c", "host-b", 2), run.now)
    run.tick(LAST_CALL + 1)
    assert run.stops[-1] == ("a", Stop(patient=True))


def test_a_layout_that_fits_all_nodes_only_waits_for_the_lost_one():
    run = expecting(fits=even, layout="the layout dp=4")
    run.join("b")
    run.tick()
    run.head.leave("b", run.now)
    run.tick()
    run.gone("a")
    run.tick(LAST_CALL + 1)
    assert run.told[-1] == (
        "note",
        {"text": "the 1 node that is left cannot hold the layout dp=4: waiting for others"},
    )
    run.head.join(Member("c", "host-b", 2), run.now)
    run.tick()
    assert run.seats["c"].size == 4


def test_a_node_whose_ranks_of_an_earlier_start_are_gone_still_has_those_of_this_one():
    run = Run(nodes=2)
    run.ended("a", 1, -9)
    run.gone("a", "b")
    assert run.head.generation == 1
    run.head.hear("a", Gone(0), run.now)
    run.head.hear("b", Gone(0), run.now)
    run.tick()
    assert run.head.outcome is None, "the word is late: ranks of the second start are at work"
    run.gone("a", "b")
    assert run.head.outcome == Outcome()


def test_a_node_that_leaves_after_its_ranks_have_ended_well_is_no_loss():
    run = Run(nodes=2)
    run.gone("b")
    run.head.leave("b", run.now)
    run.tick()
    assert run.stops == [] and run.head.outcome is None
    run.gone("a")
    assert run.head.outcome == Outcome()


def test_of_two_ranks_that_were_killed_the_first_is_named():
    run = Run(ranks=3)
    run.ended("a", 0, 75)
    run.ended("a", 1, -9)
    run.ended("a", 2, -11)
    run.gone("a")
    assert run.sentences == ["rank 1 on host-a was killed by SIGKILL; all ranks are started again"]


def test_only_nodes_that_still_have_ranks_are_told_to_stop():
    run = Run(nodes=2)
    run.gone("a")
    run.ended("b", 3, -9)
    assert run.stops == [("b", Stop(dead=(3,)))]


def test_a_lost_rank_beside_an_error_of_the_program_is_no_reason_to_start_again():
    lost, failed = Failure(0, -9, 0.0), Failure(1, 1, 0.0)
    assert Outcome((lost,)).is_cut_off and not Outcome((failed,)).is_cut_off
    assert not Outcome((lost, failed)).is_cut_off and not Outcome((lost,), "it hangs").is_cut_off


def test_all_ranks_of_a_lost_node_are_failures_and_those_of_earlier_starts_are_none_of_the_last():
    run = Run(nodes=2, ranks=2, restarts=1)
    run.ended("a", 1, -9)
    run.gone("a", "b")
    assert run.head.outcome is None and run.head.generation == 1
    run.head.leave("b", run.now)
    run.tick()
    run.gone("a")
    assert run.head.outcome is not None
    assert sorted(each.rank for each in run.head.outcome.failures) == [2, 3]


def test_a_verdict_on_ranks_that_are_ended_already_is_too_late():
    run = Run(restarts=3)
    run.ended("a", 1, -9)
    run.head.hear("a", Verdict(0, "rank 0 hangs", "end"), run.now)
    run.tick()
    run.gone("a")
    assert run.head.outcome is None and run.head.generation == 1


def test_a_node_that_comes_when_there_are_enough_takes_the_place_of_none_that_trains():
    run = Run(nodes=2)
    run.join("c")
    run.ended("b", 3, -9)
    run.gone("a", "b")
    assert run.head.generation == 1 and set(run.seats) == {"a", "b"}
    run.head.leave("b", run.now)
    run.gone("a")
    assert {name for name, seat in run.seats.items() if seat.generation == 2} == {"a", "c"}
