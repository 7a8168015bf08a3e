"""``imagepivot embed``: embeddings of images and captions as sharded datasets.

Letters: ``I`` images, ``C`` captions, ``D`` feature width, ``E`` embedding width.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.console.events import Remark
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.keys import normalization_hint
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import EmbeddingModel, FeaturesParameters
from schemas.storage.folder import Folder
from schemas.user_code import user_code
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import ShardWriter
from train.data.batches import CaptionBatch
from train.data.captions import check_token_ids, labels_of, no_captions
from train.data.features import missing_images, shard_features
from train.data.splits import check_fingerprints
from train.data.token_features import open_token_features, shard_token_vectors, token_fingerprints
from train.devices import choose_device
from train.evaluation.compatibility import check_dataset, check_languages, check_sample_outputs, check_tokens, check_vectors
from train.evaluation.evaluation import Count, embed_captions, embed_images, no_progress
from train.jobs import EmbedJob
from train.runs.checkpoints import weights_digest
from train.runs.run import Run, open_run

_MAX_NAMES = 5
_KEY = ("image_id", "language", "portion", "index", "split")

logger = logging.getLogger(__name__)

_ShardContent: TypeAlias = tuple[dict[str, Any], dict[str, int]]
"""Columns and statistics of an output shard."""


def embed_shard(
    run: Run, features: Dataset, shard: int, chosen: pa.Array | None = None, on_progress: Count = no_progress
) -> tuple[list[str], Tensor]:
    """Return the ids and embeddings ``[I, E]`` of the images in a shard.

    ``chosen`` are the ids to embed; all by default. Images without regions are left out.
    """
    image_ids, values = shard_features(features, shard, chosen=chosen, l2=run.config.data.l2_features)
    return image_ids, embed_images(run.model, values, on_progress=on_progress).values


@takes_fields(EmbedJob)
def embed(job: EmbedJob, on_progress: Count = no_progress, on_warning: Remark = logger.warning) -> list[Manifest]:
    """Embed images and captions with a run's model, one output per input shard.

    An interrupted call is resumed by the next. Embeddings of other content than that of the inputs are replaced only with
    ``overwrite``, even if fingerprints agree. Captions that are not selected, or in languages that the model does not know, are
    left out and counted. The selection is part of the fingerprint.

    ``on_warning`` receives a sentence about missing features for each split that lacks some.

    Returns:
        Manifests of the datasets: kind ``features`` in ``images``, kind ``embeddings`` in ``captions``.

    Raises:
        UsageError: the run does not know a language, or its model has no vectors.
        DatasetError: the folder holds no run; an input is of the wrong kind, or has another vocabulary or extractor than the run;
            no captions match; images of ``splits`` lack features; or the output holds embeddings of other content, or other files.
    """
    run, splits, languages = open_run(job.run, device=choose_device(job.device)), job.splits, job.languages
    check_vectors(run)
    images = open_dataset(job.features) if job.features else None
    encoded, tokens = open_dataset(job.captions, kind="encoded") if job.captions else None, None
    if images is not None:
        check_dataset(run, images, "extractor")
    if encoded is not None:
        check_dataset(run, encoded, "vocabulary")
        tokens = _open_tokens(run, encoded, job.token_features)
        check_languages(languages, run.model.languages)
        _check_selection(encoded, splits, languages)
    if images is not None and encoded is not None:
        for split in splits:
            _check_images(images, encoded, split, job.allow_missing_features, on_warning)
    if images is not None and not splits:
        _report_empty_images(images, on_warning)
    write = partial(_write_embeddings, run, weights_digest(run.model.state_dict()), job)
    manifests = []
    if images is not None:
        chosen = _images_with_captions(encoded, splits) if encoded is not None and splits else None
        sources = (images,) if chosen is None or encoded is None else (images, encoded)
        selection = {"splits": tuple(sorted(splits))} if chosen is not None else {}
        manifests.append(
            write("features", "images", sources, selection, partial(_image_rows, run, images, chosen, on_progress))
        )
    if encoded is not None:
        labels = {"splits": splits, "languages": languages}
        selection = {label: tuple(sorted(values)) for label, values in labels.items() if values}
        rows = partial(_caption_rows, run, encoded, tokens, splits, languages or run.model.languages, on_progress)
        sources = (encoded,) if tokens is None else (encoded, tokens)
        manifests.append(write("embeddings", "captions", sources, selection, rows))
    return manifests


def _open_tokens(run: Run, captions: Dataset, location: str) -> Dataset | None:
    """Open the precomputed vectors of tokens for a run that reads them."""
    width = check_tokens([run], location)
    if not width:
        return None
    tokens = open_token_features(location, captions, width=width)
    expected = {"token_model": run.fingerprints["token_model"]}
    check_fingerprints(token_fingerprints(tokens), expected, captions=captions.folder.location, features=location)
    check_sample_outputs(run, token_features=location)
    return tokens


def _check_selection(captions: Dataset, splits: Sequence[str], languages: Sequence[str]) -> None:
    """Check that each pair of a selected split and language has captions."""
    labels = labels_of(captions)
    for split, language in product(splits or ("",), languages or ("",)):
        if not any(split in ("", labeled) and language in ("", other) for labeled, other, _ in labels):
            wanted = {"split": split, "language": language}
            raise DatasetError(no_captions(captions, ", ".join(f"{name} {label!r}" for name, label in wanted.items() if label)))


def _images_with_captions(captions: Dataset, splits: Sequence[str]) -> pa.Array:
    shards = captions.shards(["image_id", "split"])
    return pa.concat_arrays([pc.unique(table.filter(_is_in(table["split"], splits))["image_id"]) for table in shards])


def _check_images(features: Dataset, captions: Dataset, split: str, allow_missing: bool, on_warning: Remark) -> None:
    """Check that all images of a split have features, or report missing ones."""
    ids = _images_with_captions(captions, [split]).unique()
    missing = sorted(ids.take(pa.array(missing_images(features, ids))).to_pylist())
    if not missing:
        return
    summary = f"{len(missing):,} of {len(ids):,} images of split {split!r}: {_first_names(missing)}"
    hint = normalization_hint(missing, features.image_ids())
    if not allow_missing:
        advice = hint or "Extract them"
        if len(missing) < len(ids):
            advice += ", or embed the other images with --allow-missing-features (allow_missing_features=True)"
        raise DatasetError(f"{features.folder.location!r} lacks the features of {summary}. {advice}")
    on_warning(f"not embedded for lack of features: {summary}{hint and f': {hint}'}")


def _report_empty_images(features: Dataset, on_warning: Remark) -> None:
    """Report images that have a row, but no region."""
    image_ids = features.image_ids()
    empty = sorted(image_ids[row] for row in missing_images(features, image_ids).tolist())
    if empty:
        on_warning(
            f"not embedded, because no region was found in them: {len(empty):,} of {len(image_ids):,} images: {_first_names(empty)}"
        )


def _first_names(image_ids: Sequence[str]) -> str:
    return ", ".join(image_ids[:_MAX_NAMES]) + (", ..." if len(image_ids) > _MAX_NAMES else "")


def _is_in(labels: pa.ChunkedArray, values: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(labels.cast(pa.string()), pa.array(values, pa.string()))


def _write_embeddings(
    run: Run,
    digest: str,
    job: EmbedJob,
    kind: str,
    folder: str,
    sources: tuple[Dataset, ...],
    selection: Mapping[str, tuple[str, ...]],
    rows: Callable[[int], _ShardContent],
) -> Manifest:
    """Write or complete a dataset with a shard for each of the first source."""
    spec = FeatureSpec(name=job.name, shape=(run.model.width,), source=run.config.description)
    languages = run.model.languages if kind == "embeddings" else None
    untrained = tuple(dict.fromkeys((*run.untrained, *sources[0].untrained))) or None
    model = EmbeddingModel(digest, run.model.similarity, languages, untrained, user_code() or None)
    shards = sources[0].manifest.shards
    others = [source.manifest.content_sha256 for source in sources[1:]]
    # Digest of the input of each output shard: a shard of the first source, and all of the others.
    listings = tuple(sha256_of_json([shard.sha256, *others]) if others else shard.sha256 for shard in shards)
    output = OutputDataset(
        folder=Folder(f"{job.output}/{folder}"),
        kind=kind,
        parameters=FeaturesParameters(feature=spec, model=model, selection=dict(selection) or None).to_json(),
        inputs=tuple({"name": source.kind, "fingerprint": source.fingerprint} for source in sources),
        shards=len(shards),
        listings=listings,
        sources=tuple(source.folder.location for source in sources),
    )

    def write_shard(index: int, shard: ShardWriter) -> None:
        columns, statistics = rows(index)
        shard.statistics = {**statistics, "listing": listings[index]}
        shard.write(pa.table(columns, schema=output.schema))

    policy = ReusePolicy(overwrite=job.overwrite, verify=job.verify)
    return write_dataset(output, write_shard, policy, libraries=("torch",))


def _image_rows(run: Run, features: Dataset, chosen: pa.Array | None, on_progress: Count, shard: int) -> _ShardContent:
    image_ids, embeddings = embed_shard(run, features, shard, chosen, on_progress)
    statistics = {"images": len(image_ids)}
    num_skipped = features.manifest.shards[shard].rows - len(image_ids)
    if chosen is not None or num_skipped:
        statistics["images_left_out"] = num_skipped
        on_progress(num_skipped)
    return {"image_id": image_ids, "feature": _column(embeddings)}, statistics


def _caption_rows(
    run: Run,
    captions: Dataset,
    tokens: Dataset | None,
    splits: Sequence[str],
    languages: Sequence[str],
    on_progress: Count,
    shard: int,
) -> _ShardContent:
    table = captions.shard(shard).combine_chunks()
    selected = table.filter(_is_in(table["language"], languages))
    selected = (selected.filter(_is_in(selected["split"], splits)) if splits else selected).combine_chunks()
    ids = selected["token_ids"].combine_chunks()
    token_ids, offsets = ids.values.to_numpy(), ids.offsets.to_numpy().astype(np.int64)
    check_token_ids(captions, token_ids[offsets[0] : offsets[-1]], np.diff(offsets))
    row_languages = np.array(selected["language"].to_pylist(), dtype=object)
    vectors = None if tokens is None else shard_token_vectors(tokens, shard, selected)
    rows = [np.flatnonzero(row_languages == language) for language in languages]
    parts = [
        embed_captions(run.model, CaptionBatch(token_ids, offsets, indices, vectors), language, on_progress=on_progress).values
        for language, indices in zip(languages, rows, strict=True)
    ]
    embeddings = torch.zeros(len(selected), run.model.width)
    embeddings[np.concatenate(rows)] = torch.cat(parts).cpu()  # One synchronization for all languages.
    on_progress(len(table) - len(selected))
    columns = {name: selected[name].combine_chunks() for name in _KEY} | {"embedding": _column(embeddings)}
    return columns, {"captions": len(selected), "captions_left_out": len(table) - len(selected)}


def _column(embeddings: Tensor) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(embeddings.cpu().numpy().ravel()), embeddings.shape[1])
