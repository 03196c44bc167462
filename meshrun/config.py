"""All that decides a run, as one frozen value, and the run directory that holds it.

    config = RunConfig(target="digits", options={"width": 256}, procs=2)
    run = RunDirectory.create(config)         # runs/digits-1, with config.json
    RunDirectory(run.path).config()           # what every rank reads

The fields are also the options of `meshrun run`: their names, types, defaults and help come from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshrun.errors import UserError

FORMAT = 1
RUNS = Path("runs")
DATA = Path("data")
RECOMPUTE = r"auto|none|full|selective|every-[1-9]\d{0,3}"
"""What `--recompute` may say; known here, so that no rank has to be started to refuse another word."""
UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def option(default: Any, help: str) -> Any:
    """A field that is also an option of the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RunConfig:
    """A run as it was asked for. `None` leaves the value to the experiment or to what is found on the machine."""

    target: str
    options: dict[str, Any] = field(default_factory=dict)
    """The parameters of the experiment function that were given."""
    arguments: tuple[str, ...] = ()
    """What a plain script gets as its own arguments."""

    procs: int | None = option(None, "Local processes; every local GPU, or one process, when absent.")
    layout: str = option("dp=*", "The mesh: axis=degree[:variant],…; * is what is left.")
    steps: int | None = option(None, "Updates in all; wins over --epochs.")
    epochs: float | None = option(None, "Passes over the training set.")
    batch: int | None = option(None, "The global batch: the same on every mesh.")
    scale_lr: bool = option(False, "Scale learning rates with a changed --batch (linear scaling rule).")
    micro: int | None = option(None, "Most samples that a rank computes at once; the rest is accumulated.")
    seed: int | None = option(None, "Decides initial weights and the order of samples.")
    clip: float | None = option(None, "Largest norm of the global gradient; inf for none.")
    precision: Literal["fp32", "tf32", "bf16", "float8"] | None = option(
        None,
        "tf32 multiplies with 10 bits on GPUs; bf16 computes in bfloat16 with fp32 weights kept; float8 also has "
        "linear layers in 8 bits.",
    )
    recompute: str = option(
        "auto", "Activations computed twice to save memory: auto, none, full, selective, or every-K."
    )
    compile: bool | None = option(None, "Compile each segment of the model; on GPUs where it pays, when absent.")
    graphs: bool | None = option(None, "Replay steps as CUDA graphs; where it pays, when absent.")
    states: Literal["fp32", "8bit"] = option("fp32", "What Adam's moments are kept in.")
    update_in_backward: bool = option(False, "Update each weight as soon as its gradient is there, and let that go.")
    offload: bool = option(False, "Keep fsdp's shards and the optimizer's state in host memory.")
    sync_batchnorm: bool = option(False, "BatchNorm over the global batch instead of each micro-batch.")
    compress: Literal["none", "fp16", "bf16", "powersgd"] = option("none", "Compress dp's gradients on their way.")
    allow_tp_across_nodes: bool = option(False, "Let tensor-parallel groups span nodes.")
    eval_every: int | None = option(None, "Evaluate every so many steps; once an epoch when absent.")
    eval_first: int | None = option(None, "Evaluate only the first so many samples of each set.")
    workers: int | None = option(None, "Reader processes a rank; from the cores of a rank when absent.")
    prefetch: int = option(2, "Batches that each reader keeps ready.")
    shuffle: str | None = option(None, "Order of an epoch: full, window[:SAMPLES], length[:BATCHES], or none.")
    cache: str = option("none", "Copy data files to the node first: auto, tmp, memory, a folder, or none.")
    skip_bad_samples: bool = option(False, "Go on without samples that cannot be read, and count them.")
    checkpoint: str = option(
        "auto", "When to save all state: auto, every so many steps (500), a time (10min), or none."
    )
    keep: int = option(2, "Newest checkpoints to keep, beside the best one.")
    mtbf: float = option(50_000.0, "Hours between two failures of one rank, from which auto finds its interval.")
    spare: bool = option(True, "Keep a copy of the state in the nodes' memory, so that a lost rank costs no step.")
    restarts: int = option(3, "Times in a row, without a finished step between, that lost ranks are replaced.")
    on_hang: Literal["restart", "end", "report"] = option("restart", "What to do with a run that hangs.")
    hang_after: float | None = option(None, "Seconds without progress that are a hang; by the pace when absent.")
    on_nan: Literal["stop", "skip", "rollback"] = option(
        "stop", "A loss that is no number: stop, skip its batch, or go back to a checkpoint and skip from there."
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = option("ignore", "The same for a loss that jumps.")
    spike: float = option(20.0, "A jump: so many times the usual spread of the last losses above their median.")
    record_ids: bool = option(False, "Write the ids of each rank's samples into its events.")
    nodes: str = option("1", "Nodes that each start this command: N, or least:most for a run that grows and shrinks.")
    join: str | None = option(None, "HOST:PORT of the run's first node, on the other ones.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where to compute; auto takes GPUs where there are any.")
    backend: Literal["auto", "gloo", "nccl"] = option("auto", "Collectives; auto is NCCL on GPUs, gloo on CPUs.")
    threads: int | None = option(None, "Computing threads a rank; its share of the cores when absent.")
    port: int | None = option(None, "Port of the local rendezvous; a free one when absent.")
    timeout: float = option(600.0, "Seconds that a rank waits for the others before it gives up.")
    deadline: str = option("auto", "When to stop in time: auto asks Slurm, a time from now (90s, 10min, 2h), or none.")
    site: str | None = option(None, "Site whose rules for addresses and networks hold (meshrun sites).")
    name: str | None = option(None, "Name of the run; the target's when absent.")
    runs: Path = option(RUNS, "Folder that run directories are made in.")
    data: Path = option(DATA, "Folder that staged files are found in, a folder a target (meshrun stage).")
    tensorboard: bool = option(True, "Write TensorBoard scalars where tensorboard is installed.")

    def __post_init__(self) -> None:
        leasts = {"procs": 1, "eval_every": 1, "eval_first": 1, "workers": 0, "prefetch": 1, "threads": 1, "keep": 1}
        leasts["restarts"] = 0
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least} (--{name.replace('_', '-')})")
        units = {"timeout": "seconds", "hang_after": "seconds", "mtbf": "hours", "spike": "times the usual spread"}
        for name, unit in units.items():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0 {unit} (--{name.replace('_', '-')})")
        if self.port is not None and not 0 < self.port < 65536:
            raise UserError(f"port is {self.port}; it must be between 1 and 65535 (--port)")
        if self.deadline not in ("auto", "none") and seconds_in(self.deadline) is None:
            raise UserError(
                f"deadline is {self.deadline!r}; it must be auto, none, or a time from now such as 90s, 10min or 2h "
                f"(--deadline)"
            )
        if not re.fullmatch(RECOMPUTE, self.recompute):
            raise UserError(
                f"recompute is {self.recompute!r}; it must be auto, none, full, selective, or every-K for every K-th "
                f"segment (--recompute)"
            )
        if not self.cache.strip():
            raise UserError("cache is empty; it must be auto, tmp, memory, a folder, or none (--cache)")
        if self.name is not None and (not self.name or "/" in self.name or self.name.startswith(".")):
            raise UserError(f"name is {self.name!r}; it must be a plain file name (--name)")

    @property
    def run_name(self) -> str:
        """What the run directory is called, less its number."""
        if self.name:
            return self.name
        stem, _, function = self.target.partition(":")
        return Path(stem).stem + (f"-{function}" if function not in ("", "experiment") else "")

    def to_json(self) -> dict[str, Any]:
        values = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        clip = "inf" if self.clip == math.inf else self.clip  # JSON has no such number
        words = {"runs": str(self.runs), "data": str(self.data), "arguments": list(self.arguments)}
        return {**values, "clip": clip, **words}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        data = Path(values.get("data", DATA))  # absent in what was written before there was such a folder
        values = {**values, "clip": math.inf} if values.get("clip") == "inf" else values
        return cls(**{**values, "runs": Path(values["runs"]), "data": data, "arguments": tuple(values["arguments"])})


