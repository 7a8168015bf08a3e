"""Semantic textual similarity: correlation of cosines with human scores.

The measure is Pearson's r over the pairs of a data set, times 100, as in the shared tasks; Spearman's rho is
reported, too. A run's model embeds the sentences after the text recipe of its captions. Models trained with
any similarity are compared by cosine (Huang et al. 2019, section 4.3; Gella et al. 2017 do not say).

The baseline is that of the shared tasks (Agirre et al. 2012, section 4): the cosine of binary vectors with a
dimension for each token. Tokens are separated by white space and keep their case and punctuation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from statistics import mean
from typing import Any

import numpy as np

from schemas.errors import UsageError
from schemas.options import takes_fields
from schemas.vocabulary import SPECIALS
from schemas.writing.made_from import MadeFrom, made_from
from train.devices import choose_device
from train.evaluation.evaluation import Count, no_progress
from train.evaluation.sentences import (
    ENCODERS,
    LoadEncoder,
    TextEncoder,
    Tokenize,
    embed_sentences,
    load_encoder,
    sentence_language,
)
from train.jobs import StsJob
from train.reports.published import STS_PAPERS
from train.runs.history import is_run
from train.runs.run import Run, open_run
from train.sts.correlation import Correlation, cosines
from train.sts.pairs import StsPairs, read_sts
from train.sts.vectors import WORD, Coverage, coverage_of, mean_vectors, read_word_vectors

OVERLAP = "word overlap"
"""Name of the baseline."""

_PAIRS = 750  # In each data set of `train.reports.published.TASKS`.
_TOLERANCE = 0.2  # The baseline is printed with one decimal; this leaves room for how it was rounded.


def sts_made_from(job: StsJob, formats: Sequence[str] = ("png",)) -> MadeFrom:
    """Return everything that the output depends on, see `schemas.writing.made_from`."""
    runs, encoders, data = _sort_places(job)
    options = {
        "runs": runs,
        **({"encoders": encoders} if encoders else {}),
        "vectors": job.vectors,
        "language": job.language,
        "tokenized": job.tokenized,
        "format": list(formats),
    }
    inputs = {"data": data, "runs": runs, "vectors": job.vectors, "truecaser": (job.truecaser,)}
    return made_from("sts", options, inputs | {"encoders": [name.partition(":")[2] for name in encoders]})


def _sort_places(job: StsJob) -> tuple[list[str], list[str], list[str]]:
    """Return runs, pretrained models and data."""
    encoders = [place for place in dict.fromkeys(job.places) if place.startswith(ENCODERS)]
    runs = [place for place in dict.fromkeys(job.places) if place not in encoders and is_run(place)]
    data = [place for place in job.places if place not in (*encoders, *runs)]
    if not data:
        raise UsageError("there are no sentence pairs: give files or folders of them, such as STS.input.images.txt")
    return runs, encoders, data


@dataclass(frozen=True)
class StsSystem:
    """A measure of similarity, with its results on each data set.

    Attributes:
        name: folder of a run, file of vectors, or `OVERLAP`.
        kind: ``baseline``, ``run``, ``encoder`` or ``vectors``.
        text: description of the tokenization.
        similarities: similarities of the pairs of each data set, float64 ``[N]``.
        language: language in which a run read the sentences; empty for other kinds.
        coverage: coverage of the words; None for systems that know all.
    """

    name: str
    kind: str
    text: str
    similarities: tuple[np.ndarray, ...]
    correlations: tuple[Correlation, ...]
    language: str = ""
    coverage: Coverage | None = None
    untrained: tuple[str, ...] = ()

    @property
    def means(self) -> Correlation:
        """The means over the data sets; None if one is None."""
        by_measure = zip(*((item.pearson, item.spearman) for item in self.correlations), strict=True)
        return Correlation(*(None if None in values else mean(map(float, values)) for values in by_measure))


@dataclass(frozen=True)
class StsResult:
    """Systems on data sets: the baseline, then runs, pretrained models and vectors."""

    data: tuple[StsPairs, ...]
    systems: tuple[StsSystem, ...]

    @property
    def tasks(self) -> tuple[str | None, ...]:
        """Names of the data sets in `train.reports.published.TASKS`; None for others."""
        return tasks_of(self.data, self.systems[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the result and published scores as plain values, for JSON."""
        tasks = {pairs.name: task for pairs, task in zip(self.data, self.tasks, strict=True)}
        known = {name: task for name, task in tasks.items() if task}
        return {
            "data": [
                {"name": pairs.name, "location": pairs.location, "pairs": len(pairs), "unscored": pairs.unscored}
                | {"task": tasks[pairs.name]}
                for pairs in self.data
            ],
            "systems": [self._plain(system) for system in self.systems],
            "published": [
                {"source": paper.title, "name": row.name, "quoted": row.quoted}
                | {"scores": {name: row.values.get(task) for name, task in known.items()}}
                for paper in STS_PAPERS.values()
                for row in paper.rows
                if known
            ],
        }

    def _plain(self, system: StsSystem) -> dict[str, Any]:
        scores = zip(self.data, system.correlations, strict=True)
        return {
            **{name: getattr(system, name) for name in ("name", "kind", "text", "language")},
            "scores": {pairs.name: vars(correlations) for pairs, correlations in scores},
            "mean": vars(system.means),
            "coverage": None if system.coverage is None else vars(system.coverage),
            "untrained": list(system.untrained),
        }


