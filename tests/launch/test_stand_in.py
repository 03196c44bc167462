"""Stand-ins for Slurm's commands do what Slurm's do, as far as job scripts use them, and refuse the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrun.cli.job_plan import planned
from meshrun.errors import UserError
from meshrun.launch.rehearsal import Rehearsal, requests
from meshrun.launch.slurm import Slurm, is_preempted
from meshrun.launch.stand_in import PlayedJob, put_up, stand_in
from meshrun.world import World, detect, environment
from meshrun.world.played import Allocation, inherited_by_jobs, of_batch
from meshrun.world.slurm import end_of_job, gpus_on_node, restart_count
from tests.launch.command import is_alive, wait_until

JOB = PlayedJob(Allocation("7", "digits-1", nodes=2, gpus_per_node=4), "/runs/job.sh", time.time(), time.time() + 3600)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    JOB.save(tmp_path)
    return tmp_path


def worlds_of(folder: Path, *flags: str) -> list[World]:
    """What the tasks of a step see."""
    dump = "import json, os, sys; own = dict(os.environ)\n"
    dump += f"open({str(folder)!r} + '/task-' + own['SLURM_PROCID'], 'w').write(json.dumps(own))"
    assert run(folder, "srun", *flags, sys.executable, "-c", dump).returncode == 0
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("task-*"))]
    assert all(restart_count(each) == 0 and gpus_on_node(each) == 4 for each in found)
    return [detect(each, "here") for each in found]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "meshrun", "stand-in", str(folder), *words]
    environment = {**inherited_by_jobs(), **of_batch(JOB.granted)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_srun_starts_one_task_a_node_that_knows_its_place(folder: Path):
    first, second = worlds_of(
        folder, "--export=ALL", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"
    )
    assert (first.rank, first.size, first.node, first.nodes, first.local_size) == (0, 2, 0, 2, 1)
    assert (second.rank, second.node, second.local_rank, second.source) == (1, 1, 0, "slurm")
    assert first.job == second.job == "slurm-7.0.0"
    assert first.hosts == ("rehearsed1", "rehearsed2")


def test_srun_starts_as_many_tasks_as_it_is_asked_for(folder: Path):
    found = worlds_of(folder, "-N2", "--ntasks-per-node=2")
    assert [(each.rank, each.node, each.local_rank) for each in found] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("exit $((SLURM_PROCID * 3))", 3, "srun: error: rehearsed2: task 1: Exited with exit code 3"),
        ("kill -9 $$", 137, "srun: error: rehearsed1: task 0: Killed"),
    ],
)
def test_srun_ends_as_its_worst_task(folder: Path, command: str, status: int, words: str):
    ended = run(folder, "srun", "sh", "-c", command)
    assert ended.returncode == status and words in ended.stderr


def test_a_program_that_is_not_there_is_named(folder: Path):
    ended = run(folder, "srun", "/not/there")
    assert ended.returncode == 2
    assert "slurmstepd-rehearsed1: error: execve(): /not/there: No such file or directory" in ended.stderr


def test_tasks_get_the_signals_of_srun_and_do_not_outlive_it(folder: Path):
    task = "import os, signal, time; signal.signal(signal.SIGUSR2, lambda *_: open(f'heard-{os.getpid()}', 'w'))\n"
    task += "open(f'pid-{os.getpid()}', 'w'); time.sleep(60); time.sleep(60)"
    argv = [sys.executable, "-m", "meshrun", "stand-in", str(folder), "srun", sys.executable, "-c", task]
    with subprocess.Popen(argv, cwd=folder, stderr=subprocess.DEVNULL) as srun:
        wait_until(lambda: len(list(folder.glob("pid-*"))) == 2, 20)
        srun.send_signal(signal.SIGUSR2)
        wait_until(lambda: len(list(folder.glob("heard-*"))) == 2, 30)
        srun.kill()
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    wait_until(lambda: not any(map(is_alive, pids)), 30)


REFUSALS = {
    "flag of srun": (
        ["srun", "--multi-prog", "x"],
        r"srun --multi-prog is not played in a rehearsal: .*known are --cpu",
    ),
    "short flag of srun": (["srun", "-X", "x"], r"srun -X is not played in a rehearsal"),
    "environment of srun": (["srun", "--export=NONE", "x"], r"srun --export=NONE is not played in a rehearsal"),
    "srun without a command": (["srun", "-N1"], r"srun is given no command"),
    "number of nodes": (["srun", "-Ntwo", "x"], r"srun --nodes is 'two'; it must be a whole number"),
    "command": (["scancel", "7"], r"scancel is not played in a rehearsal: it would ask the real Slurm"),
    "another job": (["scontrol", "requeue", "8"], r"scontrol requeue 8 is not played in a rehearsal; .* of job 7"),
    "format of squeue": (["squeue", "--format=%Q"], r"squeue --format has %Q, which is not played"),
    "module without a name": (["module", "load"], r"module load names no module"),
    "action of modules": (["module", "laod", "x"], r"module laod x: 'laod' is none of load,"),
}


@pytest.mark.parametrize(("words", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_not_played_is_refused(folder: Path, words: list[str], sentence: str):
    with pytest.raises(UserError, match=sentence):
        stand_in(folder, words)


def test_modules_are_checked_for_their_form(folder: Path):
    for words in (["load", "GCC/12", "OpenMPI"], ["purge"], ["--force", "purge"], ["use", "/opt/modules"]):
        assert stand_in(folder, ["module", *words]) == 0


def test_what_our_own_code_asks_of_slurm_is_answered(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{put_up(folder)}:{os.environ['PATH']}")
    slurm = Slurm.here()
    job = slurm.job("7")
    assert job is not None and (job.state, job.nodes, job.hosts) == ("RUNNING", 2, "rehearsed[1-2]")
    assert job.script == Path("/runs/job.sh") and not is_preempted(slurm.about("7")) and slurm.job("9") is None
    end = end_of_job({**os.environ, "SLURM_JOB_ID": "7"})
    assert end is not None and abs(end - JOB.ends) < 2
    slurm.requeue("7")
    assert (folder / "requeued").exists()
    assert slurm.submit(Path("/runs/job.sh"), "--dependency=afterany:7") == "8"
    assert json.loads((folder / "submitted.json").read_text())["script"] == "/runs/job.sh"


def test_modules_that_another_user_has_put_into_the_working_directory_are_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "meshrun.py").write_text("print('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_IS_WORKING_DIRECTORY_SEARCHED", False)
    played = subprocess.run([put_up(folder) / "squeue", "--format", "%D"], capture_output=True, text=True, check=False)
    assert (played.stdout, played.stderr) == ("2\n", "")
    plan = planned(["digits", "--nodes", "2", "--gpus-per-node", "4", "--time", "1h"])
    assert plan is not None and plan.submission.python_flags == ("-P",)


def test_requests_of_a_script_are_read_up_to_its_first_command():
    text = (
        '#!/bin/bash\n#SBATCH --nodes=2\n# words\n\n#SBATCH --output="/a b/\\"c\\"/%j.out"\nset -e\n#SBATCH --nodes=3\n'
    )
    assert requests(text) == {"--nodes": "2", "--output": '/a b/"c"/%j.out'}


def test_a_script_is_played_again_after_a_requeue_and_its_shell_is_told_in_time(tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text(
        f'#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --output="{tmp_path}/out-%j"\n'
        "trap 'echo told' USR2\n"
        'echo "link ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NUM_NODES nodes of $SLURM_JOB_NODELIST"\n'
        # What the training's step looks like; it ends when it is told.
        "srun -N1 sh -c 'sleep 1' sh -m meshrun resume RUN & wait; wait\n"
        'if [[ -z ${SLURM_RESTART_COUNT-} ]]; then scontrol requeue "$SLURM_JOB_ID"; fi\n'
    )
    said: list[str] = []
    played = Rehearsal(tmp_path / "slurm").links(script, 0, said.append)
    first, second = next(played), next(played)
    assert (first.status, first.told, second.status, second.told) == (0, True, 0, False)
    assert first.log == "link 0 on 3 nodes of rehearsed[1-3]\ntold\n" and second.log.startswith("link 1 on 3 nodes")
    assert said == (first.log + second.log).splitlines() == (tmp_path / "out-1").read_text().splitlines()


def test_a_script_that_submits_itself_is_played_as_the_next_job(tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text(
        f'#!/bin/bash\n#SBATCH --output="{tmp_path}/out-%j"\n'
        f'echo "job $SLURM_JOB_ID"\nsbatch --parsable --dependency=afterany:$SLURM_JOB_ID {script}\n'
    )
    played = Rehearsal(tmp_path / "slurm").links(script, 0, lambda _: None)
    assert [(link.job, link.log) for link in (next(played), next(played))] == [("1", "job 1\n2\n"), ("2", "job 2\n3\n")]
