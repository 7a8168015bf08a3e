from collections import Counter
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from pipelines.text.moses import load_recipe
from pipelines.text.queries import tokenize_query
from schemas.errors import UsageError
from schemas.storage.folder import Folder
from schemas.writing.made_from import is_current, write_made_from
from tests.train.trainings import encode_ids
from train.jobs import StsJob
from train.runs.run import open_run
from train.sts.pairs import StsPairs, read_sts
from train.sts.similarity import OVERLAP, score_overlap, score_sts, sts, sts_made_from, word_overlap

PUBLISHED = {"images-2014": 51.3, "images-2015": 60.4}
SENTENCES = [
    *("en1 en2", "en2 en1 en1", "en7", "en8 en9 en7", "en15 nothing", "en20 en21", "en29", "en3 en4 en5 en6 en7", "en2"),
    *("En1 en2", "en11", "en12 en13"),
]


@pytest.fixture
def data(tmp_path) -> str:
    """Two data sets of sentences in the words of the toy; their scores are drawn."""
    rng = np.random.default_rng(0)
    for name, count in (("a", 9), ("b", 6)):
        pairs = rng.choice(SENTENCES, (count, 2))
        lines = [f"{score / 5}\t{first}\t{second}" for score, (first, second) in zip(range(count), pairs, strict=True)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return str(tmp_path)


def tokenize(text, language, recipe, truecaser) -> list[str]:
    return text.lower().split()


def vector_of(run, tokens: list[str], language: str = "en") -> np.ndarray:
    """The vector of one sentence, by itself."""
    return encode_ids(run.model, run.vocabulary.encode(tokens), language).numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / sqrt((a @ a) * (b @ b)))


# --- the baseline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_word_overlap_comes_out_as_published(sts_pairs, name):
    (pairs,) = read_sts(sts_pairs / f"{name}.tsv")
    found = pairs.correlation([word_overlap(*pair) for pair in zip(pairs.first, pairs.second, strict=True)])
    assert found.pearson == pytest.approx(PUBLISHED[name], abs=0.1)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_run_is_measured_by_the_cosines_of_its_sentences(finished_run, data):
    folder, run = str(finished_run[0]), open_run(finished_run[0])
    result = sts(StsJob((data, folder), device="cpu"), tokenize)
    baseline, system = result.systems
    assert (baseline.name, system.name, system.kind, system.language) == (OVERLAP, folder, "run", "en")
    assert system.text == "recipe raw"
    for pairs, similarities, found in zip(result.data, system.similarities, system.correlations, strict=True):
        vectors = [[vector_of(run, sentence.lower().split()) for sentence in side] for side in (pairs.first, pairs.second)]
        expected = [cosine(*pair) for pair in zip(*vectors, strict=True)]
        np.testing.assert_allclose(similarities, expected, atol=1e-5)
        assert found == pairs.correlation(similarities)
    assert baseline.correlations == score_overlap(result.data).correlations
    means = [np.mean([getattr(one, name) for one in system.correlations]) for name in ("pearson", "spearman")]
    assert [system.means.pearson, system.means.spearman] == pytest.approx(means)
    used = {sentence for pairs in result.data for sentence in (*pairs.first, *pairs.second)}
    unknown = Counter(word for sentence in used for word in sentence.lower().split() if word == "nothing")
    assert system.coverage.words == sum(len(sentence.split()) for sentence in used)
    assert system.coverage.unknown == unknown


def test_tokens_are_made_as_the_captions_of_each_run_were(write_run, data):
    asked = []

    def listening(text, language, recipe, truecaser):
        asked.append((text, language, recipe.recipe, truecaser))
        return text.split()

    folders = write_run("one"), write_run("two", seed=1), write_run("german", languages=("de",))
    job = StsJob((data, *folders[:2]), truecaser="models", device="cpu")
    result = sts(job, listening)
    sentences = {sentence for pairs in result.data for sentence in pairs.sentences}
    # Both runs read the sentences alike: each is tokenized once.
    assert sorted(asked) == sorted((sentence, "en", "raw", "models") for sentence in sentences)
    assert result.systems[1].similarities[0].tolist() != result.systems[2].similarities[0].tolist()
    tokens = sts(replace(job, tokenized=True, truecaser=""))
    assert [one.text for one in tokens.systems[1:]] == ["tokens as given"] * 2
    for system, other in zip(result.systems, tokens.systems, strict=True):
        np.testing.assert_array_equal(system.similarities[0], other.similarities[0])


def test_tokenizer_of_queries_makes_tokens_as_of_captions(write_run):
    run = replace(open_run(write_run()), captions={"text": load_recipe("multi30k-lc").parameters().to_json()})
    data = StsPairs("a", "", (5.0, 4.0, 0.0), ("EN1, En2!", "en3", "en7."), ("en1 , en2 !", "en4", "en29"), (1, 2, 3))
    system = score_sts(run, [data], tokenize_query)
    assert system.text == "recipe multi30k-lc"
    assert system.similarities[0][0] == pytest.approx(1, abs=1e-6)
    assert system.coverage.unknown == {"!": 2, ",": 2, ".": 1}


