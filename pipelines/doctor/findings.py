"""What a check has found: whether it is well, in words for people and values for programs, and what to do. No secret is in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.errors import ImagepivotError

__all__ = ["Diagnosis", "Finding", "Status", "attempt", "first_line", "redacted"]

Status = Literal["ok", "note", "problem"]

_SECRET_USER = re.compile(
    r"(?<=://)(?:[^/@\s'\"]+|[^@:\s'\"]+:[^@\s'\"]+)@"
)  # A secret key may hold slashes that should be quoted.
_CUT_USER = re.compile(
    r"(?:(?<=s3://)|(?<=gs://)|(?<=gcs://))[^/@\s'\"]*:[^@\s'\"]*"
)  # As in an error that quotes half an address.
_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&\s'\"#,)]+)")
_OPEN_PARAMETERS = frozenset({"region", "scheme", "endpoint_override", "retry_limit_seconds", "alt"})
_SUBJECT_COLUMNS = 13


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        group: what the check belongs to, e.g. ``machine``.
        subject: what was checked, e.g. ``memory``.
        status: ``ok``; ``note`` for what is worth knowing; ``problem`` where something that was asked for, or everything, cannot
            work.
        found: what there is, in words. Keys in addresses are replaced by ``***``.
        advice: what to do; empty if nothing is to be done.
        values: the same as JSON values.
    """

    group: str
    subject: str
    status: Status
    found: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("found", "advice", "values"):
            object.__setattr__(self, name, _without_secrets(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "group": self.group,
            "subject": self.subject,
            "status": self.status,
            "found": self.found,
            "advice": self.advice,
            "values": dict(self.values),
        }

    def to_text(self) -> str:
        """Return a line that begins with the status, and the advice on a line of its own."""
        status = self.status.upper() if self.status == "problem" else self.status
        line = f"  {status:<8} {self.subject:<{_SUBJECT_COLUMNS}} {self.found}"
        return f"{line}\n{'':>11}-> {self.advice}" if self.advice else line


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether nothing was found that cannot work."""
        return not any(finding.status == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"works": self.works, "findings": [finding.to_json() for finding in self.findings]}

    def to_text(self) -> str:
        """Return the findings as lines, those of a group below its name, and what they come to."""
        lines, group = [], ""
        for finding in self.findings:
            if finding.group != group:
                lines.append(finding.group)
            group = finding.group
            lines.append(finding.to_text())
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """What the findings come to, in a few words."""
        problems, notes = (sum(finding.status == status for finding in self.findings) for status in ("problem", "note"))
        counts = [
            f"{count} {name}{'s' if count > 1 else ''}" for count, name in ((problems, "problem"), (notes, "note")) if count
        ]
        return ", ".join(counts) or "nothing to do"


def attempt(group: str, subject: str, check: Callable[[], Iterator[Finding]], *, advice: str = "") -> Iterator[Finding]:
    """Yield what a check finds; where it ends with an error, that is a problem.

    Args:
        group: group of that finding.
        subject: its subject.
        check: the check.
        advice: what to do where the error is none of ours, whose messages say it.
    """
    try:
        yield from check()
    except ImagepivotError as error:
        yield Finding(group, subject, "problem", str(error))
    except Exception as error:  # noqa: BLE001 -- whatever is wrong with a machine is what the check is there to find
        yield Finding(group, subject, "problem", first_line(error), advice or "report it, with all of this output")


def first_line(error: BaseException) -> str:
    """Return kind and first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"


def redacted(text: str) -> str:
    """Return a text without what addresses hold of keys, tokens and signatures.

    Example:
        >>> redacted("s3://AKIA:wJalr@bucket/x?region=eu-west-1 and https://host/w.pth?X-Amz-Signature=12ab")
        's3://***@bucket/x?region=eu-west-1 and https://host/w.pth?X-Amz-Signature=***'
    """
    text = _CUT_USER.sub("***", _SECRET_USER.sub("***@", text))
    return _PARAMETER.sub(lambda found: found[0] if found[1] in _OPEN_PARAMETERS else f"{found[1]}=***", text)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value
