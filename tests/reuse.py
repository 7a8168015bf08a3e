"""Options of a run that tests name beside fields of a job."""

from dataclasses import fields
from typing import Any

from schemas.writing.reuse_policy import ReusePolicy


def with_policy(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of a `ReusePolicy` gathered in one."""
    names = {field.name for field in fields(ReusePolicy)}
    policy = ReusePolicy(**{name: value for name, value in options.items() if name in names})
    return {"policy": policy, **{name: value for name, value in options.items() if name not in names}}
