"""Versions: what is installed, what is known to be bad, what the project was tested with."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from lit_models.doctoring.findings import Finding, ok

# Never to be run: uploads under the name of a release that were not its makers'.
MALICIOUS = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
CORE = ("torch", "lightning", "torchmetrics", "transformers", "jsonargparse", "numpy")
PROJECT = "unisono"


def check(version_of: Callable[[str], str] = version) -> list[Finding]:
    """Return findings on Python and the installed packages.

    Args:
        version_of: package name -> its version; PackageNotFoundError where it is not installed.
    """
    versions = {name: _version(name, version_of) for name in [*CORE, *MALICIOUS]}
    found = {name: value for name, value in versions.items() if value is not None}
    shown = ", ".join(f"{name} {found[name]}" for name in CORE if name in found)
    findings = [ok("python", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    bad = {name for name, value in found.items() if value in MALICIOUS.get(name, ())}
    others = {name: value for name, value in found.items() if name not in bad}
    faults = [*_malicious(found), *_outside_of_range(others)]
    return [*findings, *(faults or [ok("packages", shown)])]


def _version(name: str, version_of: Callable[[str], str]) -> str | None:
    """Return the version of a package, none where it is not installed."""
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def _malicious(found: dict[str, str]) -> list[Finding]:
    return [
        Finding(
            "packages",
            "error",
            f"{name} {found[name]} is installed",
            "this upload was malicious: whoever imported it may have lost keys and tokens",
            f"pip install '{name}>=2.6.4,<2.7', then change every secret of this machine",
        )
        for name, bad in MALICIOUS.items()
        if found.get(name) in bad
    ]


def _outside_of_range(found: dict[str, str]) -> list[Finding]:
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        wanted = [Requirement(line) for line in requires(PROJECT) or []]
    except PackageNotFoundError:
        return [
            Finding(
                "packages",
                "warning",
                "unisono runs from a folder that is not installed",
                "the versions that it needs cannot be compared",
                "pip install -e . in that folder",
            )
        ]
    ranges = {w.name: w.specifier for w in wanted if w.marker is None}
    return [
        Finding(
            "packages",
            "error",
            f"{name} {installed} is outside of {ranges[name]}",
            "unisono was never run with it",
            f"pip install '{name}{ranges[name]}'",
        )
        for name, installed in found.items()
        if name in ranges and not ranges[name].contains(Version(installed), prereleases=True)
    ]
