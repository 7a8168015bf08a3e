"""The arithmetic of an estimate: shards, time, requests and cost, from stated numbers. Nothing is read or run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, log, sqrt
from typing import Any, NamedTuple

from pipelines.estimates.prices import Prices
from pipelines.estimates.rates import Rate
from schemas.buckets import PAGE_OBJECTS, PART_BYTES
from schemas.errors import UsageError

__all__ = ["Cluster", "Cost", "Estimate", "Requests", "Work", "writes_of_upload"]

_UNLIKELY = 1000
_SENT_WHOLE = 8 << 20  # Google's client announces what is larger.
_COMPOSED = 32  # Objects that Google's store puts together at a time.


class Requests(NamedTuple):
    """Requests to a store; deleting counts as neither, as Google and AWS charge nothing for it.

    Attributes:
        writes: those that write, copy or list.
        reads: those that read, or ask for the size of something.
    """

    writes: int = 0
    reads: int = 0

    def __add__(self, other: object) -> Requests:
        """Return the sum."""
        if not isinstance(other, Requests):
            return NotImplemented
        return Requests(self.writes + other.writes, self.reads + other.reads)

    def __mul__(self, times: object) -> Requests:
        """Return the requests of several."""
        if not isinstance(times, int):
            return NotImplemented
        return Requests(self.writes * times, self.reads * times)


# Counted by a proxy before emulators of the stores, see tests/integration/test_estimates.py: for a shard, sent whole, from the
# worker's first look to the commit, and for the rest of a run, pages of listings left out.
_OF_SHARD = {"gs": Requests(3, 8), "s3": Requests(3, 9)}
_OF_RUN = {"gs": Requests(6, 4), "s3": Requests(6, 6)}


@dataclass(frozen=True)
class Work:
    """What a job has to do, as far as it is known.

    Attributes:
        command: the command that would do it.
        unit: ``images`` or ``captions``.
        count: how many of them; None if unknown.
        shards: number of shards that it makes.
        source: where they are.
        output: folder of the dataset.
        item_bytes: mean size of what is read for one, e.g. of an image file; None if unknown.
        row_bytes: size of what is stored of one; None if unknown, as for text, which is compressed.
        are_objects: whether each of them is an object of its own in a store.

    Raises:
        UsageError: a number is out of range.
    """

    command: str
    unit: str
    count: int | None
    shards: int
    source: str = ""
    output: str = ""
    item_bytes: float | None = None
    row_bytes: int | None = None
    are_objects: bool = True

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise UsageError(f"--count is {self.count}, expected 1 or more")
        if self.item_bytes is not None and not self.item_bytes >= 0:
            raise UsageError(f"--item-bytes is {self.item_bytes}, expected 0 or more")

    @property
    def store(self) -> str:
        """``gs`` or ``s3`` if the dataset goes to a store, else empty."""
        return _store_of(self.output)


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        machines: how many of them work at a time.
        slots: shards that one of them makes at a time: one on each GPU.
        rate: what one of them does in a second, on all of its GPUs; None if unknown.
        machine: the runner's name of their type; empty if it is not named.
        gpu: the runner's name of their GPUs; empty without.

    Raises:
        UsageError: a number is below 1.
    """

    machines: int = 1
    slots: int = 1
    rate: Rate | None = None
    machine: str = ""
    gpu: str = ""

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise UsageError(f"--machines is {self.machines}, expected 1 or more")


class Cost(NamedTuple):
    """A part of the cost.

    Attributes:
        what: what it is for.
        amount: the price times how much of it there is.
        arithmetic: the same in numbers.
    """

    what: str
    amount: float
    arithmetic: str


