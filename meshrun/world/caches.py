"""Where compiled code is kept from one run to the next: a folder of this user alone.

    note = keep_compiled_code()          # before anything is compiled; None, or what to tell the user

torch reads this code back as pickles, which can run anything. So the folder is `~/.cache/meshrun/compile` (or below
$XDG_CACHE_HOME), which nobody else may write to. Where there is none, it is a new folder for this process alone.
Whoever has set torch's own variables has chosen, and nothing is changed. Several processes may use it at once, as torch
renames what it has written.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshrun.config import all_can_exchange, made_private

CODE, KERNELS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def folder_of(env: Mapping[str, str], kind: str) -> Path | None:
    """Where something is kept for this user; None where they have no folder of their own."""
    base = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else "")
    return Path(base) / "meshrun" / kind if Path(base).is_absolute() else None


def made_safe(folder: Path) -> bool:
    """Make a folder for what is executed later; False where others can write to it, or put another in its place."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return made_private(folder) and all_can_exchange(folder) is None


def keep_compiled_code() -> str | None:
    """Let torch and triton keep what they compile, unless the user has said where; returns why it cannot be kept."""
    chosen, why = settings(os.environ)
    if why is not None:
        chosen = _for_this_process(os.environ)
    os.environ.update(chosen)
    return why


def _for_this_process(env: Mapping[str, str]) -> dict[str, str]:
    """A folder that goes with the process: torch's own in /tmp has a name that another user can take first."""
    folder = tempfile.mkdtemp(prefix="meshrun-compile-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {CODE: folder, KERNELS: env.get(KERNELS) or f"{folder}/triton"}


def _is_torchs_own(folder: Path) -> bool:
    """Whether nobody has chosen a folder: torch sets the variable to its own, in /tmp, when its compiler is loaded."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def settings(env: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The variables to set, or why compiled code is not kept; the folder is made."""
    if env.get(CODE) and not _is_torchs_own(Path(env[CODE])):
        return {}, None
    folder, lost = folder_of(env, "compile"), "compiled code is not kept for the next run"
    if folder is None:
        return {}, f"{lost}: there is no home directory ($HOME, $XDG_CACHE_HOME)"
    try:
        private = made_safe(folder)
    except OSError as error:
        return {}, f"{lost}: {folder}: {error.strerror or error} ($XDG_CACHE_HOME)"
    if not private or not os.access(folder, os.W_OK):
        return {}, (
            f"{lost}: {folder} must be a folder of yours that you and nobody else may write to, nor all users to one "
            f"above it ($XDG_CACHE_HOME)"
        )
    return {CODE: str(folder), KERNELS: env.get(KERNELS) or str(folder / "triton")}, None
