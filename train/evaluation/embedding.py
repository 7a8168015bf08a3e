"""``imagepivot embed``: images and captions as vectors of a model's joint space, in shards.

Letters: ``I`` images, ``C`` captions, ``D`` feature width, ``E`` embedding width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.dataset import Dataset, open_dataset
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import EmbeddingModel, FeaturesParameters
from schemas.storage import Folder
from schemas.writing import ShardWriter, write_dataset
from train.data.features import feature_spec
from train.evaluation.evaluate import embed_captions, embed_images
from train.evaluation.matching import check_captions, check_features
from train.models.joint_embedding import JointEmbedding
from train.runs.run import Run

__all__ = ["EmbedJob", "embed", "embed_shard", "weights_digest"]

_KEY = ("image_id", "language", "portion", "index", "split")

_Columns: TypeAlias = dict[str, Any]
_Rows: TypeAlias = Callable[[Run, Dataset, int], tuple[_Columns, dict[str, int]]]


@dataclass(frozen=True)
class EmbedJob:
    """What ``imagepivot embed`` does.

    Attributes:
        output: folder; its folders ``images`` and ``captions`` are the datasets that are written.
        name: what the embedding is called in the datasets, e.g. the run's name.
        features: folder of image features; no images are embedded when empty.
        captions: folder of encoded captions; no captions are embedded when empty.
        overwrite: replace datasets of another fingerprint.
    """

    output: str
    name: str
    features: str = ""
    captions: str = ""
    overwrite: bool = False


def weights_digest(model: JointEmbedding) -> str:
    """SHA-256 of a model's parameters, by name, hexadecimal."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(values.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def embed_shard(run: Run, features: Dataset, number: int) -> tuple[list[str], Tensor]:
    """Image ids of a shard of features, and their embeddings ``[I, E]``."""
    table = features.shard(number, ["image_id", "feature"])
    values = table["feature"].combine_chunks().flatten().to_numpy()
    # The width is not to be found out of a shard without images.
    array = values.reshape(table.num_rows, feature_spec(features).width).astype(np.float32)
    if run.config.data.l2_features:
        norms = np.linalg.norm(array, axis=1, keepdims=True)
        array /= np.where(norms > 0, norms, 1)
    return table["image_id"].to_pylist(), embed_images(run.model, array)


def embed(run: Run, job: EmbedJob) -> list[Manifest]:
    """Embeds images and captions with a run's model, shard by shard: as many as the features and the captions have.

    A run that was stopped goes on where it was. Captions of languages that the model does not know are left out and counted.

    Returns:
        Manifests of the datasets: kind ``features`` in ``images``, kind ``embeddings`` in ``captions``.

    Raises:
        DatasetError: an input is not of the kind, the vocabulary or the extractor that the run was trained with, or the output
            holds something that must not be lost.
    """
    features = open_dataset(job.features, kind="features") if job.features else None
    captions = open_dataset(job.captions, kind="encoded") if job.captions else None
    if features is not None:
        check_features(run, features)
    if captions is not None:
        check_captions(run, captions)
    written = []
    if features is not None:
        written.append(_write(run, job, "features", f"{job.output}/images", features, _image_rows))
    if captions is not None:
        written.append(_write(run, job, "embeddings", f"{job.output}/captions", captions, _caption_rows))
    return written


def _write(run: Run, job: EmbedJob, kind: str, location: str, source: Dataset, rows: _Rows) -> Manifest:
    """Writes a dataset with the shards of its source, or what an earlier run left of it to do."""
    spec = FeatureSpec(name=job.name, shape=(run.model.config.embedding,), source=run.config.description)
    model = EmbeddingModel(
        weights_sha256=weights_digest(run.model),
        similarity=run.model.config.similarity,
        languages=run.model.config.languages if kind == "embeddings" else None,
    )
    identity = Identity(
        kind=kind,
        parameters=FeaturesParameters(feature=spec, model=model).to_json(),
        inputs=({"name": source.kind, "fingerprint": source.fingerprint},),
        shards=source.num_shards,
    )
    output = Output(folder=Folder(location), identity=identity)

    def make_shard(number: int, shard: ShardWriter) -> None:
        columns, shard.statistics = rows(run, source, number)
        shard.write(pa.table(columns, schema=output.schema))

    return write_dataset(output, make_shard, overwrite=job.overwrite, libraries=("torch",))


def _image_rows(run: Run, features: Dataset, number: int) -> tuple[_Columns, dict[str, int]]:
    image_ids, embeddings = embed_shard(run, features, number)
    return {"image_id": image_ids, "feature": _vectors(embeddings)}, {"images": len(image_ids)}


def _caption_rows(run: Run, captions: Dataset, number: int) -> tuple[_Columns, dict[str, int]]:
    table = captions.shard(number).combine_chunks()
    known = pc.is_in(table["language"].cast(pa.string()), pa.array(run.model.config.languages))
    kept = table.filter(known).combine_chunks()
    ids = kept["token_ids"].combine_chunks()
    token_ids, offsets = ids.values.to_numpy(), ids.offsets.to_numpy().astype(np.int64)
    languages = np.array(kept["language"].to_pylist(), dtype=object)
    embeddings = torch.zeros(len(kept), run.model.config.embedding)
    for language in run.model.config.languages:
        rows = np.flatnonzero(languages == language)
        embeddings[rows] = embed_captions(run.model, token_ids, offsets, rows, language).cpu()
    columns = {name: kept[name].combine_chunks() for name in _KEY} | {"embedding": _vectors(embeddings)}
    return columns, {"captions": len(kept), "captions_left_out": len(table) - len(kept)}


def _vectors(embeddings: Tensor) -> pa.Array:
    """``[I, E]`` as a column."""
    item = pa.field("item", pa.float32(), nullable=False)
    values = pa.array(embeddings.cpu().numpy().ravel())
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, embeddings.shape[1]))
