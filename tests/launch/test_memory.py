"""The folder in a node's memory lies beside those of other users, who must not choose where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrun import config
from meshrun.config import RunDirectory
from meshrun.errors import RunFailed
from meshrun.launch.memory import Memory


@pytest.mark.parametrize("there", [True, False])
def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    of_user = RunDirectory(tmp_path / "run").memory_of("7").parent.parent
    of_user.parent.mkdir()
    target = tmp_path / "target"
    if there:
        target.mkdir()
    of_user.symlink_to(target)
    with pytest.raises(RunFailed, match="is not a folder"), Memory(RunDirectory(tmp_path / "run"), "7"):
        pass
    assert not there or not list(target.iterdir())


def test_a_folder_for_this_user_alone_is_there_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "MEMORY", tmp_path / "shm")
    for _ in range(2):
        with Memory(RunDirectory(tmp_path / "run"), "7") as memory:
            assert memory.path.parent.parent.stat().st_mode & 0o077 == 0
        assert not memory.path.exists()
