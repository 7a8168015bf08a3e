"""Sidecars of exported files, which hold the options that `import` needs to read the rows back.

``features.npy`` has ``features.import.json`` beside it if the defaults of ``import`` would read other rows, e.g. because image ids
hold slashes. Options that the user sets win over those of a sidecar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, get_args

from pipelines.exchange.image_lists import needs_exact_rule
from pipelines.exchange.jobs import IdRule, ImportJob, format_options
from schemas.errors import InputError, UsageError
from schemas.kinds import REGIONS
from schemas.storage.locations import local_path
from schemas.text import read_text

_DEFAULTS: dict[str, Any] = {"id_rule": "name", "max_regions": REGIONS, "boxes": None, "sizes": None}
_FILES = ("ids", "boxes", "sizes")


def sidecar_name(name: str) -> str:
    """Return the name of the sidecar of a file.

    >>> sidecar_name("dev_ims.npy")
    'dev_ims.import.json'
    """
    return f"{PurePath(name).stem}.import.json"


def options_for(image_ids: Iterable[str], *, regions: int | None = None, ids: str = "") -> dict[str, Any]:
    """Return the options that importing an exported file takes, or none if the defaults will do.

    Args:
        image_ids: the image ids of the file.
        regions: greatest number of regions per image; None for features.
        ids: name of the list of the image ids, if they are in one.
    """
    exact = needs_exact_rule(image_ids)
    if not exact and regions in (None, _DEFAULTS["max_regions"]):
        return {}
    options: dict[str, Any] = {"id_rule": "exact" if exact else _DEFAULTS["id_rule"]}
    if regions is not None:
        options["max_regions"] = regions
    return options | ({"ids": ids} if ids else {})


def write_sidecar(path: Path, options: Mapping[str, Any]) -> None:
    """Write the options of a file."""
    path.write_text(json.dumps(dict(options), indent=2) + "\n", encoding="utf-8")


def apply_sidecars(job: ImportJob, paths: Sequence[Path]) -> ImportJob:
    """Return a job whose unset options have the values of the sidecars of its files.

    Args:
        job: the job.
        paths: its files.

    Raises:
        InputError: a sidecar is damaged.
        UsageError: the files were exported with different options.
    """
    sidecars = [_read(path) for path in paths]
    if not any(sidecars):
        return job
    options = {name for name, value in {"id_rule": job.id_rule, **format_options(job)}.items() if value in (None, ())}
    listed = [(path.parent / sidecar.get("ids", "")).resolve() for path, sidecar in zip(paths, sidecars, strict=True)]
    ids = [local_path(location).resolve() for location in job.ids]
    if ids and ids != listed:
        options.discard("id_rule")  # Another list than the exported one has entries of another form.
    changes: dict[str, Any] = {}
    for option in sorted(options & _DEFAULTS.keys()):
        values = [sidecar.get(option, _DEFAULTS[option]) for sidecar in sidecars]
        is_file = option in _FILES
        for path, value in zip(paths, values, strict=True):
            if (value is None) != (values[0] is None) or (value != values[0] and not is_file):
                raise UsageError(
                    f"{paths[0].name} and {path.name} were exported with different options (see {sidecar_name(paths[0].name)} and "
                    f"{sidecar_name(path.name)}): give --{option.replace('_', '-')}, or import them one by one"
                )
        if values[0] is not None:
            files = tuple(str(path.with_name(str(value))) for path, value in zip(paths, values, strict=True))
            changes[option] = files if is_file else values[0]
    return replace(job, **changes)


def _read(path: Path) -> dict[str, Any]:
    sidecar = path.with_name(sidecar_name(path.name))
    if not sidecar.is_file():
        return {}
    try:
        options = json.loads(read_text(sidecar))
    except ValueError:
        options = None
    if not isinstance(options, dict) or not all(_is_valid(*option) for option in options.items()):
        raise InputError(f"{str(sidecar)!r} does not hold options as `export` writes them: export again, or delete the file")
    return options


def _is_valid(option: str, value: object) -> bool:
    if option == "id_rule":
        return value in get_args(IdRule)
    if option == "max_regions":
        return type(value) is int and value > 0
    return option in _FILES and isinstance(value, str) and PurePath(value).name == value
