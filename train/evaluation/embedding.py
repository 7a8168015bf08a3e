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
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import EmbeddingModel, FeaturesParameters
from schemas.storage import Folder
from schemas.writing import ShardWriter, write_dataset
from train.data.features import check_finite, feature_spec, unit_vectors
from train.devices import check_device_name, resolve_device
from train.evaluation.evaluating import embed_captions, embed_images
from train.evaluation.matching import check_captions, check_features
from train.models.joint_embedding import JointEmbedding
from train.runs.run import Run, open_run

__all__ = ["EmbedJob", "embed", "embed_run", "embed_shard", "weights_digest"]

_KEY = ("image_id", "language", "portion", "index", "split")

_Columns: TypeAlias = dict[str, Any]
_Rows: TypeAlias = Callable[[Run, Dataset, int], tuple[_Columns, dict[str, int]]]
"""From a run, a dataset and the number of a shard to the columns and statistics of the output shard."""


@dataclass(frozen=True)
class EmbedJob:
    """One embedding, as ``imagepivot embed`` runs it.

    Attributes:
        run: folder of the run.
        output: folder; the datasets are written to its folders ``images`` and ``captions``.
        features: folder of image features; no images are embedded if empty.
        captions: folder of encoded captions; no captions are embedded if empty.
        device: a name that `train.devices.resolve_device` knows.
        overwrite: replace datasets with another fingerprint.

    Raises:
        UsageError: there is nothing to embed, or the name of the device is unknown.
    """

    run: str
    output: str
    features: str = ""
    captions: str = ""
    device: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.features and not self.captions:
            raise UsageError("nothing to embed: give --features, --captions, or both")
        check_device_name(self.device)

    @property
    def name(self) -> str:
        """What the embedding is called in the datasets: the last component of the run's folder."""
        return self.run.rstrip("/").rpartition("/")[2] or "run"


def weights_digest(model: JointEmbedding) -> str:
    """Return the SHA-256, hexadecimal, of a model's parameters in the order of their names."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(values.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def embed_shard(run: Run, features: Dataset, number: int) -> tuple[list[str], Tensor]:
    """Return the image ids of a shard of features, and their embeddings ``[I, E]``."""
    table = features.shard(number, ["image_id", "feature"])
    values = table["feature"].combine_chunks().flatten().to_numpy()
    # A shard without images does not tell its width.
    array, image_ids = values.reshape(table.num_rows, feature_spec(features).width), table["image_id"].to_pylist()
    check_finite(array, features, image_ids)
    return image_ids, embed_images(run.model, unit_vectors(array) if run.config.data.l2_features else array)


def embed(job: EmbedJob) -> list[Manifest]:
    """Open a run and embed images and captions with it; returns and raises what `embed_run` does, and what `open_run` raises."""
    run = open_run(job.run, device=resolve_device(job.device))
    return embed_run(run, job.output, name=job.name, features=job.features, captions=job.captions, overwrite=job.overwrite)


def embed_run(
    run: Run, output: str, *, name: str, features: str = "", captions: str = "", overwrite: bool = False
) -> list[Manifest]:
    """Embed images and captions with the model of an open run, one output shard per input shard.

    If an earlier call was stopped, this one continues from there. Captions in languages that the model does not know are left
    out and counted.

    Args:
        run: the run.
        output: as in `EmbedJob`.
        name: what the embedding is called in the datasets, e.g. the name of the run.
        features: as in `EmbedJob`.
        captions: as in `EmbedJob`.
        overwrite: as in `EmbedJob`.

    Returns:
        Manifests of the datasets: kind ``features`` in ``images``, kind ``embeddings`` in ``captions``.

    Raises:
        DatasetError: an input is of the wrong kind, or has another vocabulary or extractor than the run was trained with; or the
            output holds something that must not be lost.
    """
    images = open_dataset(features, kind="features") if features else None
    encoded = open_dataset(captions, kind="encoded") if captions else None
    if images is not None:
        check_features(run, images)
    if encoded is not None:
        check_captions(run, encoded)
    manifests = []
    if images is not None:
        task = _Task("features", f"{output}/images", images, _image_rows)
        manifests.append(_write(run, task, name=name, overwrite=overwrite))
    if encoded is not None:
        task = _Task("embeddings", f"{output}/captions", encoded, _caption_rows)
        manifests.append(_write(run, task, name=name, overwrite=overwrite))
    return manifests


@dataclass(frozen=True)
class _Task:
    """One dataset to write: kind, folder, the dataset that is embedded, and the function that embeds one of its shards."""

    kind: str
    location: str
    source: Dataset
    rows: _Rows


def _write(run: Run, task: _Task, *, name: str, overwrite: bool) -> Manifest:
    """Write a dataset with as many shards as its source, or complete it."""
    spec = FeatureSpec(name=name, shape=(run.model.config.embedding,), source=run.config.description)
    model = EmbeddingModel(
        weights_sha256=weights_digest(run.model),
        similarity=run.model.config.similarity,
        languages=run.model.config.languages if task.kind == "embeddings" else None,
    )
    identity = Identity(
        kind=task.kind,
        parameters=FeaturesParameters(feature=spec, model=model).to_json(),
        inputs=({"name": task.source.kind, "fingerprint": task.source.fingerprint},),
        shards=task.source.num_shards,
    )
    output = Output(folder=Folder(task.location), identity=identity)

    def make_shard(number: int, shard: ShardWriter) -> None:
        columns, shard.statistics = task.rows(run, task.source, number)
        shard.write(pa.table(columns, schema=output.schema))

    return write_dataset(output, make_shard, overwrite=overwrite, libraries=("torch",))


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
    """Return embeddings ``[I, E]`` as a column of fixed-size lists."""
    item = pa.field("item", pa.float32(), nullable=False)
    values = pa.array(embeddings.cpu().numpy().ravel())
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, embeddings.shape[1]))
