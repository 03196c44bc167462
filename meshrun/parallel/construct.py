"""Builds a model of which no process ever holds the whole, with bit for bit the numbers of its plain constructor.

    plan = blueprint(lambda: Net(128), seed=0)
    plan.model                         # the modules, with every parameter and buffer on the meta device
    plan.fill(keep_my_shard)           # keep_my_shard(name, values): once for every parameter and buffer

The constructor runs once on the meta device, and the operations that make or change values are written down. `fill`
performs them again on the host, in the same order and with the same generator, and lets go of each tensor after its
last use, so that memory stays near the largest one. What a constructor draws only to overwrite it later is drawn into
a scratch tensor: the generator has to move on as it would have. Large draws in a row are made by several threads, up to
a gigabyte ahead (`stream`).

A tensor is known by its storage and where it lies in it, never by its Python object: then views, `.data`, `detach` and
`nn.Parameter` need no record. A constructor that looks at values that are not there yet (it calls `.item()` on a random
number, it loads a file) cannot be recorded: then the model is built on the host as a whole, and `reason` says why.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map

from meshrun.errors import RunFailed
from meshrun.parallel import stream

Take = Callable[[str, Tensor], None]

CPU, META = torch.device("cpu"), torch.device("meta")
KNOWN = 32 << 10  # bytes of a tensor that is also computed while recording, for constructors that read a small table
OUTSIDE = 64 << 20  # bytes from numpy or from earlier tensors that a recording may hold
AHEAD = 1 << 30  # bytes that are drawn at once, by several threads
MANY = 1 << 25  # draws for which threads pay

# After these nothing is left of what the written tensor held, and none of it was looked at.
OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "zero", "fill", "copy", "random", "bernoulli", "exponential", "log_normal")
)
EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_ELSEWHERE = "a file, another library or a tensor made before"
_DRAWS = torch.Tag.nondeterministic_seeded


@dataclass
class Blueprint:
    """A model without values, and the way to them."""

    model: nn.Module
    reason: str | None  # why the model was built as a whole instead, or None
    _replay: Callable[[Take], None] = field(repr=False)

    def fill(self, take: Take) -> None:
        """Call `take(name, values)` for every parameter and buffer, as soon as each is finished.

        The values are valid during the call only, and are not to be changed. Afterwards the host's generator stands
        where the plain constructor would have left it.
        """
        with torch.no_grad():
            self._replay(take)


def _none(model: nn.Module) -> None:
    """No objection."""


def blueprint(
    model_fn: Callable[[], nn.Module],
    seed: int,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    objection: Callable[[nn.Module], str | None] = _none,
) -> Blueprint:
    """Record the constructor as it runs after `torch.manual_seed(seed)`; the generators are left as they are found.

    A model that can only be built as a whole, or to which without values there is an `objection`, is built inside of
    `turn()`, which may wait for other processes.
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    recorder = _Recorder()
    torch.default_generator.manual_seed(seed)
    try:
        recorder.expected = torch.get_rng_state()
        with _initialisers(recorder), _Disguise(recorder), recorder:
            model = model_fn()
        program = recorder.finish(model)
        if (text := objection(model)) is not None:
            recorder.stop(text)
        return Blueprint(model, None, lambda take: _perform(program, seed, take))
    except Exception as error:  # an error of the constructor's own comes up again in `_whole`
        message = str(error).splitlines() or [""]
        reason = recorder.reason or f"its constructor fails on the meta device ({type(error).__name__}: {message[0]})"
    finally:
        torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    with turn():
        return _whole(model_fn, seed, reason)


