"""Which files are trainings, which are plain scripts, and which are neither, told by reading them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshrun import UserError
from meshrun.cli.options import options_of
from meshrun.cli.target import find, make, place_of
from meshrun.config import DATA
from meshrun.errors import RunFailed

EXPERIMENT = "from meshrun import Experiment\ndef experiment() -> Experiment: ...\n"


def entry(tmp_path: Path, text: str) -> str | None:
    path = tmp_path / "file.py"
    path.write_text(text)
    return find(str(path)).entry


@pytest.mark.parametrize(
    "text",
    [
        EXPERIMENT,
        EXPERIMENT
        + "if __name__ == '__main__':\n    for update in Trainer(experiment()).steps():\n        print(update)\n",
        "import torch\nprint('setting up')\n" + EXPERIMENT,
        "import functools\nfrom other import make\nexperiment = functools.partial(make, width=3)\n",
        '"""Only a name for another file\'s training."""\nfrom meshrun.recipes.digits import experiment\nWIDTH = 3\n',
    ],
    ids=["defined", "with a loop under main", "with other work", "assigned", "imported, and nothing else"],
)
def test_a_file_that_is_a_training(tmp_path: Path, text: str):
    assert entry(tmp_path, text) == "experiment"


@pytest.mark.parametrize(
    "text",
    [
        "print('hello')\n",
        "import other\n",
        "from other import experiment\nfor update in Trainer(experiment()).steps():\n    print(update)\n",
        "from other import experiment\nif __name__ == '__main__':\n    main(experiment())\n",
    ],
    ids=["a script", "imports one", "trains an imported experiment", "the same under main"],
)
def test_a_file_that_is_a_plain_script(tmp_path: Path, text: str):
    assert entry(tmp_path, text) is None


@pytest.mark.parametrize(
    "text, name",
    [
        ("from meshrun import Experiment\ndef make_it() -> Experiment: ...\n", "make_it"),
        ("import meshrun\ndef make_it() -> 'meshrun.Experiment': ...\n", "make_it"),
        ("import meshrun\ndef digits(width=3):\n    return meshrun.Experiment(model=None)\n", "digits"),
        ("WIDTH = 3\ndef experment(): ...\n", "experment"),
    ],
)
def test_a_misnamed_experiment_is_refused_with_both_ways_out(tmp_path: Path, text: str, name: str):
    with pytest.raises(UserError) as caught:
        entry(tmp_path, text)
    path = tmp_path / "file.py"
    assert str(caught.value) == (
        f"{path} has no function 'experiment' and does nothing when it is run; {name}() looks like one: rename it to "
        f"experiment, or give {path}:{name}"
    )
    assert find(f"{path}:{name}").entry == name


@pytest.mark.parametrize(
    "text", ["", "import torch\ndef helper(model): ...\nclass Net: ...\n"], ids=["empty", "only definitions"]
)
def test_a_file_that_does_nothing_when_it_is_run_is_refused(tmp_path: Path, text: str):
    with pytest.raises(UserError, match="has no function 'experiment' and does nothing when it is run; write a"):
        entry(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import fast\nexcept ImportError:\n    def experiment(): ...\n",
        "import sys\nif sys.platform:\n    experiment = make\n",
        "from elsewhere import *\n",
        "class experiment: ...\n",
        "experiment = partial(make, 3)\n",
        "import torch\ntorch.manual_seed(0)\nexperiment = partial(make, 3)\n",
    ],
)
def test_an_experiment_is_found_wherever_a_file_defines_it(tmp_path: Path, text: str):
    assert entry(tmp_path, text) == "experiment"


@pytest.mark.parametrize(
    "text",
    [
        "from comet_ml import Experiment\nexperiment = Experiment(api_key='…')\ntrain()\n",
        "from comet_ml import Experiment\nexp = Experiment()\n",
        "import comet\nexperiment = comet.start()\nfor step in range(9):\n    experiment.log_metric('loss', step)\n",
        "import sys\nif __name__ == '__main__':\n    from e import experiment\n    run(experiment)\n",
        "from meshrun import Experiment, Trainer\nexp = Experiment()\nfor update in Trainer(exp).steps(): ...\n",
    ],
)
def test_programs_that_train_by_themselves_stay_plain_scripts(tmp_path: Path, text: str):
    assert entry(tmp_path, text) is None


@pytest.mark.parametrize(
    "text, line, hint",
    [
        ("import meshrun as m\nexp = m.Experiment(model=None)\n", 2, ""),
        ("from meshrun import *\ndata = load()\nExperiment(train=data)\n", 3, ""),
        ("def main() -> 'Experiment':\n    ...\nif __name__ == '__main__':\n    main()\n", 4, ", or give {path}:main"),
    ],
)
def test_an_experiment_that_nothing_trains_is_refused(tmp_path: Path, text: str, line: int, hint: str):
    with pytest.raises(UserError) as caught:
        entry(tmp_path, text)
    path = tmp_path / "file.py"
    assert str(caught.value) == (
        f"line {line} of {path} makes an Experiment that nothing trains; let a function experiment() return it, which "
        f"meshrun calls{hint.format(path=path)}"
    )


@pytest.mark.parametrize(
    "value, said",
    [("3", "is int"), ("Path", "is a class"), ("None", "has no function")],
)
def test_what_is_no_function_is_refused(tmp_path: Path, value: str, said: str):
    path = tmp_path / f"odd_{len(value)}.py"
    path.write_text(f"from pathlib import Path\nexperiment = {value}\n")
    with pytest.raises(UserError, match=said):
        find(str(path)).function()