@takes_fields(StsJob)
def sts(
    job: StsJob, tokenize: Tokenize | None = None, on_progress: Count = no_progress, load: LoadEncoder | None = None
) -> StsResult:
    """Measure the word-overlap baseline, runs, models and vectors on sentence pairs.

    ``tokenize`` follows the text recipe of a run's captions; sentences of tokens need none. ``load`` loads pretrained models.

    Raises:
        UsageError: a run's model has no vectors or does not know the language, or the sentences need ``tokenize``.
        InputError: pairs or vectors are missing or damaged.
        DatasetError: a folder holds no run.
    """
    folders, encoders, locations = _sort_places(job)
    if folders and not job.tokenized and tokenize is None:
        raise UsageError(
            "the sentences are text, and turning text into tokens needs pip install 'imagepivot[text]': "
            "install that, or give tokens with spaces between them and --tokenized"
        )
    data = read_sts(locations)
    runs = [open_run(folder, device=choose_device(job.device)) for folder in folders]
    tokenize = None if job.tokenized or tokenize is None else cache(tokenize)  # Runs of one recipe share their tokens.
    truecased = [run.text is not None and bool(run.text.truecase) for run in runs]
    truecasers = [job.truecaser if own or not any(truecased) else "" for own in truecased]
    # Tokenize for all runs before any is measured, so that errors show early.
    for run, truecaser in zip(runs, truecasers, strict=True):
        _tokenize(run, _sentences(data), tokenize, sentence_language(run, job.language), truecaser)
    systems = [score_overlap(data)]
    for run, folder, truecaser in zip(runs, folders, truecasers, strict=True):
        options = {"name": folder, "language": job.language, "truecaser": truecaser}
        systems.append(score_sts(run, data, tokenize, **options, on_progress=on_progress))
    systems += [
        _score_encoder(model, load_encoder(load, model, job.device), data, job.language, on_progress) for model in encoders
    ]
    systems += [_score_vectors(location, data, tokenized=job.tokenized) for location in job.vectors]
    return StsResult(tuple(data), tuple(systems))


