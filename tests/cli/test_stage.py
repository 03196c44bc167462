"""`meshrun stage` in process: what a `stage_data` is called with."""

from __future__ import annotations

from typing import Any

import pytest

from meshrun.cli import stage
from meshrun.cli.stage import _called
from meshrun.cli.target import find
from meshrun.errors import UserError


def test_a_stage_data_gets_the_stage_first_and_the_options_that_it_names_as_the_experiment_gets_them(
    monkeypatch: pytest.MonkeyPatch,
):
    def values_of(_function: object, given: dict[str, Any]) -> dict[str, Any]:
        return {name: int(value) for name, value in given.items()}

    monkeypatch.setattr(stage, "values_of", values_of)
    target, place = find("digits"), object()
    given: Any = {"place": "1", "width": "2", "depth": "3"}
    assert _called(lambda place, width, rate=0.5: (place, width, rate), target, given)(place) == (place, 2, 0.5)  # type: ignore[arg-type]
    assert _called(lambda: "nothing", target, given)(place) == "nothing"  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stage_data of digits is str; it must be a function"):
        _called("fetch", target, given)
