"""A report of measurements: rows of fixed columns by part, as JSON and as Markdown."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = 1

Row = dict[str, Any]


class UnmeasurableError(Exception):
    """A part that this machine cannot measure; the message is the reason."""


@dataclass(frozen=True)
class Settings:
    """What every part is told.

    Attributes:
        device: the device that is measured.
        is_quick: measure little and small, to try the code.
        end: ``time.monotonic()`` after which nothing new is begun.
    """

    device: torch.device
    is_quick: bool = False
    end: float = float("inf")

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.end

    def need_gpu(self, why: str) -> None:
        """Raise `UnmeasurableError` on a CPU."""
        if not self.is_gpu:
            raise UnmeasurableError(f"the device is the CPU: {why}")

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Part:
    """A part of the report.

    Attributes:
        name: its name.
        title: what it is about.
        keys: columns that say what is measured.
        values: columns of what is measured; None where it could not be, and then the column ``reason`` says why.
        measure: measures the values of one set of keys.
        subjects: yields the sets of keys.
        prepare: raises `UnmeasurableError` where the machine cannot measure the part.
    """

    name: str
    title: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    subjects: Callable[[Settings], Sequence[tuple[Any, ...]]]
    measure: Callable[..., Row]
    prepare: Callable[[Settings], None] = lambda settings: None

    def rows(self, settings: Settings) -> list[Row]:
        """Measure all; an error of one row is its reason, so that the others are measured."""
        try:
            self.prepare(settings)
            impossible = ""
        except UnmeasurableError as error:
            impossible = str(error)
        rows = []
        for subject in self.subjects(settings):
            named = dict(zip(self.keys, subject, strict=True))
            if impossible or settings.is_late:
                found: Row = {"reason": impossible or "the time was up"}
            else:
                found = self._measured(settings, subject)
            unknown = set(found) - {*self.values, "reason", "error"}
            assert not unknown, f"{self.name} has no columns {unknown}"
            row = {**named, **dict.fromkeys(self.values), "reason": None, "error": None, **found}
            if any(row[name] is None for name in self.values) and not row["reason"]:
                row["reason"] = "not measured"
            rows.append(row)
        return rows

    def _measured(self, settings: Settings, subject: tuple[Any, ...]) -> Row:
        try:
            return self.measure(settings, *subject)
        except UnmeasurableError as error:
            return {"reason": str(error)}
        except torch.cuda.OutOfMemoryError:
            return {"reason": "out of memory"}
        except Exception as error:  # noqa: BLE001 - the other rows are worth having.
            first = (str(error).splitlines() or [""])[0]
            return {"reason": f"{type(error).__name__}: {first}", "error": traceback.format_exc()}
        finally:
            if settings.is_gpu:
                torch.cuda.empty_cache()


def run_parts(parts: Sequence[Part], settings: Settings, machine: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Measure parts and write the report after each of them; parts that a report of the same machine has already stay.

    Raises:
        SystemExit: the folder holds a report of another machine, or of another kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu-report.json"
    head = {"format": FORMAT, "device": settings.device.type, "quick": settings.is_quick, "machine": dict(machine)}
    report = load_report(path) if path.exists() else {**head, "parts": {}}
    if {**report, "parts": None} != {**head, "parts": None}:
        raise SystemExit(f"{path} is the report of another machine, or of other settings: name another folder with --output")
    for part in parts:
        started = time.monotonic()
        rows = part.rows(settings)
        seconds = round(time.monotonic() - started, 1)
        report["parts"][part.name] = {"title": part.title, "seconds": seconds, "rows": rows}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
        missing = sum(row["reason"] is not None for row in rows)
        print(f"{part.name}: {len(rows)} rows in {seconds} s, {missing} of them incomplete", flush=True)
    return report


def load_report(path: Path) -> dict[str, Any]:
    """Read a report."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown, a table for each part."""
    machine = ", ".join(f"{key}: {value}" for key, value in report["machine"].items())
    lines = [
        "# Measurements on a GPU" if report["device"] == "cuda" else "# A trial of the script on a CPU: no GPU was measured"
    ]
    lines += ["", machine, ""]
    if report["quick"]:
        lines += ["Little and small was measured, to try the code: these numbers say nothing about speed.", ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}: {part['title']}", ""]
        columns = [column for column in part["rows"][0] if column != "error"] if part["rows"] else []
        table = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in part["rows"])]
        lines += ["| " + " | ".join(cells) + " |" for cells in table] + [""]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
