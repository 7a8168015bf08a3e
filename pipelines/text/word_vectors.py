"""``imagepivot word-vectors``: pretrained vectors of a vocabulary's words.

Each language has its own file. Tokens are looked up without the escapes of the Moses tokenizer (``&apos;s``
as ``'s``). The lookup is repeated in lower case, since the files of aligned vectors have no capitals.

Files are read one after the other; memory holds the vectors of the vocabulary. gensim loads a fastText model (``.bin``) whole.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.jobs import WordVectorsJob
from pipelines.running.meter import Meter
from pipelines.text.moses import unescape
from schemas.dataset import open_dataset
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import WordVectorsParameters
from schemas.storage.folder import Folder
from schemas.storage.locations import is_remote, local_path
from schemas.vector_files import HEADER, VectorFile, open_user_file, read_vector_file
from schemas.vocabulary import SPECIALS, Vocabulary
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import ShardWriter

_LOOKUP = "without Moses escapes; then in lower case"
_SUB_WORDS = "; then, of a .bin, by sub-words"
_EXPECTED = "FILE takes word vectors as text (.vec, .txt, also .gz), or a model of fastText (.bin)"
_LISTED = 10
_MODEL_SUFFIX = ".bin"
_HEADER_BYTES = 64
_UNREADABLE = (ValueError, AssertionError, EOFError, NotImplementedError, LookupError, MemoryError, OSError, struct.error)


@dataclass(frozen=True)
class _LanguageVectors:
    """The vectors of a language's tokens, by token id, and their statistics."""

    file: VectorFile
    vectors: Mapping[int, np.ndarray]
    statistics: Mapping[str, Any]


