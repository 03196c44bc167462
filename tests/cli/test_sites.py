"""`meshrun sites`: what is known is listed, shown with its sources, and probed where there is a Slurm."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from meshrun.cli.main import main
from tests.launch.test_probe import recorded_slurm


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs a command line of a user whose own profiles lie in `tmp_path`: status, standard output, standard error."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def slurm(tmp_path: Path) -> None:
    recorded_slurm(tmp_path / "bin")


def test_all_sites_are_listed_and_that_none_is_here(ask):
    status, out, err = ask("sites")
    assert (
        (status, err) == (0, "")
        and "  lumi-g           LUMI-G (CSC)\n" in out
        and "this machine belongs to none of these" in out
    )
    status, out, _ = ask("sites", "--json")
    document = json.loads(out)
    assert status == 0 and len(document["sites"]) == 10 and document["here"] is None


def test_the_site_that_is_here_is_marked(ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SYSTEMNAME", "juwelsbooster")
    assert "* juwels-booster   JUWELS Booster (JSC)\n" in ask("sites")[1]
    assert json.loads(ask("sites", "--json")[1])["here"] == "juwels-booster"


def test_a_profile_is_shown_with_sources_and_what_is_not_verified(ask):
    status, out, err = ask("sites", "show", "juwels-booster")
    assert (status, err) == (0, "")
    line = next(line for line in out.splitlines() if line.startswith("host_suffix"))
    assert line.split()[:3] == ["host_suffix", "i", "no"] and "seen elsewhere" in line
    assert "https://apps.fz-juelich.de/jsc/hps/juwels/booster-overview.html" in out
    assert "8 values that no page of the site confirms" in out
    document = json.loads(ask("sites", "show", "lumi-g", "--json")[1])
    by_name = {each["what"]: each for each in document["values"]}
    assert by_name["gpus_per_node"]["value"] == 8 and by_name["gpus_per_node"]["verified"] is True
    assert by_name["cpu_masks"]["value"][4] == "fe" and by_name["environment CXI_FORK_SAFE"]["reason"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["sites", "show", "juwels"], "there is no site 'juwels'; did you mean juwels-booster"),
        (["sites", "probe"], "no Slurm on this machine"),
        (["sites", "show"], "Missing argument 'NAME'"),
        (["sites", "list"], "No such command 'list'"),
    ],
)
def test_what_cannot_be_is_one_sentence(ask, words: list[str], said: str):
    status, out, err = ask(*words)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    status, out, _ = ask(*words, "--json")
    assert status == 2 and said in json.loads(out)["error"]


@pytest.mark.usefixtures("slurm")
def test_a_cluster_is_probed_and_saved_as_a_profile_of_ones_own(ask, tmp_path: Path):
    status, out, err = ask("sites", "probe")
    assert (status, err) == (0, "") and out.startswith("the cluster virtual, Slurm 22.05.8")
    assert "partition short" in out and "at most 00:05:00, 4 GPUs a node, 4 nodes" in out
    status, out, err = ask("sites", "probe", "--save", "lab")
    path = tmp_path / "config/meshrun/sites/lab.toml"
    assert (status, err) == (0, "") and out.startswith(f"{path} has what Slurm says") and "--site lab" in out
    assert tomllib.loads(path.read_text())["gpus_per_node"]["value"] == 4 and "# GPUs of a node\n" in path.read_text()
    assert f"* lab              the cluster virtual, Slurm 22.05.8  ({path})" in ask("sites")[1]
    status, _, err = ask("sites", "probe", "--save", "lab")
    assert status == 2 and f"{path} is there already; give another name" in err
    assert json.loads(ask("sites", "probe", "--save", "lab2", "--json")[1])["file"].endswith("lab2.toml")


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("name", ["../lab", "a b", "", "-x;y", "a/b"])
def test_a_name_that_is_none_of_a_site_is_refused(ask, name: str, tmp_path: Path):
    status, _, err = ask("sites", "probe", "--save", name)
    assert status == 2 and "a site's name has letters, digits, dots and dashes only" in err
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.usefixtures("slurm")
def test_a_folder_that_cannot_be_written_is_named(ask, tmp_path: Path):
    (tmp_path / "config").write_text("")
    status, _, err = ask("sites", "probe", "--save", "lab")
    assert status == 2 and "lab.toml cannot be written: Not a directory (--save)" in err


@pytest.mark.usefixtures("slurm")
def test_a_slurm_that_does_not_answer_is_said_in_its_words(ask, tmp_path: Path):
    down = "#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2\nexit 1\n"
    (tmp_path / "bin/scontrol").write_text(down)
    status, _, err = ask("sites", "probe")
    assert status == 1 and "scontrol show config failed: slurm_load_ctl_conf error: Unable to contact" in err
    assert "this machine belongs to none of these" in ask("sites")[1]
