"""The texts that a virtual cluster is made of: Slurm's configuration, the names of its nodes, what a node does at boot.

    plan = Plan(folder, nodes=4, gpus=4, cpus=8)
    for name, text in files(plan).items():
        (folder / "etc" / name).write_text(text)

All functions are pure. Paths below /run and /etc/slurm are those of a node, which has them for itself (see
`room_script`): so every cluster has the same configuration, and its programs need no variable to find it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

CONTROL = "ctl"
"""The node of slurmctld, where people log in and submit from."""
FAST, SLOW = "10.77.0", "10.78.0"
"""The two networks. Nobody outside of the cluster sees them, so several clusters may have the same."""
SLOW_RATE = "200mbit"
OF_CONTROL = 100
"""The last number of the control node's address; a node's is its own number."""
DEVICES = "/run/cluster/dev"
"""The fake GPUs: Slurm wants a character device for each."""
MEMORY_MIB = 4000


@dataclass(frozen=True)
class Plan:
    """What a virtual cluster has."""

    folder: Path
    """Where all its files are."""
    nodes: int = 4
    gpus: int = 4
    """Of each node; fakes, which Slurm counts and hands out like real ones."""
    cpus: int = 8
    """Of each node, as far as Slurm knows: nothing is bound to them."""
    name: str = "virtual"
    """What Slurm calls it."""
    networks: int = 1
    """2: every node has also a slow `eth1`, and the name n1s there."""
    config: tuple[str, ...] = ()
    """More lines for slurm.conf; of two that say the same the last one counts."""

    @property
    def workers(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def everyone(self) -> list[str]:
        return [CONTROL, *self.workers]

    def number(self, node: str) -> int:
        return OF_CONTROL if node == CONTROL else int(node.removeprefix("n"))

    def address(self, node: str, network: str = FAST) -> str:
        return f"{network}.{self.number(node)}"


def files(plan: Plan) -> dict[str, str]:
    """What lies in /etc/slurm on every node, and the table of host names."""
    return {
        "slurm.conf": slurm_conf(plan),
        "gres.conf": gres_conf(plan),
        # Without it Slurm asks systemd for cgroups, and there is no systemd.
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        "hosts": hosts(plan),
        "task_prolog": task_prolog(plan),
    }


def slurm_conf(plan: Plan) -> str:
    """One controller, no accounting, and everything that waits does so for seconds."""
    where = plan.folder.resolve()
    gres = f" Gres=gpu:a100:{plan.gpus}" if plan.gpus else ""
    lines = [
        f"ClusterName={plan.name}",
        f"SlurmctldHost={CONTROL}({plan.address(CONTROL)})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        # A requeued job waits until the credentials of its last life are void: 2 minutes unless told.
        "AuthInfo=cred_expire=5",
        f"StateSaveLocation={where}/state",
        f"SlurmdSpoolDir={where}/spool/%n",
        f"TmpFS={where}/tmp/%n",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.%n.pid",
        f"SlurmctldLogFile={where}/log/slurmctld.log",
        f"SlurmdLogFile={where}/log/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "TaskProlog=/etc/slurm/task_prolog",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={where}/log/jobcomp.log",
        # What a partition does not allow is refused at once, as sites have it, and does not pend for ever.
        "EnforcePartLimits=ALL",
        "JobRequeue=1",
        "ReturnToService=2",
        "SlurmctldTimeout=30",
        "SlurmdTimeout=10",
        "KillWait=5",
        "InactiveLimit=0",
        "SchedulerType=sched/backfill",
        # sched_min_interval is in microseconds: a job that is submitted starts within a tenth of a second.
        "SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        *(["GresTypes=gpu"] if plan.gpus else []),
        # The machine has fewer cores than its nodes say.
        "SlurmdParameters=config_overrides",
        "PropagateResourceLimits=NONE",
        f"NodeName=n[1-{plan.nodes}] NodeAddr={FAST}.[1-{plan.nodes}] CPUs={plan.cpus} RealMemory={MEMORY_MIB}"
        f"{gres} State=UNKNOWN",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP",
        "PartitionName=short Nodes=ALL MaxTime=5 State=UP",
        *plan.config,
    ]
    return "".join(f"{line}\n" for line in lines)


def gres_conf(plan: Plan) -> str:
    """GPUs without a device file are refused, and without the flag nobody is told which ones are theirs."""
    if not plan.gpus:
        return ""
    return f"Name=gpu Type=a100 File={DEVICES}/nvidia[0-{plan.gpus - 1}] Flags=nvidia_gpu_env\n"


def hosts(plan: Plan) -> str:
    """Every node by its name, and with an `i` after it as sites call the address on the fast network."""
    lines = ["127.0.0.1 localhost", *(f"{plan.address(node)} {node} {node}i" for node in plan.everyone)]
    if plan.networks > 1:
        lines += [f"{plan.address(node, SLOW)} {node}s" for node in plan.everyone]
    return "".join(f"{line}\n" for line in lines)


def task_prolog(plan: Plan) -> str:
    """Each node has a temporary folder of its own: /tmp is the disk that all nodes share."""
    return f'#!/bin/sh\nprintf "export TMPDIR=%s/%s\\n" {_quoted(plan, "tmp")} "$(hostname)"\n'


def room_script(plan: Plan) -> str:
    """What the first process does: it makes the room that all nodes stand in, with its switches, and then only waits.

    Its file systems are seen by the nodes but not by this machine; when it ends, the kernel ends all that is in it.
    """
    lines = [
        "set -e",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir -p /run/munge {DEVICES}",
        *(f"mknod {DEVICES}/nvidia{index} c 1 3" for index in range(plan.gpus)),
        f"mount --bind {_quoted(plan, 'etc')} /etc/slurm",
        f"mount --bind {_quoted(plan, 'etc/hosts')} /etc/hosts",
        "ip link set lo up",
        *(f"ip link add br{index} type bridge && ip link set br{index} up" for index in range(plan.networks)),
        f"munged --key-file={_quoted(plan, 'etc/munge.key')} --log-file={_quoted(plan, 'log/munged.log')}"
        " --pid-file=/run/munge/munged.pid --seed-file=/run/munge/seed --num-threads=2",
        *_ready_and_waiting(plan, "room"),
    ]
    return "\n".join(lines)


def node_script(plan: Plan, node: str, shm: str) -> str:
    """What the first process of a node does: it waits for its cables, brings them up, and then only reaps orphans."""
    cables = [(f"eth{index}", network) for index, network in enumerate((FAST, SLOW)[: plan.networks])]
    lines = [
        "set -e",
        f"hostname {node}",
        f"rm -f /run/slurmd.{node}.pid",
        f"mount -t tmpfs -o size={shlex.quote(shm)} tmpfs /dev/shm",
        # /sys shows the network interfaces of whoever mounted it.
        "mount -t sysfs sysfs /sys",
        "ip link set lo up",
        *_ready(plan, node),
        *(f"until ip link show {cable} >/dev/null 2>&1; do sleep 0.01; done" for cable, _ in cables),
        *(f"ip addr add {plan.address(node, network)}/24 dev {cable}" for cable, network in cables),
        *(f"ip link set {cable} up" for cable, _ in cables),
        *([f"tc qdisc add dev eth1 root {bucket(SLOW_RATE)}"] if plan.networks > 1 else []),
        *_ready_and_waiting(plan, f"{node}.wired"),
    ]
    return "\n".join(lines)


def bucket(rate: str) -> str:
    """How a cable is made slow."""
    return f"tbf rate {rate} burst 256kb latency 100ms"


def cable_names(plan: Plan, node: str) -> list[str]:
    """The switches' ends of a node's cables."""
    return [f"v{index}-{node}" for index in range(plan.networks)]


def _ready(plan: Plan, what: str) -> list[str]:
    return [f"touch {_quoted(plan, f'run/{what}')}"]


def _ready_and_waiting(plan: Plan, what: str) -> list[str]:
    """A shell that waits also reaps what loses its parent, as the first process of a machine must."""
    return [*_ready(plan, what), "set +e", "while :; do sleep 3600 & wait $!; done"]


def _quoted(plan: Plan, inside: str) -> str:
    return shlex.quote(str(plan.folder.resolve() / inside))
