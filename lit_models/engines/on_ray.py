"""Runs on Ray, whose workers are the ranks of one run and may come and go.

A worker is a rank as torchrun starts it, alone on its node. The process group and the run folder
are this project's, not Ray's. The folder lies on storage that all workers share: a world that grew,
shrank or lost a worker resumes from the newest checkpoint there.
"""

import math
import os
import re
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_models import cli
from lit_models.commands import RUN_OPTIONS, arguments_of
from lit_models.commands.report import best_of, read_run, shown
from lit_models.config_files import (
    ROOT,
    expand_configs,
    flat,
    given_value,
    load_yaml,
    one_word_each,
)
from lit_models.engines.jobs import check_options, world_sizes
from lit_models.errors import UsageError, usage_errors
from lit_models.training.ledger import ledger_of

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
try:
    import ray
    import ray.train
    import ray.tune
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise UsageError("--engine=ray needs Ray: pip install 'unisono[ray]'.") from error

SPACES = ("uniform", "loguniform", "quniform", "randint", "lograndint", "choice")
LOOKS_EVERY = 50  # steps between checks for a leaving node; they synchronize workers


def launch(argv: list[str]) -> int:
    """Run fit, validate, test or predict on Ray; `argv` has `--engine=ray` and the options of
    `on_ray`, such as `--engine.workers=4`.

    Raises:
        UsageError: an option is wrong.
    """
    verb, *words = argv
    words = one_word_each(words)
    own = [word.replace("engine.", "", 1) for word in words if word.startswith("--engine.")]
    with usage_errors():
        arguments = arguments_of(own, on_ray)
        options = expand_configs([word for word in words if not word.startswith("--engine")])
    if unknown := arguments[RUN_OPTIONS]:
        raise UsageError(f"there is no option {unknown[0].replace('--', '--engine.')}.")
    return on_ray(**arguments | {RUN_OPTIONS: [verb, *options]})


def on_ray(
    *,
    run_options: list[str] | None = None,
    workers: str = "1",
    address: str = "local",
    resize_s: float = 60.0,
    max_failures: int = 8,
    tune: dict | None = None,
    trials: int = 1,
) -> int:
    """Run on the workers of a Ray cluster, each of which is one rank.

    Args:
        run_options: the verb and its options.
        workers: number of ranks; 1:8 is the fewest and the most of a run that grows and shrinks.
        address: address of a cluster to join, such as auto; `local` starts one on this machine.
        resize_s: seconds between checks whether there is room for more workers.
        max_failures: number of failures of workers after which the run is given up.
        tune: option of the run -> values to try, such as loguniform(1e-4, 1e-2) or choice(8, 16).
            Each trial has one worker and a run folder of its own.
        trials: number of trials of `tune`.

    Returns:
        The exit status.

    Raises:
        UsageError: an option is wrong.
        RuntimeError: the run failed on its workers.
    """
    verb, *options = run_options or ["fit"]
    fewest, most = world_sizes(workers, "--engine.workers")
    check_options(options, verb, "--engine.workers", "--engine.workers")
    for processes in {1} if tune else {fewest, most}:
        cli.check_run([verb, *options, *world_of(processes)], processes)
    with usage_errors():
        run = cli.chosen_run([verb, *options])
        folder = Path(run.folder).absolute()
        spaces = {name: space(name, values) for name, values in flat(tune or {})}
    options += [f"--{ROOT}={folder}"]
    if run.ckpt_path and verb != "fit":  # `auto` could then mean a later run's
        options += [f"--ckpt_path={Path(run.ckpt_path).absolute()}"]
    ray.init(address)
    takes_gpus = (given_value(options, "trainer.accelerator") or "auto") != "cpu"
    has_gpus = takes_gpus and "GPU" in ray.cluster_resources()
    try:
        if spaces:
            return sweep([verb, *options], folder, spaces, trials, has_gpus)
        options += ["--ckpt_path=auto"] if verb == "fit" else []
        return (
            DataParallelTrainer(
                be_a_rank,
                train_loop_config={"argv": [verb, *options], "place": os.getcwd()},
                backend_config=Rendezvous(),
                scaling_config=ray.train.ScalingConfig(
                    num_workers=(fewest, most) if fewest < most else most,
                    use_gpu=has_gpus,
                    elastic_resize_monitor_interval_s=resize_s,
                ),
                run_config=ray.train.RunConfig(
                    name=f"{verb}-{uuid.uuid4().hex[:8]}",
                    storage_path=str(folder / "ray"),
                    failure_config=ray.train.FailureConfig(max_failures=max_failures),
                ),
            )
            .fit()
            .return_value
        )
    except ray.train.TrainingFailedError as error:
        failures = getattr(error, "worker_failures", {})
        what = next((f"rank {rank}: {failure}" for rank, failure in failures.items()), str(error))
        raise RuntimeError(f"the run failed on its workers. {what}") from error
    finally:
        ray.shutdown()


