"""benchmarks/h200.py goes through from end to end on a CPU, and a later call adds to what an earlier one has found."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path

import h200
import pytest
from h200_sides import SIDES, imports_of

from meshrun.check.bench_side import Built, Entry, Taken, Turn


def taken(name: str, seconds: float) -> Taken:
    entry = Entry(name, functools.partial(iter, ()), samples=8)
    return Taken(entry, Built(1.0, [2.0], 3 << 30, 0), tuple(Turn(10, seconds, 1.0, 0.0) for _ in range(3)))


def test_a_ratio_is_against_the_fastest_of_the_others():
    sides = {"meshrun": taken("meshrun", 1.0), "a": taken("a", 3.0), "b": taken("b", 2.0)}
    assert h200.times(sides, "meshrun", "a", "b") == 2.0
    assert h200.times(sides, "meshrun", "a") == 3.0
    assert h200.times(sides, "meshrun", "not there") is None


def test_rows_tell_of_tokens_peak_and_memory():
    about = {"batch": 8, "tokens": 100, "flops": 6e8, "product": 1e9, "lasting": 8e10}
    sides = {"meshrun": taken("meshrun", 1.0), "a": taken("a", 4.0), h200.PRODUCTS: taken(h200.PRODUCTS, 0.8)}
    ours, other = h200.rows_of(sides, about)
    assert (ours["samples_per_s"], ours["tokens_per_s"], ours["peak_gib"]) == (80.0, 8000.0, 3.0)
    assert ours["of_peak"] == pytest.approx(0.48) and ours["of_lasting"] == pytest.approx(0.6)
    assert other["meshrun_is_times"] == 4.0


def test_results_of_other_parts_stay(tmp_path: Path):
    out = tmp_path / "h200.json"
    out.write_text(json.dumps(h200.merged(out, "t5", [{"side": "meshrun"}], {"t5_vs_lightning": 2.0}, 10.0)))
    again = h200.merged(out, "resnet", [{"side": "meshrun"}], {"resnet50_vs_lightning": 3.0}, 20.0)
    out.write_text(json.dumps(again))
    renewed = h200.merged(out, "t5", [{"side": "meshrun"}, {"side": "lightning"}], {"t5_vs_lightning": 2.5}, 11.0)
    assert [row["part"] for row in renewed["rows"]] == ["resnet", "t5", "t5"]
    assert renewed["ratios"] == {"t5_vs_lightning": 2.5, "resnet50_vs_lightning": 3.0}
    assert renewed["seconds"] == {"t5": 11.0, "resnet": 20.0}


def test_parts_are_named():
    assert h200.parts_of("llama, rank") == ["llama", "rank"]
    with pytest.raises(argparse.ArgumentTypeError, match="'lama' is no part; parts are llama, t5"):
        h200.parts_of("lama")


def test_sides_import_what_they_need_before_they_are_timed():
    for part, sides in SIDES.items():
        for name in sides:
            assert "torch._dynamo" in imports_of(part, name, tiny=False) or "compile" not in name, (part, name)
    assert "transformers.models.t5.modeling_t5" in imports_of("t5", "bare transformers compiled", tiny=False)


def test_a_part_goes_through_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "tiny.json"
    words = ["--tiny", "--parts", "resnet", "--sides", "lightning", "--rounds", "1", "--steps", "1", "--warm-up", "1"]
    monkeypatch.setattr(sys, "argv", ["h200.py", *words, "--out", str(out)])
    assert h200.main() == 0
    document = json.loads(out.read_text())
    assert document["rows"][0]["side"] == "meshrun" and document["rows"][0]["samples_per_s"] > 0
    assert set(document["ratios"]) == {"resnet50_vs_lightning", "resnet50_vs_bare_compiled"}
    shown = capsys.readouterr().out
    assert "resnet50_vs_lightning" in shown and "samples_per_s" in shown


@pytest.mark.parametrize("place", range(3))
def test_a_first_loss_that_is_no_number_is_far_from_the_others(place: int):
    losses = [2.0, 2.2, 1.9]
    assert h200.spread(losses) == pytest.approx(0.1) and h200.spread([]) == 0.0
    losses[place] = math.nan
    assert math.isnan(h200.spread(losses))
