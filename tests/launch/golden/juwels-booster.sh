#!/bin/bash
# A training, started by meshrun with:
#   meshrun submit digits --nodes 2 --site juwels-booster --account project --runs /scratch/project/runs
# config.json in its run directory holds all options. Submitted again by hand (sbatch job.sh), it goes on from its
# newest checkpoint.
# Site: JUWELS Booster (JSC).

#SBATCH --job-name=digits-1
#SBATCH --nodes=2
# One task a node: a launcher, which starts the node's ranks and replaces those that are lost.
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=96
#SBATCH --time=01:00:00
#SBATCH --partition=booster
#SBATCH --account=project
# What this shell and the launchers print; appended, since a requeued job keeps its number.
#SBATCH --output=/scratch/project/runs/digits-1/logs/slurm-%j.out
#SBATCH --open-mode=append
# After preemption, or the loss of the first node, Slurm starts the job anew, and it goes on.
#SBATCH --requeue
# The loss of another node does not end the job: the rest goes on without it.
#SBATCH --no-kill
# So many seconds before the end this shell is told, should the training not have stopped by itself by then.
#SBATCH --signal=B:USR2@120

set -euo pipefail
trap 'echo "meshrun: the job ends, since line $LINENO of its script failed: $BASH_COMMAND" >&2' ERR
# Slurm 22.05 to 23.02 give a step one core a task, whatever the job was granted.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# Compute nodes have no internet: what is to be downloaded is there (meshrun stage), or is missed at once.
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export TRANSFORMERS_OFFLINE=1
export WANDB_MODE=offline

RUN=/scratch/project/runs/digits-1
# -P: no modules are taken from the working directory, where others may have put some.
PYTHON=(/project/venv/bin/python -P)

STEP=(
    # All nodes get what this shell exports, also where sbatch was given --export=NONE.
    --export=ALL
    # Launchers notice by themselves when one of them is lost; Slurm must not end the rest.
    --no-kill --kill-on-bad-exit=0 --wait=0
    # A launcher may use all cores of its node that were granted, and shares them out.
    --cpu-bind=none
)

# What Slurm tells this shell reaches the training, on whatever nodes it runs, as a file that it looks for.
# What an earlier job was told, and how it ended, holds no more.
rm -f "$RUN/stop" "$RUN/stopped.json"
ask_to_stop() {
    told=yes
    # Renamed, so that it is there with its word: one without is a person's, who wants the run to rest.
    if [[ ! -e $RUN/stop ]]; then
        echo slurm >"$RUN/.stop"
        mv "$RUN/.stop" "$RUN/stop"
    fi
}
trap ask_to_stop USR2 TERM

# A node that does not see the run directory is named here, before anything starts.
status=0
srun --export=ALL ls "$RUN/config.json" >/dev/null || status=$?
if ((status != 0)); then
    echo "meshrun: the nodes named above cannot see $RUN; runs must be on a disk that all nodes share (--runs)" >&2
else
    srun "${STEP[@]}" "${PYTHON[@]}" -m meshrun resume "$RUN" --from-start &
    step=$!
    # A signal ends `wait`, and not the step: wait again, unless it was the step that ended.
    told=yes
    while [[ $told == yes ]]; do
        told=no status=0
        wait "$step" || status=$?
    done
fi

# Complete, failed, or to be gone on with: this decides, says so, and its exit status is the job's.
exec "${PYTHON[@]}" -m meshrun next "$RUN" --status "$status"
