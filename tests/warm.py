"""`python -m meshrun …` without the seconds of importing torch: forks of a process that has imported it.

    process = warm.Popen([sys.executable, "-m", "meshrun", "run", "digits"], cwd=folder, stdout=subprocess.PIPE)
    done = warm.run([sys.executable, "-m", "meshrun", "--help"], capture_output=True, text=True)

What they start has, like any process, its own words, environment, folder, standard streams, session and signals, is a
child of whoever started it, and ends as an interpreter ends. What it starts of meshrun itself, such as the nursery of
a run, is a fork of it. Other programs, and meshrun with switches of Python's own or on other numbers of threads, are
started as ever, and so are those whose caller has threads. Not for tests of what happens while a process starts.

Run as a module this is the process that forks: `python -m tests.warm FD PADDING`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READY_S = 90.0
MODULES = ("meshrun", "tests.observe.warm")
"""What is forked: all else is started as ever."""
HIGH = 800
"""File descriptors from here on are in nobody's way."""
OF_IMPORTS = (
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
)
"""Variables that are read while a process starts: with others than here it must start by itself."""
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Popen(subprocess.Popen[Any]):
    """As subprocess has it, but meshrun is forked."""

    def _execute_child(self, *given: Any) -> None:
        asked = _signature.bind(self, *given).arguments
        fork = _fork_here if _in_fork else _fork_there
        child = fork(asked) if _can_be_forked(asked) else None
        if child is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid = child
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen}, "run")
"""subprocess.run, but meshrun is forked; subprocess itself stays as it is, for other threads too."""
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def hear_ctrl_c() -> None:
    """For `preexec_fn`: where the tests run in the background of a shell they ignore it, which others would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _can_be_forked(asked: Mapping[str, Any]) -> bool:
    words = asked["args"]
    plain = not (asked["shell"] or asked["executable"] or asked["uid"] or asked["gid"] or asked["gids"])
    if not plain or asked["umask"] >= 0 or isinstance(words, str | bytes | os.PathLike):
        return False
    first, *rest = [str(word) for word in words[:3]]
    if first != sys.executable or rest[:1] != ["-m"] or rest[1:] not in [[name] for name in MODULES]:
        return False
    env = os.environ if asked["env"] is None else asked["env"]
    if any(env.get(name) != _of_server(name) for name in OF_IMPORTS):
        return False
    return asked["cwd"] is None or Path(asked["cwd"]).is_dir()


def _of_server(name: str) -> str | None:
    return "1" if name == "OMP_NUM_THREADS" else os.environ.get(name)


def _fds(asked: Mapping[str, Any]) -> list[int]:
    """What it will have open: its standard streams, and what it is to inherit under the same number."""
    given = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    return [*(standard if fd == -1 else fd for standard, fd in enumerate(given)), *asked["pass_fds"]]


def _request(asked: Mapping[str, Any]) -> dict[str, Any]:
    group = asked["process_group"]
    return {
        "argv": [os.fsdecode(word) for word in asked["args"]],
        "environment": dict(os.environ if asked["env"] is None else asked["env"]),
        "cwd": str(asked["cwd"] or Path.cwd()),
        "cores": sorted(os.sched_getaffinity(0)),
        "session": bool(asked["start_new_session"]),
        "group": -1 if group is None else group,
        "numbers": [0, 1, 2, *asked["pass_fds"]],
    }


# The side of tests: asks for forks, and becomes their parent.

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_one_at_a_time = threading.Lock()


def _fork_there(asked: Mapping[str, Any]) -> int | None:
    # Forks hear CTRL-C in any case; all else that a caller does before the program cannot be sent.
    if asked["preexec_fn"] not in (None, hear_ctrl_c):
        return None
    request = _request(asked)
    with _one_at_a_time:
        wire = _wire()
        if wire is None:
            return None
        # Between the two the kernel gives this process what is orphaned below it.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(wire, [json.dumps(request).encode()], _fds(asked))
            return int(wire.recv(64))
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _wire() -> socket.socket | None:
    """The way to the server, which is started when it is first needed."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno()), "-" * 4000],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(READY_S)
        _server = process, ours
        atexit.register(stop)
        assert ours.recv(64) == b"ready"
    process, wire = _server
    return wire if process.poll() is None else None


