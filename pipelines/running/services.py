"""Asking a runner about a job by its id: the state, the counts, and to cancel it, from any process.

Beam's own results do so only in the process that submitted the job. There is a service for Beam's job services and one for
Dataflow; jobs of other runners cannot be asked after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from apache_beam.runners.runner import PipelineState

from pipelines.running.progress import NAMESPACE

__all__ = ["ANSWER_SECONDS", "Service", "SilentError", "counts_of", "has_ended"]

ANSWER_SECONDS = 20.0
"""Seconds in which a service must answer a question."""


class SilentError(Exception):
    """A runner did not answer, or did not say what was asked."""


class Service(Protocol):
    """What can be asked after jobs.

    Attributes:
        name: the service in words.
        flags: the flags for Beam that lead to it, in one spelling.
    """

    name: str
    flags: tuple[str, ...]

    def state(self, job_id: str) -> str | None:
        """Return the state of a job, one of Beam's ``PipelineState``; None if the service knows no such job.

        Raises:
            SilentError: it does not answer.
        """

    def cancel(self, job_id: str) -> None:
        """Ask it to cancel a job.

        Raises:
            SilentError: it does not answer, or refuses.
        """

    def counts(self, job_id: str) -> dict[str, int]:
        """Return what the workers of a job have counted with a `Meter`; empty where the service does not say.

        Raises:
            SilentError: it does not answer.
        """

    def result(self, job_id: str) -> Any:
        """Return Beam's result of a job that another process submitted."""

    def page(self, job_id: str) -> str:
        """Return the address of a page that shows a job; empty if there is none."""


def has_ended(state: str | None) -> bool:
    """Return whether a job in a state does nothing any more; None is that of a job that its service does not know."""
    return state is None or PipelineState.is_terminal(state)


def counts_of(metrics: Iterable[Any]) -> dict[str, int]:
    """Return the sums of our counters of several steps: committed values, or attempted ones where the runner has no others."""
    counts: dict[str, int] = {}
    for metric in metrics:
        if metric.key.metric.namespace == NAMESPACE:
            name = metric.key.metric.name
            counts[name] = counts.get(name, 0) + (metric.committed or metric.attempted or 0)
    return counts