def score_sts(
    run: Run,
    data: Sequence[StsPairs],
    tokenize: Tokenize | None,
    *,
    name: str = "",
    language: str = "",
    truecaser: str = "",
    on_progress: Count = no_progress,
) -> StsSystem:
    """Measure an open run on data sets.

    Without ``tokenize`` the sentences are tokens, separated by spaces. The default name is the run's folder;
    other arguments are as in `StsJob`.

    Raises:
        UsageError: as for `sts`, or the run knows no word of the sentences.
    """
    language, sentences = sentence_language(run, language), _sentences(data)
    tokens = _tokenize(run, sentences, tokenize, language, truecaser)
    vocabulary = run.vocabulary.tokens
    known_ids = run.language_ids.get(language, range(len(vocabulary)))
    coverage = coverage_of(tokens, {vocabulary[token_id] for token_id in known_ids}.difference(SPECIALS))
    if not coverage.known:
        raise UsageError(
            f"{run.folder.location!r} knows no word of the sentences in {language}, such as "
            f"{sentences[0]!r}: are they in another language, or other tokens than those of its captions?"
        )
    vectors = dict(zip(sentences, embed_sentences(run, tokens, language, on_progress), strict=True))
    text = "tokens as given" if tokenize is None or run.text is None else f"recipe {run.text.recipe}"
    fields = {"language": language, "coverage": coverage, "untrained": run.untrained}
    return _system(name or run.folder.location, "run", text, data, vectors, **fields)


def word_overlap(first: str, second: str) -> float:
    """Return the cosine of two sentences as binary vectors of their tokens.

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


def _score_encoder(name: str, encoder: TextEncoder, data: Sequence[StsPairs], language: str, on_progress: Count) -> StsSystem:
    sentences = _sentences(data)
    vectors = dict(zip(sentences, encoder.encode(sentences, language or "en"), strict=True))
    on_progress(len(sentences))
    return _system(name, "encoder", "the model's own tokenizer", data, vectors)


def _score_vectors(location: str, data: Sequence[StsPairs], *, tokenized: bool) -> StsSystem:
    sentences = _sentences(data)
    cut: Callable[[str], list[str]] = str.split if tokenized else WORD.findall
    words = [cut(sentence) for sentence in sentences]
    by_word = read_word_vectors(location, {word for sentence_words in words for word in sentence_words})
    if not by_word:
        raise UsageError(f"--vectors {location!r} has a vector for no word of the sentences: are they of another language?")
    vectors = dict(zip(sentences, mean_vectors(words, by_word), strict=True))
    text = "mean of word vectors; " + ("tokens as given" if tokenized else "runs of letters and digits")
    return _system(location, "vectors", text, data, vectors, coverage=coverage_of(words, by_word))


def _system(
    name: str, kind: str, text: str, data: Sequence[StsPairs], vectors: dict[str, np.ndarray], **fields: Any
) -> StsSystem:
    similarities = tuple(
        cosines([vectors[sentence] for sentence in pairs.first], [vectors[sentence] for sentence in pairs.second])
        for pairs in data
    )
    correlations = tuple(pairs.correlation(values) for pairs, values in zip(data, similarities, strict=True))
    return StsSystem(name, kind, text, similarities, correlations, **fields)


def _tokenize(
    run: Run, sentences: Sequence[str], tokenize: Tokenize | None, language: str, truecaser: str
) -> list[Sequence[str]]:
    if tokenize is None:
        return [sentence.split() for sentence in sentences]
    try:
        return [tokenize(sentence, language, run.text, truecaser) for sentence in sentences]
    except UsageError as error:
        raise UsageError(f"{run.folder.location!r}: {error}") from error


def _sentences(data: Sequence[StsPairs]) -> list[str]:
    return list(dict.fromkeys(sentence for pairs in data for sentence in pairs.sentences))


def tasks_of(data: Sequence[StsPairs], baseline: StsSystem) -> tuple[str | None, ...]:
    """Return the names of data sets in `TASKS`; None for others.

    Number of pairs and word overlap, the baseline, identify them, since file names are ambiguous:
    ``STS.input.images.txt`` exists for 2014 and 2015, and for training and test data.
    """
    tasks = []
    for pairs, overlap in zip(data, baseline.correlations, strict=True):
        pearson = overlap.pearson or 0.0  # None if undefined.
        published = STS_PAPERS["gella2017"].rows[0].values.items() if len(pairs) == _PAIRS else ()
        tasks.append(next((task for task, value in published if abs(value - pearson) <= _TOLERANCE), None))
    return tuple(tasks)
