"""The report of real run directories: finished, failed, half written, huge, and of what is none."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli.training import _whole_run
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import UserError
from meshrun.observe import history
from meshrun.observe.drawing import Curve, curve, linear, logarithmic, smooth, thin
from meshrun.observe.events import EventFile
from meshrun.observe.history import Rank, Track, read
from meshrun.observe.legs import Leg, legs_of
from meshrun.observe.numbers import number, whole
from meshrun.observe.report import _best_step, _configuration, _duration, _speed, _spread, write_report

VOID = {"meta"}
LARGEST = 300_000


class Page(HTMLParser):
    """Holds that tags are closed in order; collects texts by tag and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str) -> list[str]:
        return [text for each, text in self.texts if each == tag]

    @property
    def seen(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("style", "script"))

    @property
    def headline(self) -> str:
        return self.all("h1")[0].replace("\N{NO-BREAK SPACE}", " ")


def page_of(run: RunDirectory) -> Page:
    path = write_report(run.path)
    assert path == run.path / "report.html"
    assert [each for each in run.path.iterdir() if each.name.startswith(".")] == []
    return Page(path.read_text())


def make_run(tmp_path: Path, target: str = "digits", world: int = 2) -> RunDirectory:
    run = RunDirectory.create(RunConfig(target=target, name="digits", runs=tmp_path, options={"width": 256}))
    for rank in range(world):
        events = EventFile(run.events_of(rank))
        events.write(
            "start",
            rank=rank,
            world=world,
            host=f"node-{rank}",
            device=f"cuda:{rank}",
            layout=f"dp={world}",
            source="torchrun",
            pid=1,
            target=target,
            total_steps=30,
        )
        events.close()
    return run


def write_steps(run: RunDirectory, rank: int, steps: range, seconds: float = 0.04, **changes: Any) -> None:
    events = EventFile(run.events_of(rank))
    for step in steps:
        values = {"loss": 2.0 / step, "grad_norm": 1.0, "lr": 1e-3, "samples": 64, "data_wait": seconds / 10}
        events.write("step", step=step, seconds=5.0 if step == 1 else seconds, **{**values, **changes})
    events.close()


def write_event(run: RunDirectory, rank: int, kind: str, /, **fields: Any) -> None:
    events = EventFile(run.events_of(rank))
    events.write(kind, **fields)
    events.close()


def scores(loss: float, accuracy: float) -> dict[str, dict[str, float]]:
    return {
        "val": {"loss": loss, "count": 2000.0, "accuracy": accuracy},
        "test": {"loss": loss + 0.1, "count": 10000.0, "accuracy": accuracy - 0.001},
    }


def finished_run(tmp_path: Path, target: str = "digits") -> RunDirectory:
    run = make_run(tmp_path, target)
    for rank, seconds in ((0, 0.04), (1, 0.05)):
        write_steps(run, rank, range(1, 31), seconds)
        for step, loss, accuracy in ((10, 0.5, 0.9), (20, 0.3, 0.985), (30, 0.4, 0.98)):
            write_event(run, rank, "eval", step=step, scores=scores(loss, accuracy), seconds=1.0)
        write_event(run, rank, "end")
    result = {
        "run": str(run.path),
        "world": 2,
        "layout": "dp=2",
        "steps": 30,
        "losses": [2.0 / step for step in range(1, 31)],
        "grad_norms": [1.0] * 30,
        "eval": scores(0.4, 0.985),
        "best": {"step": 20, **scores(0.3, 0.985)["val"]},
        "samples": 1920,
        "samples_per_s": 1600.0,
        "data_wait": 0.1,
        "seconds": 41.2,
        "device": "cuda:0",
    }
    (run.path / "result.json").write_text(json.dumps(result))
    return run


