"""The file by which a job on other machines is known beside what it writes: who asks for the same output later finds the job.

The launcher creates it before it submits the job, which keeps others out, and notes the job's id as soon as the runner has accepted
it. The commit on a worker deletes it, or the launcher does when the job has ended in another way.
"""

from __future__ import annotations

import getpass
import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata

from schemas.errors import DatasetError
from schemas.fingerprints import canonical_json
from schemas.storage import Folder
from schemas.stored import read_stored

__all__ = ["JOB_NAME", "RemoteJob", "refuse_job"]

JOB_NAME = "_job.json"
"""Name of the file in the folder of the dataset."""

_FORMAT = "job 1"


@dataclass(frozen=True)
class RemoteJob:
    """Content of the file.

    Attributes:
        runner: name of the runner.
        flags: the flags for Beam that say where the runner can be asked; empty if it cannot be asked.
        work: fingerprint of what the job makes.
        mark: tells this job from every other; its first worker goes on only where the file still has it.
        version: version of our package.
        since: when the file was made, UTC, ISO 8601.
        user: who submitted the job.
        host: from which machine.
        process: id of the launcher on that machine.
        id: the job's id as the runner calls it; empty until the runner has accepted it.
        page: address of a page that shows the job; empty if the runner has none.
    """

    runner: str
    flags: tuple[str, ...]
    work: str
    mark: str
    version: str
    since: str
    user: str
    host: str
    process: int
    id: str = ""
    page: str = ""

    @classmethod
    def of_launcher(cls, runner: str, flags: Sequence[str], work: str) -> RemoteJob:
        """Return what this process writes before it submits a job."""
        return cls(
            runner=runner,
            flags=tuple(flags),
            work=work,
            mark=uuid.uuid4().hex,
            version=metadata.version("imagepivot"),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            user=_user(),
            host=platform.node(),
            process=os.getpid(),
        )

    @property
    def words(self) -> str:
        """The job in a few words."""
        return f"{self.name} of {self.runner}"

    @property
    def name(self) -> str:
        """The job by its id, if it has one."""
        return f"job {self.id!r}" if self.id else "a job"

    @property
    def origin(self) -> str:
        """Who submitted the job, and when."""
        return f"submitted by {self.user} on {self.host} at {self.since}"

    @property
    def lost_launcher(self) -> bool:
        """Whether the launcher has ended without submitting anything, as far as this machine can tell."""
        if self.id or self.host != platform.node():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # It runs, for another user.
        return False

    def claim(self, folder: Folder) -> bool:
        """Write the file unless there is one; return whether it was written."""
        return folder.create(JOB_NAME, self._content())

    def accepted(self, folder: Folder, job_id: str, page: str = "") -> RemoteJob:
        """Note the id that the runner has given; return the job with it."""
        job = replace(self, id=job_id, page=page)
        folder.write(JOB_NAME, job._content())
        return job

    def release(self, folder: Folder) -> None:
        """Delete the file, unless it is that of another job."""
        if self.is_in(folder):
            folder.delete(JOB_NAME)

    def is_in(self, folder: Folder) -> bool:
        """Return whether the file in the folder is that of this job."""
        found = RemoteJob.read(folder)
        return found is not None and found.mark == self.mark

    def _content(self) -> bytes:
        return f"{canonical_json({'format': _FORMAT, **asdict(self)})}\n".encode()

    @classmethod
    def read(cls, folder: Folder) -> RemoteJob | None:
        """Read the file; None if there is none.

        Raises:
            DatasetError: it is damaged.
        """
        meaning = (
            "it says which job is writing this folder. Look among the jobs of your runner, and delete the file when none of "
            "them does"
        )
        return read_stored(cls, folder, JOB_NAME, version=_FORMAT, has_digest=False, meaning=meaning)


def refuse_job(folder: Folder) -> None:
    """Refuse a folder that a job on other machines is writing, for what cannot ask how the job is doing.

    Raises:
        DatasetError: there is the file of a job.
    """
    job = RemoteJob.read(folder)
    if job is not None:
        raise DatasetError(
            f"{folder.location!r} is being written by {job.words}, {job.origin}: nothing was written. The same command with its "
            f"runner behind -- waits for it, imagepivot cancel {folder.location} ends it; if it has ended, delete "
            f"{folder.path_of(JOB_NAME)!r}"
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # A container's user may have no name.
        return f"user {os.getuid()}"
