"""Real launchers start real processes, and each of them knows its place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
HYDRA = ["mpiexec.hydra"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

RANK = """\
import dataclasses, json, os, pathlib, sys
from meshrun.world import detect
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(dataclasses.asdict(detect(os.environ))))
"""

SSH_TO_HERE = """\
#!/bin/sh
# Takes ssh's place: drops options and the host's name, and runs the command on this machine.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh_to_here(tmp_path: Path) -> str:
    path = tmp_path / "ssh"
    path.write_text(SSH_TO_HERE)
    path.chmod(0o755)
    return str(path)


def start(folder: Path, launcher: list[str], prefix: tuple[str, ...] = ()) -> list[dict]:
    """The worlds of all ranks that the launcher starts, by rank."""
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    (folder / "rank.py").write_text(textwrap.dedent(RANK))
    answers = folder / f"answers-{len(list(folder.iterdir()))}"
    answers.mkdir()
    command = [*launcher, *prefix, *([] if "torch.distributed.run" in launcher else [sys.executable])]
    ran = subprocess.run(
        [*command, str(folder / "rank.py"), str(answers)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return sorted((json.loads(file.read_text()) for file in answers.iterdir()), key=lambda world: world["rank"])


@pytest.mark.parametrize(
    ("launcher", "source"),
    [
        pytest.param([*OPENMPI, "-n", "2"], "openmpi", id="mpirun"),
        pytest.param([*HYDRA, "-n", "2"], "pmi", id="mpiexec"),
        pytest.param([*TORCHRUN, "2"], "torchrun", id="torchrun"),
    ],
)
def test_two_ranks_know_their_place_and_share_a_key_that_no_other_launch_has(
    tmp_path: Path, launcher: list[str], source: str
) -> None:
    first, second = start(tmp_path, launcher), start(tmp_path, launcher)
    for worlds in (first, second):
        assert [world["rank"] for world in worlds] == [world["local_rank"] for world in worlds] == [0, 1]
        for world in worlds:
            assert (world["size"], world["local_size"], world["node"], world["nodes"]) == (2, 2, 0, 1)
            assert world["source"] == source
        assert worlds[0]["job"] == worlds[1]["job"] != ""
    assert first[0]["job"] != second[0]["job"]
    if source == "torchrun":
        for world in first:
            assert world["address"] and world["port"] > 0
            assert world["agent_store"] is True


def test_a_shell_between_mpiexec_and_its_ranks_does_not_part_them(tmp_path: Path) -> None:
    worlds = start(tmp_path, [*HYDRA, "-n", "2"], prefix=("sh", "-c", '"$@"; exit $?', "sh"))
    assert [world["rank"] for world in worlds] == [0, 1]
    assert worlds[0]["job"] == worlds[1]["job"] != ""


def test_mpirun_over_two_uneven_nodes_numbers_them(tmp_path: Path, ssh_to_here: str) -> None:
    here = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    launcher = [*OPENMPI, "--mca", "plm_rsh_agent", ssh_to_here, "--host", f"{here}:2,elsewhere:1", "-n", "3"]
    worlds = start(tmp_path, launcher)
    assert [(world["rank"], world["local_rank"], world["local_size"]) for world in worlds] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]
    assert [(world["node"], world["nodes"]) for world in worlds] == [(0, 2), (0, 2), (1, 2)]
    assert len({world["job"] for world in worlds}) == 1


def test_mpiexec_over_two_nodes_without_slurm_has_no_key(tmp_path: Path, ssh_to_here: str) -> None:
    worlds = start(tmp_path, [*HYDRA, "-launcher", "ssh", "-launcher-exec", ssh_to_here, "-hosts", "a,b", "-n", "2"])
    assert [(world["rank"], world["node"], world["nodes"]) for world in worlds] == [(0, 0, 2), (1, 1, 2)]
    assert [world["job"] for world in worlds] == ["", ""]
