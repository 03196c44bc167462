"""The page that `--help` shows of a command whose options are made: panels of names, values and what they mean.

    show("meshrun run digits [OPTIONS]", "Train digits.", [("Options of digits", options)], Console())

Typer's own page cuts names where the terminal is narrow. Here these have the room that they need.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshrun.cli.options import REQUIRED, Option

Panels = list[tuple[str, list[Option]]]


def show(usage: str, does: str, panels: Panels, console: Console) -> None:
    """Print the page."""
    console.print(Padding(Text.assemble(("Usage: ", "yellow"), (usage, "bold")), 1))
    console.print(Padding(Text(does), (0, 1, 1, 1)))
    for title, options in panels:
        console.print(Panel(_table(options), title=title, title_align="left", border_style="dim"))
    flags = any(option.kind is bool for _, options in panels for option in options)
    console.print(Padding(Text("--no-NAME unsets what --NAME sets; " * flags + "--help shows this."), (0, 2)))


def _table(options: list[Option]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(overflow="fold", ratio=1)
    for option in options:
        shape = "" if option.kind is bool else f"{option.shape}  "
        table.add_row(option.flag, Text.assemble((shape, "yellow"), _help(option)))
    return table


def _help(option: Option) -> str:
    default = "required" if option.default is REQUIRED else option.shown_default and f"default {option.shown_default}"
    return option.help + (f" ({default})" if default else "")
