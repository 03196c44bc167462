"""Site profiles: those that come with meshrun, a user's own, and what is refused in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshrun.errors import UserError
from meshrun.world import sites, walltime
from meshrun.world.profile import KEYS, Detect, Partition
from meshrun.world.profile_file import from_document, to_text

NO_HOME = {"HOME": "/nowhere"}
SAID = {"source": "a test", "verified": True}


def own(folder: Path, name: str, text: str) -> dict[str, str]:
    """An environment in which the user has a profile of that name."""
    (folder / "meshrun/sites").mkdir(parents=True, exist_ok=True)
    (folder / "meshrun/sites" / f"{name}.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


@pytest.mark.parametrize("name", sites.names(NO_HOME))
def test_every_shipped_profile_says_where_each_value_is_from(name: str):
    site = sites.load(name, NO_HOME)
    assert site.title != name and site.get("gpus_per_node") in (4, 8)
    for key, value in site.statements():
        assert value.source, f"{name}: {key} has no source"
        if value.verified:
            assert "elsewhere" not in value.source and not value.source.startswith("a user"), f"{name}: {key}"
    for value in (*site.environment.values(), *site.srun):
        assert value.reason, "a line of a job script that is not obvious has its reason"
    assert site.detect.source and (site.detect.host or site.detect.cluster or site.detect.environment)
    chosen = site.get("partition")
    assert chosen is None or not site.partitions or site.partition(chosen) is not None
    assert site.get("cores_per_gpu") * site.get("gpus_per_node") == site.get("cores_per_node")


@pytest.mark.parametrize("name", sites.names(NO_HOME))
def test_a_profile_that_is_written_and_read_again_says_the_same(name: str):
    site = sites.load(name, NO_HOME)
    assert from_document(name, tomllib.loads(to_text(site)), site.file) == site


def test_a_site_is_recognised_by_what_is_set_and_by_the_short_name_of_the_host():
    lab = Detect(host=("^login1$",), environment={"LAB": "^.*$"})
    assert lab.matches({}, None, "login1.lab.example") and lab.matches({"LAB": ""}, None, "x")
    assert not lab.matches({}, None, "x")


def test_the_ten_sites_are_there():
    ours = "clariden engaging jean-zay jupiter jureca-dc juwels-booster karolina leonardo lumi-g perlmutter"
    assert sites.names(NO_HOME) == ours.split()


def test_a_profile_knows_values_limits_and_what_is_not_verified():
    lumi = sites.load("lumi-g", NO_HOME)
    assert lumi.get("socket_interface") == "hsn" and lumi.get("host_suffix") is None
    assert lumi.partition("dev-g") is not None and lumi.partition("dev-g").max_seconds == 3 * 3600
    assert lumi.environment["NCCL_NET_GDR_LEVEL"].value == "3"
    assert [name for name, _ in sites.load("juwels-booster", NO_HOME).unverified()].count("socket_interface") == 1
    with pytest.raises(KeyError):
        lumi.get("gpus")


def test_an_unknown_site_is_refused_with_near_names():
    with pytest.raises(UserError, match=r"there is no site 'juwels'; did you mean juwels-booster.*\(--site\)"):
        sites.load("juwels", NO_HOME)
    with pytest.raises(UserError, match=r"'xyzzy'; known are clariden, engaging, .*sites probe --save"):
        sites.load("xyzzy", NO_HOME)
    with pytest.raises(UserError, match=r"there is no site '\.\./\.\./secret'"):
        sites.load("../../secret", NO_HOME)


def test_a_users_own_profile_is_found_and_replaces_ours_by_name(tmp_path: Path):
    env = own(tmp_path, "lumi-g", 'title = "mine"')
    assert sites.load("lumi-g", env).title == "mine"
    env = own(tmp_path / "another", "lab", 'title = "the lab"\n[detect]\ncluster = ["^lumi$"]\n')
    assert "lab" in sites.names(env) and len(sites.names(env)) == 11
    assert sites.load("lumi-g", env).detect.matches(env, "lumi", "somewhere")
    assert sites.found_here(env, "lumi", "somewhere").title == "the lab", "a user's own is asked first"


@pytest.mark.parametrize(
    "env, cluster, host, name",
    [
        ({"SYSTEMNAME": "juwelsbooster"}, None, "jwlogin01", "juwels-booster"),
        ({}, None, "jwlogin22.juwels", "juwels-booster"),
        ({}, "lumi", "uan01", "lumi-g"),
        ({"NERSC_HOST": "perlmutter"}, None, "login12", "perlmutter"),
        ({"SYSTEMNAME": "juwels"}, "juwels", "jwlogin01", None),
        ({}, None, "laptop", None),
        ({}, "", "", None),
    ],
)
def test_a_machine_is_recognised(env: dict[str, str], cluster: str | None, host: str, name: str | None):
    found = sites.found_here(NO_HOME | env, cluster, host)
    assert (found and found.name) == name


BAD = [
    ({"gpus_per_nod": {"value": 4}}, "unknown key 'gpus_per_nod'; did you mean 'gpus_per_node'"),
    ({"zzz": 1}, "unknown key 'zzz'; it may have gpu, "),
    ({"gpus_per_node": 4}, "gpus_per_node is 4; it must be a table with value, source, verified"),
    ({"gpus_per_node": {"value": "4"}}, "gpus_per_node is '4'; it must be a whole number"),
    ({"gpus_per_node": {"value": -1}}, "must be a whole number of at least 0"),
    ({"gpus_per_node": {"value": True}}, "gpus_per_node is True"),
    ({"gpus_per_node": {"source": "x"}}, "gpus_per_node has no value"),
    ({"gpus_per_node": {"value": 4, "sorce": "x"}}, "unknown key 'sorce'"),
    ({"gpus_per_node": {"value": 4, "verified": "yes"}}, "verified is 'yes'; it must be true or false"),
    ({"needs_account": {"value": 1}}, "needs_account is 1; it must be true or false"),
    ({"partition": {"value": "a b"}}, "partition is 'a b'; it must be one word"),
    ({"partition": {"value": "a;b"}}, "it must be one word"),
    ({"partition": {"value": "$(id)"}}, "it must be one word"),
    ({"constraint": {"value": "a100 || true"}}, "constraint is"),
    ({"title": "two\nlines"}, "title is 'two\\\\nlines'; it must be a text of one line"),
    ({"scratch_note": {"value": "x\x1b[2J"}}, "scratch_note is"),
    ({"chain": {"value": "again"}}, "chain is 'again'; it must be requeue or submit"),
    ({"gpu_request": {"value": "--gres=gpu:4"}}, r"flag with \{n\} such as --gres=gpu:\{n\}, or none"),
    ({"gpu_request": {"value": "--gres={n}:{n}"}}, "must be one word"),
    ({"gpu_request": {"value": "gpu:{n}"}}, "must be one flag"),
    ({"cpu_masks": {"value": ["fe", "xyz"]}}, "cpu_masks has 'xyz'"),
    ({"cpu_masks": {"value": ["0xfe", "fe;id"]}}, "cpu_masks has 'fe;id'"),
    ({"modules": {"value": ["rm -rf /"]}}, "modules has 'rm -rf /'; it must be a line such as"),
    ({"modules": {"value": ["module load a; id"]}}, "modules has"),
    ({"environment": {"A B": {"value": "x"}}}, "exports 'A B'"),
    ({"environment": {"A": {"value": "$(id)"}}}, r"environment A is .*no quotes, backslash or other \$"),
    ({"environment": {"A": {"value": "`id`"}}}, "environment A is"),
    ({"environment": {"A": {"value": 'x"; id; "'}}}, "environment A is"),
    ({"environment": {"A": {"value": "x\ny"}}}, "environment A is"),
    ({"srun": [{"value": "-n 5"}]}, "srun 1 is '-n 5'; it must be one word"),
    ({"srun": [{"value": "id"}]}, "srun 1 is 'id'; it must be one flag"),
    ({"srun": {"value": "--x"}}, "srun is .*; it must be a list"),
    ({"partitions": [{"name": "a"}, {"max_time": "1:00"}]}, "partition 2 has no name"),
    ({"partitions": [{"name": "a", "max_time": "a day"}]}, "max_time 'a day' is no time such as 90"),
    ({"partitions": [{"name": "a", "gpus": 4}]}, "unknown key 'gpus'"),
    ({"partitions": [{"name": "a", "nodes": "many"}]}, "nodes is 'many'"),
    ({"detect": {"host": ["("]}}, r"detect: '\(' is not a regular expression"),
    ({"detect": {"host": "x"}}, "host is 'x'; it must be a list"),
]


@pytest.mark.parametrize("document, said", BAD, ids=[str(at) for at in range(len(BAD))])
def test_what_cannot_stand_in_a_profile_is_refused_by_name(document: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said) as refusal:
        from_document("here", document)
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("site profile here")


def test_variables_may_stand_in_exported_values_and_features_be_combined():
    exported = {"A": {"value": "/tmp/x-${USER} y^z", **SAID}}
    site = from_document("here", {"environment": exported, "constraint": {"value": "a100&nvme", **SAID}})
    assert site.environment["A"].value == "/tmp/x-${USER} y^z" and site.get("constraint") == "a100&nvme"


def test_bad_toml_and_an_unreadable_file_are_one_sentence(tmp_path: Path):
    env = own(tmp_path, "broken", "title = [1\nx")
    with pytest.raises(UserError, match=r"site profile .*broken\.toml is not valid TOML: .*line 2"):
        sites.load("broken", env)
    (tmp_path / "meshrun/sites/folder.toml").mkdir()
    with pytest.raises(UserError, match=r"folder\.toml cannot be read: it is no plain file"):
        sites.load("folder", env)
    os.mkfifo(tmp_path / "meshrun/sites/pipe.toml")
    with pytest.raises(UserError, match=r"pipe\.toml cannot be read: it is no plain file"):
        sites.load("pipe", env)


@pytest.mark.parametrize(
    "text, seconds",
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216000), ("1-00:30", 88200), ("1-12:00:00", 129600)],
)
def test_slurms_times_are_read(text: str, seconds: int):
    assert walltime.parse(text) == seconds
    assert walltime.parse(walltime.text(seconds)) == seconds


def test_times_without_limit_and_times_that_are_none():
    assert walltime.parse("UNLIMITED") is walltime.parse("infinite") is None
    assert walltime.text(None) == "UNLIMITED" and walltime.text(129600) == "1-12:00:00"
    assert Partition("a").max_seconds is None and Partition("a", "infinite").max_seconds is None
    for bad in ("", "1h", "1:2:3:4", "-5", "a-1", "1-", "1:-2"):
        with pytest.raises(ValueError, match="is no time such as"):
            walltime.parse(bad)


def test_every_key_is_explained():
    assert all(text and text[-1] != "." for text in KEYS.values())


def test_a_profile_is_read_at_once_and_without_torch():
    times = []
    for _ in range(5):
        began = time.process_time()
        sites.load("clariden", NO_HOME)
        times.append(time.process_time() - began)
    assert min(times) < 0.1
    code = "import sys, meshrun.world.sites as s; s.load('lumi-g'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
