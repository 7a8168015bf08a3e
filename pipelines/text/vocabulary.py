"""``imagepivot vocabulary``: the frequent tokens of the training split.

`build_vocabulary` counts on this machine, in one process or several, or with Beam on others: see `pipelines.text.transforms`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from pipelines.jobs import VocabularyJob
from pipelines.running.execution import Execution
from pipelines.running.job import DatasetJob, run_job
from pipelines.running.meter import Meter
from pipelines.running.process_pool import Map
from pipelines.text.token_counts import count_tokens, execution_for, open_captions_dataset, selects, write_vocabulary
from schemas.dataset import Dataset
from schemas.errors import DatasetError, InputError
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import VocabularyParameters
from schemas.storage.folder import Folder
from schemas.vocabulary import TEXT_NAME
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy

_MANY_UNKNOWN = 0.5  # A share of tokens.


def _check_selected(job: VocabularyJob, captions: Dataset) -> None:
    """Check a selection by the statistics in the manifest of the captions.

    Raises:
        DatasetError: the statistics do not count captions.
        InputError: no caption is selected.
    """
    counted = captions.manifest.statistics.get("captions", {})
    groups = [tuple(key.split("/", 2)) for key in counted] if isinstance(counted, Mapping) else [()]
    if any(len(group) != 3 for group in groups):
        raise DatasetError(
            f"{job.captions!r} does not count its captions by portion, split and language: prepare the captions again"
        )
    selections = (("portion", job.portions), ("split", job.splits), ("language", job.languages))
    for position, (option, selected) in enumerate(selections):
        present = sorted({group[position] for group in groups})
        for value in selected:
            if value not in present:
                raise InputError(
                    f"{job.captions!r} has no captions of {option} {value!r}: it has "
                    f"{', '.join(present) or 'none'}. Choose with --{option}s"
                )
    if not any(split in job.splits and selects(job, portion, language) for portion, split, language in groups):
        raise InputError(
            f"{job.captions!r} has no captions of the selected portions, splits and languages together: it has "
            f"{', '.join('/'.join(group) for group in sorted(groups))}. Choose with --portions, --splits and --languages"
        )


def unknown_remark(job: VocabularyJob, unknown: Mapping[str, Mapping[str, float]]) -> str:
    """Return a remark if most counted tokens of a language are ``<unk>``, else "".

    ``unknown`` has the share of ``<unk>`` by language and split.
    """
    shares = {
        language: max((by_split.get(split, 0.0) for split in job.splits), default=0.0) for language, by_split in unknown.items()
    }
    named = ", ".join(f"{language} {share:.0%}" for language, share in sorted(shares.items()) if share > _MANY_UNKNOWN)
    if not named:
        return ""
    return (
        f"most tokens of {', '.join(job.splits)} are <unk> ({named}), since few occur {job.min_count} "
        "times: give a lower --min-count, e.g. 1"
    )


@takes_fields(VocabularyJob)
def build_vocabulary(job: VocabularyJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``vocabulary``, and return its manifest.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or holds no captions.
        InputError: no caption is selected, or no token reaches the threshold.
    """
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output)))
    captions = open_captions_dataset(job.captions)
    _check_selected(job, captions)
    execution = execution_for(captions, execution)
    output = OutputDataset(
        folder=Folder(job.output),
        kind="vocabulary",
        parameters=VocabularyParameters(
            min_count=job.min_count,
            count_scope=job.count_scope,
            splits=tuple(sorted(job.splits)),
            languages=tuple(sorted(job.languages)),
            portions=tuple(sorted(job.portions)),
        ).to_json(),
        other_files=re.escape(TEXT_NAME),
        notes=job.notes.to_json(),
    ).made_from(captions)

    def build(*arguments: Any) -> Any:
        from pipelines.text.transforms import build_counts

        return build_counts(*arguments, job=job, captions=captions, output=output, meter=meter)

    def run_here(finished: frozenset[int], run: Map) -> tuple[str, ...]:
        workers = min(execution.local_workers, captions.num_shards)
        shares = (range(first, captions.num_shards, workers) for first in range(workers))
        counts = run(partial(count_tokens, captions=captions, meter=meter), shares)
        return (write_vocabulary(job, output, counts),)

    policy = ReusePolicy(overwrite=job.overwrite, verify=job.verify)
    return run_job(DatasetJob(output, policy, execution, build, run_here, libraries=("apache-beam",), meter=meter))
