"""Runs the `__init__` of torchmetrics when something of it is asked for, not at `import`.

Lightning and this project need one class of torchmetrics, `Metric`, and two of its neighbours. The
package's `__init__` imports every metric there is, and scipy.signal and transformers where they are
installed: a third of `import lightning`, in every process of every run, and no switch leaves it
out. The hook below is the documented one of importlib. Nothing is replaced and nothing is missing:
`import torchmetrics` gives the module that it always gives, with the names of LIGHT in it; the
first question for another name runs the `__init__`, in the same module.
"""

import importlib
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "torchmetrics"
# Modules below the package -> the names that its `__init__` takes from them, in the order in which
# they can be imported one by one: `metric` and `utilities` import each other.
LIGHT = {
    "__about__": ("__version__",),
    "utilities": (),
    "metric": ("Metric",),
    "collections": ("MetricCollection",),
}


class LateLoader(Loader):
    """Loads the package without its `__init__`, which runs at the first name that is missing.

    Args:
        loader: the loader that Python itself chose for the package.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader

        vars(module)["_logger"] = logging.getLogger(PACKAGE)
        try:
            for below, names in LIGHT.items():
                part = importlib.import_module(f"{PACKAGE}.{below}")
                vars(module).update({name: getattr(part, name) for name in names})
        except (ImportError, AttributeError):  # another version: as it would be without this file
            self.loader.exec_module(module)
            return

        # No deadlock with the locks of imports: modules below ask it for names of LIGHT alone.
        lock, running = threading.RLock(), False

        def run_init(name: str) -> Any:
            """Answers for a name that the module has not, by having all of them; another thread
            waits for them. An `__init__` that fails is run again by the next question."""
            nonlocal running
            # Whoever inspects modules asks for names like __wrapped__, which are never there.
            if name.startswith("__") and name != "__all__":
                raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
            with lock:
                # Not where another thread was first, nor where the `__init__` asks for it itself.
                if not running and "__getattr__" in vars(module):
                    running = True
                    try:
                        self.loader.exec_module(module)
                        vars(module).pop("__getattr__")
                    finally:
                        running = False
            if name in vars(module):
                return vars(module)[name]
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = run_init


class LateFinder(MetaPathFinder):
    """Finds torchmetrics where Python finds it, and gives it the late loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == PACKAGE else None
        if spec is not None and spec.loader is not None:
            spec.loader = LateLoader(spec.loader)
        return spec


def install() -> None:
    """Makes the import of torchmetrics a late one; what is imported already stays as it is."""
    if not any(isinstance(finder, LateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LateFinder())
