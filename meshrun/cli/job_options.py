"""The options of a job, beside those of the run that it trains and of its target.

asked = parse_submit(["digits", "--nodes", "2", "--width", "256"])
asked.beyond["nodes"], asked.config, asked.target
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshrun.cli.command import Asked, Command, parse_words
from meshrun.cli.options import Option, options_of, run_options
from meshrun.cli.static import static_options
from meshrun.cli.target import Target

OF_SUBMIT = [
    Option("nodes", int, 1, "Nodes of the job."),
    Option("gpus_per_node", int, None, "GPUs, and ranks, of a node; all that the site has when absent, 0 for CPUs."),
    Option("time", str, "1h", "Time limit of each job: 90min, 12h, or as Slurm writes it (1-12:00:00)."),
    Option("partition", str, None, "Slurm's partition; the site's usual one when absent."),
    Option("account", str, None, "Whom the job is charged to."),
    Option("qos", str, None, "Slurm's quality of service."),
    Option("constraint", str, None, "Features that nodes must have."),
    Option("cpus_per_gpu", int, None, "Hardware threads beside each GPU or rank; the site's share when absent."),
    Option("sbatch", str, [], "Another option for sbatch, such as --sbatch=--mem=64G; as often as needed.", True),
    Option("setup", Path, None, "File of shell lines to run first in the job, such as module load."),
    Option("offline", bool, False, "Have libraries use files that are there, where the site has internet too."),
    Option("until_done", bool, False, "Go on in further jobs until the training is complete."),
    Option("links", int, None, "Most jobs of --until-done (default 20)."),
    Option("sweep", str, [], "One run for each value: lr=1e-3,3e-4; several of them give all combinations.", True),
    Option("dry_run", bool, False, "Print the script, and submit nothing."),
    Option("wait", bool, False, "Wait for the end, and end with its status, also with --json or --no-follow."),
    Option("follow", bool, True, "Show the training live until its end, and end with its status."),
]
DOES = {"submit": "Submit a job that trains", "rehearse": "Play on this machine the job that would train"}
NOT_FOR_SUBMIT = ("nodes", "join", "port")
"""Options of a run that a job decides by itself."""


def parse_submit(words: list[str], name: str = "submit", static: bool = False) -> Asked | None:
    """Read the words after `submit`; None when they only asked for help. `static` imports nothing of the target."""
    of_run = [each for each in run_options() if each.name not in NOT_FOR_SUBMIT]
    beyond = tuple(each.name for each in OF_SUBMIT)
    command = Command(name, DOES[name], [*OF_SUBMIT, *of_run], beyond=beyond)
    return parse_words(replace(command, own=options_in_text) if static else command, words)


def options_in_text(target: Target) -> list[Option]:
    """The options of a target, without importing it if its text says what they are."""
    found = static_options(target)
    return found if found is not None else options_of(target.function())
