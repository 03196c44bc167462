"""The pages that `--help` shows: of all commands, and of one whose options are made.

    overview(app, Console())
    show("meshrun run digits [OPTIONS]", "Train digits.", [("Options of digits", options)], Console())

Typer's own pages cut names where the terminal is narrow, and take as long to draw as all else takes to start.
"""

from __future__ import annotations

import inspect

import typer
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshrun.cli.options import REQUIRED, Option

Panels = list[tuple[str, list[Option]]]


def overview(app: typer.Typer, console: Console) -> None:
    """Print the page of all commands."""
    console.print(Padding(Text.assemble(("Usage: ", "yellow"), ("meshrun COMMAND [OPTIONS]", "bold")), 1))
    console.print(Padding(Text(str(app.info.help)), (0, 1, 1, 1)))
    rows = [(each.name or _name(each.callback), _first_line(each.callback)) for each in app.registered_commands]
    rows += [
        (str(each.name), str(each.typer_instance.info.help)) for each in app.registered_groups if each.typer_instance
    ]
    table = _two_columns()
    for name, does in rows:
        table.add_row(name, does)
    console.print(Panel(table, title="Commands", title_align="left", border_style="dim"))
    console.print(Padding(Text("meshrun COMMAND --help shows a command's options."), (0, 2)))


def _name(command: object) -> str:
    return str(getattr(command, "__name__", command))


def _first_line(command: object) -> str:
    return (inspect.getdoc(command) or "").partition("\n\n")[0].replace("\n", " ")


def show(usage: str, does: str, panels: Panels, console: Console) -> None:
    """Print the page."""
    console.print(Padding(Text.assemble(("Usage: ", "yellow"), (usage, "bold")), 1))
    console.print(Padding(Text(does), (0, 1, 1, 1)))
    for title, options in panels:
        console.print(Panel(_table(options), title=title, title_align="left", border_style="dim"))
    flags = any(option.kind is bool for _, options in panels for option in options)
    console.print(Padding(Text("--no-NAME unsets what --NAME sets; " * flags + "--help shows this."), (0, 2)))


def _table(options: list[Option]) -> Table:
    table = _two_columns()
    for option in options:
        shape = "" if option.kind is bool else f"{option.shape}  "
        table.add_row(option.flag, Text.assemble((shape, "yellow"), _help(option)))
    return table


def _two_columns() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(overflow="fold", ratio=1)
    return table


def _help(option: Option) -> str:
    default = "required" if option.default is REQUIRED else option.shown_default and f"default {option.shown_default}"
    return option.help + (f" ({default})" if default else "")
