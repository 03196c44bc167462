"""The bytes that each axis sends in a step, against the least that it can do with.

    python benchmarks/communication.py
    python benchmarks/communication.py --layouts "tp=4; pp=2,dp=2" --json

A Llama trains a few steps on CPU ranks while a mode sees what is asked of the process groups, by Python and by torch's
own C++ code alike: the gradients of DistributedDataParallel, what fully_shard and DTensor do, the messages of pipelines
and of ring attention, and all small sums. Each collective counts with what a rank sends in a ring of N:

    all-reduce 2(N-1)/N of its tensor, all-gather and reduce-scatter (N-1)/N of the whole tensor, send: all of it

The least is, for all ranks together (P bytes of parameters, A bytes of an activation, one micro-batch unless said):

    dp      N x 2(N-1)/N P                         gradients, once
    fsdp    N x 3(N-1)/N P, zero2 and zero1 2      parameters before forward and backward, gradients once
    tp      N x 2(N-1)/N A x (4 a block + 2)       two sums forward and two backward a block, or their halves; one each
                                                   of embedding and head
    pp      2 A a micro-batch and cut              activations forward, gradients back
    cp      N x (N-1) x 6 K a block                keys and values (K bytes each, of a rank's tokens) around the ring
                                                   forward and backward, and their gradients back
            and gradients of parameters as dp

`wire` is what the loopback interface of a network of their own has carried for them: it confirms the count, and shows
where gloo sends more than it is asked for (its reduce-scatter is an all-reduce, and so twice as much) and its headers.
It is there only if this process may make one (Linux, root).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from common import on_ranks, parameters_of, print_table, training
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrun import Trainer
from meshrun.layout import Layout, parse
from meshrun.mesh import Here
from meshrun.recipes.llama import Shape

SHAPE = Shape(256, 256, layers=8, heads=8, kv_heads=4, ffn=704, context=64)
BATCH, WARM_UP, STEPS = 16, 2, 2
LAYOUTS = (
    "dp=2; dp=4; fsdp=2; fsdp=4; fsdp=4:zero2; fsdp=4:zero1; tp=2; tp=4; "
    "pp=2; pp=4; pp=2:gpipe; pp=2:interleaved; pp=2:zb; cp=2; cp=4"
)
BAR = 1.05


def main() -> int:
    options = parsed()
    private = private_network()
    rows = [measured(parse(layout.strip()), private) for layout in options.layouts.split(";")]
    result = {
        "rows": rows,
        "ratios": {row["layout"]: row["vs_least"] for row in rows} | dict(filter(None, map(ring, rows))),
        "bar": BAR,
        "setting": {"parameters": parameters_of(SHAPE), "batch": BATCH, "context": SHAPE.context, "steps": STEPS},
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", default=LAYOUTS, help="of one axis each, separated by semicolons")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def measured(layout: Layout, private: bool) -> dict[str, Any]:
    """The figures of one layout, of all ranks together."""
    ranks = on_ranks(str(layout), counted)
    sent: Counter[str] = Counter()
    for by_kind, _, _ in ranks:
        sent.update(by_kind)
    total, minimum = sum(sent.values()), least(layout)
    return {
        "layout": str(layout),
        "bytes": total,
        "least": minimum,
        "vs_least": total / minimum,
        "micro_batches": ranks[0][1],
        "by_kind": dict(sent),
        "wire": min(wire for _, _, wire in ranks) if private else None,
    }


def least(layout: Layout) -> float:
    """Bytes that all ranks together must send in a step."""
    ranks, hidden = layout.size, SHAPE.hidden
    parameters = 4 * parameters_of(SHAPE)
    activation = 4 * BATCH * SHAPE.context * hidden
    if layout.dp == ranks:
        return 2 * (ranks - 1) * parameters
    if layout.fsdp == ranks:
        return {"zero3": 3, "zero2": 2, "zero1": 2}[layout.fsdp_variant] * (ranks - 1) * parameters
    if layout.tp == ranks:
        return 2 * (ranks - 1) * activation * (4 * SHAPE.layers + 2)
    if layout.pp == ranks:
        # The activations of all micro-batches together are those of the batch.
        stages = ranks * (2 if layout.pp_variant == "interleaved" else 1)
        return 2 * (stages - 1) * activation
    if layout.cp == ranks:
        keys = activation * SHAPE.kv_heads * SHAPE.head_size / hidden / ranks
        return ranks * (ranks - 1) * 6 * keys * SHAPE.layers + 2 * (ranks - 1) * parameters
    raise SystemExit(f"layout {layout} has several axes; the least is known of one axis alone (--layouts)")


def ring(row: dict[str, Any]) -> tuple[str, float] | None:
    """Of cp, the ring alone: beside the parameters' gradients much more traffic of it would not show."""
    ranks = parse(row["layout"]).cp
    if ranks == 1:
        return None
    gradients = 2 * (ranks - 1) * 4 * parameters_of(SHAPE)
    return f"{row['layout']} ring", row["by_kind"]["send"] / (row["least"] - gradients)


