"""All that decides a run, as one frozen value, and the run directory that holds it.

    config = RunConfig(target="digits", options={"width": 256}, procs=2)
    run = RunDirectory.create(config)         # runs/digits-1, with config.json
    RunDirectory(run.path).config()           # what every rank reads

The fields are also the options of `meshrun run`: their names, types, defaults and help come from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshrun import strict_json
from meshrun.errors import SharedError, UserError
from meshrun.files import read_plain
from meshrun.strict_json import of_type

FORMAT = 1
RUNS = Path("runs")
DATA = Path("data")
RECOMPUTE = r"auto|none|full|selective|every-[1-9]\d{0,3}"
"""What `--recompute` may say; known here, so that no rank has to be started to refuse another word."""
ON_A_NODE = 4096
"""Processes or threads, or batches that a reader keeps ready, beyond which a number is a slip of the pen."""
COUNTABLE = 10**12
RANGES = {
    **dict.fromkeys(("procs", "threads", "prefetch"), (1, ON_A_NODE)),
    **dict.fromkeys(("eval_every", "eval_first", "keep"), (1, COUNTABLE)),
    "workers": (0, ON_A_NODE),
    "restarts": (0, COUNTABLE),
}
"""The least and the most that options of whole numbers may be."""
A_YEAR = 365 * 24 * 3600
UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
SECRET = re.compile(
    r".*token|.*(?:secret|password|passwd|passphrase|credential).*"
    r"|(?:.*[-_.])?(?:pwd|pw|pass|auth|bearer|(?:api|access|private|auth|account|wandb|signing|encryption)[-_]?key)",
    re.I,
)
"""Names of options whose values are nobody else's business."""
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/?#\s@]*:[^/?#\s@]+(?=@)")
"""A user's name and password in an address."""
HIDDEN = "(hidden)"
RESERVE = 1 << 20
"""Bytes that a run keeps free for itself in memory, for what its ranks write there when they are started anew."""


def free_bytes(folder: Path) -> int:
    """Room on the file system of a folder; 0 where that cannot be told."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return 0
    return about.f_bavail * about.f_frsize


def all_can_exchange(folder: Path) -> Path | None:
    """A folder above this one in which other users can rename what lies there, and put other things in its place.

    Every user may write to it, and no sticky bit keeps them from that; or it has one, but belongs to another user.
    """
    for above in folder.absolute().parents:
        with contextlib.suppress(OSError):
            found = above.stat()
            is_kept = found.st_mode & stat.S_ISVTX and found.st_uid in (0, os.getuid())
            if found.st_mode & stat.S_IWOTH and not is_kept:
                return above
    return None


def temporary_folder() -> Path:
    """The usual folder for temporary files; /tmp or /var/tmp where other users can exchange what lies in that one."""
    usual = Path(tempfile.gettempdir())
    places = (usual, Path("/tmp"), Path("/var/tmp"))
    safe = (each for each in places if os.access(each, os.W_OK | os.X_OK) and all_can_exchange(each / "file") is None)
    return next(safe, usual)


def _memory() -> Path:
    """/dev/shm, unless it is full: then temporary files, which take what is small as well."""
    shared = Path("/dev/shm")
    usable = os.access(shared, os.W_OK) and free_bytes(shared) >= 2 * RESERVE
    return shared if usable else temporary_folder()


MEMORY = _memory()


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
    command: tuple[str, ...] = field(default=(), compare=False)
    """The words that were typed to start it."""

    procs: int | None = option(None, "Number of local processes (default: one per GPU, else 1).")
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
    restarts: int | None = option(
        None,
        "Times in a row, without a finished step between, that lost ranks are replaced; 3 when absent, and 0 for a "
        "plain script, which begins anew.",
    )
    on_hang: Literal["restart", "end", "report"] = option("restart", "What to do with a run that hangs.")
    hang_after: float | None = option(
        None, "Seconds without progress that are a hang (default: by the pace of the steps)."
    )
    on_nan: Literal["stop", "skip", "rollback"] = option(
        "stop", "What to do when the loss is NaN: stop, skip its batch, or go back to a checkpoint and skip from there."
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = option("ignore", "What to do when the loss jumps.")
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
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            flag = f"(--{name.replace('_', '-')})"
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least} {flag}")
            if value is not None and value > most:
                raise UserError(f"{name} is {value:,}; it must be at most {most:,} {flag}")
        units = {"timeout": "seconds", "hang_after": "seconds", "mtbf": "hours", "spike": "times the usual spread"}
        for name, unit in units.items():
            value = getattr(self, name)
            flag = f"(--{name.replace('_', '-')})"
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; it must be a number above 0 ({unit}) {flag}")
            if value is not None and unit == "seconds" and value > A_YEAR:
                raise UserError(f"{name} is {value:g}; it must be at most {A_YEAR:,} seconds, a year {flag}")
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
        if self.name is not None and not _is_plain_name(self.name):
            raise UserError(f"name is {self.name!r:.200}; it must be a plain file name (--name)")

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
        words = {name: list(getattr(self, name)) for name in ("arguments", "command")}
        return {**values, "clip": clip, "runs": str(self.runs), "data": str(self.data), **words}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """The configuration that a document holds; a UserError names the first value that cannot be one."""
        values = {**values, "clip": math.inf} if values.get("clip") == "inf" else values
        hints = typing.get_type_hints(cls)
        if unknown := values.keys() - hints.keys():
            raise UserError(f"its config has {sorted(unknown)[0]!r}, which this version of meshrun does not know")
        try:
            return cls(**{name: of_type(hints[name], each, name) for name, each in {"target": None, **values}.items()})
        except ValueError as error:
            raise UserError(f"its config has {error}") from None


def _is_plain_name(name: str) -> bool:
    """Whether a text can be the name of a file in a folder, on one line."""
    return bool(name) and "/" not in name and not name.startswith(".") and re.search(r"[\x00-\x1f\x7f]", name) is None


def whole_number(text: str) -> int | None:
    """The number that a text of ASCII digits says; None for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML document says; a ValueError where it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def seconds_in(text: str) -> float | None:
    """A time such as 90s, 10min or 2h in seconds; None for what is none."""
    words = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if words is None or words[2] not in UNITS or not float(words[1]):
        return None
    seconds = float(words[1]) * UNITS[words[2]]
    return seconds if seconds <= 100 * A_YEAR else None


