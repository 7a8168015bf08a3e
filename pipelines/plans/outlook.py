"""What a build would do: each step's state and reason, and as far as it is known before, how much there is and how long it takes.

Images and captions are counted, and features have a size that follows from their number. Times follow from earlier builds into the
same folder. What nobody can know yet is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelines.plans.catalogue import CommandLine
from pipelines.plans.deciding import Look, Places, changes, result_of
from pipelines.plans.job import BuildJob
from pipelines.plans.reading import Plan, Step, read_plan
from pipelines.plans.records import Memory, Record
from pipelines.plans.states import Result
from schemas.errors import InputError
from schemas.storage import Folder

__all__ = ["Outlook", "StepOutlook", "look_ahead"]


@dataclass(frozen=True)
class StepOutlook:
    """What a build would do about a step.

    Attributes:
        name: its name.
        command: its command.
        location: where its result is or will be.
        state: ``up to date``, ``continues``, ``runs``, ``taken back``, or ``depends`` on what steps before it make.
        why: the reason, in words.
        count: rows, images or captions; None if unknown.
        bytes: size of the result; None if unknown.
        seconds: time that it takes; None if unknown.
    """

    name: str
    command: str
    location: str
    state: str
    why: str = ""
    count: int | None = None
    bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Outlook:
    """What a build would do.

    Attributes:
        output: folder of the results.
        steps: every step, in order.
        kept: folders of results of other values that are kept.
    """

    output: str
    steps: tuple[StepOutlook, ...]
    kept: tuple[str, ...] = ()


def look_ahead(job: BuildJob, line: CommandLine) -> Outlook:
    """Look at a plan and at its folder; nothing is written.

    Raises:
        UsageError: the plan is not understood.
        ImagepivotError: an input is missing or cannot be read.
    """
    plan = read_plan(job.plan, line, output=job.output, settings=job.settings)
    memory = Memory.read(plan.output)
    results: dict[str, Result] = {}
    look = Look(Places(plan), line, memory.records, results)
    steps: dict[str, StepOutlook] = {}
    for step in plan.chosen(job.targets):
        state, why = _state(job, step, look, memory, steps)
        location = look.places.result(step)
        record = memory.records.get(step.name)
        if state == "up to date" and record is not None and record.result is not None:
            result = results[step.name]
            steps[step.name] = StepOutlook(step.name, step.command, location, state, why, result.rows, result.bytes, 0.0)
            continue
        count = _count(step, plan, steps, look)
        size = _size(step, count, look)
        seconds = _seconds(step, count, plan, memory.records)
        steps[step.name] = StepOutlook(step.name, step.command, location, state, why, count, size, seconds)
    return Outlook(plan.output, tuple(steps.values()), tuple(map(str, memory.earlier())))


def _state(job: BuildJob, step: Step, look: Look, memory: Memory, steps: Mapping[str, StepOutlook]) -> tuple[str, str]:
    """Return state and reason of a step; puts the result of one that is up to date among those of the look."""
    record = memory.records.get(step.name)
    location = look.places.result(step)
    is_there = bool(Folder(location).names()) if step.kind.makes in ("dataset", "run", "results", "files") else False
    waits = [name for name in step.needs if steps[name].state != "up to date"]
    now = look.at(step)
    if record is None:
        return ("continues", "something is there") if is_there else ("runs", "not made yet")
    if waits:
        own = [text for text in changes(record, now) if not _follows(step, text)]
        if own:
            return "runs", "; ".join(own)
        return "depends", f"runs if {' or '.join(waits)} changes"
    if record.key != now.key and memory.has_earlier(step.name, now.key):
        return "taken back", "these values made it before"
    if record.result is None:
        return ("continues", "was stopped") if record.key == now.key and is_there else ("runs", "was stopped")
    if found := changes(record, now):
        return "runs", "; ".join(found)
    result = result_of(step, location, record.result)
    if result is None or result.content != record.result.content:
        return "runs", "its result is gone or was changed"
    look.results[step.name] = result
    return ("runs", "--check asks every command") if job.check else ("up to date", "")


def _follows(step: Step, text: str) -> bool:
    """Whether a change is that of another step's result."""
    made = {step.keys.get(name, name) for name, references in step.inputs.items() if any(one.step for one in references)}
    return (text.endswith(" changed") and text.removesuffix(" changed").partition("[")[0] in made) or text.startswith(
        "shards: "
    )


