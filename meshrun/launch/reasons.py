"""What Slurm's own words mean, as data: why it rejects a job, and why one waits.

explain("sbatch: error: invalid partition specified: gpu")     # its words, and what to do
pending("QOSMaxGRESPerUser")                                    # "your jobs hold as many GPUs as …"
"""

from __future__ import annotations

import re

REJECTIONS: tuple[tuple[str, str], ...] = (
    (r"invalid partition", "sinfo -s lists the partitions (--partition)"),
    (
        r"invalid account|account/partition combination|not.*valid.*account|no account|project.*(invalid|expired)",
        "sacctmgr show associations user=$USER lists your accounts (--account)",
    ),
    (r"invalid qos", "sacctmgr show qos lists them, and your account must be allowed to use it (--qos)"),
    (
        r"requested time limit is invalid|time limit.*(exceed|invalid)|MaxWall|invalid --time",
        "the partition or QOS allows less; sinfo -o '%P %l' shows the limits (--time)",
    ),
    (
        r"node configuration is not available|node count specification invalid|more processors requested",
        "no nodes of the partition have that many GPUs, cores or nodes; sinfo -o '%P %D %c %G' shows what they have "
        "(--nodes, --gpus-per-node, --cpus-per-gpu)",
    ),
    (
        r"invalid generic resource|gres.*(invalid|specification)|invalid trackable resource",
        "the site asks for GPUs in another form; sinfo -o '%P %G' shows theirs, and a profile says it (meshrun sites)",
    ),
    (r"invalid feature|feature.*specification", "sinfo -o '%P %f' lists the nodes' features (--constraint)"),
    (r"invalid node name", "the node is none of this cluster (--sbatch --nodelist or --exclude)"),
    (
        r"violates accounting|accounting/QOS policy|AssocMax|QOSMax|QOSMin|limit on .*(cpu|gpu|node|job)",
        "your account or QOS may not use that much at once; ask for less, or for another QOS (--nodes, --time, --qos)",
    ),
    (r"job array", "the cluster allows fewer elements in an array; give fewer values (--sweep)"),
    (r"reservation", "scontrol show reservation lists them (--sbatch --reservation)"),
    (r"memory specification|memory.*(required|invalid)", "ask for memory as the site wants it (--sbatch --mem=…)"),
    (r"unrecognized option|invalid option", "this sbatch does not know it (--sbatch)"),
    (
        r"unable to contact|connection refused|timed out|slurm_persist|zero bytes were transmitted",
        "the Slurm controller does not answer at the moment; try again in a minute",
    ),
    (r"access denied|permission denied|not permitted|user.*not.*valid", "you may not submit there; ask the site"),
    (r"temporarily unable|resource temporarily|max.*job", "too many jobs are in the queue; try again later"),
)
"""What stands in Slurm's words, and what to do about it."""

PENDING: tuple[tuple[str, str], ...] = (
    ("Resources", "it is next, once enough nodes are free"),
    ("Priority", "jobs of a higher priority are before it"),
    ("Dependency", "it waits for another job to end"),
    ("DependencyNeverSatisfied", "the job that it waits for has not ended as it should; cancel it (meshrun cancel)"),
    ("BeginTime", "it may start in a moment; a requeued job waits until its nodes are clean"),
    ("JobHeldUser", "it is held by you; scontrol release lets it go"),
    ("JobHeldAdmin", "an administrator holds it; ask the site"),
    (
        "PartitionTimeLimit",
        "its time is above the partition's limit, so it will never start; cancel it and ask for less",
    ),
    ("PartitionNodeLimit", "it asks for more nodes than the partition gives one job, so it will never start"),
    ("PartitionDown", "the partition is down"),
    ("PartitionInactive", "the partition takes no jobs at the moment"),
    ("ReqNodeNotAvail", "nodes that it needs are down, reserved or in maintenance before it would end"),
    ("Reservation", "it waits for its reservation"),
    ("NodeDown", "a node that it needs is down"),
    ("Licenses", "it waits for a license"),
    ("QOSMaxWallDurationPerJobLimit", "its time is above the limit of the QOS, so it will never start"),
    ("QOSMinGRES", "it asks for fewer GPUs than the QOS wants, so it will never start"),
    ("QOSMax", "you hold, or ask for, as much as the QOS allows (%r)"),
    ("QOSGrp", "all users of the QOS together hold as much as it allows (%r)"),
    ("QOSUsageThreshold", "the QOS has used up what it was given"),
    ("QOSNotAllowed", "the partition does not take this QOS, so it will never start"),
    ("QOSJobLimit", "the QOS has as many jobs as it may have"),
    ("AssocMaxWallDurationPerJobLimit", "its time is above the limit of your account, so it will never start"),
    ("AssocMax", "your account allows you no more at once (%r)"),
    ("AssocGrp", "all users of your account together hold or have used as much as it allows (%r)"),
    ("AssociationJobLimit", "your account has as many jobs as it may have"),
    ("InvalidAccount", "the account is not valid any more, so it will never start"),
    ("InvalidQOS", "the QOS is not valid any more, so it will never start"),
    ("AccountNotAllowed", "the partition does not take this account, so it will never start"),
    ("JobArrayTaskLimit", "as many elements of the array run as may at once"),
    ("launch failed requeued held", "its last start failed on a node, and Slurm holds it; scontrol release lets it go"),
    ("JobLaunchFailure", "it could not be started on its node"),
    ("BadConstraints", "no nodes are what it asks for, so it will never start"),
    ("MaxJobsPerAccount", "your account has as many jobs as it may have"),
    ("Prolog", "the nodes are being prepared"),
    ("None", "Slurm has not looked at it yet"),
)
"""Reasons of waiting jobs, whole or as their beginning, and what they mean; the longest that fits holds."""


def explain(said: str) -> str:
    """A rejection as a sentence: Slurm's own words, and what to do."""
    words = _own_words(said)
    advice = next((advice for pattern, advice in REJECTIONS if re.search(pattern, said, re.IGNORECASE)), "")
    return f"Slurm rejects the job: {words or 'without a word'}" + (f"; {advice}" if advice else "")


def pending(reason: str) -> str:
    """Why a job waits, in words; the reason itself where it is none that we know."""
    fitting = [(known, means) for known, means in PENDING if reason.startswith(known)]
    if not fitting:
        return f"Slurm says {reason}"
    return max(fitting, key=lambda pair: len(pair[0]))[1].replace("%r", reason)


def _own_words(said: str) -> str:
    """The sentences of an error, less what every command of Slurm puts before them."""
    lines = [
        re.sub(r"^(s[a-z]+|allocation failure)(: (error|fatal))?: ", "", line.strip()) for line in said.splitlines()
    ]
    lines = [line.removeprefix("Batch job submission failed: ").rstrip(".") for line in lines]
    kept = [line for line in lines if line and not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(kept))
