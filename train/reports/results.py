"""The results of ``imagepivot reproduce``: one JSON file for each run of a row, or one that says why it failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schemas.errors import DatasetError
from schemas.escapes import to_json
from schemas.fingerprints import sha256_of_json
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors
from train.runs.checkpoints import BEST

DIRECTIONS = ("image_to_text", "text_to_image")
MEASURES = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank")

_DIGEST = "sha256"

_COUNTED = ("words", "captions", "pretrained")
_NEEDED: dict[str, type] = {"feature": str, "overrides": list, "scores": list}
_KINDS = _NEEDED | {"untrained": bool, "recipe": str, "vocabulary": int, "step": int, "steps": int, "members": dict}
_KINDS |= dict.fromkeys(_COUNTED, dict)


def results_folder(output: str, preset: str) -> Path:
    """Return the folder of a row's results, ``seed-*.json``, and failures, ``failed-seed-*.json``."""
    return Folder(output).local_path / "results" / preset


def result_file(output: str, preset: str, seed: int) -> Path:
    """Return the file of a run's result."""
    return results_folder(output, preset) / f"seed-{seed}.json"


def failure_file(output: str, preset: str, seed: int) -> Path:
    """Return the file that says why a run failed."""
    return results_folder(output, preset) / f"failed-seed-{seed}.json"


def finished_runs(output: str, preset: str) -> list[Path]:
    """Return the folders of the runs of a preset that were measured, in the order of their seeds.

    Raises:
        DatasetError: a result is damaged.
    """
    names = [path.stem for path in results_folder(output, preset).glob("seed-*.json") if read_result(path)["scores"]]
    runs = [Folder(output).local_path / "runs" / preset / name for name in sorted(names, key=lambda name: (len(name), name))]
    return [run for run in runs if (run / BEST).exists()]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result, whole or not at all, with a digest of it."""
    result = {**result, _DIGEST: sha256_of_json(result)}
    text = to_json(result, indent=2) + "\n"
    Folder(str(path.parent)).write(path.name, text.encode())


def read_result(path: Path) -> dict[str, Any]:
    """Read a result.

    Raises:
        DatasetError: the file is damaged.
    """
    try:
        with storage_errors(str(path)):
            result = json.loads(path.read_bytes())
        if result.pop(_DIGEST) != sha256_of_json(result):
            raise ValueError("its content is not what was written")
        _check(result)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{str(path)!r} is damaged, or not a result of imagepivot reproduce ({type(error).__name__}: {error}): delete it and "
            "the run of the same name, and give the same command again"
        ) from error
    return result


def _check(result: Any) -> None:
    """Raise one of Python's own errors unless a report can be made of a result."""
    for name, kind in _KINDS.items():
        # Results of earlier versions do not say what was trained on; those of ensembles have no steps of their own.
        needed = name in _NEEDED or (name == "step" and "members" not in result)
        if (name in result or needed) and not isinstance(result[name], kind):
            raise TypeError(f"{name} is {result[name]!r}")
    if not all(isinstance(setting, str) for setting in result["overrides"]):
        raise TypeError(f"overrides are {result['overrides']!r}")
    for name in _COUNTED:
        if not all(isinstance(number, int) for number in result.get(name, {}).values()):
            raise TypeError(f"{name} are {result[name]!r}")
    for score in result["scores"]:
        for name in ("language", "portion", "split"):
            if not isinstance(score[name], str):
                raise TypeError(f"{name} is {score[name]!r}")
        for direction in DIRECTIONS:
            for measure in MEASURES:
                if not isinstance(score[direction][measure], (int, float)):
                    raise TypeError(f"{direction} {measure} is {score[direction][measure]!r}")
