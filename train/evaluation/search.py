"""Text-to-image search by a sentence in any language of a model.

Shapes: ``I`` images, ``E`` embedding width.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from schemas.console.events import Remark
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.options import takes_fields
from schemas.parameters import FeaturesParameters, TextRecipe, untrained_remark
from schemas.storage.folder import Folder
from schemas.vocabulary import UNK
from train.data.features import VECTORS
from train.devices import choose_device
from train.evaluation.compatibility import check_dataset, check_reads_text, check_vectors
from train.evaluation.embedding import embed_shard
from train.evaluation.encoding import EncodingRun, JointModel, compare_vectors
from train.evaluation.evaluation import Count, no_progress
from train.evaluation.sentences import ENCODERS, LoadEncoder, TextEncoder, Tokenize, embed_sentences, load_encoder
from train.jobs import SearchJob
from train.models.retrieval_model import RetrievalModel
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
    """A sentence, its language and its best images, best first.

    ``right`` is the rank and hit of the right image; None if unknown.
    """

    query: str
    language: str
    hits: Sequence[Hit]
    right: tuple[int, Hit] | None = None


@dataclass(frozen=True)
class ImageSearch:
    """A model that reads queries, and images, which are read with the first answer.

    Attributes:
        languages: known languages; empty for a model that reads any.
        encode: function from a sentence and its language to ``[1, E]``, float32.
        encode_images: function from features of images, and from numbers of regions if they have regions, to ``[I, E]``.
    """

    model: RetrievalModel
    languages: Sequence[str]
    encode: Callable[[str, str], np.ndarray]
    encode_images: Callable[..., np.ndarray]
    load_gallery: Callable[[], Gallery]

    @cached_property
    def gallery(self) -> Gallery:
        """The images, in the order of their dataset."""
        return self.load_gallery()

    def language_of(self, language: str) -> str:
        """Return the language of a sentence; for an empty one the only known language.

        Raises:
            UsageError: the language is unknown, or empty where several are known.
        """
        chosen = language or (self.languages[0] if len(self.languages) == 1 else "")
        _check_language(chosen, self.languages)
        return chosen

    def encode_image(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Encode an image from columns of the extractor of the gallery's features."""
        values = next(columns[name] for name in VECTORS.values() if name in columns)
        return self.encode_images(values, *(columns[name] for name in ("num_regions",) if name in columns))

    def best(self, query: np.ndarray | Tensor, top: int) -> list[Hit]:
        """Return the best images for an encoded query, best first."""
        return _best_hits(self.model, query, self.gallery, top)

    def answer(self, job: SearchJob, pictures: Mapping[str, Mapping[str, np.ndarray]] = {}) -> list[Answer]:
        """Return the best images for all sentences of a job.

        ``pictures`` are further queries by name, as `encode_image` takes them.
        """
        queries = [(query, self.language_of(language)) for query, language in job.queries]
        # Before the images are read: a sentence that no model understands fails at once.
        encoded = [self.encode(*query) for query in queries]
        queries += [(name, "") for name in pictures]
        encoded += [self.encode_image(columns) for columns in pictures.values()]
        return [Answer(*query, self.best(vector, job.top)) for query, vector in zip(queries, encoded, strict=True)]

    def find(self, query: str, language: str, top: int) -> Answer:
        """Return the best images for a sentence."""
        chosen = self.language_of(language)
        return Answer(query, chosen, self.best(self.encode(query, chosen), top))

    def find_like(self, image_id: str, top: int) -> list[Hit]:
        """Return the most similar images to one of them.

        Raises:
            UsageError: the image is unknown.
        """
        if image_id not in self.gallery.image_ids:
            raise UsageError(f"{image_id!r} is no image of the gallery: name another")
        row = self.gallery.image_ids.index(image_id)
        hits = self.best(self.gallery.embeddings[row : row + 1], top + 1)
        return [hit for hit in hits if hit.image_id != image_id][:top]


