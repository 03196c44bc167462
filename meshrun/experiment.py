"""What a user writes: an `Experiment`, and a loss that returns a `Loss`.

    def experiment(width: int = 128, lr: float = 1e-3) -> Experiment:
        return Experiment(
            model=lambda: Net(width),
            train=Digits("train"),
            evals={"val": Digits("val")},
            loss=cross_entropy,
            optimizer=lambda params: AdamW(params, lr=lr),
            batch=64, epochs=3,
        )

Nothing here knows about ranks, and nothing here imports torch: describing a training costs nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from meshrun.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

PRECISIONS = ("fp32", "tf32", "bf16", "float8")
MOST = 10**15
"""Samples or steps beyond which a number is a slip of the pen."""
OPTIONAL_FUNCTIONS = {
    "augment": ("inputs", "draws"),
    "after": ("model", "folder"),
    "collate": ("samples",),
    "segments": ("model",),
}
"""Fields of an Experiment that may be functions, and the arguments that each is called with."""


def in_halves(precision: str) -> bool:
    """Whether matrices are stored and multiplied in bfloat16, or in less."""
    return precision in ("bf16", "float8")


class MapDataset(Protocol):
    """A dataset whose samples are found by number: `len(data)` and `data[i] -> (inputs, targets)`.

    What else it may have is used where it is there: `__getitems__(ids)`, a list of samples; `batch_of(ids)`, a whole
    batch at once; `chunk`, how many neighbouring samples are best read together; `lengths(ids)`, how long each is;
    `light`, true where reading costs next to nothing; `draws`, false in a class that never draws from a global
    generator of random numbers; `fingerprint`, a word that changes when the data does.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def sample_of(data: MapDataset, number: int) -> Any:
    """One sample, also of a dataset that can only be asked for several: torch's Dataset has a `data[i]` that raises."""
    try:
        return data[number]
    except NotImplementedError:
        many = getattr(data, "__getitems__", None)
        if many is None:
            raise
        return many([number])[0]


class Draws(Protocol):
    """Random numbers for the samples of a batch, which depend on seed, epoch and sample and never on the mesh.

    Every call gives others.
    """

    def uniform(self, count: int = 1) -> Tensor:
        """(samples, count) numbers from 0 up to 1, on the device of the batch."""


@dataclass(frozen=True)
class Loss:
    """A sum and what to divide it by, so that uneven ranks and ragged batches cannot bias the mean.

    `total` is the sum over samples (or tokens) and is what gradients flow through; `count` is how many there were.
    """

    total: Tensor
    count: Tensor | int | float


