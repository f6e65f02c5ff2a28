"""Write a job's script for SLURM or torchrun, and submit it."""

from pathlib import Path


def submit(
    *,
    run_options: list[str] | None = None,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    tasks_per_node: int | None = None,
    cpus_per_task: int | None = None,
    node_gpus: int | None = None,
    exclusive: bool | None = None,
    nodelist: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    time_limit: str = "24:00:00",
    save_ahead_s: int = 300,
    activate: list[str] | None = None,
    name: str | None = None,
    scripts: Path | None = None,
    stage: list[str] | None = None,
    verb: str = "fit",
    dry_run: bool = False,
) -> int:
    """Write the script of a job, and put it into SLURM's queue.

    The job saves ahead of its time limit, is requeued and goes on in the same run folder until the
    run is complete. Beside it lies torchrun.sh, the same for machines without SLURM. The config of
    a chain becomes one job for each stage that is not complete, each after the one before it.

    Args:
        run_options: every other option is the run's, such as --config and --trainer.max_epochs=3.
        nodes: machines.
        gpus_per_node: GPUs of each, with one process for each GPU; without it, a job on CPUs.
        tasks_per_node: processes on each machine of a job on CPUs; 1 by default.
        cpus_per_task: CPU cores of each process.
        node_gpus: how many GPUs a machine has; without it sinfo is asked.
        exclusive: no other jobs on these machines; by default where all their GPUs are used.
        nodelist: machines that must be among them.
        partition: of the cluster.
        account: that the job is charged to.
        time_limit: of one job, such as 24:00:00, 90 (minutes) or 2-12 (days and hours).
        save_ahead_s: how long before the time limit the run is told to save.
        activate: a line for the job's shell, such as "source ~/venv/bin/activate"; repeatable.
        name: of the job and of its run folder, runs/NAME_JOBID.
        scripts: folder of the scripts; jobs/NAME by default.
        stage: devices of a stage, as dump:8; repeatable; those not named run on one device.
        verb: fit, validate, test or predict.
        dry_run: write the scripts and submit nothing.
    """
    from lit_models.scheduling.jobs import Job, requested, submit_run
    from lit_models.scheduling.stage_jobs import is_chain, submit_chain

    asked = requested(
        *(nodes, gpus_per_node, tasks_per_node, cpus_per_task, node_gpus, exclusive, nodelist),
        *(partition, account, time_limit, save_ahead_s),
    )
    job = Job(run_options or [], name, scripts, tuple(activate or ()), dry_run)
    if is_chain(job):
        return submit_chain(job, asked, stage or [], verb)
    return submit_run(job, asked, stage or [], verb)
