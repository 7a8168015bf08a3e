"""Preflight check of the first remote worker: code, devices, weights and access.

A misconfigured worker fails before any long step. The launcher times out if no worker writes the marker.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version

from pipelines.running.package_wheel import DISTRIBUTION, source_files
from schemas.errors import ImagepivotError, UsageError
from schemas.storage.folder import TEMPORARY_MARK, Folder

PREFLIGHT_MARKER = f".first-worker{TEMPORARY_MARK}0"
"""File in the dataset's folder that the first worker writes after its check; commit or launcher deletes it."""


@cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for name, data in source_files():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@dataclass(frozen=True)
class PreflightCheck:
    """Check of the first worker; created by the launcher, called by the worker.

    Attributes:
        version: version of our package; by default that of this process.
        code: digest of its files; by default that of this process.
    """

    output: Folder
    extra_check: Callable[[], None] | None = None
    version: str = field(default_factory=partial(version, DISTRIBUTION))
    code: str = field(default_factory=_code_digest)

    def __call__(self) -> None:
        """Check this process.

        Raises:
            ImagepivotError: it differs from the launcher.
        """
        try:
            installed = version(DISTRIBUTION)
            if (installed, _code_digest()) != (self.version, self.code):
                expected = self.version if installed != self.version else "the launcher's code of that version"
                raise UsageError(
                    f"it has imagepivot {installed}, expected {expected}: install the launcher's package in "
                    "the workers' image, or leave the image out, and the run installs it"
                )
            if self.extra_check is not None:
                self.extra_check()
            self.output.put(PREFLIGHT_MARKER, b"")
        except ImagepivotError as error:
            raise type(error)(f"the first worker failed its check: {error}") from error
