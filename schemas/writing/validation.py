"""Validation of a dataset against the format, on the stored bytes."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.console import events
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.failures import failures_name, parse_failures
from schemas.keys import CONTROLS, shard_of
from schemas.kinds import FAILURE_REASONS, KEY_COLUMNS, belongs_to_images, is_vector
from schemas.manifest import MANIFEST_NAME, FileEntry
from schemas.parameters import EncodedParameters, TokenFeaturesParameters, WordVectorsParameters
from schemas.sample_outputs import are_equal
from schemas.storage.folder import FileInfo
from schemas.vocabulary import END, SPECIALS, START, TEXT_NAME
from schemas.writing.file_names import JOB_NAME, LOCK_NAME, PUBLISHING_NAME, is_like_shard, is_own, left_alone
from schemas.writing.output_state import ShardState, Status, file_problem, state_of
from schemas.writing.records import record_name


def validate(
    path: str | os.PathLike[str], *, strict: bool = False, on_warning: Callable[[str], None] = events.remark
) -> list[str]:
    """Check a dataset against the format; memory holds one shard.

    The checks cover manifest and fingerprint; presence, size and digest of every file, and stray shards; footers; schema; row
    counts; order and uniqueness of keys; shard assignment; values (ranges of ids, finite features, ...); failures.

    Files of other tools in the folder are problems with ``strict``; otherwise ``on_warning`` receives a sentence about them.

    Returns:
        The problems, one sentence each; empty if the dataset is valid.

    Raises:
        DatasetError: the folder has no dataset, or its manifest is unusable.
    """
    dataset = open_dataset(path)
    folder, manifest = dataset.folder, dataset.manifest
    entries = {entry.name: entry for entry in folder.list()}
    names = {MANIFEST_NAME, LOCK_NAME, PUBLISHING_NAME, JOB_NAME}
    listed: list[FileEntry] = [*manifest.shards, *manifest.failures, *manifest.files]
    names |= {record_name(shard.path) for shard in manifest.shards} | {entry.path for entry in listed}
    stray = sorted(entries.keys() - names)
    others = [] if strict else [name for name in stray if not is_own(name) and not is_like_shard(name)]
    if others:
        on_warning(left_alone(folder.location, others))
    states = [state_of(folder, entry.path, entries, manifest, read_all=True) for entry in manifest.shards]
    advice = "delete it, or move it elsewhere"
    problems = [f"{name} is in the folder but not in the manifest: {advice}" for name in stray if name not in others]
    problems += [problem for shard in states for problem in (shard.problem, shard.failures_problem) if problem]
    file_problems = (file_problem(folder, entries, entry, "the manifest", digest=True) for entry in manifest.files)
    problems += filter(None, file_problems)
    problems += [
        f"{shard.name} was computed by another version of the model's code than the manifest says"
        for shard in states
        if shard.record is not None and not are_equal(shard.record.sample_outputs, manifest.sample_outputs, manifest.parameters)
    ]
    reasons: Counter[str] = Counter()
    for index, shard in enumerate(states):
        if not shard.problem:  # Damaged shards are not parsed.
            shard_problems = list(_check_shard(dataset, index, shard, entries))
            problems += shard_problems or _check_failures(dataset, index, reasons, shard)
    if dict(reasons) != dict(manifest.failure_reasons) and not problems:
        problems.append(f"the manifest counts failures {dict(manifest.failure_reasons)}, the shards hold {dict(reasons)}")
    return problems


def _check_shard(dataset: Dataset, index: int, shard: ShardState, entries: Mapping[str, FileInfo]) -> Iterator[str]:
    entry, footer = dataset.manifest.shards[index], shard.footer
    if footer is not None and shard.status is Status.OTHER:
        yield f"{entry.path} was made for fingerprint {footer.fingerprint!r}, the dataset has {dataset.fingerprint!r}"
    try:
        table = dataset.shard(index)
    except DatasetError as error:
        yield str(error)
        return
    if footer is None:
        yield f"{entry.path} does not say in its footer which dataset it was made for"
    elif shard.record is None and record_name(entry.path) in entries:
        loss = "; then updates compare sizes of images only" if dataset.kind in ("features", "regions") else ""
        yield f"{record_name(entry.path)} is damaged, or describes another shard: delete it{loss}"
    for column in table.schema.names:
        if table[column].null_count:
            yield f"{entry.path}: column {column!r} has {table[column].null_count} nulls"
    keys = list(zip(*(table[column].to_pylist() for column in KEY_COLUMNS[dataset.kind]), strict=True))
    for before, after in itertools.pairwise(keys):
        if before >= after:
            problem = "occurs twice" if before == after else f"comes before {after}, though it is larger"
            yield f"{entry.path}: key {before} {problem}"
            break
    if belongs_to_images(dataset.kind):
        stray = next((key[0] for key in keys if shard_of(key[0], dataset.num_shards) != index), None)
        if stray is not None:
            yield f"{entry.path}: image {stray!r} belongs to shard {shard_of(stray, dataset.num_shards)}"
        if pc.any(pc.match_substring_regex(table["image_id"], f"^$|[{CONTROLS}]")).as_py():
            yield f"{entry.path}: an image id is empty or has a control character"
    for problem in _CHECKS[dataset.kind](dataset, table):
        yield f"{entry.path}: {problem}"


def _check_failures(dataset: Dataset, index: int, reasons: Counter[str], shard: ShardState) -> list[str]:
    name = failures_name(shard.name)
    entry = dataset.manifest.shard_entries.get(name)
    if entry is None or shard.failures_problem:
        return []
    try:
        table = parse_failures(dataset.folder.read(name), dataset.folder.path_of(name))
    except DatasetError as error:
        return [str(error)]
    if table.num_rows != entry.rows:
        return [f"{name} has {table.num_rows:,} rows, the manifest says {entry.rows:,}"]
    counts = Counter(table["reason"].to_pylist())
    reasons.update(counts)
    unknown = sorted(set(counts) - set(FAILURE_REASONS))
    problems = [f"{name}: reason {reason!r} is not in the closed list" for reason in unknown]
    if dataset.kind in ("features", "regions"):
        extracted = set(dataset.shard(index, ["image_id"])["image_id"].to_pylist())
        duplicates = sorted(extracted.intersection(table["key"].to_pylist()))
        problems += [f"{name}: image {key!r} failed and has a row as well" for key in duplicates[:1]]
    return problems


def _check_captions(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    if pc.any(pc.less(table["index"], 0)).as_py():
        yield "an index is negative"
    empty = pc.sum(pc.equal(pc.list_value_length(table["tokens"]), 0)).as_py()
    if empty:
        yield f"{empty} captions have no tokens"


def _check_encoded(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    if not pc.all(pc.equal(pc.list_value_length(table["token_ids"]), table["length"]), min_count=0).as_py():
        yield "a length is not the number of ids"
        return
    ids = table["token_ids"].combine_chunks().flatten().to_numpy()
    size = EncodedParameters.from_json(dataset.manifest.parameters).vocabulary_size
    if size is None:
        yield "the manifest does not say how many tokens the vocabulary has"
    elif len(ids) and (ids.min() < 0 or ids.max() >= size):
        yield f"ids are {ids.min()} to {ids.max()}, expected 0 to {size - 1}"
    lengths = table["length"].to_numpy()
    ends = np.cumsum(lengths)
    if (lengths < 2).any() or (ids[ends - 1] != END).any() or (ids[ends - lengths] != START).any():
        yield "a caption does not begin with <start> and end with <end>"


def _check_vocabulary(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    rows = table.to_pylist()
    if [row["token"] for row in rows[: len(SPECIALS)]] != list(SPECIALS):
        yield f"the first tokens are not {SPECIALS}"
    if [row["id"] for row in rows] != list(range(len(rows))):
        yield "the ids are not 0, 1, 2, ..."
    if len({row["token"] for row in rows}) != len(rows):
        yield "a token occurs twice"
    order = [(-row["count"], row["token"]) for row in rows[len(SPECIALS) :]]
    if order != sorted(order):
        yield "the tokens are not in the order of count descending, then token"
    wrong = next((row["token"] for row in rows if row["count"] != sum(count for _, count in row["counts"])), None)
    if wrong is not None:
        yield f"the count of token {wrong!r} is not the sum of its counts by language"
    text = "".join(f"{row['token']}\n" for row in rows).encode()
    if all(entry.path != TEXT_NAME for entry in dataset.manifest.files):
        yield f"{TEXT_NAME} is not in the manifest"
    elif dataset.folder.stat(TEXT_NAME) is not None and dataset.folder.read(TEXT_NAME) != text:
        yield f"{TEXT_NAME} does not hold the same tokens"


def _check_vectors(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    for column in table.schema:
        if is_vector(column.type):
            values = table[column.name].combine_chunks().flatten().to_numpy()
            if not np.isfinite(values).all():
                yield f"column {column.name!r} holds values that are not finite"


def _check_word_vectors(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    yield from _check_vectors(dataset, table)
    languages = WordVectorsParameters.from_json(dataset.manifest.parameters).languages
    tokens: dict[int, str] = {}
    for language, token_id, token in zip(*(table[name].to_pylist() for name in ("language", "id", "token")), strict=True):
        if language not in languages:
            yield f"language {language!r} is not in the manifest"
            return
        if token_id < len(SPECIALS) or tokens.setdefault(token_id, token) != token:
            expected = repr(tokens[token_id]) if token_id in tokens else f"an id of {len(SPECIALS)} or more"
            yield f"id {token_id} has the token {token!r}, expected {expected}"
            return


def _check_token_features(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    lengths = table["length"].to_numpy()
    width = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature.width
    if len(lengths) and lengths.min() < 2:
        yield f"a length is {lengths.min()}, expected 2 or more: <start> and <end> have vectors, too"
    if not np.array_equal(pc.list_value_length(table["vectors"]).to_numpy(), lengths * width):
        yield f"the number of values of a caption is not its length x {width}"
    yield from _check_vectors(dataset, table)


def _check_regions(dataset: Dataset, table: pa.Table) -> Iterator[str]:
    yield from _check_vectors(dataset, table)
    regions = dataset.schema.field("class_ids").type.list_size
    used = table["num_regions"].to_numpy()
    if len(used) and (used.min() < 0 or used.max() > regions):
        yield f"num_regions is {used.min()} to {used.max()}, expected 0 to {regions}"
        return
    unused = np.arange(regions) >= used[:, np.newaxis]
    for column in table.schema:
        if len(used) and pa.types.is_fixed_size_list(column.type):
            values = table[column.name].combine_chunks().flatten().to_numpy().reshape(len(used), regions, -1)
            wrong = np.flatnonzero((values.any(axis=2) & unused).any(axis=1))
            if len(wrong):
                image_id = table["image_id"][wrong[0]].as_py()
                yield f"column {column.name!r} is not zero beyond num_regions of image {image_id!r}"


_CHECKS = {
    "captions": _check_captions,
    "encoded": _check_encoded,
    "vocabulary": _check_vocabulary,
    "features": _check_vectors,
    "regions": _check_regions,
    "embeddings": _check_vectors,
    "word-vectors": _check_word_vectors,
    "token-features": _check_token_features,
}