def test_a_decorated_function_is_one(tmp_path: Path):
    path = tmp_path / "decorated_program.py"
    path.write_text("import functools\n@functools.cache\ndef experiment(lr: float = 0.1): ...\n")
    assert [option.name for option in options_of(find(str(path)).function())] == ["lr"]


def test_a_parameter_that_has_no_name_to_give_is_refused():
    def experiment(lr: float = 0.1, /) -> None:
        del lr

    with pytest.raises(UserError, match=r"parameter 'lr' of experiment\(\) cannot be given by its name; take the '/'"):
        options_of(experiment)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("batch=8, lr=0.1", r"has no field 'lr'; the optimizer has it: optimizer=lambda parameters: AdamW"),
        (
            "batch=8, evaluations={}",
            r"has no field 'evaluations'(; did you mean evals\?)?; its fields are model, train, ",
        ),
        ("batchsize=8", r"has no field 'batchsize'; did you mean batch\?"),
        ("", r"missing 1 required positional argument: 'batch'; its fields are model, train, loss, "),
    ],
)
def test_an_experiment_with_fields_that_it_has_not_is_told_which_it_has(tmp_path: Path, given: str, said: str):
    text = f"from meshrun import Experiment\ndef experiment(): return Experiment(f, [1], f, f, {given})\nf = print\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=rf"^the Experiment of experiment\(\) in mine\.py {said}"):
        make(find(str(tmp_path / "mine.py")), {})


def test_an_experiment_that_is_a_coroutine_is_no_plain_script(tmp_path: Path):
    assert entry(tmp_path, "async def experiment(): ...\n") == "experiment"


@pytest.mark.parametrize(
    "line, said",
    [
        ("raise RuntimeError('no dataset')", "failed in line 2: RuntimeError: no dataset"),
        ("raise BaseException", "failed in line 2: BaseException: no message"),
        ("import sys; sys.exit()", "ends the program in line 2, with sys.exit()"),
        ("raise SystemExit('no GPU')", "ends the program in line 2, with sys.exit('no GPU')"),
        (
            "from . import parts",
            "failed in line 2: ImportError: attempted relative import with no known parent package",
        ),
        (
            "raise type('Odd', (Exception,), {'__str__': lambda self: None})()",
            "failed in line 2: Odd: its message cannot be read, since __str__ raises TypeError",
        ),
    ],
)
def test_a_program_that_fails_when_it_is_imported_is_told_in_a_sentence(tmp_path: Path, line: str, said: str):
    path = tmp_path / "broken_program.py"
    path.write_text(f"{EXPERIMENT.splitlines()[0]}\n{line}\ndef experiment(): ...\n")
    with pytest.raises(RunFailed) as caught:
        find(str(path)).function()
    assert str(caught.value) == f"broken_program.py, when it is imported, {said}"


@pytest.mark.parametrize("name", ["net.v2.py", "__main__.py", ".hidden.py", "json.py", "torch.nn.py", "a-b.py"])
def test_a_file_of_any_name_is_imported(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text("import json\ndef experiment(): return json.dumps([1])\n")
    assert find(str(path)).function()() == "[1]"


def test_what_only_runs_as_a_program_is_not_imported_for_its_experiment(tmp_path: Path):
    text = "print('works')\nif __name__ == '__main__':\n    def experiment(): ...\n    print(experiment())\n"
    assert entry(tmp_path, text) is None


def test_modules_beside_a_file_are_found(tmp_path: Path):
    (tmp_path / "beside_the_file.py").write_text("WIDTH = 3\n")
    path = tmp_path / "uses_what_is_beside.py"
    path.write_text("import beside_the_file\ndef experiment(): return beside_the_file.WIDTH\n")
    assert find(str(path)).function()() == 3


def test_a_file_stands_in_for_no_module_that_others_may_import_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    (tmp_path / "wave.py").write_text("def experiment(): return 1\n")
    assert find(str(tmp_path / "wave.py")).function()() == 1
    assert "wave" not in sys.modules


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("return 3", UserError, "returned int; it must return an Experiment"),
        ("raise SystemExit(3)", RunFailed, "ends the program in line 2, with sys.exit(3)"),
    ],
)
def test_a_function_that_makes_no_experiment_is_told_in_a_sentence(
    tmp_path: Path, line: str, kind: type[Exception], said: str
):
    path = tmp_path / "none_made.py"
    path.write_text(f"def experiment():\n    {line}\n")
    with pytest.raises(kind) as caught:
        make(find(str(path)), {})
    assert str(caught.value) == f"experiment() of none_made.py {said}"


def test_a_file_that_would_train_twice_is_refused(tmp_path: Path):
    text = EXPERIMENT + "for update in meshrun.Trainer(experiment()).steps():\n    print(update)\n"
    with pytest.raises(
        UserError, match=r"defines a function 'experiment' for meshrun to train, and line 3 calls Trainer"
    ):
        entry(tmp_path, text)


def test_the_command_that_stages_files_names_their_folder():
    target = find("digits")
    assert place_of(target, {}, Path("/d")).command == "meshrun stage digits --data /d"
    assert place_of(target, {"fast": False, "lr": 0.1}, DATA).command == "meshrun stage digits --no-fast --lr=0.1"
