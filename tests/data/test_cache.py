"""What is kept on the node: one copy however many ask, the original where there is no room, memory that all see."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshrun.data import cache
from meshrun.data.sources.once import once
from meshrun.errors import RunFailed
from tests.data.forked import forked


@pytest.fixture
def places() -> Iterator[list[str]]:
    """Notes that were told; afterwards, nothing is kept anywhere."""
    yield []
    cache.use(None, None)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "train.h5"
    path.write_bytes(os.urandom(300_000))
    return path


def test_without_a_folder_the_file_itself_is_read(original: Path):
    assert cache.cached(original) == original


def test_one_copy_however_many_ask_for_it(original: Path, tmp_path: Path, places: list[str]):
    copies = tmp_path / "node"
    cache.use(copies, None, places.append)
    found = forked(4, lambda _number: (str(cache.cached(original)), cache.cached(original).stat().st_ino))
    assert len(set(found)) == 1
    copy = Path(found[0][0])
    assert copy.parent == copies and copy.read_bytes() == original.read_bytes()
    assert [each.name for each in copies.iterdir() if not each.name.startswith(".")] == [copy.name]
    assert places == []


def test_a_copy_that_another_process_makes_meanwhile_is_not_made_again(
    original: Path, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
):
    cache.use(tmp_path / "node", None, places.append)
    copy = cache.cached(original)
    copy.unlink()
    # Until the lock is had, another process has it, and makes the copy.
    monkeypatch.setattr(cache.fcntl, "flock", lambda *_: copy.write_bytes(original.read_bytes()))
    monkeypatch.setattr(cache, "_copy", lambda *_: pytest.fail("it is copied again"))
    assert cache.cached(original) == copy


def test_what_is_kept_of_a_file_is_for_this_user_alone(original: Path, tmp_path: Path, places: list[str]):
    """Others could not read the file itself, and may enter the folder."""
    original.chmod(0o600)
    cache.use(tmp_path / "node", None, places.append)
    made = once(original, "a part of it", lambda to: to.write_bytes(b"x") and None)
    assert made is not None
    for each in (cache.cached(original), made):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_a_file_that_was_written_anew_is_copied_anew(original: Path, tmp_path: Path, places: list[str]):
    cache.use(tmp_path / "node", None, places.append)
    old = cache.cached(original)
    for content in (b"other", b"again"):  # of equal length, so that only the time of writing tells them apart
        original.write_bytes(content)
        new = cache.cached(original)
        assert new.read_bytes() == content and not old.exists()
        old = new


def test_a_disk_that_is_full_is_told_once_and_the_file_itself_read(
    original: Path, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
):
    cache.use(tmp_path / "node", None, places.append)
    monkeypatch.setattr(cache, "_room", lambda _folder: 1000)
    assert [cache.cached(original) for _ in range(3)] == [original] * 3
    assert places == [
        f"{original} is not copied to {tmp_path / 'node'} but read where it is: "
        f"0.3 MiB are needed and 0.0 MiB free (--cache)"
    ]


def test_a_disk_that_gets_full_while_copying_leaves_nothing_behind(original: Path, tmp_path: Path, places: list[str]):
    copies = tmp_path / "node"
    cache.use(copies, None, places.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert cache.cached(original) == original
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (told,) = places
    assert told.startswith(f"{original} is not copied to {copies} but read where it is: File too large")
    assert [each.name for each in copies.iterdir() if not each.name.endswith(".lock")] == []


@pytest.mark.parametrize(("more", "copied"), [(-1, False), (0, True)])
def test_a_copy_leaves_some_of_the_disk_free(
    original: Path, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch, more: int, copied: bool
):
    monkeypatch.setattr(cache, "_room", lambda _: original.stat().st_size + cache.MARGIN + more)
    cache.use(tmp_path / "node", None, places.append)
    assert (cache.cached(original) != original) is copied


def test_a_folder_that_cannot_be_written_to_is_told(original: Path, places: list[str]):
    cache.use(original / "below", None, places.append)
    assert cache.cached(original) == original
    (told,) = places
    assert "Not a directory" in told and str(original) in told and "(--cache)" in told


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_while_it_is_copied_fails_the_run(
    original: Path, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch, grows: bool
):
    cache.use(tmp_path / "node", None, places.append)
    copy = cache.shutil.copyfile

    def meddled(source: Path, to: Path) -> None:
        copy(source, to)
        original.write_bytes(original.read_bytes() + b"more" * grows)

    monkeypatch.setattr(cache.shutil, "copyfile", meddled)
    with pytest.raises(RunFailed, match="has changed while it was being copied"):
        cache.cached(original)


def test_half_a_copy_is_not_taken_for_the_file(
    original: Path, tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
):
    cache.use(tmp_path / "node", None, places.append)
    monkeypatch.setattr(cache.shutil, "copyfile", lambda source, to: to.write_bytes(source.read_bytes()[:1000]))
    assert cache.cached(original) == original
    assert "only 1000 of 300000 bytes arrived" in places[0]
    assert not [each.name for each in (tmp_path / "node").iterdir() if "train" in each.name]


def test_what_a_forked_process_writes_is_seen_here():
    kept = cache.shared("squares", 64)
    assert not kept.bytes.any()

    def write(number: int) -> None:
        kept.bytes[number] = number * number + 1

    forked(2, write)
    assert kept.bytes[:3].tolist() == [1, 2, 0]
    assert cache.shared("squares", 64) is kept and cache.shared("cubes", 64) is not kept


def test_in_a_folder_of_the_node_all_who_ask_get_the_same_memory(tmp_path: Path, places: list[str]):
    cache.use(None, tmp_path / "memory", places.append)

    def write(number: int) -> None:
        cache.shared("ranks", 16).bytes[number] = number + 1

    before = os.umask(0)
    try:
        forked(2, write)
    finally:
        os.umask(before)
    assert cache.shared("ranks", 16).bytes[:3].tolist() == [1, 2, 0] and places == []
    (file,) = (tmp_path / "memory").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_memory_of_the_node_without_room_is_each_ones_own(
    tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
):
    cache.use(None, tmp_path / "memory", places.append)
    monkeypatch.setattr(cache, "_room", lambda _folder: 0)
    kept = cache.shared("large", 1 << 20)
    kept.bytes[:] = 1
    (told,) = places
    assert told.startswith("ranks of this node keep 1.0 MiB each for themselves")


def test_a_place_is_had_by_one_process_at_a_time_and_by_none_that_died():
    kept = cache.shared("places", 16)
    with kept.alone(3) as mine:
        assert mine
        assert forked(1, lambda _number: _has(kept, 3)) == [False]
        assert forked(1, lambda _number: _has(kept, 4)) == [True]
    assert forked(1, lambda _number: _has(kept, 3)) == [True], "it is let go of"
    pid = os.fork()
    if not pid:
        kept.alone(3).__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    assert _has(kept, 3)


def test_a_place_is_had_by_one_thread_at_a_time():
    kept = cache.shared("places of threads", 16)
    with ThreadPoolExecutor(1) as other, kept.alone(3):
        assert not other.submit(_has, kept, 3).result()
        assert other.submit(_has, kept, 4).result()
        assert forked(1, lambda _number: _has(kept, 3)) == [False], "the other thread has not let go of it"
    assert _has(kept, 3)


def _has(kept: cache.Shared, number: int) -> bool:
    with kept.alone(number) as mine:
        return mine


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("700000", "300000", 400_000), ("max", "3", 1_024_000), ("5", "9", 0)]
)
def test_free_memory_is_what_the_group_of_processes_may_still_take(
    monkeypatch: pytest.MonkeyPatch, limit: str, used: str, free: int
):
    group = "/sys/fs/cgroup/job"
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 1000 kB\n",
        "/proc/self/cgroup": "0::/job\n",
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
    }

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert cache.free_memory() == free


@pytest.mark.parametrize("is_memory", [False, True])
def test_a_folder_in_memory_has_room_for_what_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_memory: bool
):
    monkeypatch.setattr(cache, "_is_memory", lambda _: is_memory)
    monkeypatch.setattr(cache, "free_memory", lambda: 5)
    assert (cache._room(tmp_path) == 5) is is_memory


def test_free_memory_is_a_number_of_this_machine():
    assert 1 << 20 < cache.free_memory() < 1 << 50


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_in_a_folder_that_others_can_write_to_copies_are_in_one_of_this_user_alone(
    original: Path, shared_folder: Path, places: list[str]
):
    cache.use(shared_folder, None, places.append)
    copy = cache.cached(original)
    assert copy.parent == shared_folder / f"meshrun-{os.getuid()}"
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
    assert copy.read_bytes() == original.read_bytes() and places == []


@pytest.mark.parametrize("exposed", ["not sticky", "of another user"])
def test_in_a_folder_whose_entries_others_can_exchange_nothing_is_copied(
    original: Path, shared_folder: Path, places: list[str], exposed: str
):
    if exposed == "not sticky":
        shared_folder.chmod(0o777)
    elif os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    else:
        os.chown(shared_folder, 65534, 65534)
    cache.use(shared_folder, None, places.append)
    assert cache.cached(original) == original
    assert list(shared_folder.iterdir()) == [] and "others can rename what is in that folder" in places[0]


def test_what_another_user_has_planted_is_neither_read_nor_written(
    original: Path, shared_folder: Path, tmp_path: Path, places: list[str]
):
    """The folder of this user's name is a link of another's making, or belongs to another."""
    target = tmp_path / "precious"
    target.mkdir()
    own = shared_folder / f"meshrun-{os.getuid()}"
    own.symlink_to(target)
    cache.use(shared_folder, None, places.append)
    assert cache.cached(original) == original
    assert list(target.iterdir()) == [] and f"{own} is not this user's alone" in places[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
def test_a_copy_or_lock_of_another_user_is_not_believed(original: Path, tmp_path: Path, places: list[str]):
    cache.use(tmp_path / "mine", None, places.append)
    copy = cache.cached(original)
    copy.write_bytes(bytes(original.stat().st_size))
    os.chown(copy, 65534, 65534)
    assert cache.cached(original).read_bytes() == original.read_bytes()
    victim = tmp_path / "precious"
    victim.write_text("my thesis")
    (lock,) = (tmp_path / "mine").glob(".*.lock")
    lock.unlink()
    lock.symlink_to(victim)
    copy.unlink()
    assert cache.cached(original) == original
    assert victim.read_text() == "my thesis" and "--cache" in places[0]


def test_a_link_in_the_place_of_a_copy_is_not_followed(original: Path, tmp_path: Path, places: list[str]):
    other = tmp_path / "other.h5"
    for content in (b"mine!", b"other"):  # a link is as long as the name that it holds
        (original if content == b"mine!" else other).write_bytes(content.ljust(len(str(other)), b"."))
    cache.use(tmp_path / "node", None, places.append)
    copy = cache.cached(original)
    copy.unlink()
    copy.symlink_to(other)
    assert cache.cached(original).read_bytes().startswith(b"mine!") and not copy.is_symlink()


def test_half_a_copy_of_somebody_who_was_killed_goes_with_the_next_copy(
    original: Path, tmp_path: Path, places: list[str]
):
    cache.use(tmp_path / "node", None, places.append)
    copy = cache.cached(original)
    half = copy.with_name(f".{copy.name}.part")
    copy.rename(half)
    original.write_bytes(b"other")
    assert cache.cached(original).read_bytes() == b"other" and not half.exists()


@pytest.mark.parametrize("exposed", ["not sticky", "of another user"])
def test_nothing_is_copied_below_a_folder_where_other_users_can_rename_things(
    original: Path, tmp_path: Path, places: list[str], exposed: str
):
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777 if exposed == "not sticky" else 0o1777)
    if exposed == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(tmp_path / "open", 65534, 65534)
    cache.use(tmp_path / "open" / "mine", None, places.append)
    assert cache.cached(original) == original
    assert f"others can rename what is in {tmp_path / 'open'}" in places[0]