def stop() -> None:
    """End the server; what it has forked lives on."""
    if _server is not None:
        _server[1].close()
        _server[0].kill()
        _server[0].wait()


# The side of the server and of its forks.

_in_fork = False
_arguments = (0, 0)
"""Where the kernel looks for the words of this process, and how many bytes there are."""
_registered: list[Any] = []
"""What this command has asked to be called at its end, which is not for its forks to do."""
_finalizers: set[Any] = set()


def serve(fd: int) -> dict[str, Any]:
    """Fork as asked until nobody is left to ask. Returns in forks, with what was asked."""
    wire = socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH))
    os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for its forks, which are in the same group
    wire.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(wire, 1 << 20, 16)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()  # known before it ends, which may be before its child does anything
            if os.fork():
                os._exit(0)  # so that the kernel looks for another parent
            request: dict[str, Any] = json.loads(message)
            _be_a_process(request, fds, wire.fileno())
            while os.getppid() == between:
                time.sleep(0.0002)
            wire.send(str(os.getpid()).encode())
            wire.close()
            return request
        os.waitpid(between, 0)
        for each in fds:
            os.close(each)


def _fork_here(asked: Mapping[str, Any]) -> int | None:
    """A fork of this command, where that is sound: no thread may hold locks that it would inherit."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - without the cost of paths
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    request = _request(asked)
    if pid := os.fork():
        return pid
    status = 1
    try:
        for each in _registered:
            atexit.unregister(each)
        _registered.clear()
        for each in set(weakref.finalize._registry) - _finalizers:  # type: ignore[attr-defined]
            weakref.finalize._registry.pop(each)  # type: ignore[attr-defined]
        _be_a_process(request, _fds(asked))
        if asked["preexec_fn"] is not None:
            asked["preexec_fn"]()
        status = _status_of(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    _end(status)
    return None


def _be_a_process(request: Mapping[str, Any], fds: Sequence[int], keep: int = 0) -> None:
    """Become what was asked for, as if this were a new process."""
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
    for fd, number in zip(high, request["numbers"], strict=True):
        os.dup2(fd, number, inheritable=True)
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if fd not in (*request["numbers"], keep):
            with contextlib.suppress(OSError):
                os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = os.getcwd()  # noqa: PTH109
    sys.argv = ["-m", *request["argv"][3:]]
    sys.orig_argv = list(request["argv"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _show(request["argv"])
    sys.modules["numpy"].random.seed()


def _show(argv: Sequence[str]) -> None:
    """Have the kernel show these words as those of the process, with empty ones in the room that is left."""
    start, room = _arguments
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)[:room]
    ctypes.memmove(start, words.ljust(room, b"\0"), room)


def _status_of(request: Mapping[str, Any]) -> int:
    """Run the command; how it wants to end."""
    _become_a_fork()
    try:
        runpy.run_module(request["argv"][2], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def _end(status: int) -> None:
    """As an interpreter ends, but for freeing all it has: that would copy what is shared with the warm process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _become_a_fork() -> None:
    global _in_fork
    _in_fork = True
    subprocess.Popen = Popen  # type: ignore[misc]
    register = atexit.register

    def noted(function: Any, *words: Any, **named: Any) -> Any:
        _registered.append(function)
        return register(function, *words, **named)

    atexit.register = noted  # type: ignore[assignment]
    _finalizers.update(weakref.finalize._registry)  # type: ignore[attr-defined]


def main() -> None:
    global _arguments
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    _arguments = int(stat[45]), int(stat[46]) - int(stat[45])
    from tests.nursery import warm_up

    warm_up()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    request = serve(int(sys.argv[1]))
    gc.freeze()
    status = 1
    try:
        status = _status_of(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    _end(status)


if __name__ == "__main__":
    main()