def is_secret(name: str) -> bool:
    """Whether the name of an option says that its value is a secret."""
    return SECRET.fullmatch(name.lstrip("-")) is not None


def without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command line for others to read: values of options that are secrets are hidden."""
    shown: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if shown and shown[-1].startswith("--") and is_secret(shown[-1]) and not word.startswith("--"):
            shown.append(HIDDEN)
        elif equals and flag.startswith("--") and is_secret(flag):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(without_password(word))
    return tuple(shown)


def without_password(text: str) -> str:
    """A text for others to read: names and passwords of users in its addresses are hidden."""
    return _USER_OF_ADDRESS.sub(HIDDEN, text)


def _mode_of(document: dict[str, Any]) -> int:
    """Who may read config.json: its owner alone, where it holds a secret; else whom the umask lets."""
    return 0o600 if _holds_secret(document) else 0o666


def _holds_secret(value: Any, name: str = "") -> bool:
    """Whether a document has a secret: an option that was given, the default of one, or one of an earlier start."""
    if isinstance(value, dict):
        return any(_holds_secret(inner, str(key)) for key, inner in value.items())
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return any(map(_holds_secret, value))
    words = name == "arguments" and isinstance(value, list) and without_secrets(map(str, value)) != tuple(value)
    address = isinstance(value, str) and without_password(value) != value
    return words or address or (is_secret(name) and not isinstance(value, bool) and value not in (None, ""))


def option_fields() -> list[dataclasses.Field[Any]]:
    """The fields of RunConfig that are options of the command line."""
    return [each for each in dataclasses.fields(RunConfig) if "help" in each.metadata]


def read_file(path: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file: the same names as on the command line, dashes or underscores."""
    try:
        text = read_plain(path).decode("utf-8")
        values = strict_json.loads(text) if path.suffix == ".json" else read_toml(text)
    except ValueError as error:
        raise UserError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error} (--config)"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; it must be a TOML or JSON file (--config)") from None
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
            runs.mkdir(mode=0o775, parents=True, exist_ok=True)  # nobody else is to rename runs, whatever the umask
            refuse_exchangeable(runs)
            taken = [each.name.removeprefix(f"{name}-") for each in runs.glob(f"{name}-*")]
            number = max((each for text in taken if (each := whole_number(text)) is not None), default=0)
            while True:
                number += 1
                try:
                    # Users outside of the owner's group have no business in a run; the umask decides on the group.
                    (runs / f"{name}-{number}").mkdir(mode=0o770)
                    break
                except FileExistsError:
                    continue
            run = cls(runs / f"{name}-{number}")
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG and os.path.isdir(runs):  # noqa: PTH112 - Path's raises
                raise UserError(f"name is {name!r:.200}, of {len(name)} characters; it is too long (--name)") from None
            raise UserError(f"cannot make a run directory in {runs}: {error.strerror} (--runs)") from None
        try:
            for folder in (run.events, run.logs, run.weights):
                folder.mkdir()
            run.save_config(config, {})
        except OSError as error:
            shutil.rmtree(run.path, ignore_errors=True)
            raise UserError(f"cannot make a run directory in {runs}: {error.strerror} (--runs)") from None
        return run

    def save_config(self, config: RunConfig, resolved: dict[str, Any]) -> None:
        """Write config.json: what was asked for, and what it came to once the experiment and the mesh were known."""
        document = {"format": FORMAT, "config": config.to_json(), "resolved": resolved}
        if history := self.document().get("history"):
            document["history"] = history
        write_json(self.path / "config.json", document, _mode_of(document))

    @contextlib.contextmanager
    def renewed(self, config: RunConfig, read: dict[str, Any]) -> Iterator[None]:
        """Go on with another configuration, for the holder of the run's lock; the old ones stay under `history`.

        `read` is the config.json that the configuration was made from: where another process has started the run since
        then, this one is refused. A UserError inside of the `with` brings the old config.json back, unless there is
        a checkpoint by then which the new configuration has made.
        """
        before, saved = self.document(), self.saved_step()
        if any(before.get(name) != read.get(name) for name in ("config", "history")):
            raise SharedError(f"{self.path} was started by another process in the meantime; give the command again")
        latest = {name: value for name, value in before.items() if name != "history"}
        history = [*before.get("history", []), latest]
        document = {"format": FORMAT, "config": config.to_json(), "history": history}
        path = self.path / "config.json"
        try:
            write_json(path, document, _mode_of(document))
        except OSError as error:
            raise SharedError(f"cannot write {path}: {error.strerror}; nothing of the run was changed") from error
        try:
            yield
        except UserError:
            if self.saved_step() == saved:
                with contextlib.suppress(OSError):
                    write_json(path, before, _mode_of(before))
            raise

    def document(self) -> dict[str, Any]:
        """All of config.json; nothing while there is none. A UserError says what is wrong with one that is damaged."""
        path = self.path / "config.json"
        try:
            found = strict_json.read(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        format, config = found.get("format"), found.get("config")
        if isinstance(format, int) and format > FORMAT:
            raise UserError(
                f"{path} is of format {format}, but this meshrun knows formats up to {FORMAT}; "
                f"use the version of meshrun that wrote it, or a newer one"
            )
        tables = isinstance(config, dict) and isinstance(found.get("resolved", {}), dict)
        if not isinstance(format, int) or not tables or not _are_documents(found.get("history", [])):
            raise UserError(f"{path} is not the config.json of a run")
        return found

    def config(self) -> RunConfig:
        """What the run was asked for; a UserError where no config.json says it."""
        document = self.document()
        if not document:
            raise UserError(f"{str(self.path)!r} is no run: it has no config.json")
        try:
            return RunConfig.from_json(document["config"])
        except UserError as error:
            raise UserError(f"{self.path / 'config.json'} cannot be used: {error}") from None

    def result(self) -> dict[str, Any] | None:
        """What result.json holds, of a run that has reached its end; None without one that can be read."""
        try:
            found = strict_json.read(self.path / "result.json")
        except (OSError, ValueError):
            return None
        return found if _is_step(found.get("steps")) else None

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

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, whose folder gets its name only once it is whole; None without one."""
        found = [re.fullmatch(r"step-(\d{8,})(\.\d+)?", path.name) for path in self.checkpoints.glob("step-*")]
        return max((int(match[1]) for match in found if match), default=None)

    def what_is_left(self) -> str:
        """For a sentence on a run that was stopped: which state was saved, and how to continue from it."""
        step = self.saved_step()
        if step is None:
            return f"no state was saved; {self.path} has its logs"
        return f"state saved at step {step:,}; continue with: meshrun resume {self.path}"

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
            found = strict_json.read(self.stopped_file)
        except (OSError, ValueError):
            return None
        whole = _is_step(found.get("step")) and _is_step(found.get("of")) and isinstance(found.get("why"), str)
        return found if whole and isinstance(found.get("result", {}), dict) else None

    def memory_of(self, node: int | str) -> Path:
        """A folder in a node's own memory for this run: what survives a lost process, and not the node."""
        return self.memories / f"node-{node}"

    @property
    def memories(self) -> Path:
        """Where all folders for this run in this machine's memory are."""
        who = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]
        return memory_of_user() / who

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.jsonl"

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_documents(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def write_json(path: Path, document: dict[str, Any], mode: int = 0o666) -> None:
    """Write a document, whole or not at all; the umask takes from `mode`."""
    write_whole(path, strict_json.dumps(document, indent=2) + "\n", mode)


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it; the umask takes from `mode`."""
    # A name that nobody guesses, and no file that is there already: others may be able to write to the folder.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(
            beside,
            "w",
            encoding="utf-8",
            errors="surrogateescape",
            opener=lambda name, flags: os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, mode),
        ) as file:
            file.write(text)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def memory_of_user() -> Path:
    """The folder of this user in this machine's memory, which may still have to be made.

    Its usual name can be guessed, and another user may have taken it. Then it has a name that nobody guesses, under
    which later processes of this user find it; the oldest one counts where two processes have made one each.
    """
    usual = MEMORY / f"meshrun-{os.getuid()}"
    own = filter(is_private, (usual, *sorted(MEMORY.glob(f"{usual.name}.*"))))
    new = usual.with_name(f"{usual.name}.{time.time_ns():020d}-{secrets.token_hex(16)}")
    return next(own, new if os.path.lexists(usual) else usual)


def reserve_room(folder: Path) -> None:
    """Keep some room in a folder in memory, which `use_reserve` frees when others have filled the rest."""
    with contextlib.suppress(OSError), (folder / "reserve").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE)


def use_reserve(folder: Path) -> None:
    """Free the room that was kept in a folder in memory, if there is little else."""
    if free_bytes(folder) < RESERVE:
        remove(folder / "reserve")


def remove(path: Path) -> None:
    """Delete a file if it is there and the disk allows it: a run does not end because its disk is read-only now."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def made_private(folder: Path) -> bool:
    """Make a folder for this user alone; False where it is not, since another one may have been there first."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    return is_private(folder)


def is_private(folder: Path) -> bool:
    """Whether a folder is there that only this user can write to."""
    try:
        found = folder.lstat()  # a link would lead to what its maker has chosen
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def refuse_exchangeable(runs: Path) -> None:
    """Refuse a folder of runs in which another user can put a run of his own in the place of this user's.

    The config.json of a run decides which program its ranks execute, whenever they are started. In /tmp anybody may
    have made a folder called `runs`, or a link of that name.
    """
    for place in dict.fromkeys((runs.absolute(), runs.resolve())):
        found = place.lstat()
        is_link = stat.S_ISLNK(found.st_mode)
        is_open = not is_link and bool(found.st_mode & stat.S_IWOTH)
        is_shared = not is_link and found.st_mode & stat.S_IWGRP and found.st_gid in (os.getgid(), *os.getgroups())
        is_foreign = found.st_uid not in (0, os.getuid()) and (is_open or not is_shared)
        is_planted = is_foreign and (is_open or place.parent.stat().st_mode & stat.S_IWOTH)
        if is_planted or (is_open and not found.st_mode & stat.S_ISVTX):
            raise UserError(
                f"other users can put runs of theirs in the place of those in {runs}, which decide which program is "
                f"executed; name a folder of this user (--runs)"
            )
