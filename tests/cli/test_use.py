"""`meshrun use`: a trained model in the hands of a function of its own program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshrun.cli import after
from meshrun.cli.export import _described
from meshrun.cli.main import main
from meshrun.cli.options import REQUIRED, Option
from meshrun.cli.target import find, make
from meshrun.cli.use import _device, _values, use_command
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import UserError
from meshrun.state.weights import save_weights

PROGRAM = Path(__file__).parent / "programs" / "with_after.py"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a model that is wider than usual, with weights that are told apart by what they predict."""
    made = RunDirectory.create(RunConfig(str(PROGRAM), {"width": 5}, runs=tmp_path))
    model = make(find(str(PROGRAM)), {"width": 5}).model()
    for name, sign in (("best", 1.0), ("last", -1.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model[0].weight[0, 0] = 1.0
            model[2].weight[1, 0], model[2].weight[0, 0] = sign, -sign
        save_weights(dict(model.named_parameters()), made.weights / f"{name}.safetensors", {"step": 1})
    return made.path


def used(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["use", *words])
    return int(ended.value.code or 0)


def test_the_function_gets_the_best_or_the_last_weights(run: Path, capsys: pytest.CaptureFixture[str]):
    assert used(str(run), "right", "--device", "cpu") == 0
    assert capsys.readouterr().out == "50\n"
    assert used(str(run), "right", "--weights", "last", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(run), "function": "right", "result": 0}


def test_parameters_are_options_and_prints_stay_out_of_the_document(run: Path, capsys: pytest.CaptureFixture[str]):
    assert used(str(run), "speak", "--text", "hello", "--tone", "loud", "--times=3", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["result"] == ["HELLO"] * 3
    assert captured.err == "thinking\n"


def test_a_parameter_called_run_folder_is_the_run(run: Path, capsys: pytest.CaptureFixture[str]):
    assert used(str(run), "describe", "--json") == 0
    assert json.loads(capsys.readouterr().out)["result"]["where"] == str(run)


def test_without_a_function_those_for_the_model_are_listed(run: Path, capsys: pytest.CaptureFixture[str]):
    assert used(str(run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["right", "describe", "fail", "speak", "weights"]
    assert lines[3].endswith("Say something.")
    assert used(str(run), "--json") == 0
    assert next(iter(json.loads(capsys.readouterr().out)["functions"])) == "right"


def test_help_lists_the_functions_own_options(run: Path, capsys: pytest.CaptureFixture[str]):
    assert used(str(run), "speak", "--help") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Say something", "--text", "how often", "soft|loud", "--weights"))


SENTENCES = {
    "a function that is not there": (["spek"], 2, "has no function 'spek' that takes a model; did you mean 'speak'?"),
    "one that takes nothing": (["Tensor"], 2, "those for its model are: right, describe, fail, speak, weights"),
    "an option that is missing": (["speak"], 2, "text has no default in speak() of with_after.py; give it (--text)"),
    "a value that is none": (["speak", "--text", "a", "--times", "x"], 2, "times is 'x'; it must be a whole number"),
    "a name that is taken": (["weights"], 2, "has the name of an option of meshrun use (--weights); rename it"),
    "an error in it": (["fail"], 1, "fail() of with_after.py failed in "),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_cannot_work_is_a_sentence(case: str, run: Path, capsys: pytest.CaptureFixture[str]):
    words, status, sentence = SENTENCES[case]
    assert used(str(run), *words) == status
    assert sentence in capsys.readouterr().err


def test_a_run_without_weights_or_of_a_plain_script_is_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for weights in (run / "weights").iterdir():
        weights.unlink()
    assert used(str(run), "right") == 2
    assert "has no weights yet" in capsys.readouterr().err
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    plain = RunDirectory.create(RunConfig(str(script), runs=tmp_path))
    assert used(str(plain.path), "right") == 2
    assert "is a run of the plain script script.py, whose model meshrun does not know" in capsys.readouterr().err
    assert used("--weights", "last") == 2 and "use needs a RUN first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "has_gpu", "device"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_the_model_is_on_the_device_that_was_asked_for(asked: str, has_gpu: bool, device: str):
    assert _device(asked, has_gpu) == device


@pytest.mark.parametrize("open_to_all", ["the run", "its folder"])
def test_a_run_that_every_user_may_exchange_is_not_executed(
    tmp_path: Path, open_to_all: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path('executed').touch()\ndef experiment(): ...\ndef talk(model): ...\n"
    )
    run = RunDirectory.create(RunConfig(str(tmp_path / "evil.py"), runs=tmp_path / "runs")).path
    (run if open_to_all == "the run" else run.parent).chmod(0o777)
    for ask in (lambda: use_command([str(run), "talk"]), lambda: _described(run / "checkpoints" / "a", True)):
        with pytest.raises(UserError, match=r"which decides? which program is executed"):
            ask()
    assert use_command([str(run)]) == 0, "to list functions executes nothing"
    assert not Path("executed").exists()


def test_the_list_of_functions_cannot_do_anything_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The program may be another's: nothing of it runs, and nothing in it is obeyed."""
    program = tmp_path / "theirs.py"
    program.write_text(PROGRAM.read_text() + "\n\ndef owned(model):\n    '\\x1b]0;owned\\x07'\n")
    made = RunDirectory.create(RunConfig(str(program), runs=tmp_path))
    assert used(str(made.path)) == 0
    assert "\x1b" not in (said := capsys.readouterr().out) and "owned" in said


def test_a_parameter_that_must_be_given_may_be_given_as_zero():
    option = Option("count", int, REQUIRED)
    assert _values([option], {"count": 0}, "talk", find("digits")) == {"count": 0}
    with pytest.raises(UserError, match="count has no default"):
        _values([option], {"count": None}, "talk", find("digits"))


def test_a_function_that_refuses_what_it_was_given_has_not_failed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: object) -> None:
        raise UserError("times is 3; it must be even")

    monkeypatch.setattr(after, "as_json", refuse)
    assert used(str(run), "right", "--device", "cpu") == 2
    assert capsys.readouterr().err.endswith("meshrun: times is 3; it must be even\n")
