"""Asking Flink itself about the jobs that Beam's job service has handed to it, through Flink's REST interface.

Beam's job service for Flink can only give up a job: it interrupts the thread of its own that waits for Flink, says that the job is
cancelled, and never tells Flink, which goes on (``cancel`` and ``start`` of ``JobInvocation`` in Beam's
``runners/java-job-service``, in which only a result that has already arrived is ever cancelled). A job has one name in both.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from typing import Any

from pipelines.running.services import ANSWER_SECONDS, SilentError

__all__ = ["FlinkCluster"]

_ENDED = ("FINISHED", "CANCELED", "FAILED")  # Flink's `JobStatus`, those that are "globally terminal".
_HAND_OVER_SECONDS = 10.0


class FlinkCluster:
    """A cluster of Flink.

    Args:
        master: address of its JobManager's REST interface, with or without ``http://``.
    """

    def __init__(self, master: str) -> None:
        self._address = (master if "://" in master else f"http://{master}").rstrip("/")

    def runs(self, name: str) -> bool:
        """Return whether a job of this name is there and has not ended.

        Raises:
            SilentError: Flink does not answer.
        """
        return bool(self._running(self._called(name)))

    def cancel(self, name: str) -> None:
        """Ask Flink to cancel the job of this name.

        Raises:
            SilentError: Flink does not answer, or it is not clear which job this is.
        """
        until = time.monotonic() + _HAND_OVER_SECONDS
        while not (jobs := self._called(name)):  # The job service may just be handing it over.
            if time.monotonic() > until:
                raise SilentError(self._words(f"knows no job {name!r}"))
            time.sleep(0.5)
        running = self._running(jobs)
        if len(running) > 1:
            raise SilentError(self._words(f"runs {len(running)} jobs {name!r}"))
        for job in running:
            self._ask(f"/jobs/{job['jid']}?mode=cancel", "PATCH")

    def _called(self, name: str) -> list[dict[str, Any]]:
        try:
            return [job for job in json.loads(self._ask("/jobs/overview"))["jobs"] if job["name"] == name]
        except (ValueError, KeyError, TypeError) as error:
            raise SilentError(self._words("gives no answer of Flink's")) from error

    @staticmethod
    def _running(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [job for job in jobs if job["state"] not in _ENDED]

    def _ask(self, path: str, method: str = "GET") -> bytes:
        try:
            request = urllib.request.Request(f"{self._address}{path}", method=method)
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SilentError(self._words(f"does not answer: {error}")) from error

    def _words(self, what: str) -> str:
        return (
            f"it gives the job up without telling Flink, and {self._address!r} {what}. Cancel the job on Flink's page, or with "
            "Flink's right address: imagepivot cancel OUTPUT -- --flink_master=http://HOST:8081"
        )
