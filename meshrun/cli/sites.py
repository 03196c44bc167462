"""`meshrun sites`: what is known about clusters, from where, and what this one says of itself.

meshrun sites                        # all profiles, and which of them is here
meshrun sites show lumi-g            # every value with its source
meshrun sites probe                  # what Slurm says about the cluster that this machine is part of
meshrun sites probe --save lab       # the same as a profile of one's own, to be edited
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun import strict_json
from meshrun.errors import RunFailed, UserError

if TYPE_CHECKING:
    from meshrun.world.profile import Site

sites_app = typer.Typer(add_completion=False, help="List known clusters, with the source of each setting.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@sites_app.callback(invoke_without_command=True)
def list_command(context: typer.Context, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the sites that there is a profile of, and say which of them is here."""
    del debug  # for `main`
    if context.invoked_subcommand is not None:
        return
    from meshrun.world import sites
    from meshrun.world.environment import inherited

    env = inherited()
    known = [sites.load(name, env) for name in sites.names(env)]
    here = sites.found_here(env, _cluster_name(), socket.gethostname())
    if as_json:
        listed = [{"name": site.name, "title": site.title, "file": str(site.file)} for site in known]
        print(strict_json.dumps({"sites": listed, "here": here and here.name}))
        return
    for site in known:
        mark = "*" if here is not None and site.name == here.name else " "
        own = "" if site.file is not None and site.file.parent == sites.SHIPPED else f"  ({site.file})"
        print(f"{mark} {site.name:<16} {site.title}{own}")
    if here is not None:
        print("\n* is here, and taken when no --site is given")
    else:
        print(
            "\nthis machine belongs to none of these; "
            "meshrun sites probe --save NAME makes a profile of a cluster with Slurm"
        )


@sites_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A site, as `meshrun sites` lists them.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show every value of a profile, where it is from, and whether it is verified."""
    del debug  # for `main`
    from meshrun.world.sites import load

    _show(load(name), as_json)


@sites_app.command("probe")
def probe_command(
    save: Annotated[str | None, typer.Option(metavar="NAME", help="Write it as a profile of your own.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ask Slurm about the cluster that this machine is part of."""
    del debug  # for `main`
    from meshrun.launch.probe import asking, probe
    from meshrun.launch.slurm import Slurm
    from meshrun.world.environment import inherited
    from meshrun.world.network import interfaces

    Slurm.here()
    site = probe(asking(), inherited(), interfaces())
    if save is None:
        _show(site, as_json)
        return
    path = _save(site, save)
    if as_json:
        print(strict_json.dumps({**document(site), "file": str(path)}))
    else:
        print(f"{path} has what Slurm says of {site.title}; edit it, and use it with --site {save}")


def document(site: Site) -> dict[str, Any]:
    """A profile as JSON."""
    said = [
        {"what": what, "value": value.value, "source": value.source, "verified": value.verified, "reason": value.reason}
        for what, value in site.statements()
    ]
    return {"name": site.name, "title": site.title, "file": site.file and str(site.file), "values": said}


def _save(site: Site, name: str) -> Path:
    """Write a profile where the user's own lie; one that is there may hold what somebody has edited."""
    import tomllib

    from meshrun.world.profile_file import from_document, to_text
    from meshrun.world.sites import own_folder

    text = to_text(site)
    from_document(name, tomllib.loads(text))
    path = own_folder() / f"{name}.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; give another name, or remove it first (--save)") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror} (--save)") from None
    return path


def _cluster_name() -> str | None:
    """What Slurm calls the cluster; None where there is no Slurm, or where it does not answer."""
    if shutil.which("scontrol") is None:
        return None
    from meshrun.launch.probe import CONFIG, asking, settings

    try:
        return settings(asking()(*CONFIG)).get("ClusterName")
    except (RunFailed, UserError):
        return None


def _show(site: Site, as_json: bool) -> None:
    if as_json:
        print(strict_json.dumps(document(site)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=site.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for title in ("what", "value", "verified", "source"):
        table.add_column(title, overflow="fold")
    for what, value in site.statements():
        shown = ", ".join(value.value) if isinstance(value.value, tuple) else str(value.value)
        # As text: a bracket would begin rich's markup.
        table.add_row(Text(what), Text(shown), "yes" if value.verified else "no", Text(value.source))
    Console().print(table)
    count = len(site.unverified())
    if count:
        print(f"\n{count} value{'s' * (count != 1)} that no page of the site confirms: look before you rely on them")
