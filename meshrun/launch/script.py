"""The text of a job script: a pure function of a submission, so that what will run can be read, kept and compared.

    text = script(submission)            # job.sh; `meshrun submit --dry-run` prints it

A script does little: it asks Slurm for nodes, prepares the shell as the site wants it, starts ONE launcher on each
node (`meshrun resume RUN --from-start`), hands on what Slurm tells it, and at the end lets `meshrun next` decide how it
goes on. Each line that is not obvious has its reason above it. Nothing that a user typed gets into it but paths, which
are quoted, and plain values, which `submission` has looked at.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator

from meshrun.launch.submission import Line, Submission
from meshrun.world import walltime

WIDTH = 116
SHORT = 600
"""Seconds below which a job relies on the training's own clock."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
"""What makes libraries look at files that are here, and not for a network that is not."""

_WHY_IT_ENDS = 'echo "meshrun: the job ends, since line $LINENO of its script failed: $BASH_COMMAND" >&2'
_ENDED_BY_SETUP = 'echo "meshrun: the job ends, since --setup ended its shell with exit status $?" >&2'

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def script(submission: Submission) -> str:
    """All of job.sh."""
    parts = [_head(submission), _requests(submission), _shell(submission), _training(submission)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def quoted(text: str) -> str:
    """A text as one word of bash, which is that text whatever stands in it."""
    return text if _PLAIN.fullmatch(text) else '"' + re.sub(r'([\\$`"])', r"\\\1", text) + '"'


def lead(seconds: int) -> int | None:
    """How long before the end of its time a job's shell is told, for a training that has not stopped by itself.

    Slurm looks about twice a minute and may be a minute early: too coarse for a job of a few minutes.
    """
    return min(120, seconds // 10) if seconds >= SHORT else None


def _head(submission: Submission) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# A training, started by meshrun with:"
    yield f"#   {_one_line(shlex.join(submission.command))}"
    yield from _comment(
        "config.json in its run directory holds all options. Submitted again by hand (sbatch job.sh), it goes on from "
        "its newest checkpoint."
    )
    if submission.rules.site:
        yield f"# Site: {submission.rules.title or submission.rules.site}."


def _requests(submission: Submission) -> Iterator[str]:
    asked, rules = submission.resources, submission.rules
    yield f"#SBATCH --job-name={submission.job_name}"
    if submission.sweep:
        yield from _comment("One element of the array for each run of the sweep.")
        yield f"#SBATCH --array=0-{len(submission.sweep) - 1}"
    yield f"#SBATCH --nodes={asked.nodes}"
    yield from _comment("One task a node: a launcher, which starts the node's ranks and replaces those that are lost.")
    yield "#SBATCH --ntasks-per-node=1"
    if asked.gpus_per_node and rules.gpu_request:
        yield f"#SBATCH {rules.gpu_request.format(n=asked.gpus_per_node)}"
    if asked.cpus_per_node:
        yield f"#SBATCH --cpus-per-task={asked.cpus_per_node}"
    yield f"#SBATCH --time={walltime.text(asked.seconds)}"
    for name in ("partition", "account", "qos", "constraint"):
        if getattr(asked, name):
            yield f"#SBATCH --{name}={_sbatch_quoted(getattr(asked, name))}"
    for line in rules.sbatch:
        yield from _comment(line.why)
        yield f"#SBATCH {line.text}"
    for flag in asked.more:
        name, equals, value = flag.partition("=")
        yield f"#SBATCH {name}{equals}{_sbatch_quoted(value)}"
    yield from _comment("What this shell and the launchers print; appended, since a requeued job keeps its number.")
    yield f"#SBATCH --output={_sbatch_quoted(_output(submission))}"
    yield "#SBATCH --open-mode=append"
    yield from _comment("After preemption, or the loss of the first node, Slurm starts the job anew, and it goes on.")
    yield "#SBATCH --requeue"
    yield from _comment("The loss of another node does not end the job: the rest goes on without it.")
    yield "#SBATCH --no-kill"
    if told := lead(asked.seconds):
        yield from _comment(
            "So many seconds before the end this shell is told, should the training not have stopped by itself by then."
        )
        yield f"#SBATCH --signal=B:USR2@{told}"


def _shell(submission: Submission) -> Iterator[str]:
    rules = submission.rules
    foreign = bool(rules.modules or submission.setup)
    yield "set -eo pipefail" if foreign else "set -euo pipefail"
    yield f"trap '{'trap - EXIT; ' if submission.setup else ''}{_WHY_IT_ENDS}' ERR"
    yield from rules.modules
    if submission.setup:
        yield from _comment("Lines of --setup may end this shell, and then it says so.")
        yield f"trap '{_ENDED_BY_SETUP}' EXIT"
        yield "# From here to the next comment of meshrun: the lines of --setup, as they were given."
        yield submission.setup.rstrip("\n")
        yield "# meshrun: end of the lines of --setup."
        yield "trap - EXIT"
    if foreign:
        yield from _comment("Only now, since modules and environments use variables that are not set.")
        yield "set -u"
    above = ""
    for name, line in rules.environment.items():
        yield from _comment(line.why if line.why != above else "")
        yield f'export {name}="{line.text}"'
        above = line.why
    if submission.resources.cpus_per_node:
        yield from _comment("Slurm 22.05 to 23.02 give a step one core a task, whatever the job was granted.")
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    if submission.offline or not rules.internet:
        yield from _comment(
            "Compute nodes have no internet: what is to be downloaded is there (meshrun stage), or is missed at once."
        )
        yield from (f"export {name}={value}" for name, value in OFFLINE.items())


def _training(submission: Submission) -> Iterator[str]:
    if submission.sweep:
        yield "RUNS=("
        for element in submission.sweep:
            yield from _comment(_one_line(element.values), "    ")
            yield f"    {quoted(str(element.run))}"
        yield ")"
        yield 'RUN="${RUNS[SLURM_ARRAY_TASK_ID]}"'
    else:
        yield f"RUN={quoted(str(submission.run))}"
    if submission.python_flags:
        yield from _comment("-P: no modules are taken from the working directory, where others may have put some.")
    yield f"PYTHON=({' '.join(map(quoted, (submission.python, *submission.python_flags)))})"
    yield ""
    yield "STEP=("
    yield from _comment("All nodes get what this shell exports, also where sbatch was given --export=NONE.", "    ")
    yield "    --export=ALL"
    yield from _comment("Launchers notice by themselves when one of them is lost; Slurm must not end the rest.", "    ")
    yield "    --no-kill --kill-on-bad-exit=0 --wait=0"
    yield from _comment("A launcher may use all cores of its node that were granted, and shares them out.", "    ")
    yield "    --cpu-bind=none"
    for line in rules_for_step(submission):
        yield from _comment(line.why, "    ")
        yield f"    {line.text}"
    yield ")"
    yield ""
    yield from _RUNNING


def rules_for_step(submission: Submission) -> tuple[Line, ...]:
    """The site's flags for srun, less those that every step has."""
    return tuple(line for line in submission.rules.srun if line.text != "--cpu-bind=none")


_RUNNING = r"""
# What Slurm tells this shell reaches the training, on whatever nodes it runs, as a file that it looks for.
# What an earlier job was told, and how it ended, holds no more.
rm -f "$RUN/stop" "$RUN/stopped.json"
ask_to_stop() {
    told=yes
    # Renamed, so that it is there with its word: one without is a person's, who wants the run to rest.
    if [[ ! -e $RUN/stop ]]; then
        echo slurm >"$RUN/.stop"
        mv "$RUN/.stop" "$RUN/stop"
    fi
}
trap ask_to_stop USR2 TERM

# A node that does not see the run directory is named here, before anything starts.
status=0
srun --export=ALL ls "$RUN/config.json" >/dev/null || status=$?
if ((status != 0)); then
    echo "meshrun: the nodes named above cannot see $RUN; runs must be on a disk that all nodes share (--runs)" >&2
else
    srun "${STEP[@]}" "${PYTHON[@]}" -m meshrun resume "$RUN" --from-start &
    step=$!
    # A signal ends `wait`, and not the step: wait again, unless it was the step that ended.
    told=yes
    while [[ $told == yes ]]; do
        told=no status=0
        wait "$step" || status=$?
    done
fi

# Complete, failed, or to be gone on with: this decides, says so, and its exit status is the job's.
exec "${PYTHON[@]}" -m meshrun next "$RUN" --status "$status"
""".strip("\n").split("\n")


def _output(submission: Submission) -> str:
    """Slurm's log; a percent sign is Slurm's own and stands for itself when it is doubled."""
    logs = str(submission.run / "logs").replace("%", "%%")
    return f"{logs}/slurm-{'%A_%a' if submission.sweep else '%j'}.out"


def _sbatch_quoted(text: str) -> str:
    """A value of an #SBATCH line, which sbatch reads with quotes like a shell's, and expands nothing in."""
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    """A text that stays one line of a comment; control characters are written as Python does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
