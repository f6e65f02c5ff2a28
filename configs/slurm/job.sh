#!/bin/bash
# {{title}}
# Written by `unisono submit`. Submit it from the folder where that was called:
#   sbatch {{path}}
#SBATCH --job-name={{name}}
#SBATCH --partition={{partition}}
#SBATCH --account={{account}}
#SBATCH --nodes={{nodes}}
#SBATCH --nodelist={{nodelist}}
#SBATCH --ntasks-per-node={{tasks_per_node}}
#SBATCH --gpus-per-node={{gpus_per_node}}
#SBATCH --cpus-per-task={{cpus_per_task}}
#SBATCH --exclusive{{exclusive}}
#SBATCH --time={{time_limit}}
#SBATCH --signal=B:USR1@{{save_ahead_s}}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err

# Signals come to this script alone: SLURM's warning ahead of the time limit (USR1) is passed on,
# and a cancelled job (TERM, which SLURM sends to all) stays until the run has saved.
step= signals=0 asked=no
pass_on() {
  signals=$((signals + 1)) asked=yes
  [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null
}
trap pass_on USR1
trap 'signals=$((signals + 1))' TERM

{{activate}}

run={{run_folder}} # the same however often the job is requeued

{{command}} &
step=$!
[ $asked = no ] || kill -USR1 "$step" 2>/dev/null

# A signal ends `wait` early: the step's own status is that of a `wait` that none disturbed.
while
  before=$signals
  wait "$step"
  status=$?
  [ $signals != $before ]
do :; done

# 75: the run was asked to stop and has saved. Above 128: the warning came before it could hear it.
if [ $status = 75 ] || { [ $asked = yes ] && [ $status -gt 128 ]; }; then
  for try in 1 2 3 4 5; do
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && break
    sleep 5
  done
  if [ "$state" = RUNNING ]; then # not one that was cancelled
    echo "job $SLURM_JOB_ID ended with status $status and is requeued: it goes on"
    scontrol requeue "$SLURM_JOB_ID" && exit
  fi
fi
exit $status