@dataclass(frozen=True)
class Metric:
    """A metric that is more than a mean: `then` makes a number of the mean of `of` over the whole evaluation set.

    perplexity = Metric(token_cross_entropy, math.exp)
    """

    of: Callable[[Any, Any], Loss]
    then: Callable[[float], float]

    def __post_init__(self) -> None:
        for name, given in (("of", ("outputs", "targets")), ("then", ("mean",))):
            function = getattr(self, name)
            if not callable(function):
                raise UserError(f"{name} of a Metric is {_described(function)}; it must be a function")
            _check_parameters(name, function, given, of="Metric")

    def __call__(self, outputs: Any, targets: Any) -> Loss:
        return self.of(outputs, targets)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run, as a factor of each parameter group's own rate.

    `warmup` is a number of steps, or a share of the run when below 1; `final` is the factor at the last step.

        Schedule("cosine", warmup=100, final=0.1)
    """

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "linear", "constant"):
            raise UserError(f"schedule kind is {self.kind!r}; it must be cosine, linear or constant")
        if not _is_finite(self.warmup) or self.warmup < 0:
            raise UserError(
                f"schedule warmup is {self.warmup!r:.60}; it must be a number of steps, or a share of the run below 1"
            )
        if not _is_finite(self.final) or self.final < 0:
            raise UserError(
                f"schedule final is {self.final!r:.60}; it must be the factor of the learning rate at the last step, a "
                f"finite number of at least 0"
            )

    def factor(self, step: int, steps: int) -> float:
        """The factor for update number `step` (from 0) of a run of `steps` updates."""
        warmup = round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.kind == "constant":
            return 1.0
        passed = (step - warmup) / max(1, steps - 1 - warmup)
        falling = 1 - passed if self.kind == "linear" else (1 + math.cos(math.pi * min(1.0, passed))) / 2
        return self.final + (1 - self.final) * max(0.0, falling)


@dataclass(frozen=True)
class Experiment:
    """One training: model, data, loss, optimizer, and how long. The same on every mesh."""

    model: Callable[[], nn.Module]
    """Builds the model; called only where and when it is needed."""
    train: MapDataset
    """Any map-style dataset of (inputs, targets); inputs that are a tuple or a dict are spread over the arguments."""
    loss: Callable[[Any, Any], Loss]
    """(outputs, targets) -> Loss(total, count)."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: int
    """The GLOBAL batch: it means the same on every mesh."""
    epochs: float | None = None
    steps: int | None = None
    """Updates in all; wins over `epochs`."""
    evals: Mapping[str, MapDataset] = field(default_factory=dict)
    """Evaluated once an epoch and at the end; the first one's loss decides which weights are the best."""
    metrics: Mapping[str, Callable[[Any, Any], Loss]] = field(default_factory=dict)
    """Sums and counts like the loss, computed in evaluation; a `Metric` also says what to make of their mean."""
    schedule: Schedule | Callable[[int, int], float] | None = None
    """A Schedule, or any (step, steps) -> factor of the learning rate; constant when absent."""
    clip: float | None = None
    """Largest norm of the global gradient."""
    precision: str = "fp32"
    """fp32; tf32: the same, but GPUs round to 10 bits what they multiply; bf16: computed in bfloat16, weights and sums
    kept in fp32; float8: linear layers in 8 bits beside that."""
    micro: int | None = None
    """Most samples that a rank computes at once; the rest is accumulated."""
    seed: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    """Makes one batch of a list of samples; torch's own when absent."""
    shuffle: str = "full"
    """The order of an epoch: `full`; `window` or `window:SAMPLES`, which reads big files nearly from front to back;
    `length` or `length:BATCHES`, which puts samples of like length together; `none`. The same on every mesh."""
    augment: Callable[[Any, Draws], Any] | None = None
    """(inputs, draws) -> inputs: changes the inputs of a training batch at random, on the device that computes it.

    The batch may be of several steps, each row a sample with draws of its own."""
    after: Callable[[nn.Module, Path], Mapping[str, Any] | None] | None = None
    """(model, folder of the run): called once after the training, with the best weights in evaluation mode.

    What it prints is shown, and what it returns is in result.json."""
    segments: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """The modules that the model applies in order: where it may be cut and sharded."""
    batch_dim: int | None = None
    """0 or 1: the dimension of activations that is the batch, where meshrun asks for it because it cannot find out."""
    tensor_plan: Mapping[str, str] | None = None
    """How parameters are split over tensor-parallel ranks, by name."""
    stage_data: Callable[..., Any] | None = None
    """Fetches what the training needs, where there is internet (`meshrun stage`); may take a `Stage` as its argument.

    Data that the experiment itself reads when it is built must be there first: a function `stage_data(stage)` beside
    `experiment` in the same file is found without building it, and wins.
    """

    def __post_init__(self) -> None:
        _refuse_built_model(self.model)
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise UserError(f"Experiment({name}=…) is {_described(getattr(self, name))}; it must be a function")
        _check_parameters("model", self.model, ())
        _check_parameters("loss", self.loss, ("outputs", "targets"))
        _check_parameters("optimizer", self.optimizer, ("parameters",))
        _check_schedule(self.schedule)
        for name in ("evals", "metrics"):
            if not isinstance(getattr(self, name), Mapping):
                raise UserError(f"{name} is {_described(getattr(self, name))}; it must be a dict with a name for each")
            for key in getattr(self, name):
                if not isinstance(key, str) or not key or not key.isprintable():
                    raise UserError(
                        f"{name} has the name {key!r:.60}; names must be texts that can be printed, and not empty"
                    )
        _check_dataset("train", self.train)
        for name, data in self.evals.items():
            _check_dataset(f"evals[{name!r}]", data)
            _check_classes(self.train, name, data)
        for name, metric in self.metrics.items():
            if not callable(metric) or name in ("loss", "count", "skipped"):
                raise UserError(
                    f"metric {name!r} must be a function of (outputs, targets), not named loss, count or skipped"
                )
            _check_parameters(f"metrics[{name!r}]", metric, ("outputs", "targets"))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(1 << 63) <= self.seed < 1 << 63:
            raise UserError(f"seed is {self.seed!r:.60}; it must be a whole number of at most 64 bits (--seed)")
        if self.batch_dim is not None and (type(self.batch_dim) is not int or self.batch_dim not in (0, 1)):
            raise UserError(f"batch_dim is {self.batch_dim!r:.60}; it must be 0 or 1, or be left out")
        if self.batch is None:
            raise UserError("batch is None; it must be a whole number of at least 1 (--batch)")
        _check_number("batch", self.batch, 1)
        _check_number("steps", self.steps, 1)
        _check_number("micro", self.micro, 1)
        if self.epochs is not None and not (_is_finite(self.epochs) and self.epochs > 0):
            raise UserError(f"epochs is {self.epochs!r:.60}; it must be a finite number above 0 (--epochs)")
        if self.epochs is not None and self.epochs > MOST / len(self.train):
            raise UserError(f"epochs is {self.epochs!r}; together they must be at most {MOST:,} samples (--epochs)")
        if self.clip is not None and not (self.clip == math.inf or (_is_finite(self.clip) and self.clip > 0)):
            raise UserError(f"clip is {self.clip!r:.60}; it must be a number above 0, or inf for none (--clip)")
        if self.clip == math.inf:  # how the command line says that a recipe's clipping is not wanted
            object.__setattr__(self, "clip", None)
        for name, given in OPTIONAL_FUNCTIONS.items():
            function = getattr(self, name)
            if function is None:
                continue
            if not callable(function):
                raise UserError(f"{name} is {_described(function)}; it must be a function")
            _check_parameters(name, function, given)
        if self.stage_data is not None and not callable(self.stage_data):
            raise UserError(f"stage_data is {_described(self.stage_data)}; it must be a function")
        if self.tensor_plan is not None:
            _check_tensor_plan(self.tensor_plan)
        if not isinstance(self.shuffle, str):
            raise UserError(
                f"shuffle is {_described(self.shuffle)}; it must be a text: full, window, length or none (--shuffle)"
            )
        if self.precision not in PRECISIONS:
            raise UserError(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)} (--precision)")

    def refuse_impossible_length(self) -> None:
        """Refuse a batch above the training set, and a training without a length.

        Not when an Experiment is made: options of the command line may still change both.
        """
        if self.epochs is None and self.steps is None:
            raise UserError("Experiment has neither epochs nor steps; give one of them, or --steps")
        if self.batch > len(self.train):
            raise UserError(
                f"batch is {self.batch} but the training set has only {len(self.train)} samples; "
                f"it may be at most that (--batch)"
            )


