#!/bin/bash
# {{ name }}, {{ resources }}
# Written by `unisono submit`. Submit it from the folder where that was called:
#   sbatch {{ path }}
#SBATCH --job-name={{ name }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
#SBATCH --nodes={{ resources.most }}
{% if nodelist %}
#SBATCH --nodelist={{ nodelist }}
{% endif %}
#SBATCH --ntasks-per-node={{ resources.tasks }}
{% if gpus_per_node %}
#SBATCH --gpus-per-node={{ gpus_per_node }}
{% endif %}
{% if resources.cpus %}
#SBATCH --cpus-per-task={{ resources.cpus }}
{% endif %}
#SBATCH --time={{ time_limit }}
#SBATCH --signal=B:USR1@{{ save_ahead_s }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err

# SLURM sends its warning before the time limit to this script alone, which passes it on and repeats
# it every ten seconds: srun loses signals that come before its tasks are there, and a run that has
# received one ignores the others. All processes of a cancelled job get TERM: the script waits until
# the run has saved.
step= signals=0 asked=no run= again=
pass_on() {
  signals=$((signals + 1)) asked=yes
  [ -n "$step" ] && kill -USR1 "$step" 2>/dev/null || return
  [ -n "$again" ] || { repeat >/dev/null 2>&1 & again=$!; }
}
repeat() {
  while sleep 10 && kill -USR1 "$step"; do :; done
}
trap pass_on USR1
trap 'signals=$((signals + 1))' TERM

# 75: the run was asked to stop and has saved. Above 128: the warning came before it could listen,
# or SLURM gives the node to another job, which ends a stage that does not train.
finish() {
  [ -z "$again" ] || kill "$again" 2>/dev/null
  [ $1 -gt 128 ] && [ $asked = no ] &&
    scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]' && asked=yes
  if [ $1 = 75 ] || { [ $asked = yes ] && [ $1 -gt 128 ]; }; then
    for try in 1 2 3 4 5; do
      state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && break
      state=unknown
      sleep 5
    done
    if [ "$state" = RUNNING ]; then # not if it was cancelled
      echo "job $SLURM_JOB_ID ended with status $1 and is requeued: it goes on"
      scontrol requeue "$SLURM_JOB_ID" && exit
    elif [ "$state" = unknown ]; then
      there=${run:+, with --trainer.default_root_dir=$run}
      echo "job $SLURM_JOB_ID ended with status $1 and is not requeued: squeue does not say" \
        "whether it was cancelled. To go on, call unisono submit as before$there" >&2
    fi
  fi
  exit $1
}

{% for line in activate or [] %}
{{ line }}
{% endfor %}
{% if activate %}

{% endif %}
{{ python }} -c 'import lit_models' || {
  echo "there is no unisono on $(uname -n): give unisono submit the lines that find it with --activate" >&2
  exit 1
}
{% if run_folder %}
run={{ run_folder }} # the same however often the job is requeued
{% endif %}
[ $signals = 0 ] || finish 138 # too late to start

{{ command }} &
step=$!
[ $asked = no ] || pass_on # it came before the run

# A signal ends `wait` early: the run's own status is that of a `wait` without a signal.
while
  before=$signals
  wait "$step"
  status=$?
  [ $signals != $before ]
do :; done
finish $status
