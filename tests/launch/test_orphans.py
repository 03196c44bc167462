"""A job that goes on without its first node, as Slurm shows it, and what the nodes that are left do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import pytest

from meshrun.launch.orphans import Orphan, has_lost
from meshrun.launch.slurm import Slurm, shown

SHOWN = """JobId=20 JobName=job.sh
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   ReqNodeList=n[1-2] ExcNodeList=(null)
   NodeList=n[2-3]
   BatchHost=n1
"""
"""Of Slurm 22.05, some lines left out."""


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("", "", True),
        ("NodeList=n[2-3]", "NodeList=n[1-3]", False),
        ("JobState=RUNNING", "JobState=COMPLETING", False),
        ("BatchFlag=1", "BatchFlag=0", False),
        (SHOWN, "", False),
    ],
)
def test_a_batch_job_that_runs_on_other_nodes_than_its_first_is_an_orphan(old: str, new: str, lost: bool):
    assert has_lost(shown(SHOWN.replace(old, new) if old else SHOWN), "n1") is lost


class Asked:
    """A Slurm that notes what it is asked, and refuses to requeue if it is to."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.words = refuses, list[str]()

    def __call__(self, argv: Sequence[str], _env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        self.words.append(" ".join(argv))
        refused = self.refuses and "requeue" in argv
        return subprocess.CompletedProcess(argv, int(refused), SHOWN, "Requested operation is presently disabled")


def test_an_orphan_is_put_back_into_the_queue():
    asked = Asked(refuses=False)
    orphan = Orphan("20", "n1", Slurm(asked))
    assert orphan.is_one()
    assert orphan.requeue() == "job 20 has lost its first node, n1, and was put back into the queue"
    assert asked.words == ["scontrol show job 20", "scontrol requeue 20"]


def test_an_orphan_that_may_not_be_requeued_gives_its_nodes_back():
    asked = Asked(refuses=True)
    said = Orphan("20", "n1", Slurm(asked)).requeue()
    assert said == (
        "job 20 has lost its first node, n1, and was ended: scontrol failed: Requested operation is presently disabled"
    )
    assert asked.words == ["scontrol requeue 20", "scancel 20"]