def world_of(size: int) -> list[str]:
    """Return the options for a world of so many ranks, each alone on its node."""
    return ["--trainer.devices=1", f"--trainer.num_nodes={size}"]


class Rendezvous(BackendConfig):
    """Ray backend that only tells workers where rank 0 listens: the process group is our own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return RendezvousBackend


class RendezvousBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Choose a free port of the first worker's node."""
        address, port = worker_group.execute_single(0, free_address)
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        worker_group.execute(set_environ, place)


def free_address() -> tuple[str, int]:
    """Return the address of this node and a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def set_environ(values: dict[str, str]) -> None:
    """Add variables to the environment of the worker that runs this."""
    os.environ |= values


def be_a_rank(config: dict[str, Any]) -> int:
    """Run a command line on a worker under its rank; return the exit status."""
    context = ray.train.get_context()
    rank = str(context.get_world_rank())
    os.environ |= {"RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(context.get_world_size()), "LOCAL_WORLD_SIZE": "1"}
    os.environ["TORCHELASTIC_RUN_ID"] = context.get_experiment_name()
    os.chdir(config["place"])
    sys.path += [config["place"]]
    return cli.launch(config["argv"] + world_of(context.get_world_size()), ReportingCLI)


class RayReports(Callback):
    """Reports the metrics of each validation to Ray, and saves when a node is about to leave."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        ledger = ledger_of(trainer)
        is_time = trainer.global_step % LOOKS_EVERY == 0
        if is_time and ledger is not None and ray.train.get_preemption_info() is not None:
            ledger.wants_save = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        place = {"step": trainer.global_step, "run": trainer.default_root_dir}
        if not trainer.sanity_checking:
            ray.train.report({**metrics, **place})


class ReportingCLI(cli.UnisonoCLI):
    """Command line of a rank that reports to Ray."""

    def _default_callbacks(self) -> list[Callback]:
        return [*super()._default_callbacks(), RayReports()]


def space(name: str, values: Any) -> Any:
    """Return Ray Tune's search space for a text such as `choice(8, 16)`.

    Raises:
        UsageError: the text describes no search space.
    """
    match = re.fullmatch(r"(\w+)\((.*)\)", str(values))
    if not match or match[1] not in SPACES:
        raise UsageError(
            f"--engine.tune: {name} must be one of {', '.join(SPACES)} with its values, such as "
            f"loguniform(1e-4, 1e-2) or choice(8, 16), got {values}."
        )
    given = load_yaml(f"[{match[2]}]", name)
    return ray.tune.choice(given) if match[1] == "choice" else getattr(ray.tune, match[1])(*given)


def sweep(run: list[str], root: Path, spaces: dict[str, Any], trials: int, has_gpus: bool) -> int:
    """Train once for each trial of `spaces`, option -> search space, and print the trials, best
    first. Each trial has a run folder below `root` and, if there are GPUs, one of them."""
    place = os.getcwd()

    def be_a_trial(config: dict[str, Any]) -> dict[str, str]:
        os.chdir(place)
        sys.path.append(place)
        number = ray.tune.get_context().get_trial_id().rpartition("_")[2]
        folder = root / f"trial-{number}"
        given = [f"--{name}={value}" for name, value in config.items()]
        cli.launch([*run, *given, *world_of(1), f"--{ROOT}={folder}"])
        return {"run": str(folder)}

    results = ray.tune.Tuner(
        ray.tune.with_resources(be_a_trial, {"cpu": 1, "gpu": int(has_gpus)}),
        param_space=spaces,
        tune_config=ray.tune.TuneConfig(num_samples=trials),
        run_config=ray.tune.RunConfig(name="tune", storage_path=str(root / "ray")),
    ).fit()
    done = [(read_run(Path(r.metrics["run"]), 0.0), r.config) for r in results if not r.error]
    rows = [(best_of(record) or (0, math.nan), record, config) for record, config in done]
    sign = 1 if any(record.monitor[1] == "min" for record, _ in done) else -1

    def order(row: Any) -> float:  # the best first, one without an evaluation last
        return math.inf if math.isnan(row[0][1]) else sign * row[0][1]

    for (step, value), record, config in sorted(rows, key=order):
        values = {n: shown(v) if isinstance(v, float) else v for n, v in config.items()}
        given = "  ".join(f"{name}={text}" for name, text in values.items())
        print(f"{record.monitor[0]} {shown(value)} at step {step:,.0f}  {record.folder}  {given}")
    for result in results:
        if result.error:
            print(f"failed: {result.config}: {result.error}", file=sys.stderr)
    return int(bool(results.errors))
