"""Messages of tp beside the matrix products that need them.

    notes = hide_if_possible(plan, here, compiled=True)     # what to tell the user of it

Ranks wait for tp's messages in every layer. On GPUs that reach each other's memory, compiled code cuts a message and
the product that needs it into pieces, so that one piece travels while another is computed: torch's asynchronous tensor
parallelism, which is for layers that keep parts of the sequence between them.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrun.mesh import Here
from meshrun.parallel import tp


def hide_if_possible(plan: tp.Plan, here: Here, compiled: bool) -> list[str]:
    """Have tp's messages travel beside its products where that can be; returns what to tell of it."""
    mesh = here.submesh("tp")
    if mesh is None or here.device.type != "cuda":
        return []
    ranks, backend = here.layout.tp, dist.get_backend(mesh.get_group())
    reason = cannot_hide(plan, backend, compiled, ranks, here.world.local_size)
    if reason is None and not hide(mesh, here.device):
        reason = "the GPUs do not reach each other's memory"
    if reason is None:
        return ["tp: messages travel in pieces beside the matrix products that need them"]
    return [f"tp: every layer waits for its messages: {reason}"]


def cannot_hide(plan: tp.Plan, backend: str, compiled: bool, ranks: int, ranks_of_node: int) -> str | None:
    """Why messages cannot travel in pieces beside the products that need them, as far as all ranks know; or None."""
    if "nccl" not in backend:
        return f"the backend is {backend}, not nccl"
    if not compiled:
        return "segments are not compiled (--compile)"
    if not any(style in tp.ALONG_SEQUENCE for style in plan.styles.values()):
        return "the plan keeps no part of the sequence to a rank"
    if ranks_of_node % ranks:
        return f"tp={ranks} goes across nodes of {ranks_of_node} ranks"
    return None


def hide(mesh: DeviceMesh, device: torch.device) -> bool:
    """Let compiled code send in pieces what it computes in pieces; False where GPUs do not reach each other's memory.

    To be called by all ranks of the mesh, before anything compiled runs.
    """
    group = mesh.get_group()
    if not _all_say(_reached(device, mesh.size()), group, device):
        return False
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        memory.enable_symm_mem_for_group(group.group_name)
        memory.get_symm_mem_workspace(group.group_name, 1 << 20)
        shared = True
    except (ImportError, AttributeError, RuntimeError):
        shared = False
    if not _all_say(shared, group, device):
        return False
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    # It warns of every segment in which there is nothing to cut, such as an embedding.
    logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)
    return True


def _reached(device: torch.device, ranks: int) -> bool:
    """Whether this rank sees the GPUs of its tp group, and each of them lets it into its memory."""
    if device.type != "cuda" or device.index is None:
        return False
    first = device.index // ranks * ranks
    others = [each for each in range(first, first + ranks) if each != device.index]
    seen = first + ranks <= torch.cuda.device_count()
    return seen and all(torch.cuda.can_device_access_peer(device, each) for each in others)


def _all_say(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    said = torch.tensor([float(yes)], device=device)
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())