def _whole(model_fn: Callable[[], nn.Module], seed: int, reason: str) -> Blueprint:
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_fn()
        after = torch.get_rng_state()
    finally:
        torch.set_rng_state(before)

    def replay(take: Take) -> None:
        for name, tensor in _named(model):
            take(name, tensor.detach().cpu())
        torch.set_rng_state(after)

    return Blueprint(model, reason, replay)


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class _Ref:
    """Where a tensor lies: a storage, by its number in the recording, and the part of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int  # of the storage

    def covers_storage(self) -> bool:
        return torch.Size(self.size).numel() * self.dtype.itemsize == self.nbytes


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation, with a `_Ref` in place of every tensor."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    made: tuple[tuple[int, _Ref], ...]  # which of its outputs are new, and where they lie
    reads: frozenset[int]  # storages whose values it depends on
    writes: frozenset[int]  # storages that it makes or changes
    whole: frozenset[int]  # those of them in which it leaves nothing of what was there
    draws: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    """A step of the program, what is finished after it, and what is not needed any more."""

    step: _Step | None
    finished: tuple[tuple[str, _Ref], ...]
    drop: frozenset[int]


Values = dict[int, torch.UntypedStorage]


def _open(ref: Any, values: Values) -> Any:
    """The tensor that lies there; a storage that nothing has written yet is made here."""
    if not isinstance(ref, _Ref):
        return ref
    if ref.storage not in values:
        values[ref.storage] = torch.zeros(ref.nbytes, dtype=torch.uint8, device=CPU).untyped_storage()
    empty = torch.empty(0, dtype=ref.dtype, device=CPU)
    return empty.set_(values[ref.storage], ref.offset, ref.size, ref.stride)


def _do(step: _Step, values: Values) -> None:
    args, kwargs = tree_map(lambda leaf: _open(leaf, values), (step.args, step.kwargs))
    outputs = tree_leaves(step.call(*args, **kwargs))
    for index, ref in step.made:
        output = outputs[index]
        if tuple(output.shape) != ref.size or output.dtype != ref.dtype:
            raise RunFailed(
                f"{step.call} gave {output.dtype} of shape {tuple(output.shape)} on the host but {ref.dtype} of shape "
                f"{ref.size} on the meta device, so the model cannot be built in parts"
            )
        if (output.stride(), output.storage_offset()) != (ref.stride, ref.offset):
            moved = torch.empty(ref.nbytes, dtype=torch.uint8, device=CPU).untyped_storage()
            values[ref.storage] = moved
            _open(ref, values).copy_(output)
        else:
            values[ref.storage] = output.untyped_storage()


def _perform(program: list[_Stop], seed: int, take: Take) -> None:
    values: Values = {}
    drawn: Values = {}
    default, looked = torch.get_default_dtype(), 0
    torch.manual_seed(seed)
    try:
        for number, stop in enumerate(program):
            if stop.step is not None:
                if stop.step.draws and number >= looked:
                    drawn, looked = _drawn_ahead(program, number)
                if number in drawn:
                    values[stop.step.args[0].storage] = drawn.pop(number)
                else:
                    torch.set_default_dtype(stop.step.default_dtype)
                    _do(stop.step, values)
                    torch.set_default_dtype(default)
            for name, ref in stop.finished:
                take(name, _open(ref, values))
            for storage in stop.drop:
                values.pop(storage, None)
    finally:
        torch.set_default_dtype(default)


def _drawn_ahead(program: list[_Stop], start: int) -> tuple[Values, int]:
    """What draws from here on have given, by the number of their step, and the step before which to look again."""
    found: dict[int, _Step] = {}
    size, end, threads = 0, len(program), torch.get_num_threads()
    for number in range(start, len(program)):
        step = program[number].step
        if step is None or not step.draws:
            continue
        if not _is_plain(step) or (found and size + step.args[0].nbytes > AHEAD):
            end = max(number, start + 1)
            break
        found[number], size = step, size + step.args[0].nbytes
    if threads < 3 or size < MANY * torch.float32.itemsize:
        return {}, end
    draws = {number: _draw(step) for number, step in found.items()}
    stream.fill(list(draws.values()), threads)
    return {number: draw.tensor.untyped_storage() for number, draw in draws.items()}, end


def _draw(step: _Step) -> stream.Draw:
    """A draw that is plain, into a tensor of its own."""
    ref, *given = step.args
    bounds = (given[0] if given else 0.0, given[1] if len(given) > 1 else 1.0)
    kind = "normal_" if step.call is torch.ops.aten.normal_.default else "uniform_"
    return stream.Draw(torch.empty(ref.size, dtype=torch.float32, device=CPU), kind, bounds)


def _is_plain(step: _Step) -> bool:
    """Whether a draw fills one whole tensor of fp32 by the stream."""
    if step.call not in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
        return False
    ref, numbers = step.args[0], step.args[1:]
    whole = ref.dtype == torch.float32 and ref.covers_storage() and torch.Size(ref.size).numel() >= stream.GROUP
    ordered = torch.empty(ref.size, device=META).stride() == ref.stride
    known = all(isinstance(each, int | float) for each in numbers)
    return whole and ordered and known and all(each is None for each in step.kwargs.values())


def _arrange(steps: list[_Step], named: list[tuple[str, _Ref]]) -> list[_Stop]:
    needed = [stop.step for stop in _lifetimes(steps, named) if stop.step is not None]
    return _lifetimes(_hasten(needed), named)


def _lifetimes(steps: list[_Step], named: list[tuple[str, _Ref]]) -> list[_Stop]:
    """Leave out what nothing depends on, and find out when each tensor is finished and when it is let go of.

    Backwards, as a compiler does it: a storage is live where a later step still needs what is in it.
    """
    waiting: dict[int, list[tuple[str, _Ref]]] = {}
    for name, ref in named:
        waiting.setdefault(ref.storage, []).append((name, ref))
    live: set[int] = set()
    program: list[_Stop] = []
    for step in reversed(steps):
        finished = tuple(each for storage in step.writes for each in waiting.pop(storage, ()))
        drop = (step.reads | step.writes) - live
        live.update(ref.storage for _, ref in finished)
        if step.draws or step.writes & live:
            live -= step.whole
            live |= step.reads
            program.append(_Stop(step, finished, drop))
    unwritten = tuple(each for group in waiting.values() for each in group)
    program.append(_Stop(None, unwritten, frozenset(waiting) - live))
    return program[::-1]


def _hasten(steps: list[_Step]) -> list[_Step]:
    """Move what draws nothing right behind what it depends on: then `.to(bfloat16)` at the end leaves nothing waiting.

    What depends on nothing stays: earlier it would only take memory for longer.
    """
    turn = 0  # draws so far; they keep their order
    turns: list[int] = []
    written: dict[int, int] = {}
    touched: dict[int, int] = {}
    for step in steps:
        turn += step.draws
        after = [written[each] for each in step.reads if each in written]
        after += [touched[each] for each in step.writes if each in touched]
        mine = max(after) if after and not step.draws else turn
        turns.append(mine)
        for each in step.reads | step.writes:
            touched[each] = max(mine, touched.get(each, mine))
        written.update(dict.fromkeys(step.writes, mine))
    return [steps[index] for index in sorted(range(len(steps)), key=turns.__getitem__)]


class _CannotRecord(Exception):
    """Ends a recording; the reason stands in the recorder, as a constructor may catch this."""


class _Recorder(TorchDispatchMode):
    """Runs every operation on the meta device and writes down those that make or change values."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.reason: str | None = None
        self.expected = torch.empty(0)  # the state of the generator unless the constructor sets it
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, as addresses are used again
        self._sizes: list[int] = []
        self._known: Values = {}  # the values of small tensors that no random number went into
        self._outside: list[tuple[Tensor, Tensor]] = []  # tensors that no recorded operation made, and copies
        self._outside_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler in order to keep it out, which it does under a mode anyway."""
        return False

    def stop(self, reason: str) -> NoReturn:
        self.reason = self.reason or reason
        raise _CannotRecord(self.reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name in ("aten::lift_fresh", "aten::lift"):
            return self._inward(args[0])
        written = _written(func, args, kwargs)
        reads_only = not written and not any("Tensor" in str(each.type) for each in func._schema.returns)
        if _is_outside(func, args, kwargs, reads_only):
            return func(*args, **kwargs)
        if not all(each.is_meta for each in written):
            self.stop(f"its constructor writes into a tensor that it did not make ({func})")
        self._refuse_device(kwargs.get("device"))
        args, kwargs = tree_map(self._inward, (args, kwargs))
        asks = {each.name for each in func._schema.arguments}
        kwargs |= {key: value for key, value in (("device", CPU), ("pin_memory", False)) if key in asks}
        step_args, step_kwargs = tree_map(self._encode, (args, kwargs))
        if reads_only:
            return self._read(func, step_args, step_kwargs)
        if _DRAWS in func.tags:
            self._follow_generator()
        if "device" in asks:
            kwargs["device"] = META
        try:
            outputs = _on_meta(func, args, kwargs)
        except Exception:
            self.stop(f"its constructor calls an operation that needs values ({func})")
        if torch.Tag.inplace_view not in func.tags:  # these change only where a tensor lies
            self._write_down(func, step_args, step_kwargs, outputs, written)
        return outputs

    def init(self, func: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write down as one operation an initialiser that draws again until the values please it."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if not tensor.is_meta:
                self.stop(f"its constructor writes into a tensor that it did not make ({func.__name__})")
            self._follow_generator()
            step_args, step_kwargs = tree_map(self._encode, ((tensor, *args), kwargs))
            ref = step_args[0]
            made = frozenset([ref.storage])
            whole = made if ref.covers_storage() else frozenset()
            self._note(
                _Step(func, step_args, step_kwargs, torch.get_default_dtype(), (), frozenset(), made, whole, True)
            )
        return tensor

    def _write_down(
        self, func: torch._ops.OpOverload, args: Any, kwargs: Any, outputs: Any, written: list[Tensor]
    ) -> None:
        seen = _storages(args, kwargs)
        targets = [self._ref(each) for each in written]
        made: dict[int, tuple[int, _Ref]] = {}
        for index, leaf in enumerate(tree_leaves(outputs)):
            if isinstance(leaf, Tensor) and (ref := self._ref(leaf)).storage not in seen:
                made.setdefault(ref.storage, (index, ref))
        if not made and not written:
            return  # a view
        overwrites = func._schema.name in OVERWRITING
        self._note(
            _Step(
                func,
                args,
                kwargs,
                torch.get_default_dtype(),
                tuple(made.values()),
                reads=_storages(args[1:] if overwrites else args, kwargs),
                writes=frozenset(made) | {ref.storage for ref in targets},
                whole=frozenset(made) | {ref.storage for ref in targets if overwrites and ref.covers_storage()},
                draws=_DRAWS in func.tags,
            )
        )

    def _note(self, step: _Step) -> None:
        small = all(self._sizes[each] <= KNOWN for each in step.writes)
        if isinstance(step.call, torch._ops.OpOverload) and step.call._schema.name in EMPTY:
            # Left out: what nothing has written is zeros when it is opened, on all ranks the same.
            for _, ref in step.made if small else ():
                _open(ref, self._known)
            return
        self.steps.append(step)
        needs = step.reads | (step.writes - step.whole)
        if small and not step.draws and needs <= self._known.keys():
            _do(step, self._known)
        else:
            for storage in step.writes:
                self._known.pop(storage, None)

    def _read(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        if not _storages(args, kwargs) <= self._known.keys():
            self.stop(f"its constructor reads the value of a tensor ({func._schema.name.replace('::', '.')})")
        args, kwargs = tree_map(lambda leaf: _open(leaf, self._known), (args, kwargs))
        return func(*args, **kwargs)

    def value(self, tensor: Tensor) -> Tensor | None:
        """A copy of what a tensor holds, if that is known without a random number."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            ref = self._ref(tensor)
            return _open(ref, self._known).clone() if ref.storage in self._known else None

    def _ref(self, tensor: Tensor) -> _Ref:
        storage = tensor.untyped_storage()
        if tensor.is_conj() or tensor.is_neg():
            self.stop("its constructor keeps a conjugate view")
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
            self._sizes.append(storage.nbytes())
        if self._sizes[number] != storage.nbytes():
            self.stop("its constructor changes the size of a tensor in place")
        offset = int(tensor.storage_offset())
        return _Ref(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, self._sizes[number])

    def _encode(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator) and leaf is not torch.default_generator:
            self.stop("its constructor draws from a generator of its own")
        return self._ref(leaf) if isinstance(leaf, Tensor) else leaf

    def _inward(self, leaf: Any) -> Any:
        return self._adopt(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

    def _adopt(self, outside: Tensor) -> Tensor:
        """A recorded tensor with the values of one that was not made by a recorded operation."""
        self._refuse_device(outside.device)
        copy = outside.detach().clone()
        self._outside.append((outside, copy))
        self._outside_bytes += copy.nbytes
        if self._outside_bytes > OUTSIDE:
            self.stop(f"its constructor takes more than {OUTSIDE >> 20} MiB from {_ELSEWHERE}")
        twin = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=META)
        ref = self._ref(twin)
        made = frozenset([ref.storage])
        clone = torch.ops.aten.clone.default
        self._note(_Step(clone, (copy,), {}, torch.get_default_dtype(), ((0, ref),), frozenset(), made, made, False))
        return twin

    def _refuse_device(self, device: torch.device | None) -> None:
        if device is not None and device.type not in ("cpu", "meta"):
            self.stop(f"its constructor puts tensors on {device}")

    def _follow_generator(self) -> None:
        """Meta tensors draw nothing, so here the generator is moved: one that is set or set back is then found out."""
        if not torch.equal(torch.get_rng_state(), self.expected):
            self.stop("its constructor sets the state of the random generator")
        torch.empty(1, device=CPU).random_()
        self.expected = torch.get_rng_state()

    def finish(self, model: nn.Module) -> list[_Stop]:
        if self.reason is not None:
            self.stop(self.reason)
        self._follow_generator()
        for outside, copy in self._outside:
            if not np.array_equal(_bytes(outside), _bytes(copy)):
                self.stop("its constructor changes numpy values or earlier tensors after their use")
        named = []
        for name, tensor in _named(model):
            if not tensor.is_meta or tensor.untyped_storage()._cdata not in self._numbers:
                self.stop(f"the values of {name} come from {_ELSEWHERE}")
            named.append((name, self._ref(tensor)))
        self._settle_attributes(model)
        return _arrange(self.steps, named)

    def _settle_attributes(self, model: nn.Module) -> None:
        """Tensors that are neither parameter nor buffer are known to nobody later: give them their values now."""
        for path, module in model.named_modules():
            for key, held in list(vars(module).items()):
                if key in ("_parameters", "_buffers", "_modules") or (key == "_flat_weights" and _is_rnn(module)):
                    continue
                if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(held)):
                    continue
                if not isinstance(held, Tensor) or (value := self.value(held)) is None:
                    attribute = f"{path}.{key}".lstrip(".")
                    self.stop(f"its attribute {attribute} holds a tensor that is neither a parameter nor a buffer")
                vars(module)[key] = value