def _described(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}" if isinstance(value, int | float | str) else type(value).__name__


def _refuse_built_model(model: object) -> None:
    torch = sys.modules.get("torch")  # a program without torch has no model yet either
    if torch is not None and isinstance(model, torch.nn.Module):
        name = type(model).__name__
        raise UserError(
            f"Experiment(model=…) is a {name} that is built already; it must be a function that builds it, such as "
            f"model=lambda: {name}(…)"
        )


def _check_parameters(name: str, function: Callable[..., Any], given: tuple[str, ...], of: str = "Experiment") -> None:
    """Refuse a function, or a class, that cannot be called with as many arguments as it will be given."""
    if isinstance(function, type) and given == ("outputs", "targets") and not issubclass(function, Loss):
        raise UserError(f"{name} is the class {function.__name__}; it must be a function of (outputs, targets)")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some written in C say nothing of themselves
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        called, words = getattr(function, "__name__", type(function).__name__), ", ".join(given)
        raise UserError(
            f"{of}({name}=…) is called as {called}({words}), but {called}{signature} takes other arguments "
            f"({error}); wrap it, such as {name}={f'lambda {words}'.rstrip()}: {called}(…)"
        ) from None


def _check_schedule(schedule: object) -> None:
    if schedule is None or isinstance(schedule, Schedule):
        return
    valid = 'it must be a Schedule, such as Schedule("cosine", warmup=100), or a function of (step, steps)'
    if isinstance(schedule, type):
        raise UserError(f"schedule is the class {schedule.__name__}; {valid}")
    if not callable(schedule):
        raise UserError(f"schedule is {_described(schedule)}; {valid}")
    _check_parameters("schedule", schedule, ("step", "steps"))


def _check_tensor_plan(plan: object) -> None:
    if not isinstance(plan, Mapping):
        raise UserError(
            f"tensor_plan is {_described(plan)}; it must be a dict of parameters' names and how each is split"
        )
    for name, split in plan.items():
        if not isinstance(name, str) or not isinstance(split, str):
            raise UserError(
                f"tensor_plan has {name!r:.60}: {split!r:.60}; both must be texts, such as 'layers.*.wq': 'colwise'"
            )


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _check_number(name: str, value: int | None, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least} (--{name})")
    if value is not None and value > MOST:
        raise UserError(f"{name} is {value:,}; it must be at most {MOST:,} (--{name})")


def _check_classes(train: object, name: str, data: object) -> None:
    """Datasets that number classes by themselves must number the same ones."""
    mine, theirs = getattr(train, "classes", None), getattr(data, "classes", None)
    if isinstance(mine, list) and isinstance(theirs, list) and mine and theirs and mine != theirs:
        raise UserError(
            f"train has the classes {', '.join(map(str, mine))} but evals[{name!r}] has "
            f"{', '.join(map(str, theirs))}, so that their numbers mean others; "
            f"give both the same, such as ImageFolder(…, classes=train.classes)"
        )


def _check_dataset(name: str, data: object) -> None:
    if isinstance(data, type):
        raise UserError(f"{name} is the class {data.__name__}; it must be a dataset, such as {data.__name__}()")
    if isinstance(data, tuple) and data and all(hasattr(each, "shape") for each in data):
        raise UserError(f"{name} is a tuple of {len(data)} tensors; make a dataset of them: TensorDataset(*tensors)")
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"{name} is {_described(data)}; it must be a map-style dataset with len(data) and data[i]")
    try:
        length = len(data)
    except (TypeError, ValueError, OverflowError) as error:  # what is negative, no whole number, or beyond 64 bits
        raise UserError(
            f"the length of {name}, of type {type(data).__name__}, cannot be used ({error}); __len__ must return the "
            f"number of samples, a whole number of at least 1"
        ) from None
    if length == 0:
        raise UserError(f"{name} has no samples; a dataset must have at least one")
    if length > MOST:
        raise UserError(f"{name} has {length:,} samples by its __len__; they must be at most {MOST:,}")
