import random
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from pipelines.running.execution import Execution
from pipelines.text.captions import CaptionsJob, prepare_captions
from pipelines.text.token_counts import count_tokens
from pipelines.text.vocabulary import VocabularyJob, build_vocabulary, unknown_remark
from schemas.dataset import Dataset, open_dataset
from schemas.errors import InputError
from schemas.vocabulary import SPECIALS
from schemas.writing.validation import validate
from tests.builders import tree
from tests.pipelines.text.captions import caption, write_table

ONE = Execution(workers=1)
LANGUAGES = {"en": "abcdefgh", "de": "efghijkl", "fr": "hmnopqrs"}


def random_rows(seed: int = 3) -> list[tuple[str, str, str, str, str]]:
    """(image id, language, portion, split, text): words of one letter, some of them in two or three languages."""
    generator = random.Random(seed)
    rows = []
    for number in range(150):
        split = generator.choice(["train", "train", "train", "val", "test"])
        for language, letters in LANGUAGES.items():
            portions = ["translation"] if language == "fr" else ["translation", "comparable"]
            for portion in portions:
                weights = [2.0**-k for k in range(len(letters))]
                words = generator.choices(letters, weights, k=generator.randrange(1, 9))
                rows.append((f"img{number}", language, portion, split, " ".join(words)))
    return rows


@pytest.fixture(scope="module")
def rows():
    return random_rows()


@pytest.fixture(scope="module")
def captions(rows, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vocabulary")
    table = write_table(folder / "captions.tsv", (caption(*row[:3], split=row[3], text=row[4]) for row in rows))
    job = CaptionsJob(str(table), str(folder / "captions"), "table", recipe="raw", shards=3)
    prepare_captions(job, ONE)
    return str(folder / "captions")


def brute_counts(rows, *, splits=("train",), languages=(), portions=()) -> dict[str, Counter]:
    counts: dict[str, Counter] = defaultdict(Counter)
    for _, language, portion, split, text in rows:
        if split in splits and (not languages or language in languages) and (not portions or portion in portions):
            counts[language].update(text.split())
    return counts


def brute_vocabulary(counts, min_count, scope) -> list[str]:
    total = sum(counts.values(), Counter())
    kept = []
    for token, count in total.items():
        most = count if scope == "joint" else max(counter[token] for counter in counts.values())
        if most >= min_count:
            kept.append(token)
    return sorted(kept, key=lambda token: (-total[token], token))


# --- plain functions -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch_rows", [1, 20, 65_536])
def test_count_tokens_equals_a_plain_loop(rows, captions, monkeypatch, batch_rows):
    monkeypatch.setattr("pipelines.text.token_counts.BATCH_ROWS", batch_rows)
    monkeypatch.setattr(Dataset, "shard", lambda *_: pytest.fail("a whole shard was read"))
    dataset = open_dataset(captions)
    counts = count_tokens(range(dataset.num_shards), dataset)
    expected: dict[tuple, Counter] = defaultdict(Counter)
    for _, language, portion, split, text in rows:
        expected[portion, split, language].update(text.split())
    assert counts == expected


# --- the pipeline ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "min_count", "scope"),
    [
        ({}, 1, "language"),
        ({}, 4, "language"),
        ({}, 9, "joint"),
        ({"portions": ("translation",)}, 4, "language"),
        ({"languages": ("de", "fr")}, 9, "joint"),
        ({"splits": ("train", "val")}, 4, "language"),
    ],
)
def test_build_vocabulary_equals_a_plain_loop(rows, captions, tmp_path, selection, min_count, scope):
    folder = tmp_path / "v"
    job = VocabularyJob(captions, str(folder), min_count=min_count, count_scope=scope, **selection)
    manifest = build_vocabulary(job, ONE)
    counts = brute_counts(rows, **selection)
    tokens = brute_vocabulary(counts, min_count, scope)
    table = open_dataset(folder).table().to_pylist()
    assert [row["token"] for row in table] == [*SPECIALS, *tokens]
    assert [row["id"] for row in table] == list(range(len(tokens) + 4))
    for row in table[4:]:
        by_language = {language: counter[row["token"]] for language, counter in counts.items() if counter[row["token"]]}
        assert dict(row["counts"]) == by_language
        assert row["count"] == sum(by_language.values())
    assert (folder / "_vocabulary.txt").read_text() == "".join(f"{token}\n" for token in [*SPECIALS, *tokens])
    assert validate(folder) == []
    assert manifest.parameters["min_count"] == min_count
    assert [source["fingerprint"] for source in manifest.inputs] == [open_dataset(captions).fingerprint]
    statistics = manifest.statistics
    own = {
        language: {token for token, count in counter.items() if token in tokens and (scope == "joint" or count >= min_count)}
        for language, counter in counts.items()
    }
    assert statistics["tokens"] == {language: len(found) for language, found in own.items()}
    assert (statistics["sum"], statistics["union"]) == (sum(map(len, own.values())), len(set().union(*own.values())))
    overlaps = {(a, b): (len(own[a] & own[b]), len(own[a] | own[b])) for a, b in combinations(sorted(own), 2)}
    assert statistics["jaccard"] == {f"{a}/{b}": (both + 4) / (either + 4) for (a, b), (both, either) in overlaps.items()}
    assert statistics["types"] == {language: len(counter) for language, counter in counts.items()}
    assert statistics["singletons"] == {language: [*counter.values()].count(1) for language, counter in counts.items()}
    assert statistics["occurrences"] == {language: counter.total() for language, counter in counts.items()}
    for split in ("val", "test"):
        by_language = brute_counts(rows, **{**selection, "splits": (split,)})
        unknown = {
            language: sum(count for token, count in counter.items() if token not in tokens) / counter.total()
            for language, counter in by_language.items()
        }
        assert {language: shares[split] for language, shares in statistics["unknown"].items()} == unknown


@pytest.mark.slow
@pytest.mark.parametrize("lost", [["_manifest.json"], ["_manifest.json", "part-00000-of-00001.parquet"]])
def test_resumed_run_restores_lost_files(captions, tmp_path, lost):
    job = VocabularyJob(captions, str(tmp_path / "v"))
    build_vocabulary(job, ONE)
    before = tree(tmp_path / "v")
    for name in lost:
        (tmp_path / "v" / name).unlink()
    (tmp_path / "v" / "_vocabulary.txt").write_text("half")
    build_vocabulary(job, ONE)
    assert tree(tmp_path / "v") == before


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"splits": ("trian",)}, "no captions of split 'trian': it has test, train, val. Choose with --splits"),
        (
            {"portions": ("comparable",), "languages": ("fr",)},
            "no captions of the selected portions, splits and languages together: it has comparable/test/de, ",
        ),
    ],
)
def test_selection_without_captions_is_an_error(captions, tmp_path, selection, message):
    with pytest.raises(InputError, match=message):
        build_vocabulary(VocabularyJob(captions, str(tmp_path / "v"), **selection), ONE)
    assert not (tmp_path / "v").exists()


def test_unknown_remark_names_languages_whose_training_tokens_are_mostly_unknown():
    job = VocabularyJob("captions", "vocabulary", min_count=4)
    assert "(de 75%)" in unknown_remark(job, {"de": {"train": 0.75, "test": 0.9}, "en": {"train": 0.5, "test": 0.9}})
    assert unknown_remark(job, {"de": {"test": 0.9}}) == ""