def _is_rnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)  # it gathers its flat weights anew whenever its parameters move


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _is_outside(func: torch._ops.OpOverload, args: Any, kwargs: Any, reads_only: bool) -> bool:
    """Whether it reads, views or changes tensors from outside: they stay as they are until they meet recorded ones."""
    tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    if not tensors or _DRAWS in func.tags or not all(each.device == CPU for each in tensors):
        return False
    return reads_only or any(each.alias_info for each in func._schema.returns)


def _storages(args: Any, kwargs: Any) -> frozenset[int]:
    return frozenset(leaf.storage for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, _Ref))


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return written


def _on_meta(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation does to tensors without values.

    For `normal_` torch imports its compiler there: without values it is the same as any other that overwrites.
    """
    if func is torch.ops.aten.normal_.default and args[0].is_floating_point():
        spread = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
        if spread >= 0:  # else torch says so
            return torch.ops.aten.zero_.default(args[0])
    return func(*args, **kwargs)


@contextmanager
def _initialisers(recorder: _Recorder) -> Iterator[None]:
    """Since torch 2.13 trunc_normal_ looks at the values that it drew: as a whole it can be put off all the same."""
    plain = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = partial(recorder.init, plain)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = plain


class _Disguise(TorchFunctionMode):
    """Lets the constructor believe that its tensors are on the host: some initialise nothing that is on meta."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            answer = func(*args, **kwargs)
            return _LOOKS[func] if args[0].is_meta else answer
        if func in _READS and args[0].is_meta:
            return self._read(func, args, kwargs)
        moves = func in _MOVES and args[0].is_meta
        if any(_is_device(each, "meta") for each in (kwargs.get("device"), *(args[1:] if moves else ()))):
            self.recorder.stop("its constructor makes tensors on the meta device")
        if moves:
            # On the host it would stay where it is, as the same tensor and not as a copy.
            args = [META if _is_device(each, "cpu") else each for each in args]
            kwargs = {key: META if _is_device(each, "cpu") else each for key, each in kwargs.items()}
            return args[0] if func is Tensor.cpu else func(*args, **kwargs)
        return func(*args, **kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = None if func is Tensor.data_ptr else self.recorder.value(args[0])
        if value is None:
            self.recorder.stop(f"its constructor reads the value of a tensor (Tensor.{func.__name__})")
        answer = func(value, *args[1:], **kwargs)
        if isinstance(answer, np.ndarray):
            answer.flags.writeable = False  # writing to it would have changed the tensor
        return answer


_LOOKS = {
    Tensor.device.__get__: CPU,
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
_MOVES = {Tensor.to, Tensor.cpu}


def _is_device(given: Any, kind: str) -> bool:
    return isinstance(given, str | torch.device) and torch.device(given).type == kind
