"""Semantic textual similarity: the cosine of two sentences' vectors beside how alike people found the sentences.

The measure is Pearson's r over the pairs of a data set, times 100, as in the shared tasks; Spearman's rho stands beside it. The
sentences go through the recipe of the captions that a run was trained on, and its model embeds them. The cosine is taken whatever
the similarity that the model was trained with (Huang et al. 2019, section 4.3; Gella et al. 2017 do not say).

The baseline is that of the shared tasks (Agirre et al. 2012, section 4): the cosine of binary vectors with a dimension for each
token, where tokens are what stands between white space, in upper and lower case as written and with its punctuation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean
from typing import Any, TypeAlias

import numpy as np

from schemas.errors import UsageError
from schemas.made_from import made_from
from schemas.vocabulary import SPECIALS
from train.data.batches import CaptionBatch
from train.devices import resolve_device
from train.evaluation.compatibility import check_reads_text, check_vectors
from train.evaluation.evaluation import Count, count_nothing, encode_captions
from train.evaluation.search import Tokenize
from train.evaluation.sts_data import (
    Correlation,
    Coverage,
    StsPairs,
    cosines,
    coverage_of,
    mean_vectors,
    read_sentence_vectors,
    read_sts,
    read_word_vectors,
    words_of,
)
from train.jobs import StsJob
from train.runs.run import Run, is_run, open_run

OVERLAP = "word overlap"
"""Name of the baseline."""

Tokens: TypeAlias = Sequence[Sequence[str]]
"""The tokens of each sentence."""


def sts_made_from(job: StsJob) -> dict[str, Any]:
    """Return what the result depends on, see `schemas.made_from`."""
    runs, data = _divided(job)
    options = {"runs": runs, "vectors": job.vectors, "language": job.language, "tokenized": job.tokenized}
    return made_from("sts", options, {"data": data, "runs": runs, "vectors": job.vectors, "truecaser": (job.truecaser,)})


def _divided(job: StsJob) -> tuple[list[str], list[str]]:
    """Return the runs of a job, and its sentence pairs."""
    runs = [place for place in dict.fromkeys(job.places) if is_run(place)]
    data = [place for place in job.places if place not in runs]
    if not data:
        raise UsageError("there are no sentence pairs: give files or folders of them, such as STS.input.images.txt")
    return runs, data


@dataclass(frozen=True)
class StsSystem:
    """What finds sentences alike, and how well it agrees with people.

    Attributes:
        name: the folder of a run, the file of vectors, or `OVERLAP`.
        kind: ``baseline``, ``run`` or ``vectors``.
        text: how sentences became tokens, in words.
        similarities: of the pairs of each data set, float64 ``[N]``.
        correlations: with the scores of each data set.
        language: the language that a run read them in; empty for others.
        coverage: what it knows of the sentences; None where it has all words.
    """

    name: str
    kind: str
    text: str
    similarities: tuple[np.ndarray, ...]
    correlations: tuple[Correlation, ...]
    language: str = ""
    coverage: Coverage | None = None

    @property
    def means(self) -> Correlation:
        """The means over the data sets; None if one has none."""
        by_measure = zip(*((one.pearson, one.spearman) for one in self.correlations), strict=True)
        return Correlation(*(None if None in values else mean(map(float, values)) for values in by_measure))


@dataclass(frozen=True)
class StsResult:
    """Systems on data sets: the word-overlap baseline, then the runs, then the vectors."""

    data: tuple[StsPairs, ...]
    systems: tuple[StsSystem, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "data": [
                {"name": pairs.name, "location": pairs.location, "pairs": len(pairs), "unscored": pairs.unscored}
                for pairs in self.data
            ],
            "systems": [self._plain(system) for system in self.systems],
        }

    def _plain(self, system: StsSystem) -> dict[str, Any]:
        scores = zip(self.data, system.correlations, strict=True)
        return {
            **{name: getattr(system, name) for name in ("name", "kind", "text", "language")},
            "scores": {pairs.name: vars(found) for pairs, found in scores},
            "mean": vars(system.means),
            "coverage": None
            if system.coverage is None
            else {**vars(system.coverage), "unknown": dict(system.coverage.unknown)},
        }


def sts(job: StsJob, tokenize: Tokenize | None = None, count: Count = count_nothing) -> StsResult:
    """Read sentence pairs, and measure the word-overlap baseline, runs and vectors on them.

    ``tokenize`` turns text into tokens as a run's captions were; it is not needed without runs, or if the sentences are tokens.

    Raises:
        UsageError: a run's model makes no vectors, does not know the language, or there is no way to tokenize the sentences.
        InputError: there are no such pairs or vectors, or they are broken.
        DatasetError: a folder holds no run.
    """
    folders, places = _divided(job)
    if folders and not job.tokenized and tokenize is None:
        raise UsageError(
            "the sentences are text, and turning text into tokens needs pip install 'imagepivot[pipelines]': install that, or give "
            "tokens with spaces between them and --tokenized"
        )
    data = read_sts(places)
    sentences = _sentences(data)
    runs = [open_run(folder, device=resolve_device(job.device)) for folder in folders]
    truecased = any(_truecases(run) for run in runs)
    # All are read before any is embedded, so that what is wrong shows early; runs of one recipe are read once.
    readings: dict[Hashable, Tokens] = {}
    keys = []
    for run in runs:
        language, truecaser = _language_of(run, job.language), job.truecaser if _truecases(run) or not truecased else ""
        keys.append((run.text, language, truecaser))
        if keys[-1] not in readings:
            readings[keys[-1]] = _tokens_of(run, sentences, None if job.tokenized else tokenize, language, truecaser)
    systems = [score_overlap(data)]
    for run, folder, key in zip(runs, folders, keys, strict=True):
        systems.append(_of_run(run, data, sentences, readings[key], folder, key[1], not job.tokenized, count))
    systems += [_of_vectors(location, data, sentences, tokenized=job.tokenized) for location in job.vectors]
    return StsResult(tuple(data), tuple(systems))


def score_sts(
    run: Run,
    data: Sequence[StsPairs],
    tokenize: Tokenize | None,
    *,
    name: str = "",
    language: str = "",
    truecaser: str = "",
    count: Count = count_nothing,
) -> StsSystem:
    """Measure an open run on data sets.

    Without ``tokenize`` the sentences are tokens, separated by spaces. An empty name is that of the run's folder; the others
    are as in `StsJob`.

    Raises:
        UsageError: as for `sts`.
    """
    language, sentences = _language_of(run, language), _sentences(data)
    tokens = _tokens_of(run, sentences, tokenize, language, truecaser)
    return _of_run(run, data, sentences, tokens, name or run.folder.location, language, tokenize is not None, count)


def word_overlap(first: str, second: str) -> float:
    """Return the cosine of two sentences as binary vectors of their tokens, which white space separates.

    Example:
        >>> word_overlap("A dog runs.", "A dog sleeps.")  # "A" and "dog", of three tokens each
        0.6666666666666666
    """
    a, b = set(first.split()), set(second.split())
    return sqrt(len(a & b) ** 2 / (len(a) * len(b)))  # Under the root, equal ratios give equal numbers, and equal ranks.


def score_overlap(data: Sequence[StsPairs]) -> StsSystem:
    """Measure the baseline, `word_overlap`, on data sets."""
    similarities = tuple(np.array(list(map(word_overlap, pairs.first, pairs.second))) for pairs in data)
    correlations = tuple(pairs.correlation(values) for pairs, values in zip(data, similarities, strict=True))
    return StsSystem(OVERLAP, "baseline", "split at white space, case kept", similarities, correlations)


def _of_run(
    run: Run,
    data: Sequence[StsPairs],
    sentences: Sequence[str],
    tokens: Tokens,
    name: str,
    language: str,
    from_text: bool,
    count: Count,
) -> StsSystem:
    coverage = coverage_of(tokens, _known(run, language))
    if not coverage.known:
        raise UsageError(
            f"{run.folder.location!r} knows no word of the sentences in {language}, such as {sentences[0]!r}: are they in another "
            "language, or other tokens than those of its captions?"
        )
    vectors = dict(zip(sentences, _embed(run, tokens, language, count), strict=True))
    text = f"recipe {run.text.recipe}" if from_text and run.text is not None else "tokens as given"
    return _system(name, "run", text, data, vectors, language=language, coverage=coverage)


def _of_vectors(location: str, data: Sequence[StsPairs], sentences: Sequence[str], *, tokenized: bool) -> StsSystem:
    if location.endswith(".npz"):
        vectors, text, coverage = read_sentence_vectors(location, sentences), "vectors of whole sentences", None
    else:
        cut: Callable[[str], list[str]] = str.split if tokenized else words_of
        words = [cut(sentence) for sentence in sentences]
        by_word = read_word_vectors(location, {word for of_sentence in words for word in of_sentence})
        if not by_word:
            raise UsageError(f"--vectors {location!r} has a vector for no word of the sentences: are they of another language?")
        vectors, coverage = mean_vectors(words, by_word), coverage_of(words, by_word)
        text = "mean of word vectors; " + ("tokens as given" if tokenized else "runs of letters and digits")
    return _system(location, "vectors", text, data, dict(zip(sentences, vectors, strict=True)), coverage=coverage)


def _system(
    name: str, kind: str, text: str, data: Sequence[StsPairs], vectors: dict[str, np.ndarray], **more: Any
) -> StsSystem:
    similarities = tuple(
        cosines([vectors[sentence] for sentence in pairs.first], [vectors[sentence] for sentence in pairs.second])
        for pairs in data
    )
    correlations = tuple(pairs.correlation(values) for pairs, values in zip(data, similarities, strict=True))
    return StsSystem(name, kind, text, similarities, correlations, **more)


def _tokens_of(run: Run, sentences: Sequence[str], tokenize: Tokenize | None, language: str, truecaser: str) -> Tokens:
    """Return the tokens of sentences as a run reads them; as they are given without a function that makes them."""
    if tokenize is None:
        return [sentence.split() for sentence in sentences]
    try:
        return [tokenize(sentence, language, run.text, truecaser) for sentence in sentences]
    except UsageError as error:
        raise UsageError(f"{run.folder.location!r}: {error}") from error


def _truecases(run: Run) -> bool:
    return run.text is not None and bool(run.text.truecase)


def _embed(run: Run, sentences: Tokens, language: str, count: Count) -> np.ndarray:
    """Return the vectors of sentences, float32 ``[S, E]``."""
    ids = [run.vocabulary.encode(tokens) for tokens in sentences]
    flat = np.fromiter((token for of_sentence in ids for token in of_sentence), np.int32)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    batch = CaptionBatch(flat, offsets, np.arange(len(ids)))
    return encode_captions(run.model, batch, language, count=count).values.cpu().numpy()


def _sentences(data: Sequence[StsPairs]) -> list[str]:
    return list(dict.fromkeys(sentence for pairs in data for sentence in pairs.sentences))


def _known(run: Run, language: str) -> Collection[str]:
    """Return the tokens that a model has vectors of in a language."""
    tokens = run.vocabulary.tokens
    ids = run.language_ids.get(language, range(len(tokens)))
    return {tokens[number] for number in ids}.difference(SPECIALS)


def _language_of(run: Run, language: str) -> str:
    """Return the language that a run reads sentences in, and check that it can embed them."""
    check_vectors(run)
    check_reads_text(run)
    known = run.model.languages
    chosen = language or ("en" if "en" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        given = f"--language is {language!r}" if language else "the language of the sentences is not given"
        raise UsageError(f"{given}, but {run.folder.location!r} knows only {', '.join(known)}: give --language, one of these")
    return chosen
