"""The README's two scripts: the changed one prints the same numbers on any number of ranks, under any launcher."""

import difflib
import re
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def printed(words: list[str], folder: Path) -> list[str]:
    done = warm.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return re.findall(r"epoch \d: loss [\d.]+", done.stdout)


def test_five_lines_differ_between_the_two_scripts() -> None:
    one, other = ((EXAMPLES / name).read_text().splitlines()[1:] for name in ("single_device.py", "any_mesh.py"))
    added = [line[2:] for line in difflib.ndiff(one, other) if line.startswith("+ ")]
    assert [line for line in added if line != "import meshrun"] == [
        line for line in other if "meshrun." in line and "from" not in line
    ]
    assert len([line for line in added if line != "import meshrun"]) == 5


def test_readme_shows_what_the_changed_lines_are() -> None:
    readme = re.sub(r"\s+", "", (ROOT / "README.md").read_text())
    for name in ("replicate(Net(128))", 'save0(model.state_dict(),"digits.pt")', 'print0(f"epoch{epoch}:loss'):
        assert name in readme


def test_changed_script_prints_the_same_on_one_and_on_three_ranks(tmp_path: Path) -> None:
    script = str(EXAMPLES / "any_mesh.py")
    alone = printed([script], tmp_path)
    assert len(alone) == 2
    (tmp_path / "digits.pt").unlink()
    assert printed(["-m", "meshrun", "run", script, "--procs", "3", "--device", "cpu"], tmp_path) == alone
    assert (tmp_path / "digits.pt").is_file()


@pytest.mark.gpu
def test_single_device_script_runs(tmp_path: Path) -> None:
    assert len(printed([str(EXAMPLES / "single_device.py")], tmp_path)) == 2
