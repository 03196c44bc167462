"""The node's own folders: told from the kernel's list of mounts, whatever variables call them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrun.errors import UserError
from meshrun.world import disks
from meshrun.world.disks import ROOM, Disk, choose, file_system_of, is_shared, node_folders
from meshrun.world.profile import Site, Value

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
fs1 /p/scratch gpfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/nvme0 /local\\040disk xfs rw 0 0
over /p/scratch/over ext4 rw 0 0
other /p/scratch/over lustre rw 0 0
"""
MEMORY = Disk("memory", Path("/dev/shm"), "tmpfs", 64 << 30)
LOCAL = Disk("TMPDIR", Path("/local/job-17"), "xfs", 900 << 30)
FULL = Disk("TMPDIR", Path("/local/job-17"), "xfs", 1 << 20)
ON_LUSTRE = Disk("TMPDIR", Path("/lustre/tmp"), "lustre", 900 << 30)
SMALL_TMP = Disk("/tmp", Path("/tmp"), "tmpfs", 1 << 30)
GONE = Disk("SLURM_TMPDIR", Path("/nowhere"), "", -1)


@pytest.mark.parametrize(
    ("path", "kind"),
    {
        "/p/scratch/me/x.h5": "gpfs",
        "/p/scratch2": "ext4",
        "/home": "nfs4",
        "/local disk/x": "xfs",
        "/dev/shm/a": "tmpfs",
        "/p/scratch/over/x": "lustre",
    }.items(),
)
def test_a_path_is_on_the_file_system_that_was_mounted_nearest_to_it_and_last(path: str, kind: str):
    assert file_system_of(path, MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs_nodev", "ceph", "fuse.sshfs", "cifs", "9p"])
def test_file_systems_on_servers_are_shared(kind: str):
    assert is_shared(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "fuse.squashfuse", "btrfs", "zfs", ""])
def test_file_systems_of_a_node_are_not(kind: str):
    assert not is_shared(kind)


def test_folders_of_the_job_come_before_tmp_and_a_site_knows_best():
    site = Site("mine", "Mine", {"node_folder": Value("/local/${USER}/$JOB", "seen", True)})
    env = {"TMPDIR": "/t", "SLURM_TMPDIR": "/s", "LOCAL_SCRATCH": "relative", "USER": "me", "JOB": "17"}
    assert list(node_folders(env, site).values()) == [Path("/local/me/17"), Path("/s"), Path("/t"), Path("/tmp")]
    assert list(node_folders({}, None).values()) == [Path("/tmp")]
    assert list(node_folders({}, site).values()) == [Path("/tmp")], "what its folder is called is not known here"


@pytest.mark.parametrize(
    ("cache", "found", "chosen"),
    [
        ("none", [LOCAL], None),
        ("auto", [GONE, ON_LUSTRE, LOCAL], LOCAL.path),
        ("auto", [ON_LUSTRE, SMALL_TMP], MEMORY.path),
        ("auto", [FULL], MEMORY.path),
        ("auto", [Disk("TMPDIR", Path("/run/job"), "tmpfs", 2 * ROOM), LOCAL], LOCAL.path),
        ("tmp", [ON_LUSTRE, FULL], FULL.path),
        ("memory", [LOCAL], MEMORY.path),
        ("/somewhere/else", [LOCAL], Path("/somewhere/else")),
    ],
)
def test_copies_go_to_the_nodes_own_disk_with_room_and_else_to_memory(
    cache: str, found: list[Disk], chosen: Path | None
):
    assert choose(cache, found, MEMORY) == chosen


def test_without_room_anywhere_the_first_folder_of_the_node_will_say_so():
    assert choose("auto", [FULL], Disk("memory", Path("/dev/shm"), "tmpfs", ROOM - 1)) == FULL.path


def test_a_node_without_a_folder_of_its_own_is_refused_with_what_was_seen():
    with pytest.raises(UserError, match=r"TMPDIR \(/lustre/tmp\) is on lustre.*SLURM_TMPDIR .*not there.*memory"):
        choose("tmp", [ON_LUSTRE, GONE], MEMORY)


def test_a_folder_is_seen_with_its_room_and_one_that_is_not_there_without(tmp_path: Path):
    here = disks.look("TMPDIR", tmp_path, disks.mounts())
    assert here.free > 0 and here.kind
    assert disks.look("TMPDIR", tmp_path / "gone", disks.mounts()).free == -1


def test_a_folder_that_cannot_be_written_to_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert disks.look("TMPDIR", tmp_path, disks.mounts()).free == -1
