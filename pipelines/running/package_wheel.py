"""Wheel of the running code, which Beam installs on remote workers.

The wheel is a zip of the files that this process runs, installed or editable. Writing it needs neither a build tool nor a network.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions, SetupOptions, WorkerOptions
from packaging.requirements import Requirement
from packaging.version import Version

DISTRIBUTION = "imagepivot"
"""Name of the distribution, and of the module that resolves the names of our packages."""

_PACKAGES = ("schemas", "extractors", "pipelines", "train")
_ROOT = Path(__file__).resolve().parents[2]
_DATE = (1980, 1, 1, 0, 0, 0)  # The earliest date of a zip: equal code gives equal bytes.
_PREINSTALLED = "apache-beam"  # On workers, before the wheel is installed.


def add_wheel(options: PipelineOptions, folder: Path, extras: Iterable[str]) -> None:
    """Add our wheel to a remote run, unless the user names an image or a wheel.

    Workers import its module first, so that no file of theirs shadows our packages. The wheel must exist until submission.
    """
    setup = options.view_as(SetupOptions)
    plugins = setup.beam_plugins or []
    setup.beam_plugins = [DISTRIBUTION, *(plugin for plugin in plugins if plugin != DISTRIBUTION)]
    packages = [Path(package).name for package in setup.extra_packages or ()]
    if _has_image(options) or any(name.startswith(f"{DISTRIBUTION}-") for name in packages):
        return
    setup.extra_packages = [*(setup.extra_packages or ()), str(build_wheel(folder, extras))]


def _has_image(options: PipelineOptions) -> bool:
    portable = options.view_as(PortableOptions)
    is_docker = (portable.environment_type or "DOCKER").upper() == "DOCKER"
    keys = [option.partition("=")[0] for option in portable.environment_options or ()]
    return bool(
        options.view_as(WorkerOptions).sdk_container_image
        or (is_docker and (portable.environment_config or "docker_container_image" in keys))
    )


def source_files() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of our files, sorted by name."""
    module = f"{DISTRIBUTION}.py"
    yield module, (_ROOT / module).read_bytes()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*")):
            name = path.relative_to(_ROOT)
            if path.is_file() and not any(
                part.startswith((".", "__pycache__")) or part.endswith(".pyc") for part in name.parts
            ):
                yield name.as_posix(), path.read_bytes()


def build_wheel(folder: Path, extras: Iterable[str]) -> Path:
    """Write a wheel of the running code to a folder, and return its path.

    It requires the packages of the extras in the installed versions, so that workers compute the same values.
    """
    installed = distribution(DISTRIBUTION)
    dist_info = f"{DISTRIBUTION}-{installed.version}.dist-info"
    files = dict(source_files())
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in _pinned_requirements(installed, extras))
    files[f"{dist_info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {installed.version}\n"
        f"Requires-Python: {installed.metadata['Requires-Python']}\n{requirements}"
    ).encode()
    files[f"{dist_info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: imagepivot\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{dist_info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    record = "".join(f"{name},{_record_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{dist_info}/RECORD"] = f"{record}{dist_info}/RECORD,,\n".encode()
    path = folder / f"{DISTRIBUTION}-{installed.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return path


def _record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _pinned_requirements(installed: Distribution, extras: Iterable[str]) -> list[str]:
    pins: set[str] = set()
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.name in (DISTRIBUTION, _PREINSTALLED):
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            try:
                pins.add(f"{requirement.name}=={Version(version(requirement.name)).public}")
            except PackageNotFoundError:
                pins.add(f"{requirement.name}{requirement.specifier}")
    return sorted(pins)
