"""Times as Slurm writes them."""

from __future__ import annotations

import pytest

from meshrun.world import walltime

TIMES = {"90": 5400, "90:30": 5430, "1:30:00": 5400, "1-12": 129600, "2-0:30": 174600, "1-01:02:03": 90123, "0": 0}


@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_read_as_slurm_reads_it(text: str):
    assert walltime.parse(text) == TIMES[text]


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "-1"])
def test_no_limit_is_none(text: str):
    assert walltime.parse(text) is None


@pytest.mark.parametrize("text", ["", "1:2:3:4", "x", "1-", "-5", "1-2-3", "1.5", "1:"])
def test_what_is_no_time_is_an_error(text: str):
    with pytest.raises(ValueError, match="is no time such as"):
        walltime.parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "00:00:59"), (86399, "23:59:59"), (90123, "1-01:02:03"), (None, "UNLIMITED")]
)
def test_a_time_is_written_so_that_it_is_read_again(seconds: int | None, text: str):
    assert walltime.text(seconds) == text
    assert walltime.parse(text) == seconds