def _count(step: Step, plan: Plan, steps: Mapping[str, StepOutlook], look: Look) -> int | None:
    """Count what a step works on: captions, images, scenes."""
    if step.command == "scenes":
        return int(step.values.get("count", 300))
    for parameter in ("captions", "images", "source"):
        for reference in step.inputs.get(parameter, ()):
            if not reference.step:
                return _counted(step, parameter, look.places.location(reference))
            if parameter == "captions" and step.kind.makes == "dataset":
                return steps[reference.step].count
            before = plan.steps[reference.step]
            if steps[reference.step].state == "up to date" and before.kind.makes == "files":
                return _counted(step, parameter, look.places.location(reference))
            if before.command == "scenes" and parameter == "images" and reference.location == "images":
                return steps[reference.step].count
    return None


def _counted(step: Step, parameter: str, location: str) -> int | None:
    if step.command == "captions":
        from pipelines.inputs.captions import Selection, open_source
        from pipelines.inputs.columns import parse_columns

        values = step.values
        columns = parse_columns(values["columns"]) if values.get("columns") else None
        options = {name: values[name] for name in ("language", "ids", "delimiter", "quoting") if name in values}
        source = open_source(values["format"], location, columns=columns, **options)
        selection = Selection(*(tuple(_several(values.get(name, ""))) for name in ("languages", "portions", "splits")))
        return sum(table.num_rows for part in source.parts(selection) for table in source.tables(part, selection))
    if step.command == "features":
        from pipelines.inputs.columns import parse_columns
        from pipelines.inputs.images import open_images

        columns = parse_columns(step.values["columns"]) if step.values.get("columns") else None
        try:
            options = {name: step.values[name] for name in ("ids", "delimiter", "quoting") if name in step.values}
            return sum(1 for _ in open_images(location, columns=columns, **options).refs())
        except InputError:
            return None  # Of a step that has not drawn them yet.
    return None


def _several(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(",") if part.strip())


def _size(step: Step, count: int | None, look: Look) -> int | None:
    """Return the bytes that features take: rows times the size of one."""
    if step.command != "features" or count is None:
        return None
    from extractors import ExtractorRequest, RegionOptions
    from pipelines.features.job import stored_bytes

    values = step.values
    given = {name: values[name] for name in ("min_regions", "max_regions") if name in values}
    request = ExtractorRequest(
        values.get("extractor", "resnet50-pool"),
        regions=RegionOptions(**given) if given else None,
        dtype=values.get("dtype", "float32"),
        grid=values.get("grid", False),
        separate=values.get("separate", False),
    )
    size = stored_bytes(request)
    return None if size is None else count * size


def _seconds(step: Step, count: int | None, plan: Plan, records: Mapping[str, Record]) -> float | None:
    """Return the time at the rate of an earlier step of the same command and, of features, of the same extractor."""
    own = records.get(step.name)
    others = [own] if own is not None else []
    for name, record in records.items():
        other = plan.steps.get(name)
        if other is not None and record.command == step.command and _rate_of(other) == _rate_of(step):
            others.append(record)
    for record in others:
        while record is not None:
            rows = record.result.rows if record.result is not None else None
            if record.seconds and record.command == step.command and count and rows:
                return record.seconds * count / rows
            if record.seconds and record is own and not count:
                return record.seconds
            record = record.before  # type: ignore[assignment]
    return None


def _rate_of(step: Step) -> tuple[object, ...]:
    return tuple(step.values.get(name) for name in ("extractor", "device", "precision", "batch_size", "gpu"))
