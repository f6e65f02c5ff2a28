"""The command `unisono`; it imports only what the given subcommand needs."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys

from lit_models.commands import COMMANDS, check_rendezvous, run_command
from lit_models.config_files import did_you_mean, near_names, shipped_configs
from lit_models.errors import UsageError, run_guarded, usage_errors

VERBS = {
    "fit": "train, from the start or from a checkpoint",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "write predictions for new data to a file",
}


def run(argv: list[str]) -> int | None:
    """Runs one command line.

    Raises:
        UsageError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = {**VERBS, **{name: text for name, (_, text) in COMMANDS.items()}}
        width = max(map(len, commands))
        lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items())
        configs = "\n".join(f"  {name}" for name in shipped_configs())
        print(
            "usage: unisono COMMAND --config FILE [--config FILE …] [--KEY=VALUE …]\n\n"
            "A YAML file describes a run; later files, then command-line options override it.\n"
            "`unisono COMMAND --help` shows the main options, --print_config all of them.\n\n"
            f"commands:\n{lines}\n\nshipped configs:\n{configs}"
        )
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(f"unisono {version('unisono')}")
        return 0
    name = argv[0]
    # Classes in the working folder are found, as by `python -m`; last, to hide no package.
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    if name in VERBS:
        # Threads that busy-wait make a step 20 times slower as soon as another program uses a core
        # (0.17 s became 3.3 s on two cores). OpenMP reads this when torch loads it.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # A forked dataloader worker can hang on the background thread of Arrow's jemalloc.
        os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
        # Blocks whose sizes vary from step to step fragment a GPU's memory. The allocator reads
        # this variable at its first allocation, after the older PYTORCH_CUDA_ALLOC_CONF.
        if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        with usage_errors():
            check_rendezvous(os.environ)
        module = "engines" if any(word.startswith("--engine") for word in argv) else "cli"
        return int(importlib.import_module(f"lit_models.{module}").launch(argv))
    known = [*VERBS, *COMMANDS]
    if name not in known:
        near = did_you_mean(near_names(name, known))
        raise UsageError(f"there is no command `{name}`.{near}\nCommands: {', '.join(known)}")
    return run_command(name, argv[1:])


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    # Print Python stacks if native code crashes; the variable does so for child processes.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    return run_guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
