"""Prices, which are the user's: a small table in TOML. None are shipped, since they differ by contract, region and day."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.arguments import did_you_mean
from schemas.errors import UsageError

__all__ = ["Prices"]

_NUMBERS = ("writes-per-1000", "reads-per-1000", "gb-month")
_TEXTS = ("currency", "source", "date")
_TABLES = ("machine-hour", "gpu-hour")


@dataclass(frozen=True)
class Prices:
    """What things cost.

    Attributes:
        machine_hour: an hour of a machine, with what its runner takes for it, by the runner's name of the type.
        gpu_hour: an hour of a GPU that does not come with its machine, by the runner's name of the type.
        writes_per_1000: a thousand requests that write or list.
        reads_per_1000: a thousand requests that read.
        gb_month: keeping a GB (1,000,000,000 bytes) for a month.
        currency: of all of these.
        source: where they stand.
        date: when they stood there.

    Raises:
        UsageError: a price is negative.
    """

    machine_hour: Mapping[str, float] = field(default_factory=dict)
    gpu_hour: Mapping[str, float] = field(default_factory=dict)
    writes_per_1000: float | None = None
    reads_per_1000: float | None = None
    gb_month: float | None = None
    currency: str = ""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        every = [*self.machine_hour.values(), *self.gpu_hour.values()]
        every += [price for price in (self.writes_per_1000, self.reads_per_1000, self.gb_month) if price is not None]
        if any(not price >= 0 for price in every):
            raise UsageError(f"a price is {min(every)}, expected 0 or more")

    @classmethod
    def read(cls, location: str) -> Prices:
        """Read a file of prices.

        Args:
            location: path of a TOML file with any of the keys ``writes-per-1000``, ``reads-per-1000``, ``gb-month``,
                ``currency``, ``source``, ``date``, and the sections ``[machine-hour]`` and ``[gpu-hour]`` of a price for each type.

        Raises:
            UsageError: there is no such file, or something in it is not understood.
        """
        try:
            table = tomllib.loads(Path(location).expanduser().read_bytes().decode("utf-8-sig").replace("\r\n", "\n"))
        except OSError as error:
            raise UsageError(
                f"--prices {location!r} cannot be read: {error.strerror}. It is a TOML file with your prices"
            ) from error
        except ValueError as error:  # No text, no TOML, or a NUL in the path.
            raise UsageError(f"--prices {location!r} is not TOML: {error}") from error
        known = (*_TEXTS, *_NUMBERS, *_TABLES)
        for key, value in table.items():
            if key not in known:
                raise UsageError(f"{location!r} has the key {key!r}, which is no price{did_you_mean(key, known)}")
            _check(location, key, value)
        values = {key.replace("-", "_"): value for key, value in table.items()}
        return cls(**{**values, **({"date": str(values["date"])} if "date" in values else {})})

    def of_machine(self, machine: str) -> float | None:
        """Return the price of an hour of a machine; None where no machines have prices.

        Raises:
            UsageError: this one has none, and others do.
        """
        return _chosen(self.machine_hour, machine, "machine-hour")


def _chosen(prices: Mapping[str, float], name: str, section: str) -> float | None:
    if not prices:
        return None
    if name in prices:
        return prices[name]
    if not name and len(prices) == 1:
        return next(iter(prices.values()))
    if not name:
        raise UsageError(
            f"[{section}] has prices of {', '.join(map(repr, prices))}: say which the workers are, in the options or flags of the "
            "command that is planned, or keep one price"
        )
    raise UsageError(f"[{section}] has no price of {name!r}{did_you_mean(name, prices)}")


def _check(location: str, key: str, value: Any) -> None:
    place = f"{location!r}: {key!r} is {value!r}"
    if key in _TEXTS and not isinstance(value, str) and not (key == "date" and hasattr(value, "isoformat")):
        raise UsageError(f"{place}, expected text in quotes")
    if key in _NUMBERS and not _is_number(value):
        raise UsageError(f"{place}, expected a number")
    if key in _TABLES and not (isinstance(value, dict) and all(map(_is_number, value.values()))):
        raise UsageError(f"{place}, expected a section with a number for each type")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