def counted(here: Here) -> tuple[dict[str, float], int, float]:
    """One rank: bytes sent a step by kind of operation, micro-batches a step, and what the network has carried."""
    trainer = Trainer(training(SHAPE, BATCH, WARM_UP + STEPS), here)
    updates = trainer.steps()
    for _ in range(WARM_UP):
        next(updates)
    dist.barrier()
    before, pieces = carried(), 1
    with Sent() as sent:
        for _ in range(STEPS):
            pieces = len(next(updates).pieces)
    # Whoever is here has received all that was sent to it, and all have sent what they had to send.
    wire = carried() - before
    dist.barrier()
    return {kind: size / STEPS for kind, size in sent.bytes.items()}, pieces, wire / STEPS


class Sent(TorchDispatchMode):
    """Adds up what this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # what they do inside is seen
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional", "_dtensor"):
            named = [each.name for each in func._schema.arguments]
            self._count(name.replace("_", ""), dict(zip(named, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, given: dict[str, Any]) -> None:
        if name.startswith(SILENT):
            return
        kind = next((kind for kind in SHARES if name.startswith(kind)), None)
        if kind is None:
            raise NotImplementedError(f"the collective {name} is not one that this benchmark counts")
        group = given.get("process_group", given.get("group_name"))
        tensors = next(value for argument, value in given.items() if argument in INPUTS)
        size = sum(each.numel() * each.element_size() for each in tree_leaves(tensors))
        self.bytes[kind] += SHARES[kind](_ranks_of(group)) * size


SILENT = ("wait", "wraptensor", "barrier", "recv", "irecv")
INPUTS = ("tensors", "tensor", "input", "inputs", "input_tensor", "input_tensors", "input_list")
SHARES: dict[str, Callable[[int], float]] = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "allgather": lambda ranks: ranks - 1,
    "reducescatter": lambda ranks: (ranks - 1) / ranks,
    "alltoall": lambda ranks: (ranks - 1) / ranks,
    "sharddimalltoall": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda _: 1,
    "send": lambda _: 1,
    "isend": lambda _: 1,
}
"""Operation -> how much of what it is given a rank sends."""


def _ranks_of(group: Any) -> int:
    """Of a group as operations are given it: by name, as it is, or wrapped for C++."""
    if type(group) is str:
        return _resolve_process_group(cast(Any, group)).size()
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()


def private_network() -> bool:
    """Put this process and its ranks into a network of their own; returns whether that is allowed here."""
    new_network, up = 0x40000000, struct.pack("16sH22x", b"lo", 1)
    if ctypes.CDLL(None).unshare(new_network) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:
        fcntl.ioctl(lo, 0x8914, up)  # SIOCSIFFLAGS: bring its loopback interface up
    return True


def carried() -> int:
    """Bytes that the loopback interface has sent so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def show(result: dict[str, Any]) -> None:
    def mib(size: float | None) -> str:
        return "-" if size is None else f"{size / 2**20:,.2f}"

    setting = result["setting"]
    print(
        f"MiB that all ranks together send a step; {setting['parameters']:,} parameters, "
        f"{setting['batch']} x {setting['context']} tokens\n"
    )
    rows = [
        (
            row["layout"],
            mib(row["bytes"]),
            mib(row["least"]),
            f"{row['vs_least']:.3f}",
            "ok" if row["vs_least"] <= result["bar"] else "MISSED",
            mib(row["wire"]),
            ", ".join(f"{kind} {mib(size)}" for kind, size in sorted(row["by_kind"].items()) if size > 0.005 * 2**20),
        )
        for row in result["rows"]
    ]
    for name, ratio in result["ratios"].items():
        if name.endswith("ring"):
            rows.append((name, "", "", f"{ratio:.3f}", "ok" if ratio <= result["bar"] else "MISSED", "", ""))
    print_table(("layout", "sent", "least", "ratio", f"<= {result['bar']}", "wire", "of which"), rows)


if __name__ == "__main__":
    sys.exit(main())
