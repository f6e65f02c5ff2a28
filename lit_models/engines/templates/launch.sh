{# torchrun of a job; `meeting` and `is_host` are shell words of targets without --rendezvous. #}
{% for line in activate or [] %}
{{ line }}
{% endfor %}
{{ python }} -c 'import lit_models' || {
  echo "there is no unisono on $(uname -n): give unisono submit the lines that find it with --activate" >&2
  exit 1
}
{% if run_folder %}
run={{ run_folder }} # the same however often the job is started
{% endif %}
# Without this, half of the restarts fail: the ranks of two worlds meet in one store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec {{ python }} -m torch.distributed.run --nnodes={{ resources.nodes }} --nproc_per_node={{ resources.tasks }} \
  --max_restarts={{ max_restarts }} --rdzv_backend=c10d --rdzv_id={{ path.parent.name }} \
{% if meeting is defined %}
  --rdzv_endpoint="{{ meeting }}" --rdzv_conf="read_timeout=600,is_host={{ is_host }}" \
{% else %}
  --rdzv_endpoint={{ rendezvous }} --rdzv_conf=read_timeout=600 \
{% endif %}
  -m lit_models fit \
  {{ command }} \
  --trainer.num_nodes=auto --trainer.devices=auto
