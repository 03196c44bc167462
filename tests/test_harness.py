"""The harness of the ranks-tests, held to what it promises: right values, named failures, no hang, no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ranks import ROOT, RanksFailed, run_on_ranks


@dataclass(frozen=True)
class Point:
    x: int
    label: str


def run(body: str, n: int, timeout: float = 20, **kwargs: object) -> None:
    run_on_ranks(__file__, body, n, kwargs, timeout)


def my_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def all_reduced(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.ranks(3)
def test_all_reduce_sums_over_three_ranks():
    import torch
    import torch.distributed as dist

    assert (dist.get_world_size(), dist.get_backend(), torch.get_num_threads()) == (3, "gloo", 1)
    assert all_reduced(10.0 ** my_rank()) == 111.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("point", [Point(1, "one"), Point(2, "two")], ids=lambda p: p.label)
def test_fixtures_and_parameters_arrive(tmp_path: Path, point: Point):
    assert point in (Point(1, "one"), Point(2, "two"))
    assert tmp_path.is_dir() and tmp_path.name.startswith("test_fixtures_and_parameters")
    (tmp_path / f"{my_rank()}").write_text(point.label)
    all_reduced(1.0)
    assert (tmp_path / f"{1 - my_rank()}").read_text() == point.label


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("MESHRUN_TEST_SETTING", "seven")
    monkeypatch.chdir(tmp_path)
    return "seven"


@pytest.mark.ranks(2)
def test_environment_and_folder_of_the_fixtures_arrive(setting: str, tmp_path: Path):
    assert os.environ["MESHRUN_TEST_SETTING"] == setting
    assert Path.cwd() == tmp_path


class TestInAClass:
    @pytest.mark.ranks(2)
    def test_methods_run_on_ranks(self):
        assert all_reduced(1.0) == 2.0


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="shows that a failing rank fails the marked test")
def test_failing_body_fails_the_marked_test():
    assert all_reduced(1.0) == 3.0


def fail_on_rank_1() -> None:
    print(f"words of {my_rank()}")
    if my_rank() == 1:
        total = 40
        assert total == 2 + 40, "as it should be"
    all_reduced(1.0)


def test_failing_rank_is_named_with_its_values_traceback_and_output():
    with pytest.raises(RanksFailed) as failed:
        run("fail_on_rank_1", 3)
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 failed first: AssertionError: as it should be")
    assert "in fail_on_rank_1" in text and "assert 40 == (2 + 40)" in text
    assert "--- last output of rank 1\nwords of 1" in text
    assert "\nrank 0: error" in text and "\nrank 2: error" in text
    assert "nursery.py" not in text and "rank_body.py" not in text


def fail_while_others_sleep() -> None:
    if my_rank() == 0:
        raise ValueError("alone")
    time.sleep(60)


def test_failure_does_not_wait_for_ranks_that_never_notice():
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 of 2 failed first: ValueError: alone") as failed:
        run("fail_while_others_sleep", 2)
    assert "rank 1: still running, killed" in str(failed.value)
    assert time.monotonic() - begin < 40


def die(how: str) -> None:
    if my_rank() == 1:
        print("last words")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduced(1.0)


@pytest.mark.parametrize(("how", "said"), [("exit", "exited with status 7"), ("kill", "killed by SIGKILL")])
def test_dying_rank_is_named(how: str, said: str):
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run("die", 3, how=how)
    assert str(failed.value).startswith(
        f"rank 1 of 3 died: {said} inside the test\n--- last output of rank 1\nlast words"
    )
    assert time.monotonic() - begin < 40


def hang_in_a_collective() -> None:
    if my_rank() != 1:
        all_reduced(1.0)
    time.sleep(60)


def hang_with_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="idle").start()
    hang_in_a_collective()


def test_hang_shows_the_stacks_of_every_rank_and_thread():
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run("hang_with_a_thread", 3, timeout=3)
    text = str(failed.value)
    assert text.startswith("the time limit of 3 s struck; still running: 0, 1, 2 of 3 ranks")
    for rank in range(3):
        stacks = text.split(f"--- stacks of rank {rank}")[1].split("--- stacks of rank")[0]
        assert "hang_in_a_collective" in stacks and stacks.count("hread 0x") == 2
        assert ("all_reduced" in stacks) == (rank != 1)
    assert time.monotonic() - begin < 40


def finish_early() -> None:
    if my_rank() == 0:
        return
    time.sleep(60)


def test_hang_tells_who_had_finished():
    with pytest.raises(RanksFailed) as failed:
        run("finish_early", 2, timeout=2)
    assert "still running: 1 of 2 ranks" in str(failed.value)
    assert str(failed.value).endswith("rank 0: had finished")


def skip_on_rank_1() -> None:
    if my_rank() == 1:
        pytest.skip("no such device")
    all_reduced(1.0)


def test_skip_on_one_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="rank 1: no such device"):
        run("skip_on_rank_1", 3)


def test_value_that_does_not_pickle_is_named():
    with pytest.raises(RanksFailed, match="the argument 'lock' cannot travel to the ranks"):
        run("die", 2, how="exit", lock=threading.Lock())


def test_missing_body_is_an_error_of_the_ranks_and_not_of_the_nursery():
    with pytest.raises(RanksFailed, match=r"AttributeError: .*no_such_body"):
        run("no_such_body", 2)


def note_my_parent(folder: Path) -> None:
    (folder / f"{my_rank()}").write_text(f"{os.getppid()}")


def test_second_test_uses_the_warm_nursery(tmp_path: Path):
    run("note_my_parent", 2, folder=tmp_path)
    first = {(tmp_path / "0").read_text(), (tmp_path / "1").read_text()}
    run("note_my_parent", 2, folder=tmp_path)
    assert {(tmp_path / "0").read_text()} == first and len(first) == 1


def note_and_hang(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), os.getppid(), child.pid):
        (folder / f"{pid}").touch()
    hang_in_a_collective()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_nothing_survives_the_end_of_pytest(tmp_path: Path, sig: signal.Signals):
    call = f"run_on_ranks({__file__!r}, 'note_and_hang', 2, {{'folder': Path({str(tmp_path)!r})}}, 60)"
    awake = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    program = f"import signal; from pathlib import Path; from tests.ranks import run_on_ranks; {awake}; {call}"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 5, 60)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    process.send_signal(sig)
    process.wait(timeout=30)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 30)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not reached within {seconds:g} s"
        time.sleep(0.05)
