"""Text-to-image search by a sentence in any language of a model.

Letters: ``I`` images, ``E`` embedding width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from schemas.console.events import Remark
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.options import takes_fields
from schemas.parameters import FeaturesParameters, untrained_remark
from schemas.storage.folder import Folder
from schemas.vocabulary import UNK
from train.devices import choose_device
from train.evaluation.compatibility import check_dataset, check_reads_text, check_vectors
from train.evaluation.embedding import embed_shard
from train.evaluation.evaluation import Count, eval_mode, no_progress
from train.evaluation.sentences import Tokenize, encode_sentences
from train.jobs import SearchJob
from train.models.retrieval_model import Encoded
from train.runs.checkpoints import weights_digest
from train.runs.run import Run, open_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gallery:
    """Images to search, and their embeddings ``[I, E]`` on the model's device."""

    image_ids: Sequence[str]
    embeddings: Tensor


class Hit(NamedTuple):
    """Image in the result of a search; a higher score is more similar.

    Examples:
        >>> [hit] = imagepivot.search("runs/demo", "red circle", language="en", features="features", top=1, tokenized=True)
        >>> hit.image_id.startswith("img-"), -1 <= hit.score <= 1
        (True, True)
    """

    image_id: str
    score: float


class Answer(NamedTuple):
    """A sentence, its language and its best images, best first."""

    query: str
    language: str
    hits: Sequence[Hit]


@takes_fields(SearchJob)
def search(
    job: SearchJob,
    tokenize: Tokenize | None = None,
    report_unknown: Callable[[Sequence[str]], None] = lambda tokens: None,
    on_progress: Count = no_progress,
    on_warning: Remark = logger.warning,
) -> list[Hit]:
    """Open a run and search images for a sentence; `search_sentences` takes several.

    ``tokenize`` follows the text recipe of the run's captions; a query of tokens needs none. ``report_unknown`` receives the tokens
    that are not in the vocabulary, if any. ``on_warning`` receives a sentence about features of random weights.

    Returns:
        The best images, best first.

    Raises:
        UsageError: the run does not know the language or any token, the query needs ``tokenize``, or there are several.
        DatasetError: the folder holds no run, or the images are from another extractor or model.
    """
    if len(job.queries) != 1:
        raise UsageError(f"search takes one sentence, found {len(job.queries)}: call it once for each")
    [answer] = search_sentences(job, tokenize, report_unknown, on_progress, on_warning)
    return list(answer.hits)


def search_sentences(
    job: SearchJob,
    tokenize: Tokenize | None,
    report_unknown: Callable[[Sequence[str]], None],
    on_progress: Count,
    on_warning: Remark,
) -> list[Answer]:
    """Open a run and search images for all sentences of a job, see `search`."""
    if not job.tokenized and tokenize is None:
        raise UsageError(
            f"the query {job.queries[0][0]!r} is text, and turning text into tokens needs pip install 'imagepivot[text]': install "
            "that, or give tokens with spaces between them and --tokenized"
        )
    run = open_run(job.run, device=choose_device(job.device))
    check_reads_text(run)
    known = run.model.languages
    queries = [(query, language or (known[0] if len(known) == 1 else "")) for query, language in job.queries]
    for _, language in queries:
        _check_language(run, language)
    sentences = [
        query.split() if job.tokenized or tokenize is None else tokenize(query, language, run.text, job.truecaser)
        for query, language in queries
    ]
    gallery = embed_gallery(run, job.features, on_progress) if job.features else read_gallery(run, job.embeddings)
    answers = [
        Answer(query, language, search_gallery(run, tokens, language, gallery, top=job.top))
        for (query, language), tokens in zip(queries, sentences, strict=True)
    ]
    if remark := untrained_remark((*run.untrained, *open_dataset(job.features).untrained) if job.features else run.untrained):
        on_warning(remark)
    tokens = dict.fromkeys(token for sentence in sentences for token in sentence)
    if unknown := [token for token in tokens if token not in run.vocabulary.ids]:
        report_unknown(unknown)
    return answers


def embed_gallery(run: Run, features: str, on_progress: Count = no_progress) -> Gallery:
    """Embed all images of a dataset, except images without regions.

    Raises:
        UsageError: the run's model has no vectors.
        DatasetError: the folder holds neither features nor regions, or has another extractor than the run.
    """
    check_vectors(run)
    dataset = open_dataset(features)
    check_dataset(run, dataset, "extractor")
    shards = [embed_shard(run, dataset, shard, on_progress=on_progress) for shard in range(dataset.num_shards)]
    return Gallery([image_id for ids, _ in shards for image_id in ids], torch.cat([embeddings for _, embeddings in shards]))


def read_gallery(run: Run, folder: str) -> Gallery:
    """Read image embeddings from the output of ``embed``, or from its ``images``.

    Raises:
        UsageError: the run's model has no vectors.
        DatasetError: the folder holds no embeddings, or another model's.
    """
    check_vectors(run)
    images = f"{folder.rstrip('/')}/images"
    # Any content counts, so that a damaged subfolder is reported as such.
    dataset = open_dataset(images if Folder(images).children() else folder, kind="features")
    model = FeaturesParameters.from_json(dataset.manifest.parameters).model
    if model is None or model.weights_sha256 != weights_digest(run.model.state_dict()):
        raise DatasetError(
            f"{folder!r} does not hold images as this run embeds them: they are another model's, or features that no model has "
            "seen. Embed them again with imagepivot embed, or give --features"
        )
    device = run.model.device
    return Gallery(dataset.image_ids(), torch.from_numpy(dataset.numpy().astype(np.float32, copy=False)).to(device))


def search_gallery(run: Run, tokens: Sequence[str], language: str, gallery: Gallery, *, top: int = 10) -> list[Hit]:
    """Return the best images for a sentence, best first.

    Tokens follow the text recipe of the run's captions; unknown ones are read as ``<unk>``. Ties keep the order of the gallery.

    Raises:
        UsageError: the model does not know the language or any of the tokens, or ``top`` is less than 1.
    """
    check_reads_text(run)
    _check_language(run, language)
    if top < 1:
        raise UsageError(f"--top is {top}, expected 1 or more")
    ids = run.vocabulary.encode(tokens)
    if all(token == UNK for token in ids[1:-1]):
        raise UsageError(
            f"the model knows no word of {' '.join(tokens)!r}: its vocabulary has none of them, so every image would do as well"
        )
    query = encode_sentences(run, [tokens], language)
    with eval_mode(run.model):
        scores = run.model.scores(Encoded(gallery.embeddings), query)[:, 0]
    best = torch.argsort(scores, descending=True, stable=True)[:top]
    return [Hit(gallery.image_ids[row], score) for row, score in zip(best.tolist(), scores[best].tolist(), strict=True)]


def _check_language(run: Run, language: str) -> None:
    known = run.model.languages
    if language not in known:
        given = f"--language is {language!r}" if language else "--language is missing"
        raise UsageError(f"{given}, expected a language of the run: {', '.join(known)}")
