"""The sites that meshrun knows: one profile each, a TOML file (`profile_file` says what is in it).

    site = load("juwels-booster")                        # a UserError with near names if there is none
    names()                                              # all of them
    here = found_here(os.environ, "juwels", "jwlogin23") # the profile of this machine, or None

Those that come with meshrun lie in `world/sites/`, a user's own in `~/.config/meshrun/sites/` ($XDG_CONFIG_HOME), where
a file of the same name replaces ours.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from meshrun.config import read_toml
from meshrun.errors import UserError
from meshrun.files import read_plain
from meshrun.world.profile import Partition, Site, Value
from meshrun.world.profile_file import from_document

__all__ = ["Partition", "Site", "Value", "found_here", "load", "names", "own_folder", "read"]

Env = Mapping[str, str]

SHIPPED = Path(__file__).parent / "sites"


def load(name: str, env: Env = os.environ) -> Site:
    """The profile of that name; the user's own wins over ours."""
    files = _files(env)
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3, cutoff=0.4)
        known = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(sorted(files))}"
        raise UserError(
            f"there is no site {name!r}; {known}, and on the site itself "
            f"meshrun sites probe --save NAME makes a profile of it (--site)"
        )
    return read(files[name])


def names(env: Env = os.environ) -> list[str]:
    """Every site that there is a profile of."""
    return sorted(_files(env))


def own_folder(env: Env = os.environ) -> Path:
    """Where a user's own profiles lie."""
    config = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(config) / "meshrun" / "sites"


def found_here(env: Env, cluster: str | None, host: str) -> Site | None:
    """The profile whose expressions match this machine; the user's own are asked first."""
    sites = [read(path) for path in _files(env).values()]
    for site in sorted(sites, key=lambda site: (site.file is not None and site.file.parent == SHIPPED, site.name)):
        if site.detect.matches(env, cluster, host):
            return site
    return None


def read(path: Path) -> Site:
    """The profile in a file."""
    try:
        document = read_toml(read_plain(path).decode())
    except OSError as error:
        raise UserError(f"site profile {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"site profile {path} is not valid TOML: {error}") from None
    return from_document(path.stem, document, path)


def _files(env: Env) -> dict[str, Path]:
    folders = (SHIPPED, own_folder(env))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}