def test_headline_says_what_was_reached(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    assert page.headline == "digits-1 reached test accuracy 98.4 % after 30 steps in 41 s on 2 ranks (dp=2)"


def test_key_figures(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    assert page.all("dt") == [
        "Final loss",
        "Best evaluation",
        "Samples/s",
        "Waited for data",
        "Ranks",
        "Layout",
        "Device",
    ]
    figures = page.all("dd")
    for value in ("0.06667", "0.3", "val loss at step 20, accuracy 98.50 %", "1,600", "10.0 %", "dp=2", "cuda:0"):
        assert value in figures


def test_every_evaluation_is_a_row_and_the_best_is_marked(tmp_path: Path) -> None:
    cells = page_of(finished_run(tmp_path)).all("td")
    assert cells[:5] == ["10", "0.5000", "90.00 %", "0.6000", "89.90 %"]
    assert cells[5:10] == ["20", "0.3000", "98.50 %", "0.4000", "98.40 %"]
    assert cells.count("30") == 1


def test_ranks_have_their_times_without_the_first_step_and_the_slowest_is_marked(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    cells = page.all("td")
    assert cells[cells.index("node-0") - 1 :][:6] == ["0", "node-0", "cuda:0", "40.0", "4.0", "10.0 %"]
    assert cells[cells.index("node-1") - 1 :][:6] == ["1", "node-1", "cuda:1", "50.0", "5.0", "10.0 %"]
    assert "best" in page.all("span")
    assert "slowest, 25.0 % over the fastest" in page.all("span")


def test_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "url(" not in page.source
    assert not [tag for tag, values in page.attributes if {"src", "href", "srcset"} & values.keys() or tag == "link"]


def test_text_of_users_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('1')</script>&amp;\"x.py"
    run = finished_run(tmp_path, target=evil)
    write_event(run, 0, "note", text=evil)
    write_event(
        run, 1, "failure", rank=1, host=evil, step=3, sentence=evil, lines=[evil], by_user=False, secondary=False
    )
    write_event(run, 0, "eval", step=30, scores={evil: {"loss": 0.1, evil: 0.5}}, seconds=1.0)
    page = page_of(run)
    assert page.source.count("<script>") == 1
    assert page.source.count("</script>") == 1
    assert "alert" not in page.all("script")[0]
    for tag in ("p", "li", "pre", "th", "td", "title", "span"):
        assert any(evil in text for text in page.all(tag)), tag


def test_failed_run_shows_the_cause_first_and_consequences_after(tmp_path: Path) -> None:
    run = make_run(tmp_path, world=3)
    for rank in range(3):
        write_steps(run, rank, range(1, 13))
    lost = {"host": "node-0", "step": 12, "lines": [], "by_user": False, "secondary": True}
    write_event(run, 0, "failure", rank=0, sentence="rank 0 lost another rank", **lost)
    cause = {"host": "node-1", "step": 12, "lines": ["first line", "digits.py:61 in forward"], "by_user": False}
    write_event(run, 1, "failure", rank=1, sentence="rank 1 ran out of memory", secondary=False, **cause)
    page = page_of(run)
    assert page.headline.startswith("digits-1 failed on rank 1 after 12 of 30 steps in ")
    shown = page.seen
    assert "Rank 1 on node-1, after step 12" in shown
    order = [
        shown.index(text) for text in ("rank 1 ran out", "digits.py:61", "1 rank ended", "rank 0 lost", "Final loss")
    ]
    assert order == sorted(order)


def test_the_same_failure_on_all_ranks_is_said_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for rank in range(2):
        fields = {"host": f"node-{rank}", "step": 7, "lines": [], "by_user": False, "secondary": False}
        write_event(run, rank, "failure", rank=rank, sentence="loss is nan at step 8", **fields)
    page = page_of(run)
    assert page.seen.count("loss is nan at step 8") == 1
    assert "Ranks 0, 1 on node-0, after step 7" in page.seen


def test_of_all_ranks_but_the_first_some_steps_tell_how_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, world=2)
    for rank in (0, 1):
        write_steps(run, rank, range(1, 101))
    monkeypatch.setattr(history, "TIMED_STEPS", 10)
    first, second = read(run.path).ranks
    assert first.steps == 99 and 5 < second.steps < 25
    assert second.step_time == pytest.approx(0.04) and second.last_step == 100


def test_rank_that_was_killed_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, world=3)
    write_event(run, 1, "end")  # of the start before
    write_event(run, 1, "start")
    write_steps(run, 1, range(1, 6))
    write_event(run, 2, "end")
    fields = {"host": "node-0", "step": 5, "lines": [], "by_user": False, "secondary": True}
    write_event(run, 0, "failure", rank=0, sentence="rank 0 lost another rank", **fields)
    page = page_of(run)
    assert "rank 2 ended without a word" not in page.seen
    assert page.headline.startswith("digits-1 failed on rank 1 ")
    assert page.seen.index("rank 1 ended without a word") < page.seen.index("rank 0 lost another rank")


def test_run_without_result_is_told_from_its_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_steps(run, 0, range(1, 13))
    with run.events_of(0).open("a") as file:
        file.write('{"time": 1.0, "kind": "st')
    page = page_of(run)
    assert page.headline.startswith("digits-1 has no result yet: 12 of 30 steps in ")
    assert "1,600" in page.all("dd")


def test_run_that_has_only_a_configuration(tmp_path: Path) -> None:
    page = page_of(RunDirectory.create(RunConfig(target="digits", runs=tmp_path)))
    assert page.headline.startswith("digits-1 has no result yet")
    assert page.seen.count("Nothing recorded.") == 4
    assert "options.width" not in page.seen
    assert "Configuration" in page.all("summary")


def test_run_that_has_only_a_result_draws_its_losses(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for path in run.events.iterdir():
        path.unlink()
    page = page_of(run)
    assert page.headline.startswith("digits-1 reached test accuracy 98.4 %")
    assert page.seen.count("Nothing recorded.") == 2


@pytest.mark.parametrize("kind", ["start", "step", "eval", "note", "failure", "end", "unheard of"])
def test_events_without_fields_do_not_break_the_page(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path)
    write_event(run, 0, kind)
    write_event(run, 0, kind, step=None, loss=math.nan, scores={"val": None, "test": {}}, text=None, lines=None)
    page_of(run)


def test_steps_that_are_made_again_replace_the_first_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_steps(run, 0, range(1, 21), loss=1.0)
    for step in (10, 20):
        write_event(run, 0, "eval", step=step, scores=scores(0.5, 0.9))
    write_steps(run, 0, range(11, 16), loss=2.0)
    write_steps(run, 0, range(15, 16), loss=3.0)
    track = read(run.path).track
    steps, losses = track.series("loss")
    assert steps == list(range(1, 16))
    assert losses == [1.0] * 10 + [2.0] * 4 + [3.0]
    assert list(track.evals) == [10], "nor does an evaluation stay of a step that was undone"


def test_configuration_shows_what_was_asked_for_beside_what_it_came_to(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.save_config(run.config(), {"layout": "dp=2", "eval_samples": {"val": 2000}})
    cells = page_of(run).all("td")
    at = cells.index("layout")
    assert cells[at : at + 3] == ["layout", "dp=*", "dp=2"]
    assert cells[cells.index("eval_samples.val") + 2] == "2000"
    assert cells[cells.index("options.width") + 1] == "256"


CHOSEN = {"compile": False, "compile_why": "the device is <cpu>", "recompute": "every-2", "graphs": True, "new_way": 3}


def test_what_was_decided_about_a_step_is_shown_with_its_reason(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert "How a step was computed" not in page_of(run).seen
    run.save_config(run.config(), {"precision": "bf16", "chosen": CHOSEN})
    page = page_of(run)
    start = page.texts.index(("h2", "How a step was computed"))
    words = [("Precision", "bf16"), ("Compiled", "no", "the device is <cpu>"), ("Activations recomputed", "every-2")]
    words += [("CUDA graphs", "yes"), ("New way", "3")]
    assert [text for _, text in page.texts[start + 1 :]][:11] == [each for row in words for each in row]


def test_what_was_decided_is_known_from_the_start_of_a_run_that_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_event(run, 0, "start", rank=0, chosen={"compile": "tried", "compile_why": "no compiler"})
    page = page_of(run)
    assert "where it could be" in page.all("td") and "no compiler" in page.all("td")
    write_event(run, 0, "start", rank=0, chosen="odd")
    assert "How a step was computed" not in page_of(run).seen


def test_page_of_a_long_run_on_many_ranks_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path, world=200)
    with run.events_of(0).open("a") as file:
        for step in range(1, 50_001):
            loss = 10.0 / step + math.sin(step) ** 2
            rest = f'"lr": {1 / step}, "samples": 64, "seconds": {0.04 + step % 7 / 1000}, "data_wait": 0.001'
            file.write(
                f'{{"time": {step}.5, "kind": "step", "step": {step}, "loss": {loss}, "grad_norm": {loss}, {rest}}}\n'
            )
            if step % 100 == 0:
                file.write(json.dumps({"time": step, "kind": "eval", "step": step, "scores": scores(loss, 0.9)}) + "\n")
    sentence = "a very long sentence about what went wrong " * 100
    for rank in range(1, 200):
        write_steps(run, rank, range(1, 4))
        write_event(run, rank, "note", text=f"{rank} {sentence}")
        write_event(run, rank, "failure", rank=rank, step=3, sentence=f"{rank} {sentence}", lines=[sentence] * 50)
    page = page_of(run)
    assert len(page.source.encode()) < LARGEST
    assert "The 60 slowest of 200 ranks." in page.seen
    plots = [values for tag, values in page.attributes if tag == "div" and "data-steps" in values]
    assert len(plots) == 4
    assert all(len((values["data-steps"] or "").split()) <= 600 for values in plots)


def test_times_of_a_rank_with_many_steps_come_from_a_part_of_them(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_steps(run, 0, range(1, 3))
    with run.events_of(1).open("a") as file:
        for step in range(1, 60_001):
            seconds = 0.02 if step % 2 else 0.04
            padding = '"loss": 1.000000, "grad_norm": 1.000000, "lr": 0.001000, "samples": 64, "data_wait": 0.01'
            file.write(f'{{"time": 1.0, "kind": "step", "step": {step}, {padding}, "seconds": {seconds}}}\n')
    rank = read(run.path).ranks[1]
    assert rank.last_step == 60_000
    assert 10_000 < rank.steps <= 60_000
    assert rank.step_time == pytest.approx(0.03, rel=0.01)


def test_what_is_no_run_directory_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run directory: it holds neither config\.json nor events"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="is no run directory: it does not exist; give one"):
        write_report(tmp_path / "absent")
    file = tmp_path / "digits.py"
    file.write_text("")
    with pytest.raises(UserError, match="is no run directory"):
        write_report(file)
    assert sorted(tmp_path.iterdir()) == [file]


def test_report_is_written_without_torch() -> None:
    code = "import sys, meshrun.observe.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_thinning_keeps_extremes_and_ends() -> None:
    values = [math.sin(index / 1000) for index in range(100_000)]
    values[31_415], values[27_182] = 50.0, -50.0
    kept = thin(values)
    assert len(kept) <= 600
    assert kept == sorted(set(kept))
    assert {0, 31_415, 27_182, 99_999} <= set(kept)


def test_short_curves_are_not_thinned() -> None:
    assert thin([3.0, 1.0, 2.0]) == [0, 1, 2]


def test_smoothing_keeps_the_start_and_the_level() -> None:
    smoothed = smooth([5.0, *([1.0] * 99)], 5)
    assert smoothed[0] == 5.0
    assert smoothed[10:] == pytest.approx([1.0] * 90)
    assert len(smoothed) == 100


def test_axis_is_logarithmic_only_over_a_wide_range_of_positive_values() -> None:
    assert "loss (log)" in curve(Curve("Loss", [1, 2], [1.0, 21.0], log=True))
    assert "(log)" not in curve(Curve("Loss", [1, 2], [1.0, 19.0], log=True))
    assert "(log)" not in curve(Curve("Loss", [1, 2], [0.0, 21.0], log=True))
    assert "(log)" not in curve(Curve("Learning rate", [1, 2], [1.0, 21.0]))


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert [label for _, label in linear(0.03, 1.9).ticks] == ["0", "0.5", "1.0", "1.5", "2.0"]
    assert [label for _, label in logarithmic(0.06, 2.3).ticks] == ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"]
    assert logarithmic(3e-6, 40.0).ticks[0] == (1e-6, "1e-6")
    assert [label for _, label in linear(0.0, 2e-3).ticks] == ["0", "0.0005", "0.0010", "0.0015", "0.0020"]
    for low, high in ((0.0, 0.0), (7.0, 7.0), (-3.0, 2.0), (1e-9, 3e-9), (12_000.0, 3_400_000.0), (1.0, 1.0 + 1e-9)):
        scale = linear(low, high)
        assert scale(low) >= -1e-6
        assert scale(high) <= 1 + 1e-6
        assert 2 <= len(scale.ticks) <= 8
    for low, high in ((1e-12, 1e3), (0.99, 21.0), (1.0, 1000.0), (2e-99, 1e99)):
        scale = logarithmic(low, high)
        assert scale(low) >= -1e-6
        assert scale(high) <= 1 + 1e-6
        assert 2 <= len(scale.ticks) <= 12


ODD = {
    "a step of 400 digits": [{"time": 1, "kind": "step", "step": 10**400, "loss": 1}],
    "a step beyond all": [{"time": 1, "kind": "step", "step": 1e300, "loss": 1}],
    "a time beyond all": [{"time": 1e300, "kind": "start"}],
    "a time in no year": [{"time": 1e12, "kind": "start"}],
    "a time before all": [{"time": -1e18, "kind": "start"}],
    "a time that is a text": [{"time": "x", "kind": "start"}],
    "steps before the first": [{"time": 1, "kind": "step", "step": -5, "loss": 1, "seconds": -1, "samples": 1}],
    "a score that is a text": [{"time": 1, "kind": "eval", "step": 1, "scores": {"a": {"loss": "x"}}}],
    "a score of 400 digits": [{"time": 1, "kind": "eval", "step": 1, "scores": {"a": {"loss": 10**400}}}],
    "a kind that is a list": [{"time": 1, "kind": ["a"]}],
    "more steps than there can be": [{"time": 1, "kind": "start", "total_steps": 1e308}],
    "choices that are a list": [{"time": 1, "kind": "start", "chosen": [1]}],
}


@pytest.mark.parametrize("case", ODD)
def test_numbers_that_no_run_can_have_do_not_break_the_page(tmp_path: Path, case: str) -> None:
    run = make_run(tmp_path)
    run.events_of(0).write_text("".join(json.dumps(each) + "\n" for each in ODD[case]))
    page_of(run)


@pytest.mark.parametrize("result", ['{"data_waits": "abc"}', '{"losses": 5, "steps": "x"}', "[" * 200_000, "[1]", ""])
def test_a_result_that_is_none_does_not_break_the_page(tmp_path: Path, result: str) -> None:
    run = make_run(tmp_path)
    (run.path / "result.json").write_text(result)
    page_of(run)


def test_a_picture_that_is_gone_does_not_break_the_page(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run.path / "pictures").mkdir()
    (run.path / "pictures" / "gone.svg").symlink_to("/nowhere")
    (run.path / "pictures" / "folder.svg").mkdir()
    page_of(run)


def test_a_link_among_the_pictures_does_not_bring_another_file_into_the_page(tmp_path: Path) -> None:
    """Who has made the directory may want to see what only the reader may, and gets the report."""
    run = finished_run(tmp_path)
    (run.path / "pictures").mkdir()
    (tmp_path / "private").write_text("for nobody")
    (run.path / "pictures" / "private.svg").symlink_to(tmp_path / "private")
    assert read(run.path).pictures == {}


def test_a_picture_that_would_make_the_page_too_large_is_left_out(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run.path / "pictures").mkdir()
    for name, size in (("small", 100), ("large", (1 << 20) + 1)):
        (run.path / "pictures" / f"{name}.svg").write_bytes(b" " * size)
    assert list(read(run.path).pictures) == ["small"]


def test_numbers_of_a_document_are_numbers_and_nothing_else() -> None:
    assert (number(2), number(0.5), whole(7.0)) == (2.0, 0.5, 7)
    assert all(math.isnan(number(value)) for value in (True, "2", None, 10**400))
    assert [whole(value) for value in (math.inf, math.nan, True, 1e17)] == [0, 0, 0, 0]


def resumed_run(tmp_path: Path) -> RunDirectory:
    """Started on two ranks under meshrun, cut off after step 12, resumed from step 10 on one, and finished."""
    run = RunDirectory.create(
        RunConfig("digits", name="digits", runs=tmp_path, command=("meshrun", "run", "digits", "--lr", "a b"))
    )
    write = functools.partial(write_at, run)
    start = {"rank": 0, "host": "n7", "device": "cpu", "target": "digits", "total_steps": 20, "source": "torchrun"}
    write(1000.0, "start", **start, world=2, layout="dp=2", launcher="meshrun", began=998.0)
    for step in range(1, 13):
        write(1000.0 + step, "step", step=step, loss=2.0 / step, samples=8, seconds=1.0)
    write(5000.0, "start", **start, world=1, layout="dp=1", launcher="slurm", began=4999.0)
    write(5000.5, "resumed", step=10, source="checkpoints/step-00000010", seconds=0.1)
    for step in range(11, 21):
        write(4990.0 + step, "step", step=step, loss=2.0 / step, samples=8, seconds=1.0)
    write(5012.0, "end")
    return run


def write_at(run: RunDirectory, time: float, kind: str, **fields: Any) -> None:
    with run.events_of(0).open("a") as file:
        file.write(json.dumps({"time": time, "kind": kind, **fields}) + "\n")


def test_the_starts_of_a_run_are_found_in_its_events(tmp_path: Path) -> None:
    assert legs_of(resumed_run(tmp_path).events_of(0)) == [
        Leg(998.0, 14.0, "meshrun", "dp=2", 2, 0, 12),
        Leg(4999.0, 13.0, "slurm", "dp=1", 1, 10, 20),
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(9.94, "9.9 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3599.6, "1 h 0 min"), (2 * 3600 + 5 * 60, "2 h 5 min")],
)
def test_times_are_shown_in_units_that_people_use(seconds: float, shown: str) -> None:
    assert _duration(seconds) == shown


def test_the_speed_is_shown_without_the_first_step_which_pays_for_the_start() -> None:
    track = Track()
    for step in (1, 2, 3):
        track.add({"kind": "step", "step": step, "samples": 8, "seconds": 4.0 if step == 1 else 0.5})
    shown = _speed(track)
    assert list(shown.steps) == [2, 3] and list(shown.values) == [16.0, 16.0]


def test_secrets_among_the_options_are_not_shown() -> None:
    options = {"api_key": "hush", "width": 7, "source": "s3://me:hush@host/data"}
    shown = _configuration({"config": {"options": options, "api_key": "hush"}, "resolved": {"options": options}})
    assert "hush" not in shown and "<td>7</td>" in shown


def test_the_best_evaluation_is_that_of_the_lowest_loss_that_is_a_number() -> None:
    track = Track()
    for step, loss in ((1, 0.5), (2, 0.3), (3, math.nan), (4, 0.4)):
        track.add({"kind": "eval", "step": step, "scores": {"val": {"loss": loss}}})
    assert _best_step(track) == 2 and _best_step(Track()) is None


def test_rows_that_are_shown_of_many_are_evenly_spaced_with_the_first_and_the_last() -> None:
    assert _spread(list(range(10)), 4) == [0, 3, 6, 9] and _spread([1, 2], 4) == [1, 2]


def test_the_result_of_a_resumed_run_has_the_time_of_all_its_starts(tmp_path: Path) -> None:
    found = _whole_run(resumed_run(tmp_path), {"seconds": 40.0, "steps": 22})
    assert found["seconds"] == 14.0 + 40.0
    assert [(leg["seconds"], leg["last_step"]) for leg in found["legs"]] == [(14.0, 12), (40.0, 22)]
    assert _whole_run(RunDirectory(tmp_path / "none"), {}) == {}, "of a single start nothing is to be added up"


def test_a_start_that_came_to_no_step_stands_where_it_was_resumed(tmp_path: Path) -> None:
    run = resumed_run(tmp_path)
    write_at(run, 6000.0, "start", world=1, layout="dp=1", launcher="slurm")
    write_at(run, 6001.0, "resumed", step=20, source="checkpoints/step-00000020", seconds=0.1)
    assert legs_of(run.events_of(0))[-1] == Leg(6000.0, 1.0, "slurm", "dp=1", 1, 20, 20)


def test_a_start_that_was_refused_is_none(tmp_path: Path) -> None:
    run = resumed_run(tmp_path)
    write_at(run, 6000.0, "start", world=1, layout="dp=1", launcher="slurm", total_steps=80)
    write_at(run, 6001.0, "failure", sentence="was trained with seed 0 but seed is 5 now", lines=[], by_user=True)
    assert [leg.last_step for leg in legs_of(run.events_of(0))] == [12, 20]


def test_a_start_that_was_refused_adds_no_time_and_is_not_in_the_report_of_a_later_one(tmp_path: Path) -> None:
    run = resumed_run(tmp_path)
    refused = {"rank": 0, "sentence": "batch is 9999 but there are 64 samples", "lines": [], "by_user": True}
    write_at(run, 7000.0, "failure", **refused, step=0)
    write_at(run, 8000.0, "start", world=1, layout="dp=1", launcher="slurm", total_steps=80)
    write_at(run, 8001.0, "resumed", step=20, source="checkpoints/step-00000020", seconds=0.1)
    assert [leg.seconds for leg in legs_of(run.events_of(0))] == [14.0, 13.0, 1.0]
    assert "9999" not in page_of(run).seen


def test_the_report_of_a_resumed_run_has_the_time_of_all_its_starts_and_marks_them(tmp_path: Path) -> None:
    run = resumed_run(tmp_path)
    (run.path / "result.json").write_text(json.dumps({"steps": 20, "seconds": 13.0, "layout": "dp=1", "world": 1}))
    page = page_of(run)
    assert (
        page.headline
        == "digits-1 reached training loss 0.1 after 20 steps in 27 s in 2 starts, the last on 1 rank (dp=1)"
    )
    assert "Starts" in page.all("h2")
    for text in ("0 to 12", "10 to 20", "dp=2", "meshrun", "slurm", "14 s", "13 s"):
        assert text in page.all("td"), text
    assert page.all("title")[1:] == ["start 2 on dp=1, after step 10"] and "started anew" in page.seen


def test_the_report_names_the_true_launcher_and_the_command(tmp_path: Path) -> None:
    page = page_of(resumed_run(tmp_path))
    assert "under slurm" in page.seen and "meshrun" in page.all("td") and "torchrun" not in page.seen
    assert page.all("code") == ["meshrun run digits --lr 'a b'"]


@pytest.mark.parametrize("lost", [b"", b"{", b'{"time": 5000.0, "kind": "st', b"\xff\n\n", b'{"kind": "start"}\n'])
def test_starts_are_found_beside_lines_that_are_no_events(tmp_path: Path, lost: bytes) -> None:
    events = resumed_run(tmp_path).events_of(0)
    events.write_bytes(lost + b"\n" + events.read_bytes() + lost)
    assert [(leg.last_step, leg.seconds) for leg in legs_of(events)] == [(12, 14.0), (20, 13.0)]
    assert legs_of(tmp_path / "none") == []


def test_a_clock_that_was_set_back_takes_nothing_from_the_time_of_a_rank():
    rank = Rank(0)
    for moment in (10.0, 30.0, 20.0):
        rank.add({"kind": "note", "time": moment, "text": ""})
    assert (rank.first_time, rank.last_time) == (10.0, 30.0)
