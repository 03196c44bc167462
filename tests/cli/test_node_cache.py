"""`--cache`: copies of data files in a folder of the node that is the run's own, and goes with it."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from torch.utils.data import Subset

from meshrun import ImageFolder, UserError
from meshrun.cli.node_cache import copies_of, kept_on_node, leave_node, make_private, not_copied, sweep, use_node
from meshrun.config import MEMORY, RunConfig, RunDirectory
from meshrun.data import cache
from meshrun.recipes.images import STAMPS
from meshrun.world import disks


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the job says is the node's own folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(folder))
    return folder


def config(place: str) -> RunConfig:
    return RunConfig("digits", cache=place)


def test_copies_are_made_for_this_user_alone_and_go_with_the_run(node: Path, tmp_path: Path):
    run = RunDirectory(tmp_path / "runs" / "digits-1")
    with kept_on_node(config("tmp"), run, None, None):
        copies = copies_of(config("tmp"), run, None, None)
        assert copies is not None and copies.parent == node
        make_private(copies)
        assert stat.S_IMODE(copies.stat().st_mode) == 0o700
        (copies / "train.h5").write_text("data")
        make_private(copies)
    assert list(node.iterdir()) == []


@pytest.mark.usefixtures("node")
def test_after_a_run_nothing_of_it_is_used_or_told_any_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said: list[str] = []
    use_node(config("tmp"), RunDirectory(tmp_path / "runs/a-1"), None, None, said.append)
    cache.note("one")
    leave_node()
    cache.note("other")
    assert (said, cache.folder(), capsys.readouterr().err) == (["one"], None, "note: other\n")


def test_of_an_image_folder_it_is_said_that_it_is_not_copied():
    pictures = ImageFolder(STAMPS / "val", 16)
    for data in (pictures, Subset(pictures, [0, 1])):
        assert not_copied(config("none"), data) == []
        (said,) = not_copied(config("auto"), data)
        assert "val are read where they are: --cache auto copies no image folders; meshrun convert-data" in said
    assert not_copied(config("auto"), [(1, 2)]) == []


def test_two_runs_and_two_nodes_on_a_machine_do_not_share_a_folder(node: Path, tmp_path: Path):
    found = {
        copies_of(config("tmp"), RunDirectory(tmp_path / name), None, memory)
        for name in ("digits-1", "digits-2")
        for memory in (None, Path("/dev/shm/x/node-1"), Path("/dev/shm/x/node-2"))
    }
    assert len(found) == 6 and {each.parent for each in found if each is not None} == {node}


def test_a_folder_that_the_user_names_is_taken_as_it_is_and_stays(tmp_path: Path):
    run, mine = RunDirectory(tmp_path / "digits-1"), tmp_path / "mine"
    with kept_on_node(config(str(mine)), run, None, None):
        assert copies_of(config(str(mine)), run, None, None) == mine
        mine.mkdir()
    assert mine.is_dir()
    assert copies_of(config("none"), run, None, None) is None


def test_in_memory_copies_are_where_the_launcher_clears_up(tmp_path: Path):
    run = RunDirectory(tmp_path / "digits-1")
    assert copies_of(config("memory"), run, None, Path("/dev/shm/x/node-1")) == Path("/dev/shm/x/node-1/copies")
    alone = copies_of(config("memory"), run, None, None)
    assert alone is not None and alone.parent == MEMORY


def test_who_comes_when_the_disk_is_full_goes_where_the_first_one_went(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDirectory(tmp_path / "digits-1")
    first = copies_of(config("auto"), run, None, None)
    assert first is not None
    first.mkdir(parents=True)
    monkeypatch.setattr(disks, "ROOM", 1 << 62)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "other"))
    monkeypatch.setenv("TMPDIR", str(node))
    assert copies_of(config("auto"), RunDirectory(tmp_path / "digits-2"), None, None) != first
    assert copies_of(config("auto"), run, None, None) == first
    with kept_on_node(config("auto"), run, None, None):
        pass
    assert not first.exists()


def test_a_folder_that_another_has_put_there_is_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"link is not this user's alone; have it removed, or .* \(--cache\)"):
        make_private(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UserError, match="open is not this user's alone"):
        make_private(tmp_path / "open")
    if os.getuid() == 0:
        os.chown(tmp_path / "elsewhere", 12345, -1)
        with pytest.raises(UserError, match="is not this user's alone"):
            make_private(tmp_path / "elsewhere")


def test_copies_of_a_run_that_was_killed_are_swept_by_the_next_run_of_the_user(node: Path, tmp_path: Path):
    killed, lives = (RunDirectory(tmp_path / "runs" / name) for name in ("killed-1", "lives-1"))
    if (rank := os.fork()) == 0:  # a rank that is killed, and its launcher with it
        use_node(config("tmp"), killed, None, Path("node-1"), print)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(rank, 0)
    left = copies_of(config("tmp"), killed, None, Path("node-1"))
    assert left is not None and left.is_dir()
    use_node(config("tmp"), lives, None, Path("node-2"), print)
    held = copies_of(config("tmp"), lives, None, Path("node-2"))
    with kept_on_node(config("tmp"), RunDirectory(tmp_path / "runs" / "next-1"), None, Path("node-3")):
        assert list(node.iterdir()) == [held]
    leave_node()
    with kept_on_node(config("none"), RunDirectory(tmp_path / "runs" / "next-2"), None, Path("node-4")):
        assert list(node.iterdir()) == []


def test_copies_that_are_just_being_made_and_those_of_other_users_are_not_swept(node: Path):
    new, old, another = (node / f"meshrun-{os.getuid()}-{name}-node" for name in ("new", "old", "another"))
    for folder in (new, old, another):
        folder.mkdir()
    for folder in (old, another):
        os.utime(folder, (0, 0))
    if os.getuid() == 0:
        os.chown(another, 12345, -1)
    else:
        another.rename(node / f"meshrun-{os.getuid() + 1}-another-node")
    sweep([node])
    assert new.exists() and not old.exists() and len(list(node.iterdir())) == 2


def test_a_name_that_another_user_has_taken_costs_a_note_and_nothing_else(node: Path, tmp_path: Path):
    """It follows from the run's path, which others may know."""
    run, said = RunDirectory(tmp_path / "runs" / "a-1"), list[str]()
    taken = copies_of(config("tmp"), run, None, None)
    assert taken is not None and taken.parent == node
    taken.mkdir()
    taken.chmod(0o777)
    use_node(config("tmp"), run, None, None, said.append)
    assert cache.folder() is None
    assert said == [
        f"data files are read where they are: {taken} is not this user's alone; have it removed, or name "
        "another folder (--cache)"
    ]
    assert copies_of(config("memory"), run, None, None) != taken, "it stands for no folder of this run"
