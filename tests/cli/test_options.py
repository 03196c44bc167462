"""Options made from a function's parameters: what the command line, a file and config.json give is what it gets."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from meshrun import __version__
from meshrun.cli.command import Asked, _as_before, invoke, parse_run, shared_with
from meshrun.cli.main import main
from meshrun.cli.options import REQUIRED, Option, options_of, run_options
from meshrun.cli.target import make
from meshrun.config import RunConfig, RunDirectory, option_fields
from meshrun.errors import UserError

EVERY_TYPE = str(Path(__file__).parent / "programs" / "every_type.py")


def asked(*words: str) -> Asked:
    found = parse_run([EVERY_TYPE, *words])
    assert found is not None
    return found


def received(folder: Path, found: Asked) -> dict[str, Any]:
    """What the function is called with on a rank: after config.json was written and read again."""
    run = RunDirectory.create(dataclasses.replace(found.config, runs=folder))
    experiment = make(found.target, RunDirectory(run.path).config().options)
    assert experiment.stage_data is not None
    values: dict[str, Any] = experiment.stage_data()
    return values


def written(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.write_text(inspect.cleandoc(text))
    return str(path)


def of_enum(values: dict[str, Any], name: str, member: str) -> Any:
    """A member of the enum that the program itself has."""
    return type(values[name])[member]


def test_without_options_the_function_keeps_its_defaults(tmp_path: Path):
    values = received(tmp_path, asked())
    assert asked().config.options == {}
    assert (values["width"], values["rate"], values["title"], values["bias"]) == (128, 1e-3, "plain", True)
    assert (values["sizes"], values["names"], values["limit"], values["of_no_option"]) == ([1, 2], (), None, None)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--width", "256"], "width", 256),
        (["--width=-3"], "width", -3),
        (["--rate", "3e-4"], "rate", 3e-4),
        (["--rate", "1"], "rate", 1.0),
        (["--title", "a title, with a comma"], "title", "a title, with a comma"),
        (["--title", "7"], "title", "7"),
        (["--title", "true"], "title", "true"),
        (["--no-bias"], "bias", False),
        (["--bias"], "bias", True),
        (["--dark"], "dark", True),
        (["--no-dark"], "dark", False),
        (["--folder", "some/where"], "folder", Path("some/where")),
        (["--kind", "large"], "kind", "large"),
        (["--depth", "3"], "depth", 3),
        (["--limit", "5"], "limit", 5),
        (["--sizes", "4"], "sizes", [4]),
        (["--sizes", "4,5", "--sizes", "6"], "sizes", [4, 5, 6]),
        (["--sizes", ""], "sizes", []),
        (["--names", "a,b"], "names", ("a", "b")),
        (["--guess", "0.25"], "guess", 0.25),
        (["--context", "32"], "context", 32),
    ],
)
def test_value_reaches_the_function_in_its_type_through_config_json(
    tmp_path: Path, words: list[str], name: str, value: Any
):
    values = received(tmp_path, asked(*words))
    assert values[name] == value
    assert type(values[name]) is type(value)


@pytest.mark.parametrize("text", ["thorough", "slow", "SLOW", "Thorough"])
def test_enum_is_given_by_value_or_by_name(tmp_path: Path, text: str):
    values = received(tmp_path, asked("--mode", text))
    assert values["mode"] is of_enum(values, "mode", "SLOW")


def test_enum_of_numbers_is_given_by_name(tmp_path: Path):
    values = received(tmp_path, asked("--level", "high"))
    assert values["level"] is of_enum(values, "level", "HIGH")


def test_list_of_enums(tmp_path: Path):
    values = received(tmp_path, asked("--modes", "quick,slow", "--modes", "fast"))
    assert [member.name for member in values["modes"]] == ["FAST", "SLOW", "FAST"]


def test_every_parameter_that_can_be_given_survives_config_json_together(tmp_path: Path):
    words = (
        "--width 1 --rate 2 --title t --no-bias --dark --folder f --mode slow --level high --kind large --depth 2 "
        "--limit 3 --sizes 1,2 --names n --modes slow --guess 4 --context 5"
    )
    found = asked(*words.split())
    values = received(tmp_path, found)
    names = [option.name for option in options_of(found.target.function())]
    assert set(names) == set(found.config.options) == set(values) - {"of_no_option"}
    assert {name: str(values[name]) for name in names} == {
        "width": "1",
        "rate": "2.0",
        "title": "t",
        "bias": "False",
        "dark": "True",
        "folder": "f",
        "mode": "Mode.SLOW",
        "level": "Level.HIGH",
        "kind": "large",
        "depth": "2",
        "limit": "3",
        "sizes": "[1, 2]",
        "names": "('n',)",
        "modes": "[<Mode.SLOW: 'thorough'>]",
        "guess": "4.0",
        "context": "5",
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--width", "wide"], "width is 'wide'; it must be a whole number (--width)"),
        (["--width", "1.5"], "width is '1.5'; it must be a whole number (--width)"),
        (["--rate", "fast"], "rate is 'fast'; it must be a number (--rate)"),
        (["--mode", "medium"], "mode is 'medium'; it must be one of quick, thorough (--mode)"),
        (["--level", "3"], "level is '3'; it must be one of low, high (--level)"),
        (["--kind", "medium"], "kind is 'medium'; it must be one of small, large (--kind)"),
        (["--depth", "4"], "depth is '4'; it must be one of 1, 2, 3 (--depth)"),
        (["--sizes", "1,two"], "sizes is 'two'; it must be a whole number (--sizes)"),
        (["--eval-every", "often"], "eval_every is 'often'; it must be a whole number (--eval-every)"),
        (["--device", "tpu"], "device is 'tpu'; it must be one of auto, cpu, cuda (--device)"),
    ],
)
def test_wrong_value_is_refused_with_what_would_be_valid(words: list[str], sentence: str):
    with pytest.raises(UserError) as refused:
        asked(*words)
    assert str(refused.value) == sentence


def test_a_parameter_of_several_types_is_no_option():
    def function(width: int | str = 3, depth: int | None = None) -> None: ...

    assert [option.name for option in options_of(function)] == ["depth"]


def test_a_switch_before_the_target_does_not_swallow_it(tmp_path: Path):
    path = written(tmp_path, "def experiment(): ...")
    found = parse_run(["--json", "--procs", "2", path])
    assert found is not None and found.as_json and (found.config.procs, found.target.path) == (2, Path(path))


def test_a_required_parameter_may_be_given_as_zero(tmp_path: Path):
    found = parse_run([written(tmp_path, "def experiment(width: int): ..."), "--width", "0"])
    assert found is not None and found.config.options == {"width": 0}


def test_required_parameter_must_be_given(tmp_path: Path):
    program = written(tmp_path, "def experiment(data: str, shards: list): ...")
    with pytest.raises(UserError, match=r"data has no default in program.py; give it a value \(--data\)"):
        parse_run([program, "--shards", "a,b"])
    found = parse_run([program, "--data", "x", "--shards", "a,b"])
    assert found is not None and found.config.options == {"data": "x", "shards": ["a", "b"]}
    assert all(option.default is REQUIRED for option in options_of(found.target.function()))


def test_type_that_no_option_can_give_is_refused_unless_it_has_a_default(tmp_path: Path):
    program = written(tmp_path, "def experiment(table: dict, plan: dict = {}): ...")
    with pytest.raises(UserError, match=r"parameter 'table' of experiment\(\) has the type .*dict.*, which no option"):
        parse_run([program])


def test_annotation_that_cannot_be_read_is_named(tmp_path: Path):
    program = written(tmp_path, "def experiment(width: 'Width' = 1): ...")
    with pytest.raises(UserError, match=r"an annotation of experiment\(\) cannot be read: name 'Width' is not defined"):
        parse_run([program])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def experiment(width: 'int |' = 1): ...", r"experiment\(\) cannot be read: SyntaxError"),
        ("import os\ndef experiment(width: 'os.Int' = 1): ...", r"experiment\(\) cannot be read: AttributeError"),
        ("def experiment(width: '1 / 0' = 1): ...", r"experiment\(\) cannot be read: ZeroDivisionError"),
        ("experiment = max", r"the parameters of max\(\) cannot be read: ValueError: no signature"),
    ],
)
def test_parameters_that_cannot_be_read_are_refused_in_a_sentence(tmp_path: Path, text: str, said: str):
    with pytest.raises(UserError, match=said):
        parse_run([written(tmp_path, text)])


@pytest.mark.parametrize(
    "text",
    [
        "import functools\ndef made(depth: int, width: int = 1): ...\nexperiment = functools.partial(made, 2)",
        "class Made:\n    def __call__(self, width: int = 1): ...\nexperiment = Made()",
        "def experiment(_context: str = '', width: int = 1): ...",
    ],
)
def test_whatever_can_be_called_has_options(tmp_path: Path, text: str):
    found = parse_run([written(tmp_path, text), "--width", "3"])
    assert found is not None and found.config.options["width"] == 3


def test_unannotated_parameters_have_the_types_of_their_defaults():
    def experiment(width=1, rate=0.5, flag=False, title="t", sizes=[1], words=[], anything=None):  # noqa: B006
        del width, rate, flag, title, sizes, words, anything

    found = {option.name: (option.kind, option.many) for option in options_of(experiment)}
    assert found["width"] == (int, False)
    assert found["rate"] == (float, False)
    assert found["flag"] == (bool, False)
    assert found["sizes"] == (int, True)
    assert found["words"] == (str, True)
    assert found["title"] == found["anything"] == (str, False)


TOML = """
width = 7
rate = 0.5
bias = false
mode = "slow"
level = "high"
sizes = [3, 4]
names = "one"
folder = "there"
depth = 2
eval-every = 9
procs = 2
"""


def test_file_of_options_gives_every_type_and_the_command_line_wins(tmp_path: Path):
    path = tmp_path / "options.toml"
    path.write_text(TOML)
    found = asked("--config", str(path), "--width", "8", "--procs", "3")
    values = received(tmp_path, found)
    assert (found.config.procs, found.config.eval_every) == (3, 9)
    assert (values["width"], values["rate"], values["bias"], values["sizes"]) == (8, 0.5, False, [3, 4])
    assert (values["mode"].name, values["level"].name, values["names"]) == ("SLOW", "HIGH", ("one",))
    assert (values["folder"], values["depth"]) == (Path("there"), 2)


def test_json_file_says_the_same_as_a_toml_file(tmp_path: Path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"width": 7, "sizes": [3], "eval_every": 9, "seed": None, "limit": None}))
    found = asked("--config", str(path))
    assert found.config.options == {"width": 7, "sizes": [3]}
    assert (found.config.eval_every, found.config.seed) == (9, None)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("o.toml", "widht = 7", "sets 'widht', which is no option of this target"),
        ("o.toml", "config = 'other.toml'", "sets 'config', which is no option of this target"),
        ("o.toml", "width = [7]", "width is [7]; it must be a whole number (--width)"),
        ("o.toml", "width = true", "width is True; it must be a whole number (--width)"),
        ("o.toml", "bias = 'perhaps'", "bias is 'perhaps'; it must be true or false (--bias)"),
        ("o.toml", "width = ", "o.toml is not valid TOML: "),
        ("o.json", "{", "o.json is not valid JSON: "),
        ("o.json", "[1]", "o.json holds list; it must be a table of options"),
    ],
)
def test_wrong_file_of_options_is_refused(tmp_path: Path, name: str, text: str, sentence: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        asked("--config", str(path))
    assert sentence in str(refused.value)
    assert str(refused.value).endswith((" (--config)", " (--width)", " (--bias)"))


def test_functions_own_batch_and_seed_take_the_place_of_the_runs(tmp_path: Path):
    program = written(tmp_path, "def experiment(batch: int = 32, seed: str = 'apple'): ...")
    found = parse_run([program, "--batch", "64", "--seed", "pear"])
    assert found is not None
    assert found.config.options == {"batch": 64, "seed": "pear"}
    assert (found.config.batch, found.config.seed) == (None, None)


@pytest.mark.parametrize("name", ["procs", "layout", "json", "config", "help"])
def test_parameter_with_the_name_of_an_option_of_the_run_is_refused(tmp_path: Path, name: str):
    program = written(tmp_path, f"def experiment({name}: int = 1): ...")
    with pytest.raises(UserError, match=rf"parameter '{name}' of experiment\(\) in program.py has the name of an opt"):
        parse_run([program])


def test_options_of_the_run_come_from_the_configuration():
    assert [option.name for option in run_options()] == [field.name for field in option_fields()]
    assert all(option.help for option in run_options())


def test_options_may_stand_before_the_target_if_they_are_the_runs():
    found = parse_run(["--procs", "2", "--json", "--layout=dp=2", EVERY_TYPE, "--width", "1"])
    assert found is not None
    assert (found.config.procs, found.config.layout, found.as_json) == (2, "dp=2", True)
    with pytest.raises(UserError, match="'--width' stands before TARGET; give the target first"):
        parse_run(["--width", "1", EVERY_TYPE])


def test_target_is_kept_so_that_a_rank_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "def experiment(): ...\ndef other(): ...")
    monkeypatch.chdir(tmp_path)
    for text, name in (("program.py", "program"), ("program.py:other", "program-other")):
        found = parse_run([text])
        assert found is not None
        assert Path(found.config.target.partition(":")[0]).is_absolute()
        assert found.config.run_name == name


def test_words_of_a_plain_script_are_its_own(tmp_path: Path):
    script = written(tmp_path, "print('hello')", "script.py")
    found = parse_run([script, "--procs", "2", "--epochs", "3", "-v", "--", "--procs", "4"])
    assert found is not None
    assert found.config.procs == 2
    assert found.config.arguments == ("--epochs", "3", "-v", "--procs", "4")


def test_words_behind_two_dashes_reach_a_script_also_where_they_ask_for_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    written(tmp_path, "import sys; print(sys.argv[1:])", "script.py")
    with pytest.raises(SystemExit) as ended:
        main(["run", "script.py", "--device", "cpu", "--", "--help", "-h", "--json", "--debug"])
    assert (ended.value.code, capfd.readouterr().out) == (0, "['--help', '-h', '--json', '--debug']\n")


def test_an_option_that_a_script_has_too_is_told_about(tmp_path: Path):
    script = written(
        tmp_path, "parser.add_argument('--name', '-n'); parser.add_argument('--procs-per-node')", "mine.py"
    )
    words = (script, "--procs=2", "--name=a", "--", "--device", "cpu")
    assert shared_with(Path(script), words) == ["--name"]
    script = written(tmp_path, "parser.add_argument('--json'); parser.add_argument('--steps')", "mine.py")
    assert shared_with(Path(script), (script, "--json", "--steps", "3")) == ["--json"]


def test_a_configuration_of_a_script_that_is_none_of_meshruns_says_where_it_belongs(tmp_path: Path):
    script, config = written(tmp_path, "print('hello')", "mine.py"), written(tmp_path, "lr: 1", "mine.yaml")
    with pytest.raises(UserError, match=r"mine\.yaml is not valid TOML.*stands behind --"):
        parse_run([script, "--config", config])


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_of_a_target_lists_its_options_with_types_defaults_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    shown = help_of(capsys, EVERY_TYPE)
    for line in (
        "--width INT channels of the hidden layer (default 128)",
        "--rate FLOAT how fast it learns (default 0.001)",
        "--title TEXT what is written on top (default plain)",
        "--folder PATH (default data)",
        "--mode quick|thorough (default quick)",
        "--level low|high (default low)",
        "--kind small|large (default small)",
        "--depth 1|2|3 (default 1)",
        "--sizes INT,… (default 1,2)",
        "--procs INT Number of local processes",
        "The mesh: axis=degree[:variant],…",
        "--config PATH",
    ):
        assert line in shown
    assert "--bias" in shown and "--no-NAME unsets" in shown
    assert "of-no-option" not in shown


def test_help_without_a_target_lists_the_options_of_every_run(capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys)
    assert "--layout" in shown and "--json" in shown and "after TARGET, --help lists its options too" in shown


def test_help_cuts_no_name_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = help_of(capsys)
    assert all(f" {option.flag} " in shown for option in run_options())


def test_help_of_a_plain_script_lists_only_what_makes_sense_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys, written(tmp_path, "print('hello')", "script.py"))
    assert "--procs" in shown and "--steps" not in shown
    assert "hello" not in shown, "asking for help must not run it"


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_the_version_is_a_command_and_an_option(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0 and capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("words", [["run", "-h"], ["run", "digits", "-h"], ["sites", "-h"]])
def test_a_short_h_asks_for_help(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0 and "Usage: " in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    assert ended.value.code == 0
    assert "recipes" in shown.out and shown.err == ""


@pytest.mark.parametrize("kind, valid", [(Path, "a path"), (str, "a text")])
@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=ascii)
def test_characters_that_no_file_can_have_are_refused(kind: type, valid: str, text: str):
    option = Option("where", kind, None)
    for read in (option.convert, option.from_document):
        with pytest.raises(UserError, match=f"it must be {valid} .--where.$"):
            read(text)
    assert option.convert("caf\udce9") == kind("caf\udce9"), "names of files that are not UTF-8 come so"


def test_numbers_of_a_document_keep_all_of_their_digits():
    assert Option("lr", float, None).from_document(0.123456789012) == 0.123456789012
    assert Option("rates", float, None, many=True).from_document([1e-300, 7]) == [1e-300, 7.0]


def test_more_epochs_for_a_run_of_steps_take_the_place_of_its_steps():
    before = RunConfig("digits", steps=5)
    assert _as_before(before, [], run_options(), {"epochs": 2.0})["steps"] is None
    assert _as_before(before, [], run_options(), {})["steps"] == 5


def test_ctrl_c_amid_a_command_is_an_interrupt():
    app = typer.Typer()

    @app.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        invoke(app, [])


def test_the_command_line_is_kept_without_its_secrets(tmp_path: Path):
    path = written(tmp_path, "def experiment(api_key: str = '', lr: float = 0.1): ...")
    found = parse_run([path, "--api-key", "s3cr3t", "--lr", "2"])
    assert found is not None and found.config.options["api_key"] == "s3cr3t"
    assert found.config.command == ("meshrun", "run", path, "--api-key", "(hidden)", "--lr", "2")


def test_the_words_true_and_false_are_what_they_say():
    one, several = Option("flag", bool, True), Option("flags", bool, [True], many=True)
    assert [one.from_document(text) for text in ("False", "true", False)] == [False, True, False]
    assert several.convert("true,false") == several.from_document([True, False]) == [True, False]
