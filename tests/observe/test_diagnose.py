"""Who is to blame, from what the ranks show: cases that are hard to bring about with real processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.observe import hang
from meshrun.observe.flight import Call, Group
from meshrun.observe.hang import DataReader, Witness, diagnose, place_of
from meshrun.observe.pulse import Reading
from meshrun.observe.stacks import Frame
from meshrun.observe.testimony import FRESH, all_witnesses, publish

TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = [Frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"), Frame("/home/me/loop.py", 4, "main")]
IN_COLLECTIVE = [Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"), Frame("/home/me/a.py", 9, "f")]
READING = [Frame(f"{TORCH}/utils/data/dataloader.py", 1200, "_try_get_data"), Frame("/home/me/loop.py", 3, "main")]


def pulse(rank: int, silent: float = 11.2, phase: str = "computing", what: str = "the gradients of step 12") -> Reading:
    return Reading(
        rank=rank, pid=100 + rank, generation=0, thread=1, beats=9, beat_age=0.1, marks=50, silent=silent, step=12,
        phase=phase, what=what, finished=11, last=11, longest=0.3, seconds=3.0, data_wait=0.1, cpu=2.0, sniff=0.001,
        evaluations=0, longest_evaluating=0.0,
    )  # fmt: skip


def pending(number: int, name: str = "all_reduce", age: float = 11.0, ranks: tuple[int, ...] = (0, 1)) -> Group:
    return Group("gloo:0", ranks, (Call(number, name, "[10] Float", age, False),))


def waiting(rank: int, **changes: Any) -> Witness:
    return Witness(
        **{"pulse": pulse(rank), "host": "node7", "frames": IN_COLLECTIVE, "groups": [pending(37)], **changes}
    )


def user_file(tmp_path: Path, line: str) -> Frame:
    path = tmp_path / "model.py"
    path.write_text(f"def forward():\n    {line}\n")
    return Frame(str(path), 2, "forward")


def test_where_nobody_can_be_named_the_longest_silence_is_told():
    witnesses = [waiting(rank, pulse=pulse(rank, 11.0 + 50 * rank), host=f"node{rank}") for rank in (0, 1)]
    finding = diagnose(witnesses)
    assert finding.rank == -1 and finding.sentence.startswith("no rank on node1 has got on for 61 s at step 12: ")


def test_backward_pass_is_a_wait_only_with_a_collective_under_way():
    assert place_of(waiting(0, frames=BACKWARD)).kind == "others"
    busy = place_of(waiting(0, frames=BACKWARD, groups=[]))
    assert (busy.kind, busy.text) == ("code", "has been in loop.py:4 main")


def test_ranks_of_a_script_are_named_without_a_step(tmp_path: Path):
    frame = user_file(tmp_path, "dist.destroy_process_group()")
    frames = [Frame(f"{TORCH}/distributed/distributed_c10d.py", 2000, "destroy_process_group"), frame]
    stuck = waiting(0, pulse=pulse(0, 61, "script", ""), frames=frames, groups=[])
    ended = waiting(1, pulse=pulse(1, 62, "ended", ""), frames=[], groups=[])
    assert diagnose([stuck, ended]).sentence == (
        "rank 1 on node7 has finished, while rank 0 waits for it in model.py:2 forward (dist.destroy_process_group()); "
        "all ranks must call the model, barrier() and other collectives equally often"
    )
    assert diagnose([stuck]).sentence == (
        "no rank on node7 has got on for 61 s: rank 0 waits for others in model.py:2 forward "
        "(dist.destroy_process_group())"
    )
    assert diagnose([ended]).sentence == (
        "rank 1 on node7 has come to the end of its script, but its process has not ended for 62 s"
    )


def test_a_script_that_has_ended_while_another_waits_in_another_collective_has_finished(tmp_path: Path):
    line = [IN_COLLECTIVE[0], user_file(tmp_path, "meshrun.barrier()")]
    stuck = waiting(
        0, pulse=pulse(0, 61, "script", "a word from every rank"), frames=line, groups=[pending(1, "gather")]
    )
    ended = waiting(1, pulse=pulse(1, 62, "ended", "all ranks to finish"), groups=[pending(1)])
    finding = diagnose([stuck, ended])
    assert finding.rank == 1
    assert finding.sentence.startswith(
        "rank 1 on node7 has finished, while rank 0 waits for it in model.py:2 forward (meshrun.barrier())"
    )


def test_rank_that_computes_its_backward_pass_forever_is_named():
    finding = diagnose([waiting(0), waiting(1, frames=BACKWARD, groups=[])])
    assert finding.rank == 1
    assert finding.sentence == (
        "rank 1 on node7 has been in loop.py:4 main for 11 s at step 12, "
        "while rank 0 waits for it in the gradients of step 12"
    )


@pytest.mark.parametrize(
    ("line", "kind"), [("loss.item()", "others"), ("torch.cuda.synchronize()", "others"), ("slow(loss)", "code")]
)
def test_reading_a_number_of_a_gpu_is_a_wait_for_the_collectives_before_it(tmp_path: Path, line: str, kind: str):
    frame = user_file(tmp_path, line)
    assert place_of(waiting(0, frames=[frame])).kind == kind
    assert place_of(waiting(0, frames=[frame], groups=[])).kind == "code"


def test_process_that_waits_for_a_disk_is_named_so(tmp_path: Path):
    finding = diagnose(
        [waiting(0), waiting(1, state="D", groups=[], frames=[user_file(tmp_path, "data = open(x).read()")])]
    )
    assert finding.sentence.startswith(
        "rank 1 on node7 has been in model.py:2 forward (data = open(x).read()), "
        "where it waits for a disk or a network file system, for 11 s at step 12"
    )


def test_of_several_readers_the_one_that_is_not_idle_is_named(tmp_path: Path):
    idle = DataReader(7, "S", [Frame(f"{TORCH}/utils/data/_utils/worker.py", 300, "_worker_loop")])
    busy = DataReader(8, "S", [user_file(tmp_path, "time.sleep(9)"), *idle.frames])
    finding = diagnose([waiting(0), waiting(1, frames=READING, groups=[], readers=[idle, busy])])
    assert finding.rank == 1
    assert "its data reader (process 8), which is in model.py:2 forward (time.sleep(9))" in finding.sentence


def test_a_rank_that_shows_no_stack_waits_if_it_says_so_or_has_a_collective_under_way():
    assert place_of(waiting(0, frames=[], groups=[])).kind == "others"
    assert place_of(waiting(0, frames=[], pulse=pulse(0, what=""))).kind == "others"
    assert place_of(waiting(0, frames=[], pulse=pulse(0, what=""), groups=[])).text == "has been computing"


def test_a_reader_that_gives_no_answer_is_named_before_one_that_is_idle():
    idle = DataReader(7, "S", [Frame(f"{TORCH}/utils/data/_utils/worker.py", 300, "_worker_loop")])
    finding = diagnose([waiting(0, frames=READING, readers=[idle, DataReader(8, "S", [])]), waiting(1)])
    assert "for its data reader (process 8), which gives no answer, while" in finding.sentence


def test_a_reader_that_is_stopped_is_named_before_one_that_is_busy(tmp_path: Path):
    stopped = DataReader(7, "T", [Frame(f"{TORCH}/utils/data/_utils/worker.py", 300, "_worker_loop")])
    busy = DataReader(8, "S", [user_file(tmp_path, "time.sleep(9)"), *stopped.frames])
    finding = diagnose([waiting(0), waiting(1, frames=READING, groups=[], readers=[busy, stopped])])
    assert "its data reader (process 7), which is stopped (SIGSTOP)" in finding.sentence


def test_what_most_of_the_others_wait_in_is_said(tmp_path: Path):
    guilty = waiting(0, groups=[], frames=[user_file(tmp_path, "pass")])
    odd = waiting(3, pulse=pulse(3, what="the last checkpoint"))
    assert (
        "ranks 1, 2 and 3 wait for it in the gradients of step 12"
        in diagnose([guilty, waiting(1), waiting(2), odd]).sentence
    )


def test_who_is_neither_waiting_nor_to_blame_is_not_said_to_wait(tmp_path: Path):
    frames = [user_file(tmp_path, "pass")]
    guilty, busy = (
        waiting(rank, pulse=pulse(rank, silent), groups=[], frames=frames) for rank, silent in ((0, 40.0), (1, 5.0))
    )
    assert "while rank 2 waits for it in" in diagnose([guilty, busy, waiting(2)]).sentence


def test_rank_whose_readers_are_gone_is_named_so():
    finding = diagnose([waiting(0), waiting(1, frames=READING, groups=[])])
    assert "for its data reader, of which no process is left" in finding.sentence


def test_stopped_rank_comes_before_one_that_is_in_its_own_code(tmp_path: Path):
    busy = waiting(0, groups=[], frames=[user_file(tmp_path, "pass")])
    assert diagnose([busy, waiting(1, state="T", frames=[], groups=[])]).rank == 1


@pytest.mark.parametrize("state", ["S", "T"])
def test_of_two_ranks_in_the_same_kind_of_place_the_one_that_got_on_longest_ago_is_named(tmp_path: Path, state: str):
    frames = [user_file(tmp_path, "pass")]
    quick = waiting(0, pulse=pulse(0, silent=3.0), groups=[], frames=frames, state=state)
    slow = waiting(1, pulse=pulse(1, silent=40.0), groups=[], frames=frames, state=state)
    assert diagnose([quick, slow]).rank == 1
    assert diagnose([slow, quick]).rank == 1


def of_steps(kinds: str, age: float = 60.0) -> tuple[Call, ...]:
    """Calls that are over, one a second, as a program repeats them with every step."""
    names = {"r": "all_reduce", "g": "all_gather", "b": "broadcast"}
    return tuple(Call(n + 1, names[kind], "[10] Float", age - n, True) for n, kind in enumerate(kinds))


def test_of_two_ranks_that_wait_for_each_other_the_one_that_left_its_usual_order_is_named():
    """Rank 0 waits in its 7th call of group A, as in every step; rank 1 in a call of group B that no step had."""
    usual = of_steps("rgrgrg")
    a_stuck = Group("gloo:a", (0, 1), (*usual, Call(7, "all_reduce", "[10] Float", 20.0, False)))
    b_idle = Group("gloo:b", (0, 1), ())
    a_idle = Group("gloo:a", (0, 1), usual)
    b_stuck = Group("gloo:b", (0, 1), (Call(1, "broadcast", "[10] Float", 30.0, False),))
    finding = diagnose([waiting(0, groups=[a_stuck, b_idle]), waiting(1, groups=[a_idle, b_stuck])])
    assert finding.rank == 1
    assert "rank 1 on node7 never came to all_reduce" in finding.sentence


def test_among_ranks_that_never_came_the_longest_wait_decides_where_both_are_as_usual():
    """Ranks 0 and 1 each wait for rank 2 or 3, which show no calls of their own."""
    early = waiting(0, groups=[Group("gloo:a", (0, 2), (Call(1, "all_reduce", "[10] Float", 50.0, False),))])
    late = waiting(1, groups=[Group("gloo:b", (1, 3), (Call(1, "all_reduce", "[10] Float", 10.0, False),))])
    idle = [waiting(rank, groups=[]) for rank in (2, 3)]
    assert diagnose([late, early, *idle]).rank == 2


def test_a_rank_whose_records_begin_after_a_collective_has_come_to_it():
    ranks = 0, 1, 2
    stuck = [waiting(rank, groups=[pending(37, ranks=ranks)]) for rank in (0, 1)]
    ahead = Group("gloo:0", ranks, (Call(40, "all_reduce", "[10] Float", 10.0, True),))
    assert hang.missing([*stuck, waiting(2, groups=[ahead])]) is None
    behind = Group("gloo:0", ranks, (Call(36, "all_reduce", "[10] Float", 12.0, True),))
    late = hang.missing([*stuck, waiting(2, groups=[behind])])
    assert late is not None and late.rank == 2


def test_one_rank_against_two_is_the_one_that_made_another_call():
    def stuck(rank: int, kind: str) -> Witness:
        return waiting(rank, groups=[pending(37, kind, ranks=(0, 1, 2))])

    finding = diagnose([stuck(0, "all_reduce"), stuck(1, "broadcast"), stuck(2, "all_reduce")])
    assert finding.rank == 1
    assert "left a collective out or made one too many at step 12: its number 37 is broadcast" in finding.sentence
    assert "where ranks 0 and 2 have waited for 11 s in all_reduce" in finding.sentence


def test_one_rank_against_two_is_the_odd_one_also_where_its_order_is_the_usual_one():
    def stuck(rank: int, kind: str, before: str) -> Witness:
        calls = (*of_steps(before), Call(len(before) + 1, kind, "[10] Float", 9.0, False))
        return waiting(rank, groups=[Group("gloo:0", (0, 1, 2), calls)])

    ranks = [stuck(0, "all_reduce", "gggg"), stuck(1, "broadcast", "bbbb"), stuck(2, "all_reduce", "gggg")]
    assert diagnose(ranks).rank == 1


def test_only_those_that_wait_in_the_same_call_are_said_to_have_waited_in_it():
    missed = Group("gloo:a", (0, 1, 2), (Call(1, "all_reduce", "[10] Float", 50.0, False),))
    other = Group("gloo:b", (3,), (Call(1, "broadcast", "[10] Float", 50.0, False),))
    ranks = [
        waiting(0, groups=[missed]),
        waiting(1, groups=[]),
        waiting(2, groups=[missed]),
        waiting(3, groups=[other]),
    ]
    assert (
        "rank 1 on node7 never came to all_reduce number 1, in which ranks 0 and 2 have waited"
        in diagnose(ranks).sentence
    )


def test_rank_that_has_finished_while_others_wait_is_named():
    done = waiting(1, pulse=pulse(1, phase="done", what=""), frames=[], groups=[])
    assert diagnose([waiting(0, groups=[]), done]).sentence == (
        "rank 1 on node7 has finished at step 12, while rank 0 waits for it in the gradients of step 12"
    )


def test_nobody_is_named_where_all_wait_for_ranks_that_are_not_seen():
    finding = diagnose([waiting(rank, groups=[pending(37, ranks=(0, 1, 2, 3))]) for rank in (0, 1)])
    assert finding.rank == -1
    assert finding.sentence == (
        "no rank on node7 has got on for 11 s at step 12: ranks 0 and 1 wait for others in the gradients of step 12"
    )


def test_many_ranks_are_counted_and_not_listed(tmp_path: Path):
    guilty = waiting(9, groups=[], frames=[user_file(tmp_path, "pass")])
    finding = diagnose([*map(waiting, range(9)), guilty])
    assert "while ranks 0, 1, 2, 3, 4, 5 and 3 more wait for it" in finding.sentence


def test_recipes_count_as_the_users_code_and_the_rest_of_meshrun_does_not():
    ours = Frame(f"{hang._OURS}train/step.py", 70, "__call__")
    recipe = Frame(f"{hang._OURS}recipes/digits.py", 30, "forward")
    assert "digits.py:30" in place_of(waiting(0, frames=[ours, recipe, ours], groups=[])).text
    assert "step.py:70" in place_of(waiting(0, frames=[ours], groups=[])).text


def test_witnesses_of_other_nodes_are_read_as_they_were_written(tmp_path: Path):
    there = waiting(1, host="node8", readers=[DataReader(8, "T", [Frame("a.py", 1, "f")])])
    publish(tmp_path / "hangs", 0, [there])
    publish(tmp_path / "hangs", 1, [waiting(2)])
    found = all_witnesses(tmp_path / "hangs", 0, [waiting(0)], give_up=0.0)
    assert [each.rank for each in found] == [0, 1]
    assert found[1].readers == there.readers and found[1].groups == there.groups and found[1].pulse == there.pulse


def test_what_another_node_saw_in_an_earlier_hang_is_left_out(tmp_path: Path):
    old, new = publish(tmp_path, 0, [waiting(1)]), publish(tmp_path, 0, [waiting(2)])
    now = new.stat().st_mtime
    os.utime(old, (now - FRESH - 1, now - FRESH - 1))
    os.utime(new, (now - FRESH / 2, now - FRESH / 2))
    assert [witness.rank for witness in all_witnesses(tmp_path, 0, [waiting(0)], give_up=0.0)] == [0, 2]


def test_a_node_waits_for_what_the_others_see_until_all_ranks_of_its_groups_have_shown_themselves(tmp_path: Path):
    later = threading.Timer(0.05, publish, (tmp_path, 0, [waiting(1)]))
    later.start()
    began = time.monotonic()
    assert [witness.rank for witness in all_witnesses(tmp_path, 0, [waiting(0)], began + 20)] == [0, 1]
    assert time.monotonic() - began < 10
    later.join()


def test_a_node_that_sees_no_group_waits_for_the_others_until_the_end(tmp_path: Path):
    give_up = time.monotonic() + 0.15
    all_witnesses(tmp_path, 0, [waiting(0, groups=[])], give_up)
    assert time.monotonic() >= give_up


def test_a_rank_in_a_wait_of_its_own_waits_for_others(tmp_path: Path):
    assert place_of(waiting(0, frames=[user_file(tmp_path, "work.wait()")], groups=[])).kind == "others"


def test_a_rank_that_waits_for_others_at_its_end_has_not_finished():
    assert place_of(waiting(0, pulse=pulse(0, phase="done", what="the last checkpoint"))).kind == "others"
    assert place_of(waiting(0, pulse=pulse(0, phase="done", what=""))).kind == "done"


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_rank_that_a_signal_or_a_debugger_holds_is_stopped(state: str):
    assert place_of(waiting(0, state=state)).kind == "stopped"
