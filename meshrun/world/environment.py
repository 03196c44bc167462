"""The variables of a run's processes: this process's own, and a rank's place in the words of torchrun.

Popen(python_for(["-m", "meshrun"]))     # a process of this package
given = {**inherited(), **of_rank(rank=3, size=4, …)}
take_over(given)                     # in a process that was forked to become that rank
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrun.config import temporary_folder

if TYPE_CHECKING:
    from meshrun.world.detect import World


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - as Python writes it into its path
    except FileNotFoundError:
        return None


_IS_WORKING_DIRECTORY_SEARCHED = "" in sys.path or _working_directory() in sys.path
"""From its start on: later the folder of the user's program is searched, which may be the working directory."""


def inherited() -> dict[str, str]:
    """What a process started from here would get."""
    return dict(os.environ)


def python_for(words: Sequence[str]) -> list[str]:
    """How to start Python with these words, of which the first are often `-m` and a module's name.

    For `-m` Python would look for all modules in the working directory first, where another user may have put some:
    it does so only if this process does, too.
    """
    return [sys.executable, *(flags_of_python() if words[0] == "-m" else ()), *words]


def flags_of_python() -> tuple[str, ...]:
    """With these, `python -m` looks for modules in the working directory only if this process does, too."""
    return () if _IS_WORKING_DIRECTORY_SEARCHED else ("-P",)


def of_python() -> dict[str, str]:
    """What a process started from here would get, with the same meaning for a Python that is given no flags."""
    return {**inherited(), **({} if _IS_WORKING_DIRECTORY_SEARCHED else {"PYTHONSAFEPATH": "1"})}


def keep_temporary_files_safe() -> None:
    """Make temporary files, here and in all processes started from here, where no other user can exchange them."""
    if (folder := temporary_folder()) != Path(tempfile.gettempdir()):
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


def forget_terminals_beyond_reason() -> None:
    """Forget a width or a height of the terminal that is none: what draws tables fails on it, or fills the memory."""
    for name in ("COLUMNS", "LINES"):
        text = os.environ.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) <= len("9999") and int(text)):
            os.environ.pop(name, None)


def of_nursery() -> dict[str, str]:
    """For the process that ranks are forked from: asking whether there are GPUs must not open them."""
    return {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def of_rank(
    rank: int, size: int, local: tuple[int, int], node: tuple[int, int], meet: tuple[str, int], attempt: int, job: str
) -> dict[str, str]:
    """A rank's place as torchrun says it: `local` and `node` are an index and how many, `meet` where the store is."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "GROUP_RANK": str(node[0]),
        "GROUP_WORLD_SIZE": str(node[1]),
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": str(meet[1]),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Also for programs that form their groups themselves: on one machine no port is open to others.
        **({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or "lo"} if node[1] == 1 else {}),
        # As torch's own launcher has it: a rank whose NCCL peer is gone ends instead of waiting for it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def of_lone_rank(address: str, port: int) -> dict[str, str]:
    """The only rank's place, and that of a store which processes that it starts are not told of: see `joining_at`."""
    variables = of_rank(0, 1, (0, 1), (0, 1), (address, port), 0, f"alone-{os.getpid()}")
    del variables["TORCHELASTIC_USE_AGENT_STORE"]
    return variables


def of_foreign_rank(world: World, meet: tuple[str, int] | None) -> dict[str, str]:
    """The place of a rank that another launcher than torchrun has started, in torchrun's words."""
    local, node = (world.local_rank, world.local_size), (world.node, world.nodes)
    variables = of_rank(world.rank, world.size, local, node, meet or ("", 0), world.attempt, world.job)
    if meet is None:  # the user has said where ranks are to meet: rank 0 serves the store there
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            del variables[name]
    return variables


@contextlib.contextmanager
def joining_at(port: int) -> Iterator[None]:
    """Inside, torch joins the store at this port, and serves one by itself where the program names another port."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function of the same name hides it
    before = rendezvous._torchelastic_use_agent_store
    rendezvous._torchelastic_use_agent_store = lambda: os.environ.get("MASTER_PORT") == str(port)
    try:
        yield
    finally:
        rendezvous._torchelastic_use_agent_store = before


def take_over(environment: Mapping[str, str]) -> None:
    """Have these variables and no others from now on."""
    os.environ.clear()
    os.environ.update(environment)


@contextlib.contextmanager
def only(environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these variables and no others."""
    before = dict(os.environ)
    take_over(environment)
    try:
        yield
    finally:
        take_over(before)


def choose_interfaces(gloo: str | None, nccl: str | None) -> None:
    """Have gloo and NCCL talk over these, where nobody has chosen before."""
    for name, interface in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl)):
        if interface and not os.environ.get(name):
            os.environ[name] = interface


def one_thread_for_tokenizers() -> None:
    """In one of several processes that turn texts into tokens: each has a core, and threads would fight for it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def module_system(env: Mapping[str, str]) -> str | None:
    """Which system of modules a shell was set up with."""
    if env.get("LMOD_CMD") or env.get("LMOD_VERSION"):
        return "lmod"
    return "tcl" if env.get("MODULESHOME") or env.get("MODULES_CMD") else None


def of_new_job() -> dict[str, str]:
    """For Slurm's commands: a job submitted from within a job must not inherit what the old one was granted."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    mine = {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(("SLURM_", "SRUN_"))
    }
    return {**mine, "SLURM_TIME_FORMAT": "standard"}
