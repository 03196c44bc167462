"""Python's bytecode of packages that come without it, kept from one run to the next in a folder of this user alone.

    keep_bytecode()                      # before torch is imported

Images of containers, and installations that nobody may write to, often have no bytecode: then every process of every
run compiles anew all that it imports, which of torch and its compiler takes twice as long as all else of their import.
It is kept in `~/.cache/meshrun/bytecode` (or below $XDG_CACHE_HOME), which nobody else may write to. Whoever has chosen
a place ($PYTHONPYCACHEPREFIX) has chosen, and where a package has its bytecode beside it nothing is changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from meshrun.world.caches import folder_of, made_safe


def keep_bytecode(package: str = "torch") -> None:
    """Have Python keep bytecode from now on, should this package have none."""
    if sys.pycache_prefix is None and _has_none(package) and (folder := _folder(os.environ)) is not None:
        sys.pycache_prefix = str(folder)
        # Who does not want it among the sources has nothing against it here.
        sys.dont_write_bytecode = False


def _has_none(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.cached is not None and not Path(found.cached).exists()


def _folder(env: Mapping[str, str]) -> Path | None:
    """Where it is kept, if it can be."""
    folder = folder_of(env, "bytecode")
    try:
        return folder if folder is not None and made_safe(folder) and os.access(folder, os.W_OK) else None
    except OSError:
        return None
