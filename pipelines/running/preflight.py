"""The check of the first worker on another machine: it has the launcher's code, and can do what the launcher planned.

It comes before anything that takes long. A worker that lacks something fails immediately, and the launcher times out if no worker
starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from pipelines.running.package_wheel import DISTRIBUTION, source_files
from schemas.errors import ImagepivotError, UsageError
from schemas.storage.folder import TEMPORARY_MARK, Folder

SIGN = f".first-worker{TEMPORARY_MARK}0"
"""Name of the file in the folder of the dataset by which the first worker shows that it works; commit or launcher deletes it."""


@lru_cache(maxsize=1)
def _code() -> str:
    """Return the digest of our files."""
    digest = hashlib.sha256()
    for name, data in source_files():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@dataclass(frozen=True)
class FirstWorker:
    """What the first worker checks; made by the launcher, called by the worker.

    Attributes:
        also: checks what only this kind of work needs.
        version: version of our package.
        code: digest of its files.
    """

    output: Folder
    also: Callable[[], None] | None = None
    version: str = ""
    code: str = ""

    @classmethod
    def of_launcher(cls, output: Folder, also: Callable[[], None] | None = None) -> FirstWorker:
        """Return the check that a worker is as this process."""
        return cls(output, also, version(DISTRIBUTION), _code())

    def forget(self) -> None:
        """Delete the sign of an earlier job's first worker."""
        self.output.delete(SIGN)

    def __call__(self) -> None:
        """Check this process.

        Raises:
            ImagepivotError: it is not as the launcher; the message says in what.
        """
        try:
            here = version(DISTRIBUTION)
            if (here, _code()) != (self.version, self.code):
                what = f"{here!r}, expected {self.version!r}" if here != self.version else f"{here!r} with other code in it"
                raise UsageError(
                    f"it has imagepivot {what}: install what the launcher has in the workers' image, or leave the image out "
                    "and let the run bring the package along"
                )
            if self.also is not None:
                self.also()
            self.output.write(SIGN, b"")
        except ImagepivotError as error:
            raise type(error)(f"the first worker cannot do the work: {error}") from error