def seconds_in(text: str) -> float | None:
    """A time such as 90s, 10min or 2h in seconds; None for what is none."""
    words = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if words is None or words[2] not in UNITS or not float(words[1]):
        return None
    return float(words[1]) * UNITS[words[2]]


def option_fields() -> list[dataclasses.Field[Any]]:
    """The fields of RunConfig that are options of the command line."""
    return [each for each in dataclasses.fields(RunConfig) if "help" in each.metadata]


def read_file(path: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file: the same names as on the command line, dashes or underscores."""
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error} (--config)"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror} (--config)") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}; it must be a table of options (--config)")
    return {name.replace("-", "_"): value for name, value in values.items()}


@dataclass(frozen=True)
class RunDirectory:
    """`runs/NAME-N/`: everything that one run leaves behind."""

    path: Path

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """The next free number of this name. mkdir decides, so two runs at once cannot get the same one."""
        runs, name = config.runs, config.run_name
        try:
            runs.mkdir(parents=True, exist_ok=True)
            taken = [each.name.removeprefix(f"{name}-") for each in runs.glob(f"{name}-*")]
            number = max((int(text) for text in taken if text.isdigit()), default=0)
            while True:
                number += 1
                try:
                    (runs / f"{name}-{number}").mkdir()
                    break
                except FileExistsError:
                    continue
            run = cls(runs / f"{name}-{number}")
            for folder in (run.events, run.logs, run.weights):
                folder.mkdir()
        except OSError as error:
            raise UserError(f"cannot make a run directory in {runs}: {error.strerror} (--runs)") from None
        run.save_config(config, {})
        return run

    def save_config(self, config: RunConfig, resolved: dict[str, Any]) -> None:
        """Write config.json: what was asked for, and what it came to once the experiment and the mesh were known."""
        document = {"format": FORMAT, "config": config.to_json(), "resolved": resolved}
        if history := self.document().get("history"):
            document["history"] = history
        write_json(self.path / "config.json", document)

    def renew_config(self, config: RunConfig) -> None:
        """Go on with another configuration; what was there before is kept under `history`, oldest first."""
        before = self.document()
        history = [*before.pop("history", []), before]
        write_json(self.path / "config.json", {"format": FORMAT, "config": config.to_json(), "history": history})

    def document(self) -> dict[str, Any]:
        """All of config.json; nothing while there is none."""
        path = self.path / "config.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def config(self) -> RunConfig:
        return RunConfig.from_json(self.document()["config"])

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def what_is_left(self) -> str:
        """For a sentence on a run that was stopped: where it lies, and how it goes on if its state was written."""
        goes_on = f": meshrun resume {self.path} goes on" if any(self.checkpoints.glob("step-*/manifest.json")) else ""
        return f"what was reached is in {self.path}{goes_on}"

    @property
    def stop_file(self) -> Path:
        """Whoever makes it asks the run to stop in time."""
        return self.path / "stop"

    def asked_to_stop_by(self) -> Literal["user", "slurm"] | None:
        """Who has made `stop_file`: the script of a job, which Slurm has told something, writes that into it."""
        try:
            return "slurm" if self.stop_file.read_text().strip() == "slurm" else "user"
        except (PermissionError, UnicodeDecodeError):
            return "user"
        except OSError:  # there is none, or the disk does not say now
            return None

    @property
    def stopped_file(self) -> Path:
        """Why and after which step the run has stopped in time; not there while it trains or after it has ended."""
        return self.path / "stopped.json"

    def stopped(self) -> dict[str, Any] | None:
        """What `stopped_file` holds: step, why, time, of (how many steps), saved, and the result that was reached."""
        try:
            found: dict[str, Any] = json.loads(self.stopped_file.read_text())
        except (OSError, ValueError):
            return None
        return found

    def memory_of(self, node: int | str) -> Path:
        """A folder in a node's own memory for this run: what survives a lost process, and not the node."""
        return self.memories / f"node-{node}"

    @property
    def memories(self) -> Path:
        """Where all folders for this run in this machine's memory are."""
        who = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        return MEMORY / f"meshrun-{os.getuid()}" / who

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.jsonl"

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document, whole or not at all."""
    write_whole(path, json.dumps(document, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def made_private(folder: Path) -> bool:
    """Make a folder for this user alone; False where it is not, since another one may have been there first."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()  # a link would lead to what its maker has chosen
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
