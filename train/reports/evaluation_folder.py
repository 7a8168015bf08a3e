"""Folder of ``evaluate --output``: ``evaluation.json`` and ``ranks.parquet``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from schemas.errors import UsageError
from schemas.escapes import redact, to_json
from schemas.storage.folder import Folder, file_at
from train.evaluation.ranks import RANKS, write_ranks
from train.evaluation.scores import Score, evaluation_report
from train.runs.checkpoints import BEST, checkpoint_settings, read_checkpoint
from train.runs.run import is_run

EVALUATION = "evaluation.json"


def check_evaluation_folder(location: str) -> None:
    """Check that scores may be written into a folder.

    Raises:
        UsageError: the location is a file, ends in ``.json``, or holds a run.
        DatasetError: the folder is not writable.
    """
    beside, name = file_at(location)
    if name.endswith(".json") or (name and beside.stat(name) is not None):
        raise UsageError(
            f"--output is {location!r}, expected a folder: {EVALUATION} and {RANKS} are written into it. Leave .json out, or name "
            "another folder"
        )
    if is_run(location):
        raise UsageError(f"--output is {location!r}, which holds a run: choose another folder; nothing was changed")
    Folder(location).check_writable()


def evaluation_content(scores: Sequence[Score], runs: Sequence[str]) -> dict[str, Any]:
    """Return the runs, their scores and averages as plain values, for JSON."""
    described = []
    for run in runs:
        checkpoint = read_checkpoint(Folder(run), BEST)
        settings = checkpoint_settings(checkpoint)
        described.append(
            {"folder": redact(run), "step": checkpoint.progress.step, "seed": checkpoint.seed, "settings": settings}
        )
    return {"runs": described, **evaluation_report(scores)}


def write_evaluation(scores: Sequence[Score], content: Mapping[str, Any], location: str) -> list[str]:
    """Write scores and ranks, and return the names of the files."""
    tables = [score.ranks for score in scores]
    tables += [result.ranks for score in scores for result in score.cross_lingual.values()]
    Folder(location).put(EVALUATION, (to_json(content, indent=2) + "\n").encode())
    write_ranks(Folder(location), pa.concat_tables(tables))
    return [EVALUATION, RANKS]
