"""Which files are trainings, which are plain scripts, and which are neither, told by reading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrun import UserError
from meshrun.cli.target import find, place_of
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
