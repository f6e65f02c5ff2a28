"""From a command line to a run: finds the configs, settles the run folder, cleans up at the end."""

import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from lit_models import config_files
from lit_models.cli import TRUST, UnisonoCLI, brief_help, with_help_classes
from lit_models.errors import UsageError, is_first_process, say
from lit_models.training.checkpoints import checkpoint_to_use, newest_checkpoint
from lit_models.training.faults import REPEATED_WITHIN_S, REQUEUE_SIGNALS
from lit_models.training.ledger import ledger_of
from lit_models.training.lineage import stop_reason
from lit_models.training.rules import complete_rendezvous
from lit_models.training.run_folder import Run, check_writable, decide, locked, settle, withdraw

ONLY_PRINTS = ("--help", "--print_config", ".help")


NOISE = (
    "💡 Tip",
    "GPU available: ",  # the banner says what it runs on
    "TPU available: ",
    "HPU available: ",
    "torch.distributed.nn.functional.all_gather is deprecated",  # called by Lightning
    "`weights_only` was not set",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "Checkpoint directory",
    "The number of training batches",
    "The `srun` command is available on your system but is not used",
)


ROOT = "trainer.default_root_dir"
REQUEUE, INTERRUPTED = 75, 130  # "try again" of sysexits.h; 128 + SIGINT
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def launch(argv: list[str]) -> int:
    """Runs fit, validate, test or predict.

    Args:
        argv: the verb and its options.

    Returns:
        0; 75 on the first rank where a signal asked the run to end and it saved its state, so
        that whoever sent it starts it again, and under srun on all ranks; 130 after Ctrl-C.

    Raises:
        UsageError: the command line cannot be run.
    """
    try:
        argv = [argv[0], *config_files.expand_configs(with_value(argv[1:], f"--{TRUST}"))]
        if any(a in ("-h", "--help") for a in argv[1:]):
            print(brief_help(argv))
            return 0
        if any(a.split("=")[0].endswith(ONLY_PRINTS) for a in argv[1:]):
            UnisonoCLI(with_help_classes(argv), Run("runs"))
            return 0
        num_nodes = config_files.given_value(argv, "trainer.num_nodes")
        complete_rendezvous(os.environ, num_nodes if isinstance(num_nodes, int) else 1)
        root = run_root(argv)
        ckpt_path = config_files.given_value(argv, "ckpt_path")
        newest = newest_checkpoint if argv[0] == "fit" else checkpoint_to_use
        is_asked = config_files.given_option(argv, ROOT) is not None
        choose = partial(decide, argv[0], root, ckpt_path, newest, is_asked)
        choose_once = partial(locked, choose) if argv[0] == "fit" else choose
        run = settle(choose_once, os.environ, root.parent)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    is_stopped = run_and_end(argv, run, root.parent)
    return exit_status(Path(run.folder), is_stopped) if argv[0] == "fit" else 0


def with_value(argv: list[str], flag: str) -> list[str]:
    """Returns the arguments with `--flag=true` for a `--flag` that no value follows."""
    following = [*argv[1:], "--"]
    return [
        f"{word}=true" if word == flag and after.startswith("-") else word
        for word, after in zip(argv, following, strict=True)
    ]


def run_and_end(argv: list[str], run: Run, runs: Path) -> bool:
    """Starts a run that is settled, ends its process group, and clears what settling left.

    Args:
        argv: the verb and its options.
        run: with its folder.
        runs: the folder of all runs.

    Returns:
        whether all ranks decided to stop it.
    """
    is_over = False
    silence_noise(argv[0])
    try:
        if run.notice and is_first_process():
            say(run.notice)
        check_writable(Path(run.folder))
        passed_on = forward_signals()
        is_stopped = has_stopped(UnisonoCLI(argv, run))
        if signal.SIGUSR1 in passed_on:  # a handler would be gone before Python has ended
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if is_srun_rank(os.environ):
            end_together(is_stopped)
        # Without it a run that succeeded ends with status 134 now and then (gloo's threads).
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        is_over = True
    except Exception as error:
        error.__dict__["run_folder"] = run.folder  # for the traceback
        raise
    finally:
        withdraw(os.environ, runs, is_over)
    return is_stopped


