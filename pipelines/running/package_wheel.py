"""Our own package for workers on other machines: a wheel of the code that runs here, which Beam installs there.

It is made of the files of the installed distribution, whether that is a copy or a checkout (an editable install), by writing a zip:
nothing is built, and no network is needed.
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
"""Our name as a distribution, and that of the module which makes the names of our packages mean ours."""

_PACKAGES = ("schemas", "extractors", "pipelines", "train")
_ROOT = Path(__file__).resolve().parents[2]
_DATE = (1980, 1, 1, 0, 0, 0)  # The first that a zip can hold: equal code gives equal bytes.
_LAUNCHER = "apache-beam"  # The workers' environment brings its own, which must be there before anything is installed.


def stage(options: PipelineOptions, folder: Path, extras: Iterable[str]) -> None:
    """Make a run on other machines bring our package along, unless the user says that it is there.

    The workers import it before anything else, so that no module of the same name in their folder takes its place.

    Args:
        options: Beam's options, which are changed.
        folder: where the wheel may lie until the job is submitted.
        extras: names of the extras that the workers need.
    """
    setup = options.view_as(SetupOptions)
    plugins = setup.beam_plugins or []
    setup.beam_plugins = [DISTRIBUTION, *(plugin for plugin in plugins if plugin != DISTRIBUTION)]
    given = [Path(package).name for package in setup.extra_packages or ()]
    if _has_image(options) or any(name.startswith(f"{DISTRIBUTION}-") for name in given):
        return
    setup.extra_packages = [*(setup.extra_packages or ()), str(build_wheel(folder, extras))]


def _has_image(options: PipelineOptions) -> bool:
    """Return whether the user names a container image for the workers."""
    portable = options.view_as(PortableOptions)
    is_docker = (portable.environment_type or "DOCKER").upper() == "DOCKER"
    choices = [option.partition("=")[0] for option in portable.environment_options or ()]
    return bool(
        options.view_as(WorkerOptions).sdk_container_image
        or (is_docker and (portable.environment_config or "docker_container_image" in choices))
    )


def source_files() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each of our files, in the order of their names."""
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
    """Write a wheel of the code that runs in this process into a folder, and return its path.

    It has the requirements of the extras besides our own, in the versions that are installed here.
    """
    installed = distribution(DISTRIBUTION)
    information = f"{DISTRIBUTION}-{installed.version}.dist-info"
    files = dict(source_files())
    files[f"{information}/METADATA"] = _metadata(installed, extras).encode()
    files[f"{information}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: imagepivot\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{information}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    path = folder / f"{DISTRIBUTION}-{installed.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return path


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _metadata(installed: Distribution, extras: Iterable[str]) -> str:
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in _requirements(installed, extras))
    return (
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {installed.version}\n"
        f"Requires-Python: {installed.metadata['Requires-Python']}\n{requirements}"
    )


def _requirements(installed: Distribution, extras: Iterable[str]) -> list[str]:
    """Return what the wheel requires: the same versions as here, so that the workers compute what this machine would."""
    wanted: set[str] = set()
    chosen = ["", *extras]
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.name in (DISTRIBUTION, _LAUNCHER):
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in chosen):
            try:
                wanted.add(f"{requirement.name}=={Version(version(requirement.name)).public}")
            except PackageNotFoundError:
                wanted.add(f"{requirement.name}{requirement.specifier}")
    return sorted(wanted)
