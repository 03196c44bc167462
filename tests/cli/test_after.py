"""What is done after a training: once all is kept, on rank 0, and never to the training's harm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun import UserError
from meshrun.cli.after import as_json, trained_model
from meshrun.cli.target import find, make
from meshrun.config import RunDirectory
from meshrun.observe.events import Event
from meshrun.state.weights import save_weights
from tests.cli import in_process

PROGRAM = str(Path(__file__).parent / "programs" / "with_after.py")


def trained(folder: Path, **options: Any) -> tuple[dict[str, Any], list[Event]]:
    return in_process.trained(PROGRAM, folder, options)


@pytest.mark.ranks(2)
def test_rank_0_has_the_best_model_to_itself_when_the_others_have_left(tmp_path: Path):
    result, told = trained(tmp_path)
    if not told:
        assert "after" not in result, "only rank 0 does anything"
        return
    after = result["after"]
    assert after["right"] > 30 and after["right"] / 50 == pytest.approx(1 - errors(result), abs=0.021)
    assert math.isnan(after["none"]) and len(after["drawn"]) == 2 and after["where"] == result["run"]
    (text,) = [event["text"] for event in told if event["kind"] == "after"]
    assert text == f"of {after['right']} points, and training is False\nalone\n"
    run = Path(result["run"])
    written = json.loads((run / "result.json").read_text(), parse_constant=pytest.fail)
    assert written.pop("not_numbers") == {"/after/none": "NaN"} and written["after"]["none"] is None
    assert {**written, "after": after} == result
    report = (run / "report.html").read_text()
    assert "points, and training is False" in report and 'alt="square" src="data:image/svg+xml;base64,' in report
    assert result["data_wait"] == max(result["data_waits"]) and len(result["data_waits"]) == 2


def errors(result: dict[str, Any]) -> float:
    """Share of points that the best weights get wrong, told from the weights themselves."""
    from meshrun.cli.target import make
    from meshrun.state.weights import load_weights
    from tests.cli.programs import with_after

    model = make(find(PROGRAM), {}).model()
    load_weights(model, Path(result["run"]) / "weights" / "best.safetensors")
    return 1 - with_after.right(model.eval()).item() / 50


def test_an_error_after_the_training_is_a_note_and_the_run_has_not_failed(tmp_path: Path):
    result, told = trained(tmp_path, end="fail")
    assert result["steps"] == 4 and result["after"] is None
    kinds = [event["kind"] for event in told]
    assert kinds.index("after") < len(kinds) - 1 - kinds[::-1].index("note"), "what it printed comes first"
    assert [event["text"] for event in told if event["kind"] == "after"] == ["so far so good\n"]
    note = [event["text"] for event in told if event["kind"] == "note"][-1]
    assert note.startswith("what was to be done after the training failed in ") and "with_after.py:" in note
    assert note.endswith("ValueError: no way with Sequential in with_after-1; the training itself is kept")


def test_a_function_that_closes_standard_output_and_returns_what_no_document_holds_is_a_note(tmp_path: Path):
    result, told = trained(tmp_path, end="close")
    assert result["steps"] == 4 and result["after"] is None
    assert [event["text"] for event in told if event["kind"] == "after"] == ["before it closes\n"]
    assert "Exceeds the limit" in [event["text"] for event in told if event["kind"] == "note"][-1]


def test_values_are_as_a_document_has_them():
    value = {"a": torch.tensor([1.0, float("inf")]), 2: (torch.tensor(3), True, None), "b": {Path("x")}}
    assert as_json(value) == {"a": [1.0, float("inf")], "2": [3, True, None], "b": ["x"]}


def test_a_folder_without_weights_is_a_sentence(tmp_path: Path):
    from meshrun.cli.after import trained_model
    from meshrun.cli.target import make
    from meshrun.config import RunDirectory

    with pytest.raises(UserError, match=r"has no weights yet .*last.safetensors"):
        trained_model(make(find(PROGRAM), {}), RunDirectory(tmp_path), "best", torch.device("cpu"))


def test_what_is_drawn_with_a_trained_model_is_the_same_every_time(tmp_path: Path):
    experiment = make(find(PROGRAM), {})
    run = RunDirectory(tmp_path)
    save_weights(dict(experiment.model().named_parameters()), run.weights / "last.safetensors", {})
    drawn = []
    for _ in range(2):
        torch.rand(7)
        assert not trained_model(experiment, run, "best", torch.device("cpu")).training
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]
