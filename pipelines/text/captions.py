"""``imagepivot captions``: tokenize captions by an external merge sort.

`prepare_captions` runs on this machine, in one process or several, or with Beam on others: see `pipelines.text.transforms`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from pipelines.inputs.captions.base import Selection
from pipelines.jobs import CaptionsJob
from pipelines.running.execution import Execution
from pipelines.running.job import DatasetJob, run_job
from pipelines.running.meter import Meter
from pipelines.running.process_pool import Map, by_key
from pipelines.running.spill_files import spill_folder
from pipelines.text.caption_shards import group_parts, learn_truecasers, list_sorted_runs, write_caption_shard
from pipelines.text.moses import load_recipe
from pipelines.text.truecasing import TRUECASER_FILES, load_truecasers, truecaser_inputs, write_truecaser
from schemas.errors import UsageError
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import CaptionsParameters
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_count import TEXT_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards

_COMPRESSED = (".gz", ".parquet")
_COMPRESSION = 4
"""Rough ratio of text to compressed bytes. The number of shards is a power of two, so a better estimate changes little."""
_BYTES_OF_WORKER = 8 << 20
"""Bytes of text for each local worker, see `Execution.for_text`."""


@takes_fields(CaptionsJob)
def prepare_captions(job: CaptionsJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``captions``, and return its manifest.

    Raises:
        UsageError: the job has truecasers and a recipe that does not truecase.
        ImagepivotError: the source is broken, or the folder cannot be written.
    """
    if job.truecaser is not None and not load_recipe(job.recipe).truecase:
        raise UsageError(f"recipe {job.recipe!r} does not truecase: leave --truecaser out, or use --recipe moses-truecase")
    source = job.open_captions()
    job = replace(job, source=source)
    execution.check_locations((("SOURCE", source.location), ("OUTPUT", job.output)))
    models = load_truecasers(job.truecaser) if job.truecaser is not None else None
    parts = source.parts(job.selection)  # Fails for an empty selection, before the files are hashed.
    inputs = source.inputs(job.selection)
    execution = execution.for_text(_text_bytes(inputs), _BYTES_OF_WORKER)
    output = replace(plan_captions(job, inputs, models), max_failures=execution.commit_limit)

    def build(*arguments: Any) -> Any:
        from pipelines.text.transforms import build_captions

        return build_captions(*arguments, job=job, output=output, models=models, meter=meter)

    def run_here(finished: frozenset[int], run: Map) -> tuple[str, ...]:
        steps = load_recipe(job.recipe)
        skip_shards = frozenset() if steps.truecase and models is None else finished  # Truecasers learn from all captions.
        with spill_folder(output.folder) as folder:
            read = partial(
                list_sorted_runs,
                source=source,
                selection=job.selection,
                shards=output.shards,
                skip_shards=skip_shards,
                folder=folder,
            )
            runs = by_key(chain.from_iterable(run(read, group_parts(parts))))
            texts: Mapping[str, str] = {}
            if steps.truecase:
                texts = models if models is not None else learn_truecasers(runs.values(), steps, job.train_splits, run)
            files = tuple(write_truecaser(language, text, output.folder) for language, text in texts.items())
            write = partial(
                write_caption_shard, models=texts, output=output, recipe=steps, advice=source.repeat_advice, meter=meter
            )
            for _ in run(write, ((shard, runs.pop(shard, [])) for shard in output.missing(finished))):
                pass
        return files

    policy = ReusePolicy(overwrite=job.overwrite, verify=job.verify)
    # A broken table fails before Beam is loaded.
    check = None if execution.is_local or not parts else lambda: next(source.tables(parts[0], Selection()), None)
    libraries = ("apache-beam", "sacremoses")
    return run_job(
        DatasetJob(output, policy, execution, build, run_here, check_launcher=check, libraries=libraries, meter=meter)
    )


def plan_captions(job: CaptionsJob, inputs: list[dict[str, Any]], models: Mapping[str, str] | None = None) -> OutputDataset:
    """Return the dataset that a job writes.

    ``models`` holds the texts of the truecasers of the job, by language; None if they are learned or not used.
    """
    steps = load_recipe(job.recipe)
    selection = job.selection
    parameters = CaptionsParameters(
        text=steps.parameters(),
        languages=tuple(sorted(selection.languages)),
        portions=tuple(sorted(selection.portions)),
        splits=tuple(sorted(selection.splits)),
        train_splits=tuple(sorted(job.train_splits)) if steps.truecase and models is None else None,
        source=job.open_captions().parameters(),
    )
    folder, size = Folder(job.output), _text_bytes(inputs)
    # By the bytes of the files: counting the captions would take another pass.
    shards = known_shards(job.shards, folder, overwrite=job.overwrite) or choose_shards(size, TEXT_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    return OutputDataset(
        folder=folder,
        kind="captions",
        parameters=parameters.to_json(),
        inputs=(*inputs, *truecaser_inputs(models or {})),
        shards=shards,
        other_files=TRUECASER_FILES,
        notes=job.notes.to_json(),
    )


def _text_bytes(inputs: Iterable[Mapping[str, Any]]) -> int:
    return sum(entry["bytes"] * (_COMPRESSION if entry["name"].endswith(_COMPRESSED) else 1) for entry in inputs)
