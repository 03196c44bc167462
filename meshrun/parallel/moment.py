"""What is being computed now: which step, of which samples, and how often each module was called in it.

    moment = Moment(seed=0, device=here.device)
    moment.step, moment.ids = 7, ids           # before each forward pass
    with frozen(moment, moment.copy()): …      # later, as it is now

    checkpoint(block, x, use_reentrant=False, context_fn=lambda: replay(moment))     # recomputed at the same moment

Modules that draw by key (`dropout.py`) read numbers of it, all of them as tensors on the model's own device. So
compiled code need not be compiled again when they change, and comes with no kernel for the host; and a recorded step
(`graphs.py`) finds what the next one is to draw by in the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrun.errors import RunFailed

CPU = torch.device("cpu")
TURN = -0x61C8864680B583EB
"""What a module's word grows by from one call to the next: an odd constant, as of Weyl sequences."""
AHEAD = 12
"""Calls of a module in one forward pass for which words are made beforehand: more than most are ever called."""


@dataclass(frozen=True)
class Place:
    """Where the batch is in the input of one call of a dropout."""

    dim: int | None
    """None: no dimension grows with the batch, all samples share the tensor."""
    shape: tuple[int, ...]
    """Of the input for one sample: at `dim`, how many entries a sample owns."""
    together: int | None = None
    """How many of these are next to each other: (…, batch, together) at `dim`; None: all, 0: they are in no order."""


class Call:
    """One call of a module in a forward pass: the word that it draws by, and the call after it.

    Words stay when a pass is over: no code needs to compute them, and compiled code may keep them for the backward
    pass, in which it computes again what was dropped.
    """

    def __init__(self, word: Tensor, following: Call | None = None) -> None:
        self.word, self.following = word, following
        self.place: Place | None = None
        """Where the batch is in what the module gets, if that was found out (`batch_dim.py`)."""

    def after(self) -> Call:
        if self.following is None:
            self.following = Call(self.word + TURN)
        return self.following


class Turn:
    """Which call of a module comes next in this forward pass."""

    def __init__(self, first: Call) -> None:
        self.first = self.now = first

    @classmethod
    def of(cls, name: str, device: torch.device) -> Turn:
        """Of a module of that name, before its first call."""
        first, call = word(name), None
        for number in range(AHEAD, -1, -1):
            call = Call(tensor_of(first + number * TURN, device), call)
        assert call is not None
        return cls(call)

    def __int__(self) -> int:
        """How many calls there were. Nobody looks at what is on a device."""
        count, call = 0, self.first
        while call is not self.now:
            assert call.following is not None
            count, call = count + 1, call.following
        return count


@dataclass(frozen=True)
class Earlier:
    """A moment as it was."""

    seed: int
    step: int | None
    ids: Tensor | None
    positions: Tensor | None
    length: int | None
    turns: Mapping[str, Call]


