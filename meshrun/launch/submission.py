"""A training that is to run as a Slurm job: what it asks for, and what the site it runs at wants, as plain values.

    asked = Resources(nodes=2, gpus_per_node=4, procs=4, seconds=3600)
    submission = Submission("digits-1", run, ("meshrun", "submit", "digits"), sys.executable, asked, rules_of(site))
    script(submission)                                   # `script` makes the text of job.sh from it
    of_type(Submission, submission.to_json(), "it")      # submission.json keeps it

Each thing that a user typed and that stands in the script is looked at here: what could be anything but a plain value
there is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshrun.errors import UserError
from meshrun.world.profile import Site, Value

NAME = "submission.json"
SCRIPT = "job.sh"
LINKS = 20
"""Links of a chain, at most, where nobody says how many."""

_WORD = re.compile(r"[A-Za-z0-9_.,:@+/=-]+")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:@+/=&|*()\[\]!-]+")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*(=[^\"'\\`$]+)?")


@dataclass(frozen=True)
class Line:
    """A line of a script, or a part of one, with the reason that stands above it."""

    text: str
    why: str = ""


@dataclass(frozen=True)
class Resources:
    """What a job asks Slurm for."""

    nodes: int
    gpus_per_node: int
    """0 for a job that computes on CPUs."""
    procs: int
    """Ranks a node."""
    seconds: int
    cpus_per_node: int | None = None
    """Hardware threads; None leaves it to Slurm."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    more: tuple[str, ...] = ()
    """Options of sbatch, as they were given."""

    def __post_init__(self) -> None:
        leasts = {"nodes": 1, "gpus_per_node": 0, "procs": 1, "cpus_per_node": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least} (--{name.replace('_', '-')})")
        if self.seconds < 60:
            raise UserError(f"time is {self.seconds} s; Slurm counts whole minutes, at least 1 (--time)")
        for name in ("partition", "account", "qos"):
            _refuse_unless(_WORD, name, getattr(self, name), "letters, digits and _.,:@+/=-")
        _refuse_unless(_CONSTRAINT, "constraint", self.constraint, "letters, digits and _.,:@+/=&|*()[]!-")
        for flag in self.more:
            _refuse_unless(_FLAG, "sbatch", flag, "one option such as --mem=64G, without quotes, $, ` and backslashes")

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs


@dataclass(frozen=True)
class Rules:
    """What a job script does because of the site that it runs at; as it stands, where no site is known."""

    site: str = ""
    title: str = ""
    gpu_request: str | None = "--gres=gpu:{n}"
    """None where every node has its GPUs without asking."""
    sbatch: tuple[Line, ...] = ()
    modules: tuple[str, ...] = ()
    environment: Mapping[str, Line] = field(default_factory=dict)
    """Each value stands between double quotes, where ${NAME} is expanded."""
    srun: tuple[Line, ...] = ()
    internet: bool = True
    chain: Literal["requeue", "submit"] = "requeue"


@dataclass(frozen=True)
class Element:
    """One run of a sweep, and in words what it has of its own."""

    run: Path
    values: str


@dataclass(frozen=True)
class Submission:
    """One job: a run, or a sweep of several."""

    name: str
    run: Path
    """The run directory; that of a sweep holds the script and Slurm's logs of all its runs."""
    command: tuple[str, ...]
    """The words that the user typed."""
    python: str
    resources: Resources
    python_flags: tuple[str, ...] = ("-P",)
    """-P: modules are not looked for in the working directory, where other users may have put some."""
    rules: Rules = Rules()
    sweep: tuple[Element, ...] = ()
    """The runs of a sweep, in the order of the job array."""
    setup: str = ""
    """Lines of the user's own, run before anything else on the job's first node."""
    offline: bool = False
    links: int = 1
    """Jobs, or starts of one job, that the training may take in all."""

    def __post_init__(self) -> None:
        for path in (self.run, Path(self.python), *(element.run for element in self.sweep)):
            refuse_path(path)
        if self.links < 1:
            raise UserError(f"links is {self.links}; it must be at least 1 (--links)")
        if "\0" in self.setup:
            raise UserError("the file of --setup has a zero byte, so it is no text; give lines of a shell (--setup)")

    @property
    def script_path(self) -> Path:
        return self.run / SCRIPT

    @property
    def job_name(self) -> str:
        """The name in letters that every Slurm and every shell takes."""
        return re.sub(r"[^A-Za-z0-9._-]+", "_", self.name).strip("_-.")[:64] or "meshrun"

    def to_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        return {
            **document,
            "run": str(self.run),
            "sweep": [{"run": str(element.run), "values": element.values} for element in self.sweep],
            "rules": {**document["rules"], "environment": dict(document["rules"]["environment"])},
        }


def rules_of(site: Site) -> Rules:
    """What a profile says that a script has to follow: lines with their reasons, and whether these are verified."""
    sbatch = []
    if site.get("exclusive"):
        sbatch.append(Line("--exclusive", _why(site.values["exclusive"], "Jobs get whole nodes here.")))
    if site.get("hint"):
        sbatch.append(Line(f"--hint={site.get('hint')}", _why(site.values["hint"], "As the site asks for it.")))
    request = site.get("gpu_request")
    return Rules(
        site=site.name,
        title=site.title,
        gpu_request=None if request == "none" else request or Rules.gpu_request,
        sbatch=tuple(sbatch),
        modules=site.get("modules") or (),
        environment={name: Line(value.value, _why(value)) for name, value in site.environment.items()},
        srun=tuple(Line(value.value, _why(value)) for value in site.srun),
        internet=site.get("internet") is not False,
        chain=site.get("chain") or "requeue",
    )


def refuse_path(path: Path) -> None:
    """Slurm itself cannot take every path as the place of a job's output."""
    text = str(path)
    if not text.isprintable():
        raise UserError(f"the path {text!r} has characters that no job script can hold; choose another one (--runs)")
    if "\\" in text:
        raise UserError(f"the path {text!r} has a backslash, with which Slurm finds no output file (--runs)")


def _refuse_unless(pattern: re.Pattern[str], name: str, value: str | None, valid: str) -> None:
    if value is not None and (not pattern.fullmatch(value) or not value.isprintable()):
        raise UserError(f"{name} is {value!r}; it must be {valid} (--{name})")


def _why(value: Value, usual: str = "") -> str:
    why = value.reason or usual
    return why if value.verified else f"{why} (Not verified: {value.source or 'no source'}.)".strip()
