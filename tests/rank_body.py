"""The life of one rank: joins the group, finds the test body, calls it, says how it ended.

`be_rank` runs in a fork of the nursery, `load` before it in the nursery itself, so that a test file's imports are
paid once a session.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

from tests.ranks import NotConnected, Outcome, Request


def be_rank(number: int, module: ModuleType, request: Request, home: Path, pipe: Connection) -> None:
    """The life of a rank: it says how its body ended, and leaves in good order only if all did well."""
    os.setpgid(0, 0)
    output = os.open(home / "output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    stacks = os.open(home / "stacks", os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    try:
        os.chdir(request.cwd)
        os.environ.clear()
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **request.environ, "OMP_NUM_THREADS": "1"})
        store = dist.FileStore(str(home.parent / "store"), request.n)
        patience = timedelta(seconds=request.timeout + 60)  # the harness's limit strikes first, and says more
        try:
            dist.init_process_group("gloo", store=store, rank=number, world_size=request.n, timeout=patience)
        except RuntimeError as error:
            raise NotConnected(str(error)) from error
        find(module, request.qualname)(**pickle.loads(request.kwargs))
        outcome = Outcome(number, "ok")
    except BaseException as error:
        outcome = failure(number, error)
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(outcome))
    if outcome.status == "ok":
        pipe.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)


def failure(number: int, error: BaseException) -> Outcome:
    at = time.monotonic()
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    statuses = {pytest.skip.Exception: "skipped", pytest.xfail.Exception: "xfailed"}
    status = next((name for kind, name in statuses.items() if isinstance(error, kind)), "error")
    message = (str(error).splitlines() or [""])[0]
    return Outcome(number, status, message if status != "error" else f"{type(error).__name__}: {message}", text, at)


class Rewriting(importlib.machinery.SourceFileLoader):
    """Loads a test file with pytest's asserts, which show values; never through the cache of plain bytecode."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source)
        return compile(tree, path, "exec", dont_inherit=True)


def load(path: str) -> ModuleType:
    """Imports a file once, under the name that pytest gives it, so that pickled values find their classes."""
    file = Path(path).resolve()
    root = next(folder for folder in file.parents if not (folder / "__init__.py").exists())
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, file, loader=Rewriting(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find(module: ModuleType, qualname: str) -> Any:
    """The function; a method comes bound to a fresh instance."""
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found() if isinstance(found, type) else found, name)
    return found
