"""Datasets made of plain rows, through the public writer."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.features import FeatureSpec
from schemas.kinds import KEY_COLUMNS
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.file_names import LOCK_NAME
from schemas.writing.output import OutputDataset


def shard_by_hand(image_id: str, shards: int) -> int:
    return int(hashlib.blake2b(image_id.encode()).hexdigest(), 16) % shards


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def stored(location: str | Path) -> dict[str, bytes]:
    """Every file of a dataset on a disk or in a store, without the lock."""
    folder = Folder(str(location))
    return {name: folder.read(name) for name in folder.names() if name != LOCK_NAME}


def sign(manifest: dict[str, Any]) -> dict[str, Any]:
    """Give an edited manifest the digest of what it holds now, so that it passes for one that was written so."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_rows(
    path: Path,
    kind: str,
    rows: Iterable[Mapping[str, Any]],
    spec: FeatureSpec | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    inputs: Sequence[Mapping[str, Any]] = (),
    shards: int = 1,
    failures: Iterable[Mapping[str, str]] = (),
    files: Mapping[str, bytes] | None = None,
    statistics: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write rows in any order, each to its shard; vectors may have any shape."""
    rows, failures, files = list(rows), list(failures), dict(files or {})
    stored = {} if spec is None else {"feature": {**vars(spec), "shape": list(spec.shape)}}
    if kind == "vocabulary":
        files["_vocabulary.txt"] = "".join(f"{row['token']}\n" for row in rows).encode()
    output = OutputDataset(Folder(str(path)), kind, {**stored, **(parameters or {})}, inputs, shards, files=files)

    def write_feature_shard(number: int, shard: Any) -> None:
        chosen = [
            row for row in rows if "image_id" not in KEY_COLUMNS[kind] or shard_by_hand(row["image_id"], shards) == number
        ]
        flat = [{name: v.ravel() if isinstance(v, np.ndarray) else v for name, v in row.items()} for row in chosen]
        flat.sort(key=lambda row: [row[name] for name in KEY_COLUMNS[kind]])
        shard.write(pa.Table.from_pylist(flat, schema=output.schema))
        shard.add_failures(row for row in failures if shard_by_hand(row["key"].split("/")[0], shards) == number)

    manifest = replace(write_dataset(output, write_feature_shard), statistics=statistics or {})
    output.folder.put(MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def region_row(
    image_id: str, boxes: Any, features: Any, used: int, *, width: int = 640, height: int = 480, **labels: Any
) -> dict[str, Any]:
    """Make a row of kind ``regions``; labels that are not given, and regions that are not in use, are 0."""
    names = ("class_ids", "class_scores", "attribute_ids", "attribute_scores")
    columns = {"boxes": boxes, "features": features, **dict.fromkeys(names, np.zeros(len(boxes))), **labels}
    columns = {name: np.array(values) for name, values in columns.items()}
    for values in columns.values():
        values[used:] = 0
    return {"image_id": image_id, "width": width, "height": height, "num_regions": used, **columns}


def write_encoded(folder: Path, captions: Sequence[Mapping[str, Any]], *, seed: int = 0, shards: int = 1) -> None:
    """Write ``vocabulary``, of all tokens of captions, and ``encoded``, the captions as ids of it; ``seed`` is a parameter."""
    counts: dict[str, Counter[str]] = {row["language"]: Counter() for row in captions}
    for row in captions:
        counts[row["language"]].update(row["tokens"])
    vocabulary = Vocabulary.from_counts(counts, min_count=1)
    words = write_rows(folder / "vocabulary", "vocabulary", vocabulary.table.to_pylist(), parameters={"seed": seed})
    encoded = []
    for row in captions:
        ids = vocabulary.encode(row["tokens"])
        kept = {name: value for name, value in row.items() if name not in ("text", "tokens")}
        encoded.append({**kept, "token_ids": ids, "length": len(ids)})
    parameters = {"vocabulary_size": len(vocabulary), "text": {"recipe": "raw"}}
    inputs = ({"name": "captions", "fingerprint": "c" * 64}, {"name": "vocabulary", "fingerprint": words.fingerprint})
    write_rows(folder / "encoded", "encoded", encoded, parameters=parameters, inputs=inputs, shards=shards)