def test_truecasers_are_passed_to_truecasing_runs(write_run, data, monkeypatch):
    asked = set()
    folders = write_run("raw"), write_run("truecased", seed=1)

    def opened(folder, **options):
        run = open_run(folder, **options)
        text = {"text": {"recipe": "moses-truecase", "truecase": True}}
        return replace(run, captions=text) if folder == folders[1] else run

    def listening(text, language, recipe, truecaser):
        asked.add((recipe.recipe, truecaser))
        return text.split()

    monkeypatch.setattr("train.sts.similarity.open_run", opened)
    sts(StsJob((data, *folders), truecaser="models", device="cpu"), listening)
    assert asked == {("raw", ""), ("moses-truecase", "models")}


@pytest.mark.parametrize(
    ("languages", "given", "expected"), [(("en", "de"), "", "en"), (("de",), "", "de"), (("en", "de"), "de", "de")]
)
def test_language_is_english_or_the_only_one(write_run, data, languages, given, expected):
    german = [replace(pairs, first=pairs.first[:1] + tuple("de1" for _ in pairs.first[1:])) for pairs in read_sts(data)]
    system = score_sts(open_run(write_run(languages=languages)), german, None, language=given)
    assert system.language == expected


def test_words_without_a_vector_of_their_own_are_not_known(finished_run, data):
    run = open_run(finished_run[0])
    english = [run.vocabulary.tokens.index(word) for word in ("en1", "en2")]
    system = score_sts(replace(run, language_ids={"en": english}), read_sts(data), tokenize)
    words = {word for pairs in read_sts(data) for sentence in pairs.sentences for word in sentence.lower().split()}
    assert set(system.coverage.unknown) == words - {"en1", "en2"}


def test_unsuitable_runs_are_refused_with_a_reason(write_run, data, monkeypatch):
    folder = write_run()
    job = StsJob((data, folder), device="cpu")
    with pytest.raises(UsageError, match=r"the sentences are text.*pip install 'imagepivot\[text\]'.*--tokenized"):
        sts(job)
    with pytest.raises(UsageError, match=r"run' knows no word of the sentences in de, such as 'en"):
        sts(replace(job, language="de"), lambda *_: ["cats", "and", "dogs"])
    monkeypatch.setattr("train.models.vse.JointEmbedding.vectors", False)
    with pytest.raises(UsageError, match=r"run' holds a model of the kind 'vse', which .*part by part.* compare sentences by"):
        sts(job, tokenize)


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_word_vectors_are_averaged(tmp_path, data):
    rng = np.random.default_rng(0)
    vectors = {f"en{n}": rng.standard_normal(4).round(3) for n in range(30)}
    lines = [f"{word} {' '.join(map(str, vector))}" for word, vector in vectors.items()]
    path = tmp_path / "vectors.vec"
    path.write_text("\n".join(["30 4", *lines]) + "\n")
    result = sts(StsJob((data,), vectors=(str(path),)))
    system = result.systems[1]
    assert (system.name, system.kind, system.text) == (str(path), "vectors", "mean of word vectors; runs of letters and digits")
    for pairs, similarities in zip(result.data, system.similarities, strict=True):
        for first, second, similarity in zip(pairs.first, pairs.second, similarities, strict=True):
            means = [
                np.mean([vectors[word] for word in sentence.lower().split() if word in vectors], axis=0)
                for sentence in (first, second)
            ]
            assert similarity == pytest.approx(cosine(*means))
    assert set(system.coverage.unknown) <= {"nothing"}
    tokens = sts(StsJob((data,), vectors=(str(path),), tokenized=True)).systems[1]
    assert tokens.text == "mean of word vectors; tokens as given"
    path.write_text("hund 1 2\n")
    with pytest.raises(UsageError, match="has a vector for no word of the sentences"):
        sts(StsJob((data,), vectors=(str(path),)))


# --- jobs and results ------------------------------------------------------------------------------------------------


def test_sts_made_from_with_other_gold_scores_beside_the_named_file_is_not_current(tmp_path):
    pairs = (
        "a red circle\ta small red circle",
        "a blue star\ta red circle",
        "two stars\ttwo blue stars",
        "a green square\ta blue star",
    )
    (tmp_path / "STS.input.x.txt").write_text("\n".join(pairs) + "\n")
    job, output = StsJob((str(tmp_path / "STS.input.x.txt"),)), Folder(str(tmp_path / "out"))
    for scores, pearson in (("5 1 4 0", 97.9642), ("0 4 1 5", -97.9642)):
        (tmp_path / "STS.gs.x.txt").write_text("\n".join(scores.split()) + "\n")
        made_from = sts_made_from(job)
        assert not is_current(output, made_from)
        assert sts(job).systems[0].correlations[0].pearson == pytest.approx(pearson, abs=5e-5)  # Of numpy.corrcoef.
        write_made_from(output, made_from, {})
        assert is_current(output, sts_made_from(job))
