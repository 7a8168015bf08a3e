"""``imagepivot embed``: images and captions as vectors of a model's joint space, in shards.

Letters: ``I`` images, ``C`` captions, ``D`` feature width, ``E`` embedding width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.keys import normalization_hint
from schemas.manifest import Manifest
from schemas.parameters import EmbeddingModel, FeaturesParameters
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import ShardWriter
from train.data.batches import CaptionBatch
from train.data.captions import check_token_ids, labels_of, no_captions
from train.data.features import missing_images, shard_features
from train.data.splits import check_fingerprints
from train.data.token_features import open_token_features, shard_token_vectors, token_fingerprints
from train.devices import resolve_device
from train.evaluation.compatibility import check_captions, check_features, check_tokens, check_vectors
from train.evaluation.evaluation import Count, count_nothing, encode_captions, encode_images
from train.jobs import EmbedJob
from train.runs.checkpoints import weights_digest
from train.runs.run import Run, open_run

Remark: TypeAlias = Callable[[str], None]

_NAMED = 5
_KEY = ("image_id", "language", "portion", "index", "split")

logger = logging.getLogger(__name__)

_Columns: TypeAlias = dict[str, Any]
_Rows: TypeAlias = Callable[[int], tuple[_Columns, dict[str, int]]]
"""From the number of a shard to the columns and statistics of the output shard."""


def embed_shard(
    run: Run, features: Dataset, number: int, chosen: pa.Array | None = None, count: Count = count_nothing
) -> tuple[list[str], Tensor]:
    """Return the image ids of a shard of features, and their embeddings ``[I, E]``; only the chosen ones, if any are given.

    Images in which no region was found are left out.
    """
    image_ids, read = shard_features(features, number, chosen=chosen, l2=run.config.data.l2_features)
    return image_ids, encode_images(run.model, read, count=count).values


def embed(job: EmbedJob, count: Count = count_nothing, remark: Remark = logger.warning) -> list[Manifest]:
    """Open a run and embed images and captions with its model, one output shard per input shard.

    If an earlier call was stopped, this one continues from there. Embeddings of other content than the inputs hold now, with the
    same fingerprints or not, are replaced only by ``overwrite``. Captions in languages that the model does not know are left
    out and counted, as is what was not selected. Another selection makes another dataset, with another fingerprint.

    ``remark`` receives a sentence about the images that lack features, for each split that has such.

    Returns:
        Manifests of the datasets: kind ``features`` in ``images``, kind ``embeddings`` in ``captions``.

    Raises:
        UsageError: the run does not know a language, or its model makes no vectors.
        DatasetError: there is no run, an input is of the wrong kind, or has another vocabulary or extractor than the run was
            trained with; there are no such captions; images of ``splits`` lack features; or the output holds something that must
            not be lost, such as embeddings of other content.
    """
    run, splits, languages = open_run(job.run, device=resolve_device(job.device)), job.splits, job.languages
    check_vectors(run)
    images = open_dataset(job.features) if job.features else None
    encoded, tokens = open_dataset(job.captions, kind="encoded") if job.captions else None, None
    if images is not None:
        check_features(run, images)
    if encoded is not None:
        check_captions(run, encoded)
        tokens = _open_tokens(run, encoded, job.token_features)
        _check_selection(run, encoded, splits, languages)
    if images is not None and encoded is not None:
        for split in splits:
            _check_images(images, encoded, split, job.allow_missing_features, remark)
    if images is not None and not splits:
        _mention_empty(images, remark)
    write = partial(_write, run, weights_digest(run.model.state_dict()), job)
    manifests = []
    if images is not None:
        chosen = _images_of(encoded, splits) if encoded is not None and splits else None
        sources = (images,) if chosen is None or encoded is None else (images, encoded)
        selection = {"splits": tuple(sorted(splits))} if chosen is not None else {}
        manifests.append(write("features", "images", sources, selection, partial(_image_rows, run, images, chosen, count)))
    if encoded is not None:
        given = {"splits": splits, "languages": languages}
        selection = {label: tuple(sorted(values)) for label, values in given.items() if values}
        rows = partial(_caption_rows, run, encoded, tokens, splits, languages or run.model.languages, count)
        sources = (encoded,) if tokens is None else (encoded, tokens)
        manifests.append(write("embeddings", "captions", sources, selection, rows))
    return manifests


def _open_tokens(run: Run, captions: Dataset, location: str) -> Dataset | None:
    """Return the vectors of the tokens of captions, for a run that reads them."""
    width = check_tokens([run], location)
    if not width:
        return None
    tokens = open_token_features(location, captions, width=width)
    found, expected = token_fingerprints(tokens), {"token_model": run.fingerprints["token_model"]}
    check_fingerprints(found, expected, captions=captions.folder.location, features=location)
    return tokens


def _check_selection(run: Run, captions: Dataset, splits: Sequence[str], languages: Sequence[str]) -> None:
    known = run.model.languages
    if unknown := [language for language in languages if language not in known]:
        raise UsageError(
            f"--languages names {', '.join(unknown)}, but this run knows only {', '.join(known)}: give some of these"
        )
    labels = labels_of(captions)
    for split in splits or ("",):
        for language in languages or ("",):
            if not any(split in ("", labeled) and language in ("", other) for labeled, other, _ in labels):
                wanted = [f"split {split!r}"] if split else []
                wanted += [f"language {language!r}"] if language else []
                raise DatasetError(no_captions(captions, ", ".join(wanted)))


def _images_of(captions: Dataset, splits: Sequence[str]) -> pa.Array:
    """Return the ids of the images that have captions in some splits."""
    shards = captions.shards(["image_id", "split"])
    return pa.concat_arrays([pc.unique(table.filter(_is_in(table["split"], splits))["image_id"]) for table in shards])


def _check_images(features: Dataset, captions: Dataset, split: str, allow_missing: bool, remark: Remark) -> None:
    """Check that all images of a split have features, or say which ones do not."""
    ids = _images_of(captions, [split]).unique()
    missing = sorted(ids.take(pa.array(missing_images(features, ids))).to_pylist())
    if not missing:
        return
    found = f"{len(missing):,} of {len(ids):,} images of split {split!r}: {_names(missing)}"
    hint = normalization_hint(missing, features.image_ids())
    if not allow_missing:
        advice = hint or "Extract them"
        if len(missing) < len(ids):
            advice += ", or embed the other images with --allow-missing-features (allow_missing_features=True)"
        raise DatasetError(f"{features.folder.location!r} lacks the features of {found}. {advice}")
    remark(f"not embedded for lack of features: {found}{hint and f': {hint}'}")


def _mention_empty(features: Dataset, remark: Remark) -> None:
    """Say which images have a row, but no region that could be embedded."""
    image_ids = features.image_ids()
    empty = sorted(image_ids[n] for n in missing_images(features, image_ids).tolist())
    if empty:
        remark(
            f"not embedded, because no region was found in them: {len(empty):,} of {len(image_ids):,} images: {_names(empty)}"
        )


def _names(image_ids: Sequence[str]) -> str:
    return ", ".join(image_ids[:_NAMED]) + (", ..." if len(image_ids) > _NAMED else "")


def _is_in(labels: pa.ChunkedArray, values: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(labels.cast(pa.string()), pa.array(values, pa.string()))


def _write(
    run: Run,
    digest: str,
    job: EmbedJob,
    kind: str,
    folder: str,
    sources: tuple[Dataset, ...],
    selection: Mapping[str, tuple[str, ...]],
    rows: _Rows,
) -> Manifest:
    """Write a dataset with as many shards as the first of its sources, or complete it; the digest is that of the weights."""
    spec = FeatureSpec(name=job.name, shape=(run.model.width,), source=run.config.description)
    languages = run.model.languages if kind == "embeddings" else None
    model = EmbeddingModel(weights_sha256=digest, similarity=run.model.similarity, languages=languages)
    listings = _listings(sources)
    output = OutputDataset(
        folder=Folder(f"{job.output}/{folder}"),
        kind=kind,
        parameters=FeaturesParameters(feature=spec, model=model, selection=dict(selection) or None).to_json(),
        inputs=tuple({"name": source.kind, "fingerprint": source.fingerprint} for source in sources),
        shards=sources[0].num_shards,
        listings=listings,
        sources=tuple(source.folder.location for source in sources),
    )

    def make_shard(number: int, shard: ShardWriter) -> None:
        columns, statistics = rows(number)
        shard.statistics = {**statistics, "listing": listings[number]}
        shard.write(pa.table(columns, schema=output.schema))

    policy = ReusePolicy(overwrite=job.overwrite, verify=job.verify)
    return write_dataset(output, make_shard, policy, libraries=("torch",))


def _listings(sources: Sequence[Dataset]) -> tuple[str, ...]:
    """Return a digest of what each shard is made from: a shard of the first dataset, and the whole of the others."""
    first, *others = (source.manifest for source in sources)
    if not others:
        return tuple(shard.sha256 for shard in first.shards)
    contents = [other.content_sha256 for other in others]
    return tuple(sha256_of_json([shard.sha256, *contents]) for shard in first.shards)


def _image_rows(
    run: Run, features: Dataset, chosen: pa.Array | None, count: Count, number: int
) -> tuple[_Columns, dict[str, int]]:
    image_ids, embeddings = embed_shard(run, features, number, chosen, count)
    statistics = {"images": len(image_ids)}
    left_out = features.manifest.shards[number].rows - len(image_ids)
    if chosen is not None or left_out:
        statistics["images_left_out"] = left_out
        count(left_out)
    return {"image_id": image_ids, "feature": _vectors(embeddings)}, statistics


def _caption_rows(
    run: Run,
    captions: Dataset,
    tokens: Dataset | None,
    splits: Sequence[str],
    languages: Sequence[str],
    count: Count,
    number: int,
) -> tuple[_Columns, dict[str, int]]:
    table = captions.shard(number).combine_chunks()
    kept = table.filter(_is_in(table["language"], languages))
    kept = (kept.filter(_is_in(kept["split"], splits)) if splits else kept).combine_chunks()
    ids = kept["token_ids"].combine_chunks()
    token_ids, offsets = ids.values.to_numpy(), ids.offsets.to_numpy().astype(np.int64)
    check_token_ids(captions, token_ids[offsets[0] : offsets[-1]], np.diff(offsets))
    spoken = np.array(kept["language"].to_pylist(), dtype=object)
    vectors = None if tokens is None else shard_token_vectors(tokens, number, kept)
    rows = [np.flatnonzero(spoken == language) for language in languages]
    parts = [
        encode_captions(run.model, CaptionBatch(token_ids, offsets, of_language, vectors), language, count=count).values
        for language, of_language in zip(languages, rows, strict=True)
    ]
    embeddings = torch.zeros(len(kept), run.model.width)
    embeddings[np.concatenate(rows)] = torch.cat(parts).cpu()  # A GPU is waited for once.
    count(len(table) - len(kept))  # Those that are not chosen, or that the model does not know, are done, too.
    columns = {name: kept[name].combine_chunks() for name in _KEY} | {"embedding": _vectors(embeddings)}
    return columns, {"captions": len(kept), "captions_left_out": len(table) - len(kept)}


def _vectors(embeddings: Tensor) -> pa.Array:
    """Return embeddings ``[I, E]`` as a column of fixed-size lists."""
    item = pa.field("item", pa.float32(), nullable=False)
    values = pa.array(embeddings.cpu().numpy().ravel())
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, embeddings.shape[1]))
