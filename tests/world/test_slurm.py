"""What a process in a Slurm job knows of it, as Slurm's own commands and variables say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import pytest

from meshrun.world.slurm import (
    _answer,
    element_id,
    end_of_job,
    gpus_on_node,
    in_job,
    job_id,
    restart_count,
    told_end_of_job,
)

JOB = {"SLURM_JOB_ID": "17"}
END = datetime(2026, 11, 15, 12, 30, 0)


class Slurm:
    """Stands for squeue and scontrol: what each of them prints."""

    def __init__(self, **prints: str) -> None:
        self.prints, self.commands = prints, list[str]()

    def __call__(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        self.commands.append(command[0])
        assert env["SLURM_TIME_FORMAT"] == "%s", "a user's own format of times must not be met"
        return self.prints.get(command[0], "")


def test_outside_of_a_job_nothing_is_known_and_nobody_is_asked():
    slurm = Slurm(squeue="17 1794700000")
    assert (job_id({}), in_job({}), restart_count({}), gpus_on_node({"CUDA_VISIBLE_DEVICES": "0,1"})) == (
        None,
        False,
        0,
        None,
    )
    assert told_end_of_job({"SLURM_JOB_END_TIME": "5"}) is None and end_of_job({}, slurm) is None
    assert slurm.commands == []


def test_the_end_that_slurm_leaves_in_the_environment_may_have_been_put_off_since():
    env = {**JOB, "SLURM_JOB_END_TIME": "1794700000"}
    assert told_end_of_job(env) == 1794700000.0
    assert end_of_job(env, Slurm(squeue="17 1794700500")) == 1794700500.0
    assert told_end_of_job(JOB) is None


def test_of_an_array_only_the_own_job_counts():
    assert end_of_job(JOB, Slurm(squeue="18 1794700001\n17 1794700002\n19 N/A\n")) == 1794700002.0


@pytest.mark.parametrize("squeue", ["", "17 N/A", "squeue: error: nobody answers"])
def test_where_squeue_does_not_know_the_end_scontrol_is_asked(squeue: str):
    slurm = Slurm(squeue=squeue, scontrol="JobId=17 …\n   StartTime=1794690000 EndTime=1794700000 Deadline=N/A\n")
    assert end_of_job(JOB, slurm) == 1794700000.0
    assert slurm.commands == ["squeue", "scontrol"]


def test_a_slurm_that_writes_times_in_its_own_way_is_read_too():
    assert end_of_job(JOB, Slurm(squeue=f"17 {END.isoformat()}")) == END.timestamp()


def test_a_job_without_a_limit_has_no_end():
    assert end_of_job(JOB, Slurm(squeue="17 N/A", scontrol="EndTime=Unknown")) is None


def test_commands_that_are_not_there_are_no_error():
    assert end_of_job({**JOB, "PATH": ""}) is None


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
        ({"SLURM_JOB_GPUS": "0,2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({}, None),
    ],
)
def test_gpus_of_the_node_are_counted_as_slurm_says(env: dict[str, str], count: int | None):
    assert gpus_on_node({**JOB, **env}) == count


def test_restarts_are_counted():
    assert restart_count({**JOB, "SLURM_RESTART_COUNT": "3"}) == 3
    assert job_id({"SLURM_JOBID": "17"}) == "17"


def test_an_element_of_an_array_has_a_name_of_its_own():
    array = {**JOB, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert element_id(array) == "12_3" and element_id(JOB) == job_id(JOB) == "17"
    assert element_id({}) is None


@pytest.mark.parametrize(
    ("command", "answer"), [("echo 17", "17\n"), ("echo 17; exit 1", ""), ("printf '\\377'", "\ufffd")]
)
def test_what_a_command_prints_counts_only_if_it_succeeds(command: str, answer: str):
    assert _answer(["sh", "-c", command], {}) == answer
    assert _answer(["/no/such/command"], {}) == ""
