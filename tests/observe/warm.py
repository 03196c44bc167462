"""Ranks that are watched from outside, forked from one process that has imported torch.

    with Warm() as warm:
        ranks = warm.ranks(folder, 2, fault="forward", step=6)     # {0: pid, 1: pid}
        warm.end(ranks)

Run as a module it is that process: a request a line on its standard input, process numbers a line on its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[2]


class Warm:
    """The handle on that process."""

    def __enter__(self) -> Warm:
        self._process = warm.Popen(
            [sys.executable, "-m", "tests.observe.warm"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ranks(self, folder: Path, world: int, **asked: Any) -> dict[int, int]:
        """Start to train `programs/hanging.py` on so many ranks."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"folder": str(folder), "world": world, "port": _free_port(), "asked": asked}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return {int(rank): pid for rank, pid in json.loads(self._process.stdout.readline()).items()}

    @staticmethod
    def end(ranks: dict[int, int]) -> None:
        """Kill the ranks and their readers, which are in groups of their own."""
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve() -> None:
    import torch._dynamo  # noqa: F401  # the first optimizer would import it on every rank

    from meshrun.train import loop  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pids = {rank: _fork(rank, request) for rank in range(request["world"])}
        print(json.dumps(pids), flush=True)


def _fork(rank: int, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent()
        folder, world = Path(request["folder"]), request["world"]
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]),
        )  # fmt: skip
        train(folder, rank, **request["asked"])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def train(
    folder: Path,
    rank: int,
    layout: str = "dp=*",
    workers: int = 0,
    eval_every: int = 10**6,
    save: float = 0.0,
    beside: bool = False,
    **asked: Any,
) -> None:
    """A rank's life as `meshrun rank` has it."""
    from meshrun import mesh
    from meshrun.observe.pulse import Pulse
    from meshrun.observe.stragglers import sniff_on
    from meshrun.train.loop import Trainer
    from tests.observe.programs.hanging import experiment

    pulse = Pulse.open(folder, rank, 0)
    mesh.listen(pulse.waiting)
    mesh.use(mesh.Meeting(layout=layout, device="cpu", timeout=60))
    here = mesh.start()
    pulse.sniff = sniff_on(here.device)

    def record(kind: str, **fields: Any) -> None:
        if kind == "step":
            pulse.finished(fields["step"], fields["seconds"], fields["data_wait"])
            if save and fields["step"] == 6 and rank == 0:
                pulse.mark("saving", fields["step"])
                time.sleep(save)
                pulse.mark("reading", fields["step"] + 1)
            if fields["step"] % eval_every == 0:
                pulse.mark("evaluating", fields["step"])

    pulse.mark("reading", 1)
    trainer = Trainer(experiment(**asked), here, workers=workers, eval_every=eval_every, record=record)
    with _watched(folder, rank, here.size) if beside else contextlib.nullcontext():
        trainer.train()


def _watched(folder: Path, rank: int, world: int) -> Any:
    """Without a launcher that watches: the first two ranks do, and write down what they find."""
    from meshrun.config import RunConfig
    from meshrun.observe.beside import LATE, Beside
    from meshrun.observe.watch import Watcher

    if rank > 1:
        return contextlib.nullcontext()
    config = RunConfig("x", hang_after=2.0, timeout=60)
    watcher = Watcher(folder, folder.parent, config, "here", others=False, late=LATE * rank)

    def found(finding: Any) -> None:
        (folder / f"found-by-{rank}").write_text(finding.sentence)

    return Beside(watcher, folder, world, 0, found, end=True)


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    serve()
