"""What a rank holds in memory on every axis, against the ideal: 1/N of the whole.

    python benchmarks/memory.py                      # CPU ranks, every live tensor counted
    python benchmarks/memory.py --cuda --json        # one GPU, by torch.cuda.max_memory_allocated

A Llama of 16 equal blocks is trained for three steps with AdamW in fp32: 16 bytes a parameter for it, its gradient and
the two moments. Its vocabulary is so small that embedding and head hold next to nothing: then 16 blocks can be shared
evenly by 2 and 4 stages, and one block is a small part of the model. Of all ranks, the one that holds most counts.

- state is parameters, gradients and the optimizer's tensors, as they are before the optimizer steps
- peak is everything that is alive at a time: gathered parameters, gradients on their way and activations too
- built is the same while the model is constructed
- activations are everything alive that is not state, of a model with more tokens and a vocabulary of 2,048; logits are
  what the head leaves on a rank

On the CPU a mode sees every operation and follows the memory that it makes until nobody uses it (`Alive`). On a GPU the
ranks of fsdp share the card, over gloo; of the other axes one real rank runs under torch's fake process group, whose
messages arrive without their values, which costs the same memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import on_one_real_rank, on_ranks, parameters_of, print_table, training
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrun import Trainer
from meshrun.layout import parse
from meshrun.mesh import Here
from meshrun.parallel.meshed import Meshed
from meshrun.parallel.placed import Placed
from meshrun.recipes.llama import Shape
from meshrun.train.totals import Update

EVEN = Shape(64, 256, layers=16, heads=8, kv_heads=4, ffn=704, context=8)
LONG = Shape(2048, 128, layers=8, heads=8, kv_heads=4, ffn=352, context=128)
EVEN_GPU = Shape(256, 768, layers=16, heads=12, kv_heads=6, ffn=2112, context=16)
LONG_GPU = Shape(32_768, 1024, layers=8, heads=16, kv_heads=8, ffn=2816, context=2048)
STEPS, BYTES = 3, 16

BARS = {
    "state fsdp=2": 1.05,
    "state fsdp=4": 1.05,
    "state pp=2": 1.05,
    "state pp=4": 1.05,
    "peak fsdp=4": 0.35,
    "built fsdp=4": 0.35,
    "activations tp=2": 0.55,
    "logits tp=2": 0.55,
}


def main() -> int:
    options = parsed()
    result = compared(options.cuda)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="on one GPU, with a larger model")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def compared(cuda: bool) -> dict[str, Any]:
    """Every layout's figures, and those of them that are claimed."""
    even, long = (EVEN_GPU, LONG_GPU) if cuda else (EVEN, LONG)
    whole = BYTES * parameters_of(even)
    rows = []
    for layout in ("dp=1", "fsdp=2", "fsdp=4", "pp=2", "pp=4"):
        ranks = parse(layout).size
        held = measured(layout, even, max(ranks, 4), cuda)
        most = {name: max(each[name] for each in held) for name in ("state", "peak", "built")}
        row = {"layout": layout, **most, "state_vs_ideal": most["state"] * ranks / whole}
        rows.append(row | {f"{name}_vs_whole": most[name] / whole for name in most})
    alone, split = (measured(layout, long, 8, cuda) for layout in ("dp=1", "tp=2"))
    activations, logits = ([max(each[name] for each in held) for held in (alone, split)] for name in ACTIVE)
    ratios = {f"state {row['layout']}": row["state_vs_ideal"] for row in rows[1:]}
    ratios |= {f"{name} fsdp=4": rows[2][f"{name}_vs_whole"] for name in ("peak", "built")}
    ratios |= {"activations tp=2": activations[1] / activations[0], "logits tp=2": logits[1] / logits[0]}
    return {
        "rows": rows,
        "ratios": ratios,
        "bars": BARS,
        "tp": {"activations": activations, "logits": logits},
        "setting": {"device": "cuda" if cuda else "cpu", "parameters": whole // BYTES, "whole_state": whole},
    }


ACTIVE = ("activations", "logits")
Figures = dict[str, int]


def measured(layout: str, shape: Shape, batch: int, cuda: bool) -> list[Figures]:
    """What each rank of a layout holds at most."""
    if not cuda:
        return on_ranks(layout, counted, shape, batch)
    if layout == "dp=1" or layout.startswith("fsdp"):
        return on_ranks(layout, allocated, shape, batch, device="cuda")
    ranks = range(parse(layout).size)
    return [on_one_real_rank(layout, rank, alone, shape, batch, device="cuda") for rank in ranks]


def counted(here: Here, shape: Shape, batch: int) -> Figures:
    """One rank on the CPU."""
    alive = Alive()
    logits: list[int] = []
    state: set[int] = set()

    def note(_: int, placed: Placed) -> None:
        state.update(alive.numbers(each.parameter.grad for each in placed.shards))

    with alive:
        trainer = Trainer(training(shape, batch, STEPS), here, inspect=note)
        built = len(alive.log)
        state.update(alive.numbers(each.parameter for each in trainer.placed.shards))
        note_logits(trainer, logits)
        for _ in trainer.steps():
            state.update(alive.numbers(tree_leaves(list(trainer.optimizer.state.values()))))
    return {
        "state": alive.peak(lambda number: number in state),
        "peak": alive.peak(lambda _: True),
        "built": alive.peak(lambda _: True, built),
        "activations": alive.peak(lambda number: number not in state),
        "logits": max(logits, default=0),
    }


def note_logits(trainer: Trainer, logits: list[int]) -> None:
    """Write down how many bytes of the head's outputs this rank holds."""

    def seen(_module: Any, _inputs: Any, outputs: Any) -> None:
        held = outputs.to_local() if isinstance(outputs, DTensor) else outputs
        logits.append(held.numel() * held.element_size())

    trainer.model.get_submodule("head").register_forward_hook(seen)


class Alive(TorchDispatchMode):
    """Follows the memory of every tensor: a log of what was made and let go of, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []
        """(number of a storage, bytes more or less)"""
        self._known: dict[int, int] = {}
        self._sizes: list[int] = []

    def __enter__(self) -> Alive:
        # fully_shard gives and takes the memory of gathered parameters by resizing it, which is no operation.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @property
    def _resized(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._follow(storage)
            return result

        return resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # what they do inside is seen
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor | AsyncCollectiveTensor):
                self._follow(leaf.untyped_storage())
        return outputs

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        number = self._known.get(storage._cdata)
        if number is None:
            number = self._known[storage._cdata] = len(self._sizes)
            self._sizes.append(0)
            weakref.finalize(storage, self._gone, storage._cdata, number)
        self._set(number, storage.nbytes())

    def _gone(self, address: int, number: int) -> None:
        if self._known.get(address) == number:
            del self._known[address]
        self._set(number, 0)

    def _set(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.log.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def numbers(self, tensors: Iterable[Any]) -> Iterator[int]:
        """The numbers of the storages of these tensors, of those that are tensors."""
        for each in tensors:
            if isinstance(each, Tensor):
                yield self._known[each.untyped_storage()._cdata]

    def peak(self, of: Any, until: int | None = None) -> int:
        """The most bytes at a time of the storages that `of` chooses."""
        now = most = 0
        for number, change in self.log[:until]:
            if of(number):
                now += change
                most = max(most, now)
        return most


def allocated(here: Here, shape: Shape, batch: int) -> Figures:
    """One rank on a GPU, by what torch's allocator has given out."""
    # The first product of a thread allocates what the library works with, which no layout changes.
    some = torch.ones(8, 8, device=here.device, requires_grad=True)
    (some @ some).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits: list[int] = []
    states: list[int] = []

    def note(_step: int, _placed: Placed) -> None:
        states.append(torch.cuda.memory_allocated() - before)

    trainer = Indifferent(training(shape, batch, STEPS), here, inspect=note)
    built = torch.cuda.max_memory_allocated() - before
    expect_messages(trainer, shape)
    note_logits(trainer, logits)
    updates = trainer.steps()
    for _ in range(STEPS - 1):
        next(updates)
    so_far = torch.cuda.max_memory_allocated() - before
    between_steps = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    next(updates)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "state": states[-1],
        "peak": max(peak, so_far),
        "built": built,
        "activations": peak - between_steps,
        "logits": max(logits, default=0),
    }


