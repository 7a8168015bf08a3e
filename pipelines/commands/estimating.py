"""What ``imagepivot cluster plan`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from pipelines.estimates.estimate import Estimate
from pipelines.estimates.graph import Graph
from schemas.progress import duration

__all__ = ["lines_of", "print_plan"]

_MEASURE = {
    "images": "give --rate a file with what this prints on such a machine: imagepivot doctor --extractor NAME --measure --json",
    "captions": "run the command on a part of them with --log-json, and give --rate what it wrote to standard error",
}
_COLUMNS = 12


def print_plan(estimate: Estimate, graph: Graph | None, runner: str, console: Console) -> None:
    """Print a plan as lines."""
    for line in lines_of(estimate, graph, runner):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines_of(estimate: Estimate, graph: Graph | None, runner: str) -> Iterator[str]:
    """Yield the lines of a plan.

    Args:
        estimate: what the job takes.
        graph: what would be submitted; None where nothing was looked at that it would name.
        runner: name of the runner; empty for this machine.
    """
    yield from _job(estimate, graph, runner)
    for title, text in (
        ("dataset", _dataset(estimate)),
        ("work", _work(estimate)),
        ("time", _time(estimate)),
        ("requests", _requests(estimate)),
        ("bytes", _bytes(estimate)),
    ):
        yield f"{title:<{_COLUMNS}}{text}"
    yield from _cost(estimate)


def _job(estimate: Estimate, graph: Graph | None, runner: str) -> Iterator[str]:
    work = estimate.work
    yield f"{'job':<{_COLUMNS}}{work.command} of {work.source}, into {work.output}, on {runner or 'this machine'}"
    if graph is None:
        yield f"{'graph':<{_COLUMNS}}? (it names every file of the source: leave out --count or --item-bytes to look at them)"
        return
    yield f"{'graph':<{_COLUMNS}}{graph.bytes:,} bytes, at most {graph.most_bytes:,} are submitted"
    for step in graph.steps:
        hints = ", ".join(f"{name} {value}" for name, value in step.hints.items())
        yield f"{'':<{_COLUMNS}}{step.name}{f'  [{hints}]' if hints else ''}"
    yield f"{'workers':<{_COLUMNS}}{graph.environment}"


def _dataset(estimate: Estimate) -> str:
    work = estimate.work
    if estimate.shard_rows is None:
        return f"? {work.unit} in {work.shards:,} shards: --count says how many there are"
    shards = f"{work.shards:,} shards = {estimate.shard_rows:,} each, {estimate.most_rows:,} in the fullest"
    text = f"{work.count:,} {work.unit} / {shards}"
    if estimate.stored_bytes is None or estimate.shard_bytes is None:
        return text
    return f"{text}; x {work.row_bytes:,} bytes = {size(estimate.stored_bytes)}, {size(estimate.shard_bytes)} a shard, ids left out"


def _work(estimate: Estimate) -> str:
    cluster, slots, shards = estimate.cluster, estimate.slots, estimate.work.shards
    gpus = f" with {cluster.slots} {cluster.gpu}" if cluster.gpu else ""
    machines = f"{cluster.machines:,} machine{'s' if cluster.machines > 1 else ''}{gpus}"
    rounds = f"{shards:,} shards / {slots:,} at a time = {estimate.rounds:,} one after the other"
    idle = cluster.machines * cluster.slots - slots
    return f"{machines}; {rounds}{f'; no more than {slots:,} can be at work' if idle else ''}"


def _time(estimate: Estimate) -> str:
    rate, seconds, rows = estimate.cluster.rate, estimate.seconds, estimate.slot_rows
    if rate is None:
        return f"? ({_MEASURE[estimate.work.unit]})"
    if seconds is None or rows is None or estimate.machine_hours is None:
        return "? (--count says how many there are)"
    per_slot = f"{rate.per_second:,g}/s" + (f" / {estimate.cluster.slots}" if estimate.cluster.slots > 1 else "")
    return (
        f"{rows:,} {estimate.work.unit} / ({per_slot}) = {duration(seconds)}, x {estimate.cluster.machines:,} = "
        f"{estimate.machine_hours:,.2f} machine hours; the rate is {rate.origin}, and starting machines takes longer"
    )


def _requests(estimate: Estimate) -> str:
    requests = estimate.requests
    if requests is None:
        return "? (they depend on how the files are cut)"
    return (
        f"{requests.writes:,} that write or list, {requests.reads:,} that read"
        if any(requests)
        else "none, no store is involved"
    )


def _bytes(estimate: Estimate) -> str:
    read, stored = ("?" if number is None else size(number) for number in (estimate.read_bytes, estimate.stored_bytes))
    return f"{read} read, {stored} written"


def _cost(estimate: Estimate) -> Iterator[str]:
    prices = estimate.prices
    if prices is None:
        yield f"{'cost':<{_COLUMNS}}? (--prices names a file with your prices)"
        return
    total = estimate.cost
    origin = ", ".join(text for text in (prices.source, prices.date) if text)
    unit = f" {prices.currency}" if prices.currency else ""
    yield f"{'cost':<{_COLUMNS}}{'?' if total is None else f'{total:,.2f}{unit}'}{f', by {origin}' if origin else ''}"
    for cost in (*estimate.costs, *((estimate.month,) if estimate.month else ())):
        yield f"{'':<{_COLUMNS}}{cost.what}: {cost.arithmetic} = {cost.amount:,.2f}{unit}"


def size(number: int) -> str:
    """Return bytes in words, in powers of ten as stores bill them: ``8.19 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:,.2f} {unit}"
    return f"{number} bytes"