@takes_fields(WordVectorsJob)
def import_word_vectors(job: WordVectorsJob, meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``word-vectors``.

    Returns:
        Its manifest, with the coverage of types and occurrences by language, and the most frequent missing words.

    Raises:
        DatasetError: ``job.vocabulary`` is not a vocabulary, or the folder cannot be written.
        InputError: a file is unreadable or has none of the words, widths differ, or the vocabulary lacks a language.
    """
    dataset = open_dataset(job.vocabulary, kind="vocabulary")
    vocabulary = dataset.vocabulary()
    counted = sorted({language for counts in vocabulary.counts for language in counts})
    for language in job.languages:
        if language not in counted:
            raise InputError(
                f"{job.vocabulary!r} has no words of language {language!r}: it has "
                f"{', '.join(counted) or 'none'}. Choose with --languages"
            )
    locations = dict(sorted(zip(job.languages, job.files, strict=True)))
    looked_up = {language: _look_up(vocabulary, language, location, meter) for language, location in locations.items()}
    spec = FeatureSpec(name="word-vectors", shape=(_common_width(looked_up, locations),))
    has_models = any(location.endswith(_MODEL_SUFFIX) for location in job.files)
    output = OutputDataset(
        folder=Folder(job.output),
        kind="word-vectors",
        notes=job.notes.to_json(),
        parameters=WordVectorsParameters(
            feature=spec, languages=tuple(looked_up), lookup=_LOOKUP + (_SUB_WORDS if has_models else "")
        ).to_json(),
        inputs=tuple(
            {
                "name": locations[language].rstrip("/").rpartition("/")[2],
                "language": language,
                "bytes": vectors.file.bytes,
                "sha256": vectors.file.sha256,
            }
            for language, vectors in looked_up.items()
        ),
    ).made_from(dataset)

    def write_shard(_index: int, shard: ShardWriter) -> None:
        for language, vectors in looked_up.items():
            shard.write(_word_vector_table(vocabulary, language, vectors.vectors, spec))
        shard.statistics = {language: vectors.statistics for language, vectors in looked_up.items()}

    return write_dataset(
        output,
        write_shard,
        ReusePolicy(overwrite=job.overwrite, verify=job.verify),
        libraries=("gensim",) if has_models else (),
    )


def _look_up(vocabulary: Vocabulary, language: str, location: str, meter: Meter) -> _LanguageVectors:
    """Find the vectors of the tokens that a vocabulary counts in a language."""
    words = {
        token_id: unescape(token)
        for token_id, token in enumerate(vocabulary.tokens)
        if token_id >= len(SPECIALS) and language in vocabulary.counts[token_id]
    }
    wanted = {form for word in words.values() for form in (word, word.lower())}
    if location.endswith(_MODEL_SUFFIX):
        file = _read_model_file(location, wanted, words.values())
    else:
        file = read_vector_file(location, wanted, expected=_EXPECTED, on_progress=lambda count: meter.add(words=count))
    vectors: dict[int, np.ndarray] = {}
    counts = {token_id: vocabulary.counts[token_id][language] for token_id in words}
    lower = 0
    for token_id, word in words.items():
        form = word if word in file.vectors else word.lower()
        if form in file.vectors:
            vectors[token_id] = file.vectors[form]
            lower += form != word
    if not vectors:
        raise InputError(
            f"{location!r} has none of the {len(words):,} words of {language!r} among its {file.words:,}: "
            "check that it is the file of that language, and that the vocabulary holds whole words"
        )
    missing = sorted(
        (token_id for token_id in words if token_id not in vectors), key=lambda token_id: (-counts[token_id], token_id)
    )
    return _LanguageVectors(
        file,
        vectors,
        {
            "file_words": file.words,
            "types": len(words),
            "types_found": len(vectors),
            "types_in_lower_case": lower,
            "occurrences": sum(counts.values()),
            "occurrences_found": sum(counts[token_id] for token_id in vectors),
            "most_frequent_missing": {vocabulary.tokens[token_id]: counts[token_id] for token_id in missing[:_LISTED]},
        },
    )


def _common_width(looked_up: Mapping[str, _LanguageVectors], locations: Mapping[str, str]) -> int:
    (first, width), *others = ((language, vectors.file.width) for language, vectors in looked_up.items())
    for language, other in others:
        if other != width:
            raise InputError(
                f"{locations[language]!r} has {other} numbers a word, {locations[first]!r} has {width}: the "
                "vectors of all languages must be of one width: give the files of one model, such as fastText's aligned vectors"
            )
    return width


def _word_vector_table(vocabulary: Vocabulary, language: str, vectors: Mapping[int, np.ndarray], spec: FeatureSpec) -> pa.Table:
    token_ids = sorted(vectors)
    values = spec.rounded(np.stack([vectors[token_id] for token_id in token_ids]).astype(np.float32))
    schema = schema_of("word-vectors", spec)
    return pa.table(
        {
            "language": pa.array([language] * len(token_ids)).dictionary_encode(),
            "id": np.array(token_ids, np.int32),
            "token": [vocabulary.tokens[token_id] for token_id in token_ids],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=schema.field("vector").type),
        },
        schema=schema,
    )


def _read_model_file(location: str, wanted: Iterable[str], composed: Iterable[str]) -> VectorFile:
    """Read the vectors of words from a model of fastText.

    Words in ``composed`` that the model lacks, also in lower case, are composed of known sub-words, if they have any.

    Raises:
        InputError: the file cannot be read, or is not a model.
        UsageError: gensim is not installed.
    """
    try:
        from gensim.models.fasttext import load_facebook_vectors
    except ImportError:
        raise UsageError(
            "reading a model of fastText needs gensim, which is not installed: pip install 'imagepivot[fasttext]' (on Python 3.11 "
            "to 3.13: gensim has no wheels for 3.14), or give vectors as text (.vec)"
        ) from None
    if is_remote(location):
        raise InputError(f"{location!r} is in a store, expected a local file: copy the model of fastText here first")
    with open_user_file(location, _EXPECTED) as (stream, digest):
        if HEADER.fullmatch(stream.readline(_HEADER_BYTES)):  # A model of fastText begins with a magic number.
            raise InputError(
                f"{location!r} is in word2vec's binary format: convert it to text with gensim: "
                f"KeyedVectors.load_word2vec_format({location!r}, binary=True).save_word2vec_format('vectors.vec')"
            )
        sha256 = digest.sha256()
    try:
        model = load_facebook_vectors(str(local_path(location)))
    except _UNREADABLE as error:
        raise InputError(
            f"{location!r} is not a model of fastText, or is cut off ({type(error).__name__}: {error}): fetch it again. {_EXPECTED}"
        ) from error
    vectors = {word: model.get_vector(word) for word in wanted if word in model.key_to_index}
    for word in composed:
        if word not in vectors and word.lower() not in vectors:
            try:
                vectors[word] = model.get_vector(word)
            except KeyError:  # None of its sub-words is in the model.
                continue
    return VectorFile(
        vectors={word: np.asarray(vector, np.float64) for word, vector in vectors.items()},
        width=model.vector_size,
        words=len(model.key_to_index),
        bytes=digest.bytes,
        sha256=sha256,
    )
