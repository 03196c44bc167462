"""Texts of launchers, of Slurm's commands and of people: host lists, layouts, times, variables, site profiles."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshrun.config import read_toml, seconds_in, whole_number
from meshrun.data.order import Order
from meshrun.errors import UserError
from meshrun.launch.nodes import nodes_of
from meshrun.launch.probe import CONFIG, NODES, PARTITIONS, probe
from meshrun.launch.slurm import Slurm, is_preempted, is_requeued, shown
from meshrun.layout import parse
from meshrun.observe.failures import told_in
from meshrun.world import grants, slurm, walltime
from meshrun.world.detect import detect
from meshrun.world.hostlist import expand_hosts, expand_tasks
from meshrun.world.profile_file import from_document, to_text
from meshrun.world.sites import SHIPPED
from tests.fuzz.engine import Format, WrongValue
from tests.fuzz.mutations import of_json, of_text


def text_of(data: bytes) -> str:
    """As a process gets its arguments, its variables and what others print."""
    return data.decode(errors="surrogateescape")


def _reads(read: Callable[[str], Any]) -> Callable[[bytes, Path], Any]:
    return lambda data, _: read(text_of(data))


def _examples(*texts: str) -> Callable[[Path], Sequence[bytes]]:
    return lambda _: [text.encode() for text in texts]


def _layout(text: str) -> Any:
    layout = parse(text)
    for size in (1, 8, 10**9):
        try:
            found = layout.resolve(size)
        except UserError:
            continue
        if found.size != size:
            raise WrongValue(f"{found} is not of {size} ranks")
    if parse(str(layout)) != layout:
        raise WrongValue(f"{layout} is another layout when it is read again")
    return layout


def _walltime(text: str) -> int | None:
    try:
        found = walltime.parse(text)
    except ValueError as error:
        raise UserError(str(error)) from None
    if (found or 0) < 10**10 and walltime.parse(walltime.text(found)) != found:
        raise WrongValue(f"{found} s are others when they are written and read again")
    return found


def _numbers(text: str) -> Any:
    seconds = seconds_in(text)
    if seconds is not None and not 0 < seconds < 1e18:
        raise WrongValue(f"{seconds} is no time")
    return seconds, whole_number(text)


def _shuffle(text: str) -> Any:
    return Order.of(range(1000), 8, 1, text).batch_ids(3)  # type: ignore[arg-type]


VARIABLES = (
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "29500", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
     "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7",
     "SLURM_RESTART_COUNT": "1", "SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_END_TIME": "17e8"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "x"},
    {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "5"},
)  # fmt: skip


def _variables(text: str) -> Any:
    env = json.loads(text) if text.startswith("{") else {}
    env = {str(name): str(value).replace("\0", "") for name, value in env.items()} if isinstance(env, dict) else {}
    grants.granted(env)
    grants.settings(env)
    slurm.gpus_on_node(env)
    slurm.restart_count(env)
    slurm.told_end_of_job(env)
    slurm.place_in_job(env)
    world = detect(env, "n1")
    if not 0 <= world.rank < world.size or not 0 <= world.node < world.nodes:
        raise WrongValue(f"{world} is no place in a job")
    return world


def _read_variables(data: bytes, _: Path) -> Any:
    try:
        return _variables(text_of(data))
    except (ValueError, RecursionError) as error:  # the input is no table of variables: nothing to read
        if isinstance(error, json.JSONDecodeError | UnicodeEncodeError | RecursionError):
            return None
        raise


def _profile(text: str) -> Any:
    try:
        document = read_toml(text)
    except ValueError as error:
        raise UserError(f"not valid TOML: {error}") from None
    site = from_document("mine", document)
    site.detect.matches({"X": "y"}, "cluster", "login1")
    again = from_document("mine", read_toml(to_text(site)))
    if again.values != site.values:
        raise WrongValue("the profile is another one when it is written and read again")
    return site


def _answers(stdout: str, code: int = 0) -> Any:
    return lambda *_: subprocess.CompletedProcess([], code, stdout, "")


def _squeue(text: str) -> Any:
    jobs = Slurm(_answers(text)).jobs()
    return [(job.over, job.nodes, str(job.script)) for job in jobs]


def _scontrol(text: str) -> Any:
    about = shown(text)
    return is_preempted(about), is_requeued(about, 1), slurm.end_of_job({"SLURM_JOB_ID": "7"}, lambda *_: text)


def _submitted(text: str) -> Any:
    job = Slurm(_answers(text)).submit(Path("job.sh"))
    if not job.isalnum():
        raise WrongValue(f"{job!r} is no job")
    return job


def _cluster(text: str) -> Any:
    """What `scontrol show config`, `sinfo` and `scontrol show partition` say, one after the other."""
    of_cluster, of_nodes, of_partitions = [*text.split("\x1e"), "", "", ""][:3]
    answers = {CONFIG: of_cluster, NODES: of_nodes, PARTITIONS: of_partitions}
    return to_text(probe(lambda *words: answers.get(words, "")))


SQUEUE = "\x1f".join(
    ("17", "17_2", "RUNNING", "None", "1:00", "2:00:00", "2026-01-01T00:00:00", "2", "n[1-2]", "/runs/x-1/job.sh")
)
SCONTROL = (
    "JobId=7 JobName=x\n   UserId=me(1) Restarts=1 EndTime=2026-01-01T10:00:00\n   PreemptTime=None SuspendTime=None\n"
)
CLUSTER = "\x1e".join(
    (
        "Configuration data\nClusterName             = jsc\nJobRequeue              = 1\nSLURM_VERSION  = 22.05.8\n",
        "gpu|4|96|2:24:2|gpu:a100:4(S:0-1)|512000|idle\n",
        "PartitionName=gpu\n   AllowGroups=ALL Default=YES MaxTime=1-00:00:00 Nodes=n[1-4] TotalNodes=4 State=UP\n",
    )
)
LOG = "Traceback (most recent call last):\nmeshrun: rank 0 on n1 failed: ValueError: x\nmeshrun: done\n"

FORMATS = [
    Format("host-list", _examples("n[1-3,07-09]x,m5", "jwb[0001-0002]", "a[0-1]b[2-3]"), _reads(expand_hosts), of_text),
    Format("tasks", _examples("4(x2),3", "1", "2(x3)"), _reads(expand_tasks), of_text),
    Format("layout", _examples("dp=2,fsdp=4:zero2,tp=2", "pp=2:1f1b,dp=*", "cp=3"), _reads(_layout), of_text),
    Format("walltime", _examples("1-12:00:00", "90", "1:30:00", "UNLIMITED", "2-12"), _reads(_walltime), of_text),
    Format("times", _examples("90s", "10min", "1.5h", "17"), _reads(_numbers), of_text),
    Format("nodes", _examples("2", "1:4"), _reads(nodes_of), of_text),
    Format("shuffle", _examples("full", "window:100", "none", "window"), _reads(_shuffle), of_text),
    Format("launcher", lambda _: [json.dumps(each).encode() for each in VARIABLES], _read_variables, of_json),
    Format(
        "site-profile",
        lambda _: [path.read_bytes() for path in sorted(SHIPPED.glob("*.toml"))],
        _reads(_profile),
        of_text,
    ),
    Format("squeue", _examples(SQUEUE, f"{SQUEUE}\n{SQUEUE}\n"), _reads(_squeue), of_text),
    Format("scontrol", _examples(SCONTROL, "7 1794700000\n", "7 N/A\n"), _reads(_scontrol), of_text),
    Format("sbatch", _examples("4711\n", "4711;cluster\n", "a warning\n4711\n"), _reads(_submitted), of_text),
    Format("cluster", _examples(CLUSTER), _reads(_cluster), of_text),
    Format("log", _examples(LOG), _reads(lambda text: told_in(text.splitlines())), of_text),
]