def forward_signals() -> set[int]:
    """Hands signals on to spawned processes, which train while this one waits for them.

    SIGUSR1 is repeated by a job's script: once they have it, it does not end this process either.

    Returns:
        the signals that were handed on; more while they come.
    """
    first_interrupt: float | None = None
    passed_on: set[int] = set()

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal first_interrupt
        # Those that prepare batches are daemons: what trains is this process then.
        children = [c for c in multiprocessing.active_children() if not c.daemon]
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signum)
        if children:
            passed_on.add(signum)
        elif signum != signal.SIGUSR1 or signum not in passed_on:
            signal.signal(signum, before[signal.Signals(signum)])
            os.kill(os.getpid(), signum)
        if signum == signal.SIGINT:
            now, first = time.monotonic(), first_interrupt
            first_interrupt = first or now
            if first and now - first > REPEATED_WITHIN_S:
                # The second one ends the children without a result, which this one waits for.
                raise KeyboardInterrupt

    before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    return passed_on


def has_stopped(cli: UnisonoCLI) -> bool:
    """Returns whether all ranks decided to stop this training."""
    ledger = ledger_of(cli.trainer)
    return ledger is not None and ledger.is_stopping


def is_srun_rank(environ: Mapping[str, str]) -> bool:
    """Returns whether srun started this rank and others, and reads the exit status of each."""
    is_step = "SLURM_STEP_ID" in environ and "TORCHELASTIC_RUN_ID" not in environ
    return is_step and int(environ.get("SLURM_NTASKS") or 1) > 1


def end_together(is_stopped: bool) -> None:
    """Lets no signal change the exit status of a run that is over.

    With --kill-on-bad-exit srun ends all ranks as soon as one has ended with 75: those that are
    a moment later would end by that signal, and their status would hide that the run is saved.
    So the ranks of a stopped run wait until each has written what it had to. A run that is
    complete would be requeued for a warning that comes while Python ends.
    """
    for signum in REQUEUE_SIGNALS if is_stopped else (signal.SIGUSR1,):
        signal.signal(signum, signal.SIG_IGN)
    if is_stopped and dist.is_available() and dist.is_initialized():
        dist.barrier()


def exit_status(run: Path, is_stopped: bool) -> int:
    """Returns what this process ends with, and says how a stopped run goes on."""
    if not is_first_process():
        return REQUEUE if is_stopped and is_srun_rank(os.environ) else 0
    reason = stop_reason(run)
    if reason is None:
        return 0
    say(f"stopped by {reason}; everything is saved: the same command with --ckpt_path auto goes on")
    return INTERRUPTED if reason == signal.SIGINT.name else REQUEUE


def silence_noise(verb: str = "fit") -> None:
    """Drops Lightning's messages that tell the user of this command nothing."""
    if verb != "fit":  # it says that an evaluation elsewhere keeps no checkpoints
        warnings.filterwarnings("ignore", message="The dirpath has changed from ")
    for start in NOISE:
        warnings.filterwarnings("ignore", message=start.replace("(", r"\(").replace(")", r"\)"))
    for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logging.getLogger(f"lightning.pytorch.{name}").addFilter(is_no_noise)


def is_no_noise(record: logging.LogRecord) -> bool:
    """Returns whether a log record is worth showing."""
    return not record.getMessage().startswith(NOISE)


def run_root(argv: list[str]) -> Path:
    """Returns trainer.default_root_dir, by default runs/FAMILY-NAME of the first config file."""
    given = config_files.given_value(argv, ROOT)
    if given:
        return Path(str(given))
    paths = config_files.config_paths(argv)
    if not paths:
        return Path("runs") / "unnamed"
    family = paths[0].resolve().parent.name
    is_family = (Path(__file__).parent / family).is_dir()
    return Path("runs") / (f"{family}-{paths[0].stem}" if is_family else paths[0].stem)
