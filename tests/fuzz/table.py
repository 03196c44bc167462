"""All formats that meshrun reads, by name; a new one is a `Format` in the list of its room."""

from __future__ import annotations

from tests.fuzz import data_formats, run_formats, state_formats, wire_formats, world_formats
from tests.fuzz.engine import Format

ROOMS = (data_formats, state_formats, run_formats, world_formats, wire_formats)
FORMATS: dict[str, Format] = {each.name: each for room in ROOMS for each in room.FORMATS}
