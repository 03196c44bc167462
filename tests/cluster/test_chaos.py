"""Faults of nodes, network and Slurm strike into a job on a virtual cluster, and leave no trace in what it reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.check.test_chaos import PROGRAMS


def chaos(*words: object) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "meshrun", "chaos", *map(str, words), "--cluster", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout), ran.stderr


@pytest.mark.every  # test_nodes.py has the same loss in a third of the time
@pytest.mark.timeout(260)
def test_a_run_goes_on_without_a_node_that_lost_its_power(tmp_path):
    # Random numbers and means of the ranks' own would be others with another number of ranks.
    target = (PROGRAMS / "restless.py", "--no-blur", "--no-norm", "--steps", 100)
    status, found, said = chaos(*target, "--faults", 2, "--kinds", "slurmctld-restart,node-off", "--keep", tmp_path)
    assert (status, found["failures"]) == (0, []), said
    assert (found["survived"], found["ids_lost"], found["ids_repeated"], found["weights_equal"]) == (2, 0, 0, True)
    assert found["by_kind"]["node-off"]["seconds"] < 26, "half of what torchrun takes"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--kinds", "segv"), "segv does not strike on a virtual cluster; there are network-cut, network-gone, "),
        (("--procs", 3), "procs is 3; on a virtual cluster a node has 2 ranks (--procs)"),
    ],
)
def test_what_does_not_go_on_a_cluster_is_refused_before_anything_runs(words: tuple[object, ...], error: str):
    status, found, _ = chaos("digits", *words)
    assert status == 2 and found["error"].startswith(error)
