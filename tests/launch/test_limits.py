"""What a cluster will not give, and Slurm's own words: each a sentence that says what would do."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.errors import UserError
from meshrun.launch.limits import node_local, refuse, refuse_without_account
from meshrun.launch.reasons import explain, pending
from meshrun.launch.submission import Resources
from meshrun.world.profile import Partition, Site, Value

ASKED = Resources(nodes=2, gpus_per_node=4, procs=4, seconds=3600)
PARTITIONS = (
    Partition("main", "1-00:00:00", 4, 10, default=True),
    Partition("short", "00:05:00", 4, 10),
    Partition("long", "UNLIMITED", 2, 10),
)
SITE = Site("here", "Here", {"gpus_per_node": Value(4, "", True), "needs_account": Value(True, "", True)})


def test_what_fits_is_not_refused():
    refuse(ASKED, None, PARTITIONS, known_all=True)
    refuse(replace(ASKED, partition="short", seconds=300), None, PARTITIONS, known_all=True)
    refuse(replace(ASKED, partition="elsewhere"), SITE, PARTITIONS, known_all=False)
    refuse(replace(ASKED, partition="elsewhere"), None, (), known_all=True)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"seconds": 301}, False),
        ({"nodes": 10}, True),
        ({"nodes": 11}, False),
        ({"gpus_per_node": 5}, False),
    ],
)
def test_a_limit_itself_may_be_asked_for_and_no_more(change: dict[str, int], fits: bool):
    asked = replace(ASKED, **{"partition": "short", "seconds": 300, **change})  # type: ignore[arg-type]
    said = "ends jobs after 00:05:00|but partition short has 10|of partition short has 4"
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match=said):
        refuse(asked, None, PARTITIONS, known_all=True)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no such partition": (
        {"partition": "nope"},
        "there is no partition 'nope'; there are main, short, long (--partition)",
    ),
    "more GPUs than a node has": (
        {"gpus_per_node": 8},
        "gpus_per_node is 8, but a node of partition main has 4; ask for more nodes instead (--gpus-per-node, --nodes)",
    ),
    "more than this partition's nodes have": (
        {"partition": "long"},
        "gpus_per_node is 4, but a node of partition long has 2; ask for more nodes instead (--gpus-per-node, --nodes)",
    ),
    "a time above the limit": (
        {"partition": "short"},
        "time is 01:00:00, but partition short ends jobs after 00:05:00; main or long would do (--partition); "
        "ask for less and go on in further jobs (--time, --until-done)",
    ),
    "more nodes than there are": ({"nodes": 11}, "nodes is 11, but partition main has 10 (--nodes, --partition)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_cluster_cannot_give_is_refused(case: str):
    changes, sentence = REFUSED[case]
    with pytest.raises(UserError) as refused:
        refuse(replace(ASKED, **changes), None, PARTITIONS, known_all=True)  # type: ignore[arg-type]
    assert str(refused.value) == sentence


def test_without_a_partition_the_limits_are_those_of_the_default_one():
    refuse(ASKED, None, PARTITIONS[::-1], known_all=True)
    with pytest.raises(UserError, match="a node of partition main has 4"):
        refuse(replace(ASKED, gpus_per_node=5), None, PARTITIONS[::-1], known_all=True)


def test_the_sites_word_on_gpus_holds_where_no_partition_is_known():
    with pytest.raises(UserError, match="a node of Here has 4"):
        refuse(replace(ASKED, gpus_per_node=5), SITE, (), known_all=False)


def test_an_account_is_asked_for_where_the_site_needs_one():
    with pytest.raises(UserError, match=r"^Here takes no job without an account; .* \(--account\)$"):
        refuse_without_account(ASKED, SITE, from_environment=False)
    refuse_without_account(ASKED, SITE, from_environment=True)
    refuse_without_account(replace(ASKED, account="me"), SITE, from_environment=False)
    refuse_without_account(ASKED, None, from_environment=False)


MOUNTS = "/dev/sda / ext4 rw 0 0\nnfs:/home /home nfs4 rw 0 0\ntmpfs /home/in\\040memory tmpfs rw 0 0\n"


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/tmp/runs", "/tmp is usually a node's own"),
        ("/dev/shm/x", "/dev/shm is usually a node's own"),
        ("/home/in memory/runs", "it is in this node's memory (tmpfs)"),
        ("/home/me/runs", ""),
        ("/tmpfolder/runs", ""),
    ],
)
def test_a_folder_that_other_nodes_may_not_see_is_known(folder: str, why: str):
    assert node_local(Path(folder), MOUNTS) == why


FAILED = "sbatch: error: Batch job submission failed: "
REJECTED = {
    f"sbatch: error: invalid partition specified: nope\n{FAILED}Invalid partition name specified\n": (
        "Slurm rejects the job: invalid partition specified: nope; Invalid partition name specified; "
        "sinfo -s lists the partitions (--partition)"
    ),
    f"{FAILED}Requested node configuration is not available": "(--nodes, --gpus-per-node, --cpus-per-gpu)",
    f"{FAILED}Invalid account or account/partition combination specified": "(--account)",
    f"{FAILED}Invalid qos specification": "(--qos)",
    f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)": "(--time)",
    "sbatch: error: Invalid generic resource (gres) specification": "(meshrun sites)",
    f"{FAILED}Invalid feature specification": "(--constraint)",
    f"sbatch: error: QOSMaxGRESPerUser\n{FAILED}Job violates accounting/QOS policy (job submit limit, user's size "
    "and/or time limits)": "(--nodes, --time, --qos)",
    "sbatch: unrecognized option '--foo=1'\nTry \"sbatch --help\" for more information": (
        "unrecognized option '--foo=1'; this sbatch does not know it (--sbatch)"
    ),
    f"{FAILED}Unable to contact slurm controller (connect failure)": "try again",
    "": "Slurm rejects the job: without a word",
    "sbatch: error: something new": "Slurm rejects the job: something new",
}


@pytest.mark.parametrize("said", REJECTED)
def test_a_rejection_is_slurms_own_words_and_what_to_do(said: str):
    sentence = explain(said)
    assert REJECTED[said] in sentence
    assert sentence.startswith("Slurm rejects the job: ") and "\n" not in sentence


@pytest.mark.parametrize(
    ("reason", "means"),
    [
        ("Resources", "it is next, once enough nodes are free"),
        ("Priority", "jobs of a higher priority are before it"),
        ("QOSMaxGRESPerUser", "you hold, or ask for, as much as the QOS allows (QOSMaxGRESPerUser)"),
        ("QOSMaxWallDurationPerJobLimit", "its time is above the limit of the QOS, so it will never start"),
        ("AssocGrpGRESMinutes", "all users of your account together hold or have used as much as it allows (AssocGrp"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", "nodes that it needs are down, reserved or in maintenance"),
        ("DependencyNeverSatisfied", "the job that it waits for has not ended as it should"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)
def test_a_reason_to_wait_is_explained(reason: str, means: str):
    assert pending(reason).startswith(means)