@dataclass(frozen=True)
class Estimate:
    """What a job takes. What nobody can know yet is None.

    Attributes:
        work: what it has to do.
        cluster: the machines.
        prices: what they cost; None if nobody says.
    """

    work: Work
    cluster: Cluster = Cluster()
    prices: Prices | None = None

    @property
    def shard_rows(self) -> int | None:
        """Rows of a shard, on average."""
        return None if self.work.count is None else ceil(self.work.count / self.work.shards)

    @property
    def most_rows(self) -> int | None:
        """Rows of the fullest shard, at most; see `_at_most`."""
        count, shards = self.work.count, self.work.shards
        return None if count is None else min(count, _at_most(count / shards, shards))

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the dataset, ids and records left out."""
        count, row = self.work.count, self.work.row_bytes
        return None if count is None or row is None else count * row

    @property
    def shard_bytes(self) -> int | None:
        """Bytes of a shard, on average."""
        return None if self.stored_bytes is None else ceil(self.stored_bytes / self.work.shards)

    @property
    def read_bytes(self) -> int | None:
        """Bytes that are read from the source."""
        count, size = self.work.count, self.work.item_bytes
        return None if count is None or size is None else round(count * size)

    @property
    def slots(self) -> int:
        """Shards that are made at a time."""
        return min(self.work.shards, self.cluster.machines * self.cluster.slots)

    @property
    def rounds(self) -> int:
        """How many shards a slot makes, one after the other."""
        return ceil(self.work.shards / self.slots)

    @property
    def slot_rows(self) -> int | None:
        """Rows of the shards that one slot makes, at most."""
        count = self.work.count
        return None if count is None else min(count, _at_most(self.rounds * count / self.work.shards, self.slots))

    @property
    def seconds(self) -> float | None:
        """Seconds from the first shard to the last. Starting machines takes minutes more."""
        if self.slot_rows is None or self.cluster.rate is None:
            return None
        return self.slot_rows / (self.cluster.rate.per_second / self.cluster.slots)

    @property
    def machine_hours(self) -> float | None:
        """Hours of all machines together."""
        return None if self.seconds is None else self.cluster.machines * self.seconds / 3600

    @property
    def requests(self) -> Requests | None:
        """Requests to stores; None where their number is unknown."""
        total = Requests()
        if _store_of(self.work.source):
            if not self.work.are_objects or self.work.count is None:
                return None
            total += Requests(ceil(self.work.count / PAGE_OBJECTS), self.work.count)
        if store := self.work.store:
            if self.shard_bytes is None:
                return None
            # Its folder is listed before the run and by the commit, each shard with its record.
            pages = 3 * ceil(2 * self.work.shards / PAGE_OBJECTS)
            uploads = Requests(writes_of_upload(store, self.shard_bytes) - 1)
            total += (_OF_SHARD[store] + uploads) * self.work.shards + _OF_RUN[store] + Requests(pages)
        return total

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What the run costs, part by part, as far as prices are stated and numbers known; keeping the dataset is no part of it.

        Raises:
            UsageError: machines have prices, but not these.
        """
        prices, found = self.prices, []
        if prices is None:
            return ()
        if (hour := prices.of_machine(self.cluster.machine)) is not None and (hours := self.machine_hours) is not None:
            found.append(Cost("machines", hours * hour, f"{hours:,.2f} machine hours x {hour:g}"))
        if self.cluster.gpu in prices.gpu_hour and (hours := self.machine_hours) is not None:
            gpu, count = prices.gpu_hour[self.cluster.gpu], self.cluster.slots
            found.append(Cost("GPUs", hours * count * gpu, f"{hours:,.2f} machine hours x {count} x {gpu:g}"))
        if (requests := self.requests) is not None:
            for what, number, price in (
                ("requests that write", requests.writes, prices.writes_per_1000),
                ("requests that read", requests.reads, prices.reads_per_1000),
            ):
                if price is not None:
                    found.append(Cost(what, number / 1000 * price, f"{number:,} / 1,000 x {price:g}"))
        return tuple(found)

    @property
    def cost(self) -> float | None:
        """Sum of `costs`; None if there are none."""
        return sum(cost.amount for cost in self.costs) if self.costs else None

    @property
    def month(self) -> Cost | None:
        """What keeping the dataset costs in a month."""
        if self.prices is None or self.prices.gb_month is None or self.stored_bytes is None:
            return None
        size, price = self.stored_bytes / 1e9, self.prices.gb_month
        return Cost("keeping it for a month", size * price, f"{size:,.2f} GB x {price:g}")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        requests, rate = self.requests, self.cluster.rate
        return {
            "work": asdict(self.work),
            "cluster": {**asdict(self.cluster), "rate": None if rate is None else rate._asdict()},
            "shard_rows": self.shard_rows,
            "most_rows": self.most_rows,
            "stored_bytes": self.stored_bytes,
            "shard_bytes": self.shard_bytes,
            "read_bytes": self.read_bytes,
            "slots": self.slots,
            "rounds": self.rounds,
            "slot_rows": self.slot_rows,
            "seconds": self.seconds,
            "machine_hours": self.machine_hours,
            "requests": None if requests is None else requests._asdict(),
            "prices": None if self.prices is None else asdict(self.prices),
            "costs": [cost._asdict() for cost in self.costs],
            "cost": self.cost,
            "month": None if self.month is None else self.month._asdict(),
        }


def _at_most(mean: float, several: int) -> int:
    """Return the rows that none of several parts of a dataset exceeds, but for one list in a thousand: a hash deals rows out.

    Bernstein's inequality for a sum of independent indicators, whose chance is a thousandth divided by the number of parts.
    """
    exponent = log(_UNLIKELY * several)
    return ceil(mean + exponent / 3 + sqrt(exponent**2 / 9 + 2 * mean * exponent))


def _store_of(location: str) -> str:
    scheme = location.partition("://")[0] if "://" in location else ""
    return scheme if scheme in _OF_SHARD else ""


def writes_of_upload(store: str, size: int) -> int:
    """Return the requests that write an object of so many bytes to ``gs`` or ``s3``, whole or in parts of 16 MiB."""
    if store == "s3":
        return 1 if size <= PART_BYTES else ceil(size / PART_BYTES) + 2  # Its beginning and its end.
    whole, rest = divmod(size, PART_BYTES)
    writes = 2 * whole + (rest > 0) + (rest > _SENT_WHOLE)
    parts = whole + (rest > 0)
    while parts > _COMPOSED:
        parts = ceil(parts / _COMPOSED)
        writes += parts
    return max(1, writes + (parts > 1))
