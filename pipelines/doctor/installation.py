"""What is installed: our package, Python, the libraries of each extra, and settings in the environment. Imports none of them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pipelines.doctor.findings import Finding

__all__ = ["Requirement", "check_extras", "check_installation", "check_packages", "requirements"]

_GROUP = "installation"
_DISTRIBUTION = "imagepivot"
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([\w, -]+)\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_COLLECTIONS = ("all", "dev")
_SHOWN = ("numpy", "pyarrow", "torch", "torchvision", "timm", "pillow", "apache-beam", "sacremoses")
_SETTINGS = re.compile(
    r"IMAGEPIVOT_\w+|TORCH_HOME|HF_\w+|TMPDIR|OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_\w+|NVIDIA_VISIBLE_DEVICES|PYTHONPATH|"
    r"AWS_\w+|STORAGE_EMULATOR_HOST|GOOGLE_\w+|CLOUDSDK_\w+|(?:https?|all|no)_proxy",
    re.IGNORECASE,
)


class Requirement(NamedTuple):
    """A distribution that is required.

    Attributes:
        name: its name.
        bounds: the versions that will do, as pip takes them; empty for any.
        extras: its own extras that are required.
        extra: the extra of ours that requires it; empty if the package itself does.
    """

    name: str
    bounds: str = ""
    extras: tuple[str, ...] = ()
    extra: str = ""


def requirements(lines: Iterable[str] | None = None) -> tuple[Requirement, ...]:
    """Return what our package and its extras require on this Python.

    Args:
        lines: requirements as metadata have them; by default those of the installed package.
    """
    if lines is None:
        try:
            lines = distribution(_DISTRIBUTION).requires or ()
        except PackageNotFoundError:  # Files without metadata.
            lines = ()
    found = []
    for line in lines:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None:
            continue
        name, extras, bounds, marker = (text or "" for text in match.groups())
        extra = _EXTRA.search(marker)
        if "python_version" in marker and not _holds(marker, extra[1] if extra else ""):
            continue
        bounds = bounds.strip("()")
        found.append(Requirement(name, bounds, tuple(re.findall(r"[\w-]+", extras)), extra[1] if extra else ""))
    return tuple(found)


def check_installation() -> Iterator[Finding]:
    """Find out which version of our package runs, on what, and which settings it finds in the environment."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    folder = str(Path(__file__).resolve().parents[2])
    values = {"python": platform.python_version(), "system": system, "folder": folder, "executable": sys.executable}
    try:
        ours = version(_DISTRIBUTION)
    except PackageNotFoundError:
        found = f"not installed, its files lie in {folder}; Python {values['python']}, {system}"
        yield Finding(_GROUP, "imagepivot", "problem", found, f"pip install {folder}", {"version": None, **values})
        return
    found = f"{ours} in {folder}, Python {values['python']}, {system}"
    yield Finding(_GROUP, "imagepivot", "ok", found, values={"version": ours, **values})
    if names := sorted(name for name in os.environ if _SETTINGS.fullmatch(name)):
        found = f"set in the environment (values are not shown): {', '.join(names)}"
        yield Finding(_GROUP, "settings", "ok", found, values={"variables": names})


def check_packages(required: Iterable[Requirement], installed: Mapping[str, str | None] | None = None) -> Iterator[Finding]:
    """Find out which libraries are installed, and whether their versions will do.

    Args:
        required: from `requirements`.
        installed: versions of distributions, None for those that are missing; by default as they are installed.
    """
    required = [one for one in required if one.extra not in _COLLECTIONS and one.name != _DISTRIBUTION]
    versions = installed if installed is not None else {one.name: _version(one.name) for one in required}
    there = {one.name: version for one in required if (version := versions.get(one.name)) is not None}
    wrong = {one.name: one for one in required if one.name in there and one.bounds and not _fits(there[one.name], one.bounds)}
    for name, one in sorted(wrong.items()):
        package = f"{_DISTRIBUTION}[{one.extra}]" if one.extra else _DISTRIBUTION
        found = f"{name} {there[name]} is installed, expected {one.bounds}"
        values = {"name": name, "version": there[name], "bounds": one.bounds}
        yield Finding(_GROUP, "packages", "note", found, f"pip install --upgrade '{package}'", values)
    shown = ", ".join(f"{name} {there[name]}" for name in _SHOWN if name in there)
    yield Finding(_GROUP, "packages", "ok", shown or "none", values=dict(sorted(there.items())))


def check_extras(
    required: Iterable[Requirement], needed: Mapping[str, str], installed: Mapping[str, str | None] | None = None
) -> Iterator[Finding]:
    """Find out which extras are installed, and whether those are that something needs.

    Args:
        required: from `requirements`.
        needed: what is asked for, in words, by the extra that it needs.
        installed: as `check_packages` takes it.
    """
    lacking: dict[str, list[str]] = {}
    required = list(required)
    for extra in sorted({one.extra for one in required} - {"", *_COLLECTIONS}):
        names = sorted(_names(extra, required))
        versions = installed if installed is not None else {name: _version(name) for name in names}
        lacking[extra] = [name for name in names if versions.get(name) is None]
    for extra, what in needed.items():
        if missing := lacking.get(extra):
            found = (
                f"{what} needs the extra {extra}, of which {_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
            advice, values = f"pip install '{_DISTRIBUTION}[{extra}]'", {"extra": extra, "missing": missing}
            yield Finding(_GROUP, "extras", "problem", found, advice, values)
    if lacking:
        there = ", ".join(extra for extra, missing in lacking.items() if not missing) or "none"
        rest = ", ".join(extra for extra, missing in lacking.items() if missing)
        found = f"installed: {there}" + (f"; not installed: {rest}" if rest else "")
        yield Finding(_GROUP, "extras", "ok", found, values=lacking)


def _names(extra: str, required: Iterable[Requirement]) -> set[str]:
    """Return the distributions that an extra of ours brings, by way of its other extras and of those of others, too."""
    names: set[str] = set()
    for one in required:
        if one.extra != extra:
            continue
        if one.name == _DISTRIBUTION:
            names.update(*(_names(other, required) for other in one.extras))
            continue
        names.add(one.name)
        if one.extras and _version(one.name) is not None:
            names.update(other.name for other in requirements(distribution(one.name).requires) if other.extra in one.extras)
    return names


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fits(found: str, bounds: str) -> bool:
    """Return whether a version is within bounds; yes where the package that tells versions apart is not installed."""
    if find_spec("packaging") is None:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(bounds).contains(found, prereleases=True)


def _holds(marker: str, extra: str) -> bool:
    """Return whether a requirement is one of this Python; no where that cannot be told: only old versions have such."""
    if find_spec("packaging") is None:
        return False
    from packaging.markers import Marker

    return Marker(marker).evaluate({"extra": extra})