class Indifferent(Trainer):
    """Does not look at losses: where messages carry no values, they may be anything."""

    def _settle(self, update: Update) -> None:
        """Nothing is checked."""


def alone(here: Here, shape: Shape, batch: int) -> Figures:
    """One real rank of a layout: the others say nothing."""

    def gathered(self: Here, value: Any) -> list[Any]:
        return [value if rank == self.rank else type(value)() for rank in range(self.size)]

    Here.gathered = gathered  # type: ignore[method-assign]
    return allocated(here, shape, batch)


def expect_messages(trainer: Trainer, shape: Shape) -> None:
    """Tell a pipeline how messages look, where no rank before it says so."""
    if isinstance(trainer.placed, Meshed) and dist.get_backend() == "fake":
        trainer.placed.pipeline._shapes = _Alike(torch.Size((1, shape.context, shape.hidden)))


class _Alike(dict[Any, Any]):
    """All messages are one tensor of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def __contains__(self, _: object) -> bool:
        return True

    def get(self, *_: Any) -> Any:
        return [(self.shape, torch.float32)]


def show(result: dict[str, Any]) -> None:
    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    setting = result["setting"]
    whole = setting["whole_state"] / 2**20
    print(f"{setting['parameters']:,} parameters, {whole:,.1f} MiB of state in one process, on {setting['device']}\n")
    columns = ("layout", "state MiB", "against 1/N", "peak of all", "while built")
    print_table(
        columns,
        [
            (
                row["layout"],
                f"{row['state'] / 2**20:,.1f}",
                f"{row['state_vs_ideal']:.3f}",
                percent(row["peak_vs_whole"]),
                percent(row["built_vs_whole"]),
            )
            for row in result["rows"]
        ],
    )
    print("\nand the claims:\n")
    rows = [
        (name, f"{value:.3f}", f"at most {result['bars'][name]}", "ok" if value <= result["bars"][name] else "MISSED")
        for name, value in result["ratios"].items()
    ]
    print_table(("what", "is", "bar", ""), rows)


if __name__ == "__main__":
    sys.exit(main())
