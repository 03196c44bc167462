#!/bin/bash
# A training, started by meshrun with:
#   meshrun submit digits --nodes 2 --gpus-per-node 4 --time 2h --runs /scratch/project/runs
# config.json in its run directory holds all options. Submitted again by hand (sbatch job.sh), it goes on from its
# newest checkpoint.

#SBATCH --job-name=digits-1
#SBATCH --nodes=2
# One task a node: a launcher, which starts the node's ranks and replaces those that are lost.
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --time=02:00:00
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
