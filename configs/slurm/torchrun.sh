#!/bin/bash
# {{title}}
# Written by `unisono submit`, for machines without SLURM. From the folder where that was called,
# which all machines share:
#   {{usage}}
# The same command again goes on where the run was.
{{activate}}

{{python}} -c 'import lit_models' || {
  echo "there is no unisono on $(uname -n): {{missing}}" >&2
  exit 1
}

# Restarted ranks would else read the addresses of those before them, and half the restarts fail.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

{{arguments}}
{{command}}
