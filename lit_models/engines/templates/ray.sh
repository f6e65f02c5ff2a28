#!/bin/bash
# {{ name }}, {{ resources }}
# Written by `unisono submit`. Submit it from the folder where that was called, which is sent along:
#   {{ hand_in }}
# Workers may come later, leave and come back: the run goes on from its newest checkpoint. So does
# the same line after all of them have ended.

{{ python }} -c 'import lit_models' || {
  echo "there is no unisono on $(uname -n): install it there, or submit from its checkout" >&2
  exit 1
}
{% if run_folder %}
run={{ run_folder }} # the same however often the job is started
{% endif %}
exec {{ python }} -m lit_models fit --engine=ray --engine.address=auto \
  --engine.workers={{ resources.tasks * resources.fewest }}:{{ resources.tasks * resources.most }} --engine.max_failures={{ max_restarts }} \
  {{ command }}
