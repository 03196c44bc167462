"""The plan of the house, held: who may import whom, what loads torch, and what is done in one place only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshrun
from tests.pace import SMALL_HELP, cost

HOUSE = Path(meshrun.__file__).parent
ROOT = HOUSE.parent

GROUND = {"errors", "files", "layout", "experiment", "config", "strict_json"}
AXES_AND_STATE = {"mesh", "errors", "files", "experiment", "layout", "strict_json"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "strict_json": {"files"},
    "typed_json": set(),
    "store": {"errors", "world"},
    "layout": {"errors"},
    "experiment": {"errors"},
    "config": {"errors", "files", "strict_json"},
    "world": GROUND,
    "plan": GROUND,
    "observe": GROUND,
    "launch": {"world", "errors", "files", "config", "strict_json", "store"},
    "kernels": set(),
    "mesh": {"world", "layout", "errors", "store", "typed_json"},
    "parallel": AXES_AND_STATE | {"kernels"},
    "data": AXES_AND_STATE | {"config"},  # staging writes its files like the run directory's, and knows where they lie
    "state": AXES_AND_STATE | {"store"},  # copies for other nodes begin with the store's handshake
    "train": GROUND | {"world", "plan", "observe", "launch", "mesh", "kernels", "parallel", "data", "state"},
}
"""What each room may import beside itself; a room that is in no table is refused."""
MAY_IMPORT_ALL = {"check", "cli"}
PUBLIC_NAMES_ONLY = {"recipes"}
DOORS = {"__init__", "__main__"}
"""The front door offers names of any room; the back door starts the command line."""

WITHOUT_TORCH = (
    *("world", "launch", "store", "layout", "plan"),
    *("errors", "experiment", "config", "files", "strict_json", "typed_json"),
)
LAUNCHERS_VARIABLE = re.compile(
    "(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    "|(SLURM|OMPI|PMI|PMIX|MPI|TORCHELASTIC)_[A-Za-z_]+"
)


def room_of(path: Path) -> str:
    """The file's name at the top of the house, or the folder that it is in."""
    first, *inside = path.relative_to(HOUSE).parts
    return first if inside else Path(first).stem


def files() -> dict[str, ast.Module]:
    """Every file of the package, by its path in it."""
    return {str(path.relative_to(HOUSE)): ast.parse(path.read_text()) for path in sorted(HOUSE.rglob("*.py"))}


FILES = files()


def imported(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of ours that a file imports, be it inside a function or for types only."""
    package = ["meshrun", *Path(file).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name.split(".")[0] == "meshrun")
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name == "meshrun":
                yield from ((node.lineno, f"meshrun.{each.name}") for each in node.names)
            elif name.startswith("meshrun."):
                yield node.lineno, name


def rooms_imported(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of each import; a public name is an import of the front door."""
    for line, name in imported(file, tree):
        first = name.split(".")[1] if "." in name else "__init__"
        yield line, first if first in ROOMS else "__init__"


ROOMS = {room_of(HOUSE / file) for file in FILES}


def test_every_room_has_its_rule():
    known = set(MAY_IMPORT) | MAY_IMPORT_ALL | PUBLIC_NAMES_ONLY | DOORS
    assert not ROOMS - known, f"say in MAY_IMPORT what {', '.join(sorted(ROOMS - known))} may import"


@pytest.mark.parametrize("room", sorted(ROOMS & set(MAY_IMPORT)))
def test_imports_point_downward(room: str):
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{file}:{line} imports {other}"
        for file, tree in FILES.items()
        if room_of(HOUSE / file) == room
        for line, other in rooms_imported(file, tree)
        if other not in allowed
    ]
    assert not wrong, f"{room} may import only {', '.join(sorted(allowed))}"


def test_recipes_use_public_names_only():
    for file, tree in FILES.items():
        if room_of(HOUSE / file) == "recipes":
            names = [name.removeprefix("meshrun.") for _, name in imported(file, tree)]
            assert set(names) <= set(meshrun.__all__), file


def test_only_the_back_door_imports_the_command_line():
    importers = {file for file, tree in FILES.items() if "cli" in dict(map(reversed, rooms_imported(file, tree)))}
    assert {file for file in importers if not file.startswith("cli/")} == {"__main__.py"}


def test_public_names_are_all_there_and_typed_like_they_are_loaded():
    tree = FILES["__init__.py"]
    typed = {
        each.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshrun.")
        for each in node.names
    }
    loaded = {name: home for home, names in meshrun._HOMES.items() for name in names}
    assert typed == loaded
    assert set(meshrun.__all__) == {*loaded, "__version__"}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Every name that a file uses, as `name`, as `something.name`, or in an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute | ast.alias):
            yield getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", "")


def test_one_place_forms_process_groups():
    assert [file for file, tree in FILES.items() if "init_process_group" in names_in(tree)] == ["mesh.py"]


def test_only_world_names_the_variables_of_launchers():
    named = {
        f"{file}:{node.lineno} {node.value}"
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LAUNCHERS_VARIABLE.fullmatch(node.value)
        if not file.startswith("world/")
    }
    assert not named
    assert any("SLURM_PROCID" in ast.dump(tree) for file, tree in FILES.items() if file.startswith("world/"))


def test_outside_world_the_environment_is_only_handed_to_detect():
    """No variable carries configuration: nobody else looks into the environment, whatever the name."""
    for file, tree in FILES.items():
        if file.startswith("world/"):
            continue
        handed = {
            id(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "detect"
            for argument in node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                assert id(node) in handed, f"{file}:{node.lineno} reads the environment"


@pytest.mark.parametrize("forbidden", ["pickle.load", "torch.load"])
def test_no_pickle_is_loaded(forbidden: str):
    assert not [file for file in FILES if forbidden in (HOUSE / file).read_text()]


def test_ranks_exchange_no_pickles():
    """torch's collectives of objects send pickles, which execute whatever their sender has put into them."""
    pickling = re.compile(r"\w+_object(_list)?|pickle|cPickle|dill|cloudpickle|marshal|shelve")
    named = {(file, name) for file, tree in FILES.items() for name in names_in(tree) if pickling.fullmatch(name)}
    # A reader asks whether its error can be sent to its parent; the archive writes files for `torch.load`.
    assert named == {("data/readers.py", "pickle"), ("state/archive.py", "pickle")}


def in_fresh_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_planning_and_launching_import_without_torch():
    light = [Path(file) for file in FILES if room_of(HOUSE / file) in WITHOUT_TORCH]
    names = ["meshrun", *(".".join(["meshrun", *path.with_suffix("").parts]) for path in light)]
    assert {"meshrun.world.detect", "meshrun.launch.local", "meshrun.layout"} <= set(names)
    program = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{{name}} loads torch"
"""
    in_fresh_python("-c", program)


HELPS = [
    ["--help"],
    ["run", "--help"],
    ["verify", "--help"],
    ["recipes"],
    ["bench", "--help"],
    ["bench", "rank", "--help"],
]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_loads_no_torch(words: list[str]):
    ended = in_fresh_python("-X", "importtime", "-m", "meshrun", *words)
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "meshrun.cli.main" in loaded and ("Usage" in ended.stdout or "digits" in ended.stdout)
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "numpy")}


@pytest.mark.parametrize("words", HELPS[:3], ids=" ".join)
def test_help_takes_little_more_than_that_of_a_small_program(words: list[str]):
    """Three tenths of a second are promised on an idle machine, which is 1.7 times as much; it takes about as much."""
    assert cost(["-m", "meshrun", *words], beside=SMALL_HELP, at_most=1.7) < 1.7