@takes_fields(SearchJob)
def search(
    job: SearchJob,
    tokenize: Tokenize | None = None,
    report_unknown: Callable[[Sequence[str]], None] = lambda tokens: None,
    on_progress: Count = no_progress,
    on_warning: Remark = logger.warning,
    load: LoadEncoder | None = None,
) -> list[Hit]:
    """Open a run, or load a text encoder, and search images with a sentence.

    An encoder, from ``load``, searches vectors of images in its space. ``tokenize`` follows the text recipe
    of the run's captions; a query of tokens needs none. ``report_unknown`` receives the tokens that are not
    in the vocabulary, if any. ``on_warning`` receives a sentence about features of random weights.

    Returns:
        The best images, best first.

    Raises:
        UsageError: the language or all tokens are unknown, the query needs ``tokenize``, or there are several queries.
        DatasetError: the folder holds no run, or the images are from another extractor or model.
    """
    if len(job.queries) != 1:
        raise UsageError(f"search takes one sentence, found {len(job.queries)}: call it once for each")
    [answer] = open_search(job, tokenize, report_unknown, on_progress, on_warning, load).answer(job)
    return list(answer.hits)


def open_search(
    job: SearchJob,
    tokenize: Tokenize | None,
    report_unknown: Callable[[Sequence[str]], None],
    on_progress: Count,
    on_warning: Remark,
    load: LoadEncoder | None,
) -> ImageSearch:
    """Open the model of a job for several searches, with arguments as of `search`."""
    if job.run.startswith(ENCODERS):
        return _open_pair(load_encoder(load, job.run, job.device), job)

    def tokenize_query(query: str, language: str, recipe: TextRecipe | None, truecaser: str) -> Sequence[str]:
        if job.tokenized:
            return query.split()
        if tokenize is None:
            raise UsageError(
                f"the query {query!r} is text, and turning text into tokens needs pip install "
                "'imagepivot[text]': install that, or give tokens with spaces between them and --tokenized"
            )
        return tokenize(query, language, recipe, truecaser)

    run = EncodingRun(**vars(open_run(job.run, device=choose_device(job.device))), tokenize=tokenize_query)
    check_reads_text(run)
    check_vectors(run)
    if remark := untrained_remark((*run.untrained, *open_dataset(job.features).untrained) if job.features else run.untrained):
        on_warning(remark)

    def encode(query: str, language: str) -> np.ndarray:
        tokens = run.tokenize(query, language, run.text, job.truecaser)
        encoded = _encode_tokens(run, tokens, language)
        if unknown := [token for token in tokens if token not in run.vocabulary.ids]:
            report_unknown(unknown)
        return encoded

    def load_gallery() -> Gallery:
        return embed_gallery(run, job.features, on_progress) if job.features else read_gallery(run, job.embeddings)

    return ImageSearch(run.model, run.model.languages, encode, run.encode_images, load_gallery)


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
            f"{folder!r} does not hold images as this run embeds them: they are another model's, or "
            "features that no model has seen. Embed them again with imagepivot embed, or give --features"
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
    _check_language(language, run.model.languages)
    if top < 1:
        raise UsageError(f"--top is {top}, expected 1 or more")
    return _best_hits(run.model, _encode_tokens(run, tokens, language), gallery, top)


def _encode_tokens(run: Run, tokens: Sequence[str], language: str) -> np.ndarray:
    ids = run.vocabulary.encode(tokens)
    if all(token == UNK for token in ids[1:-1]):
        raise UsageError(
            f"the model knows no word of {' '.join(tokens)!r}: its vocabulary has none of them, so every image would do as well"
        )
    return embed_sentences(run, [tokens], language)


def _open_pair(encoder: TextEncoder, job: SearchJob) -> ImageSearch:
    location = job.embeddings or job.features
    dataset = open_dataset(location, kind="features")
    images = FeaturesParameters.from_json(dataset.manifest.parameters)
    model = JointModel(encoder, images, place=location, device=choose_device(job.device))

    def load_gallery() -> Gallery:
        return Gallery(dataset.image_ids(), torch.from_numpy(model.encode_images(dataset.numpy())))

    def encode(query: str, language: str) -> np.ndarray:
        return model.encode_text([query], language=language)

    return ImageSearch(model.model, (), encode, model.encode_images, load_gallery)


def _best_hits(model: RetrievalModel, query: np.ndarray | Tensor, gallery: Gallery, top: int) -> list[Hit]:
    scores = compare_vectors(model, gallery.embeddings, query)[:, 0]
    best = np.argsort(-scores, kind="stable")[:top]
    return [Hit(gallery.image_ids[row], score) for row, score in zip(best, scores[best].tolist(), strict=True)]


def _check_language(language: str, known: Sequence[str]) -> None:
    if known and language not in known:
        given = f"--language is {language!r}" if language else "--language is missing"
        raise UsageError(f"{given}, expected a language of the run: {', '.join(known)}")
