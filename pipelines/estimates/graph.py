"""The pipeline that a command would submit: its steps and their hints, the workers' environment, and its size."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions, WorkerOptions
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines.running.execution import Execution
from pipelines.running.runner import LARGEST_GRAPH
from pipelines.running.staging import stage

__all__ = ["Graph", "Step", "graph_of"]


@dataclass(frozen=True)
class Step:
    """A step of a pipeline.

    Attributes:
        name: its name, with those of the steps that it is a part of.
        hints: Beam's resource hints, by name.
    """

    name: str
    hints: Mapping[str, str]


@dataclass(frozen=True)
class Graph:
    """A pipeline as it would be submitted.

    Attributes:
        steps: its steps, in order.
        bytes: its size.
        most_bytes: the largest size that is submitted.
        environment: what the workers run, in words.
    """

    steps: tuple[Step, ...]
    bytes: int
    environment: str
    most_bytes: int = LARGEST_GRAPH


def graph_of(build: Callable[[beam.Pipeline], object], execution: Execution, extras: Iterable[str] = ("pipelines",)) -> Graph:
    """Build a pipeline and look at it; nothing is submitted, and no runner is asked.

    Args:
        build: adds the transforms to an empty pipeline.
        execution: where it would run.
        extras: names of the extras that workers on other machines need.
    """
    options = execution.options
    with tempfile.TemporaryDirectory(prefix="imagepivot-graph-") as folder:
        if not execution.runs_here:
            stage(options, Path(folder), extras)
        # Beam's own runner, which asks nobody: others look for credentials and buckets as soon as there is a pipeline.
        pipeline = beam.Pipeline(runner=FnApiRunner(), options=options)
        build(pipeline)
        steps: list[Step] = []
        pipeline.visit(_Steps(steps))
        environment = _environment(options, execution)
    return Graph(tuple(steps), pipeline.to_runner_api().ByteSize(), environment)


class _Steps(PipelineVisitor):
    """Gathers the steps that our own transforms consist of, and not those that Beam makes of these."""

    def __init__(self, found: list[Step]) -> None:
        self._found = found

    def enter_composite_transform(self, node: AppliedPTransform) -> None:
        self._add(node)

    def visit_transform(self, node: AppliedPTransform) -> None:
        self._add(node)

    def _add(self, node: AppliedPTransform) -> None:
        if node.transform is not None and not _is_ours(node) and (node.parent is None or _is_ours(node.parent)):
            hints = {_name_of(urn): value.decode() for urn, value in sorted(node.resource_hints.items())}
            self._found.append(Step(node.full_label, hints))


def _is_ours(node: Any) -> bool:
    """Whether a step is one of our composite transforms, or the whole pipeline."""
    return node.transform is None or type(node.transform).__module__.partition(".")[0] == "pipelines"


def _name_of(urn: str) -> str:
    """Return ``accelerator`` for ``beam:resources:accelerator:v1``."""
    return urn.split(":")[-2] if urn.count(":") >= 2 else urn


def _environment(options: PipelineOptions, execution: Execution) -> str:
    if execution.runs_here:
        return "processes of this machine"
    image = options.view_as(WorkerOptions).sdk_container_image
    if image:
        return f"the image {image}"
    packages = [Path(package) for package in options.view_as(SetupOptions).extra_packages or ()]
    brought = ", ".join(f"{path.name} ({path.stat().st_size / 1e6:,.1f} MB)" for path in packages if path.is_file())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"the runner's own, with Python {python} and Beam {beam.__version__}; the command brings {brought or 'nothing'} along"
    )
