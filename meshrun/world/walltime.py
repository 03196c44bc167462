"""Times as Slurm writes them: `90` (minutes), `1:30:00`, `2-12`, `1-00:00:00`, `UNLIMITED`.

parse("1-12:00:00")       # 129600 seconds
parse("infinite")         # None: without a limit
text(129600)              # "1-12:00:00"
"""

from __future__ import annotations

import re

_UNLIMITED = ("unlimited", "infinite", "-1")
_CLOCK = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def parse(text: str) -> int | None:
    """Seconds; None for a time without a limit. ValueError for what is no time in any of Slurm's forms."""
    if text.strip().lower() in _UNLIMITED:
        return None
    days, dash, clock = text.strip().rpartition("-")
    match = _CLOCK.fullmatch(clock)
    if match is None or (dash and not re.fullmatch("[0-9]{1,6}", days)):
        raise ValueError(f"{text!r} is no time such as 90 (minutes), 1:30:00 or 1-12:00:00")
    parts = [int(part) for part in match.groups() if part is not None]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    # Without days one number is minutes, two are minutes and seconds.
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def text(seconds: int | None) -> str:
    """The form that Slurm itself prints."""
    if seconds is None:
        return "UNLIMITED"
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02d}:{minute:02d}:{second:02d}"
