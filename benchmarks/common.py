"""What the benchmarks of the axes share: ranks that are forks of this process, a Llama to train, and tables.

    results = on_ranks("fsdp=2,tp=2", measure, shape)       # [measure(here, shape) of each rank]
    experiment = training(shape, batch=8, steps=3)

torch is imported once, here; a fork is ready in a tenth of a second. So this process must neither compute gradients nor
touch a GPU before it has started its ranks. Ranks meet on gloo, and what they return must pickle.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, which would cost every rank a second
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from meshrun import Experiment, mesh
from meshrun.launch.local import die_with_launcher
from meshrun.layout import parse
from meshrun.recipes.llama import PLAN, Llama, Shape, segments
from meshrun.train.losses import token_cross_entropy

Body = Callable[..., Any]


def on_ranks(layout: str, body: Body, *arguments: Any, device: str = "cpu") -> list[Any]:
    """Call `body(here, *arguments)` on every rank of a layout; ends the program if one of them fails."""
    return _forked(layout, range(parse(layout).size), "gloo", device, body, arguments)


def on_one_real_rank(layout: str, rank: int, body: Body, *arguments: Any, device: str = "cpu") -> Any:
    """The same on one rank alone: the others are made up by torch's fake process group, which moves no values."""
    return _forked(layout, [rank], "fake", device, body, arguments)[0]


def _forked(
    layout: str, ranks: Sequence[int], backend: str, device: str, body: Body, arguments: tuple[Any, ...]
) -> list[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="meshrun-bench-") as folder:
        # To a fake process group belongs no device of its own, as to gloo.
        meeting = mesh.Meeting(layout=layout, device=device, backend="gloo", threads=1, runs=Path(folder))
        pipes: list[Connection] = []
        processes = []
        for rank in ranks:
            mine, theirs = forks.Pipe(duplex=False)
            process = forks.Process(
                target=_be_rank, args=(theirs, os.getpid(), rank, backend, meeting, body, arguments)
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results, failure = _received(pipes)
        for process in processes:
            if failure:
                process.kill()
            process.join()
    if failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1)
    return results


def _received(pipes: list[Connection]) -> tuple[list[Any], str]:
    """What all ranks return, or what the first that failed says."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for ready in wait([pipe for number, pipe in enumerate(pipes) if number not in results]):
            assert isinstance(ready, Connection)
            try:
                result, failure = ready.recv()
            except EOFError:
                result, failure = None, "a rank ended without a word"
            if failure:
                return [], failure
            results[pipes.index(ready)] = result
    return [results[number] for number in range(len(pipes))], ""


def _be_rank(
    pipe: Connection,
    parent: int,
    rank: int,
    backend: str,
    meeting: mesh.Meeting,
    body: Body,
    arguments: tuple[Any, ...],
) -> None:
    die_with_launcher(parent)
    os.dup2(2, 1)  # standard output is for the result
    torch.set_num_threads(1)
    try:
        _join(rank, parse(meeting.layout).size, backend, meeting.runs / "store")
        mesh.use(meeting)
        pipe.send((body(mesh.start(), *arguments), ""))
        if backend == "gloo":
            mesh.finish()
    except BaseException:
        pipe.send((None, f"rank {rank} of {meeting.layout}: {traceback.format_exc()}"))
        raise SystemExit(1) from None


def _join(rank: int, ranks: int, backend: str, meeting_point: Path) -> None:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    elif ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(meeting_point), ranks), rank=rank, world_size=ranks)


class Tokens:
    """Random sequences, and the token that follows each token."""

    draws = False

    def __init__(self, vocabulary: int, context: int, length: int) -> None:
        drawn = torch.randint(vocabulary, (length, context + 1), generator=torch.Generator().manual_seed(0))
        self.rows = drawn

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def training(shape: Shape, batch: int, steps: int, **changes: Any) -> Experiment:
    """A Llama of the recipe on random tokens, with AdamW."""
    fields: dict[str, Any] = {
        "model": lambda: Llama(shape),
        "train": Tokens(shape.vocabulary, shape.context, 4 * batch),
        "loss": token_cross_entropy,
        "optimizer": adamw,
        "batch": batch,
        "steps": steps,
        "clip": 1.0,
        "segments": segments,
        "tensor_plan": PLAN,
    }
    return Experiment(**{**fields, **changes})


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Llama(shape).parameters())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
