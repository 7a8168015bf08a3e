"""How many images or captions a machine does in a second: given, or measured by an earlier run or by ``imagepivot doctor``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import UsageError

__all__ = ["Rate", "read_rate"]


class Rate(NamedTuple):
    """A rate.

    Attributes:
        per_second: images or captions a second, of one machine.
        origin: where the number comes from, in words.
    """

    per_second: float
    origin: str


def read_rate(text: str) -> Rate:
    """Return a rate that is a number, or that stands in a file.

    Args:
        text: a number; or the path of what ``imagepivot doctor --measure --json`` printed on such a machine, or of what a command
            wrote to standard error there with ``--log-json``.

    Raises:
        UsageError: it is neither, or the file holds no rate.
    """
    with suppress(ValueError):
        return _positive(float(text), text, "given")
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--rate {text!r} is neither a number nor a file that can be read: give images a second of one machine, or what "
            "imagepivot doctor --measure --json printed there"
        ) from error
    values = _of_doctor(content) or _of_log(content)
    if values is None:
        raise UsageError(
            f"--rate {text!r} holds no rate: it is neither what imagepivot doctor --extractor NAME --measure --json prints, nor "
            "what a command writes with --log-json"
        )
    return _positive(*values)


def _positive(per_second: float, text: str, origin: str) -> Rate:
    if not 0 < per_second < float("inf"):
        raise UsageError(f"--rate is {text}, expected more than 0 images or captions a second")
    return Rate(per_second, origin)


def _of_doctor(content: str) -> tuple[float, str, str] | None:
    """Return the rate of what is slowest."""
    try:
        findings = json.loads(content)["findings"]
        values = next(one["values"] for one in findings if (one["group"], one["subject"]) == ("rates", "bottleneck"))
        rate = float(values["per_second"])
        return rate, str(rate), f"measured by doctor, bound by {values['bottleneck']}"
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def _of_log(content: str) -> tuple[float, str, str] | None:
    """Return the last rate that a run told."""
    found = None
    for line in content.splitlines():
        event = _object(line)
        if event.get("event") == "progress" and isinstance(event.get("per_second"), (int, float)) and event["per_second"] > 0:
            found = event
    if found is None:
        return None
    return float(found["per_second"]), str(found["per_second"]), f"measured by a run of {found.get('what')}"


def _object(line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