@dataclass(eq=False)
class Moment:
    """What is being computed now. All keyed modules of a model share one; the trainer assigns to its fields.

    Assigning `step` or `ids` begins a forward pass: a module that is called twice in it drops other elements the second
    time. Where the key is written in place, all backward passes of a step come before the next step.
    """

    seed: int = 0
    step: int | None = None
    """None: nobody has said, and modules do what plain torch does."""
    ids: Tensor | None = None
    """The sample ids (int64) of the micro-batch, in its order; on the model's device they need not be sent there."""
    positions: Tensor | None = None
    """Under context parallelism: where in the sequence the tokens of this rank stand (dim 1 of activations)."""
    length: int | None = None
    """The length of the whole sequence where `positions` are given."""
    device: torch.device = CPU
    """Where the model computes."""
    batch_dim: int | None = None
    """Which of dims 0 and 1 the user says is the batch, where only sizes can tell and both would fit."""
    unplaced: str | None = None
    """Why the model could not be traced for its batch dimensions: where sizes fit two, a dropout refuses to guess."""
    alone: frozenset[str] = frozenset()
    """Names of modules that drop for each sample by itself, as far as tracing has found out."""
    locate: Callable[[], None] | None = None
    """Traces the model for its batch dimensions; called once, before a model first draws as a function."""
    draws_in_functions: bool = False
    """Whether the model has called a dropout as a function, and so wants the sample ids on its device."""
    outputs: Sequence[Place] | None = None
    """Where the batch is in each tensor among the model's outputs, where that was found out."""
    targets: Sequence[Place] | None = None
    """The same of the targets."""
    in_place: bool = field(init=False, repr=False, default=False)
    """Whether the keys of all steps are one tensor, so that what was recorded of one step reads that of the next."""
    key: Tensor | None = field(init=False, repr=False, default=None)
    """Seed and step in one word."""
    _memory: Tensor | None = field(init=False, repr=False, default=None)
    _written: int | None = field(init=False, repr=False, default=None)
    """What is in memory: the key, also while nobody says which step it is."""
    turns: dict[str, Turn] = field(init=False, repr=False, default_factory=dict)
    """Which call of each module comes next in this forward pass."""

    def __post_init__(self) -> None:
        self.in_place = self.device.type != "cpu"
        self._find_key()

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if "turns" not in self.__dict__:
            return  # it is being made
        if name in ("seed", "step"):
            self._find_key()
        if name in ("step", "ids"):
            for turn in self.turns.values():
                turn.now = turn.first

    def turn_of(self, name: str) -> Turn:
        """Of the module of that name."""
        if name not in self.turns:
            self.turns[name] = Turn.of(name, self.device)
        return self.turns[name]

    def place(self, calls: Mapping[str, Sequence[Place]]) -> None:
        """Tell the calls of modules where the batch is in what they get."""
        for name, places in calls.items():
            call = self.turn_of(name).first
            for place in places:
                call.place = place
                call = call.after()

    def copy(self) -> Earlier:
        """This moment, to be returned to when it has moved on."""
        calls = {name: turn.now for name, turn in self.turns.items()}
        return Earlier(self.seed, self.step, self.ids, self.positions, self.length, calls)

    def restore(self, earlier: Earlier) -> None:
        """Return to a copy."""
        self.ids, self.positions, self.length = earlier.ids, earlier.positions, earlier.length
        object.__setattr__(self, "seed", earlier.seed)
        object.__setattr__(self, "step", earlier.step)
        number = self._number()
        if number is not None and number != self._written:
            # What is in memory may be needed there by a backward pass of the step to which it belongs.
            self.key = self._new(number)
        else:
            self.key = None if number is None else self._memory
        for name, turn in self.turns.items():
            turn.now = earlier.turns.get(name, turn.first)

    def returning(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Makes contexts, inside of which the moment is what it is now."""
        return functools.partial(frozen, self, self.copy())

    def _number(self) -> int | None:
        return None if self.step is None else word(f"{self.seed} {self.step}")

    def _find_key(self) -> None:
        number = self._number()
        if number is not None and number != self._written:
            if self.in_place and self._memory is not None:
                self._refuse_recording()
                self._memory.fill_(number)  # the host does not wait, as it does for a number that is copied
            else:
                self._memory = self._new(number)
            self._written = number
        self.key = None if number is None else self._memory

    def _new(self, number: int) -> Tensor:
        self._refuse_recording()
        return tensor_of(number, self.device)

    def _refuse_recording(self) -> None:
        if is_recorded(self.device):
            raise RunFailed(f"step {self.step} begins within a recorded one, which would drop the same for ever")


@contextlib.contextmanager
def frozen(moment: Moment, at: Earlier) -> Iterator[None]:
    """Inside, the moment is what it was when `at` was copied from it."""
    now = moment.copy()
    moment.restore(at)
    try:
        yield
    finally:
        moment.restore(now)


def replay(
    moment: Moment,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The contexts of a forward pass and of its recomputation, as `torch.utils.checkpoint` wants them."""
    return contextlib.nullcontext(), frozen(moment, moment.copy())


def word(text: str) -> int:
    """64 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def tensor_of(number: int, device: torch.device) -> Tensor:
    """A number as a tensor of 64 bits, those above them left out. It is filled there: the host does not wait."""
    return torch.full((), (number + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=device)


def is_recorded(device: torch.device) -> bool:
    """Whether what the device is told now is only written down."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
