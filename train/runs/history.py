"""Parsed log of a run, and the table ``metrics.csv``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.console.tables import Table
from schemas.errors import DatasetError
from schemas.manifest import RUN_FILES
from schemas.storage.folder import Folder

LOG = "log.jsonl"

_RECALLS = {f"{direction}/recall_at_{k}" for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
_WITHOUT_CLOCK = ("step", "evaluation", "validation")


def is_run(location: str) -> bool:
    """Return whether a folder holds a run, finished or not."""
    folder = Folder(location)
    return any(folder.stat(name) is not None for name in RUN_FILES)


class Series(NamedTuple):
    """A quantity over a training: its values at ascending steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class History:
    """The lines of a run's log, see `train.runs.log`."""

    entries: tuple[Mapping[str, Any], ...]

    def of(self, event: str) -> Iterator[Mapping[str, Any]]:
        """Yield the entries of an event, see `train.runs.log`."""
        return (entry for entry in self.entries if entry["event"] == event)

    @property
    def last_step(self) -> int:
        """The last logged step; 0 for an empty log."""
        return max((entry["step"] for entry in self.entries), default=0)

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The first evaluation with the maximum score; None before the first evaluation."""
        evaluations = [entry for entry in self.of("evaluation") if _is_number(entry.get("score"))]
        return max(evaluations, key=lambda entry: entry["score"], default=None)

    def losses(self, event: str = "step") -> dict[str, Series]:
        """Return the objective's terms per query by name; ``event`` may be ``validation``."""
        terms = sorted({name for entry in self.of(event) if isinstance(entry.get("terms"), Mapping) for name in entry["terms"]})
        return {name: self.series(event, "terms", name) for name in terms}

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that were evaluated in both directions, in the order of the log."""
        items = [item for entry in self.of("evaluation") for item in entry.items() if isinstance(item[1], Mapping)]
        return tuple(dict.fromkeys(name for name, metrics in items if numbers_in(metrics).keys() >= _RECALLS))

    def chance(self, language: str) -> Mapping[str, Any]:
        """Return `train.chance.Chance.to_dict`; empty if unknown."""
        logged = [entry[language] for entry in self.of("chance") if isinstance(entry.get(language), Mapping)]
        return logged[-1] if logged else {}

    @property
    def speed(self) -> dict[str, float]:
        """Steps and pairs per second over all timed laps; empty without any."""
        timed = [entry for entry in self.of("timing") if _is_number(entry.get("steps_per_second"))]
        laps = [entry for entry in timed if entry["steps_per_second"] > 0]
        seconds = sum(lap["steps"] / lap["steps_per_second"] for lap in laps)
        return {f"{name}_per_second": sum(lap[name] for lap in laps) / seconds for name in ("steps", "pairs") if laps}

    def to_csv(self) -> str:
        """Return steps and evaluations as a table with a row for each.

        Times are left out, so that runs with the same configuration and seed have equal tables.
        """
        rows = []
        # Columns of a section, e.g. the terms, are adjacent, in order of first occurrence.
        sections: dict[str, dict[str, None]] = {"event": {"event": None}, "step": {"step": None}}
        for entry in self.entries:
            if entry["event"] in _WITHOUT_CLOCK:
                row = {}
                for path, value in _leaves(entry):
                    name = ".".join(path)
                    if isinstance(value, list):  # The language of captions in several languages is null.
                        value = " ".join("mixed" if item is None else str(item) for item in value)
                    row[name] = value
                    sections.setdefault(path[0], {})[name] = None
                rows.append(row)
        columns = [name for section in sections.values() for name in section]
        return Table(columns, [[row.get(name) for name in columns] for row in rows]).to_csv()

    def series(self, event: str, *path: str) -> Series:
        """Return the numbers of an event at a path in its entries, e.g. ``loss``."""
        points = []
        for entry in self.of(event):
            value: Any = entry
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            if _is_number(value):
                points.append((entry["step"], float(value)))
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))


def read_history(folder: Folder) -> History:
    """Read the log of a run, which may still be training; a missing log is empty.

    Raises:
        DatasetError: a line is damaged, or the file cannot be read.
    """
    if folder.stat(LOG) is None:
        return History(())
    return History(tuple(entry for _, entry in parse_entries(folder.read(LOG), folder.path_of(LOG))))


def parse_entries(data: bytes, source: str) -> list[tuple[bytes, dict[str, Any]]]:
    """Parse a log into lines and their content, without an unfinished last line.

    Raises:
        DatasetError: a line is damaged.
    """
    entries = []
    # Lines of text would also end at Unicode line separators in names.
    for line_number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["step"], int) or not isinstance(entry["event"], str):
                raise TypeError(f"step is {entry['step']!r}, event is {entry['event']!r}")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DatasetError(
                f"{source}, line {line_number}, is damaged ({type(error).__name__}: {error}): delete this "
                "line, or the whole file, which is only for people, and give the same command again"
            ) from error
        entries.append((line + b"\n", entry))
    return entries


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return nested numbers by path, e.g. ``en/text_to_image/recall_at_1``."""
    return {"/".join(path): float(value) for path, value in _leaves(values) if isinstance(value, (int, float))}


def _leaves(values: Mapping[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, *path, name)
        else:
            yield (*path, name), value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
