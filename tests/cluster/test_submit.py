"""Jobs on the real Slurm: submitted, followed, rejected, cancelled, swept, and the golden scripts before sbatch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.cluster import Cluster
from tests.cluster.jobs import meshrun
from tests.launch.command import TINY, wait_until
from tests.launch.command import meshrun as here
from tests.launch.test_script import GOLDEN, HOSTILE, WORDS

CPUS, GPUS = 8, 4
"""Of a node of the virtual cluster."""


def mapped(script: str) -> str:
    """A site's script as this cluster can take it: its partition, no accounts, no more than its nodes have."""
    lines = []
    for line in script.splitlines():
        if re.match(r"#SBATCH --(account|qos|constraint|mail-user|exclude|mem)=", line):
            continue
        line = re.sub(r"^#SBATCH --partition=.*", "#SBATCH --partition=main", line)
        line = re.sub(r"^#SBATCH --gres=gpu:(?:\w+:)?\d+", f"#SBATCH --gres=gpu:{GPUS}", line)
        line = re.sub(r"^#SBATCH --gpus-per-node=(?:\w+:)?\d+", f"#SBATCH --gpus-per-node={GPUS}", line)
        lines.append(re.sub(r"^#SBATCH --cpus-per-task=\d+", f"#SBATCH --cpus-per-task={CPUS}", line))
    return "\n".join(lines) + "\n"


def test_sbatch_takes_every_golden_script(cluster: Cluster, tmp_path: Path):
    for name in WORDS:
        (tmp_path / f"{name}.sh").write_text(mapped((GOLDEN / f"{name}.sh").read_text()))
    program = 'for each in *.sh; do sbatch --test-only "$each" || echo "rejects $each" >&2; done'
    said = cluster.run("ctl", ["bash", "-c", program], cwd=tmp_path).stderr
    assert "rejects" not in said, said
    assert len(re.findall(r"Job \d+ to start at .* in partition main", said)) == len(WORDS)


def test_sbatch_rejects_what_the_script_asks_wrongly(cluster: Cluster, tmp_path: Path):
    """So that the test above can fail."""
    (tmp_path / "job.sh").write_text(mapped((GOLDEN / "generic.sh").read_text()).replace("gpu:4", "gpu:5"))
    assert cluster.run("ctl", ["sbatch", "--test-only", "job.sh"], cwd=tmp_path).returncode != 0


DIGITS = ("digits", "--width", 32, "--steps", 12, "--eval-first", 100)


def test_a_job_on_two_nodes_trains_to_the_losses_of_one_process(cluster: Cluster, tmp_path: Path):
    alone = here(tmp_path, "run", *DIGITS, "--json").document
    folder = tmp_path / HOSTILE.replace("/", "-")
    folder.mkdir()
    words = ("--nodes", 2, "--gpus-per-node", 2, "--time", "5min", "--wait", "--json")
    ended = meshrun(cluster, "ctl", "submit", *DIGITS, *words, cwd=folder)
    assert ended.status == 0, ended.err
    found = ended.document
    assert found["world"] == 4 and found["state"] == "complete" and found["script"].startswith("#!/bin/bash\n")
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert found["sample_ids_sha256"] == alone["sample_ids_sha256"]
    run = Path(found["run"])
    assert run.parent == folder / "runs"
    assert "meshrun: the training is complete\n" in (run / "logs" / f"slurm-{found['job']}.out").read_text()

    (listed,) = jobs(cluster, run)
    assert [listed[name] for name in ("job", "state", "step", "of")] == [found["job"], "complete", 12, 12]


REJECTED: dict[str, tuple[list[object], str]] = {
    "partition": (["--partition", "nope"], "there is no partition 'nope'; there are main, short"),
    "GPUs": (["--gpus-per-node", 5], "gpus_per_node is 5, but a node of partition main has 4; "),
    "time": (["--partition", "short", "--time", "1h"], "partition short ends jobs after 00:05:00; main "),
    "sbatch": (
        ["--sbatch=--reservation=none"],
        "Slurm rejects the job: Requested reservation is invalid; scontrol show",
    ),
}


def test_what_the_cluster_does_not_give_is_refused_and_leaves_nothing(cluster: Cluster, tmp_path: Path):
    for words, sentence in REJECTED.values():
        ended = meshrun(cluster, "ctl", "submit", TINY, *words, cwd=tmp_path)
        assert ended.status == 2 and sentence in ended.sentences[-1], ended.err
    assert not list((tmp_path / "runs").glob("*"))
    assert cluster.run("ctl", ["squeue", "-h"]).stdout == ""


def test_a_sweep_trains_one_run_for_each_value(cluster: Cluster, tmp_path: Path):
    words = ("--gpus-per-node", 1, "--time", "5min", "--wait", "--json", "--sweep", "seed=1,2")
    ended = meshrun(cluster, "ctl", "submit", TINY, *words, cwd=tmp_path)
    assert ended.status == 0, ended.err
    runs = ended.document["runs"]
    assert [(each["state"], each["steps"], each["world"]) for each in runs] == [("complete", 5, 1)] * 2
    assert runs[0]["losses"] != runs[1]["losses"]
    configs = [json.loads((Path(each["run"]) / "config.json").read_text())["config"] for each in runs]
    assert [config["seed"] for config in configs] == [1, 2]


def test_a_job_that_fails_ends_with_the_first_error_of_any_rank(cluster: Cluster, tmp_path: Path):
    words = ("--fault", "raise", "--gpus-per-node", 2, "--time", "5min", "--until-done")
    ended = meshrun(cluster, "ctl", "submit", TINY, *words, cwd=tmp_path)
    assert ended.status == 1
    assert re.search(r"^rank 1 on n\d failed at step 3: ValueError: bad luck", ended.sentences[-1]), ended.err
    (listed,) = jobs(cluster, tmp_path / "runs" / "tiny-1")
    assert (listed["state"], listed["links"]) == ("failed", 1)


def test_cancelling_ends_the_job_and_its_chain(cluster: Cluster, tmp_path: Path):
    words = ("--pause", 0.1, "--steps", 2000, "--gpus-per-node", 1, "--time", "5min", "--until-done", "--json")
    run = Path(meshrun(cluster, "ctl", "submit", TINY, *words, cwd=tmp_path).document["run"])
    wait_until(lambda: '"kind": "step"' in _text(run / "events" / "rank-00000.jsonl"), 60)
    (listed,) = jobs(cluster, run)
    assert (listed["state"], listed["of"]) == ("running", 2000)
    cancelled = meshrun(cluster, "ctl", "cancel", run.name, cwd=tmp_path)
    assert (cancelled.status, cancelled.out) == (
        0,
        f"cancelled job {listed['job']} of {run}; what was saved is kept\n",
    )
    followed = meshrun(cluster, "ctl", "follow", listed["job"], cwd=tmp_path)
    assert followed.status == 1 and followed.sentences[-1] == f"job {listed['job']} was cancelled"
    assert cluster.run("ctl", ["squeue", "-h", "-t", "PENDING,RUNNING"]).stdout == ""
    again = meshrun(cluster, "ctl", "cancel", run.name, cwd=tmp_path)
    assert again.status == 2 and "has no job that is pending or running" in again.sentences[-1]


def jobs(cluster: Cluster, run: Path) -> list[dict[str, Any]]:
    """What `meshrun jobs` lists of a run; those of other tests are in the list too."""
    listed = meshrun(cluster, "ctl", "jobs", "--json", cwd=run.parent.parent).document["jobs"]
    return [each for each in listed if each["run"] == str(run)]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
