"""Recipe moses-truecase end to end, against a second truecaser by the rules of the Perl script."""

import gzip
import random
from collections import defaultdict
from pathlib import Path

import pytest

from pipelines.text.moses import RECIPES, prepare
from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.pipelines.text.test_truecasing import reference_counts, reference_truecase

pytestmark = pytest.mark.slow

HEADER = ("image_id", "language", "portion", "index", "split", "text")


def learn(captions) -> dict[str, int]:
    """Count the forms of words that do not begin a sentence."""
    counts = reference_counts([" ".join(tokens) for tokens in captions])
    return {form: tenths // 10 for forms in counts.values() for form, tenths in forms.items()}


def best_forms(counts) -> dict[str, str]:
    """The most frequent form of each word, by the word in lower case."""
    best: dict[str, str] = {}
    for form in sorted(counts, key=lambda form: (-counts[form], form)):
        best.setdefault(form.lower(), form)
    return best


def model_text(counts) -> str:
    types = defaultdict(list)
    for form in sorted(counts, key=lambda form: (-counts[form], form)):
        types[form.lower()].append(form)
    lines = []
    for _, (best, *others) in sorted(types.items()):
        total = counts[best] + sum(counts[form] for form in others)
        lines.append(f"{best} ({counts[best]}/{total})" + "".join(f" {form} ({counts[form]})" for form in others) + "\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def rows(photos, multi30k) -> list[tuple[str, ...]]:
    """Captions of the photographs, and a sample of Multi30K: two thirds in training, the rest in validation."""
    lines = (photos / "captions.tsv").read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("\t")) for line in lines[1:]]
    assert tuple(lines[0].split("\t")) == HEADER
    generator = random.Random(8)
    for language in ("en", "de", "fr", "cs"):
        with gzip.open(
            multi30k / "data" / "task1" / "raw" / f"train.{language}.gz", "rt", encoding="utf-8", newline="\n"
        ) as file:
            captions = [line.rstrip("\n").replace("\t", " ").replace('"', "''") for line in file]
        for number in generator.sample(range(len(captions)), 600):
            split = "train" if number % 3 else "val"
            rows.append((f"m{number}", language, "translation", "0", split, captions[number].strip()))
    assert all(row[5] for row in rows)
    return rows


def write(path: Path, rows) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in [HEADER, *rows]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(rows, imagepivot, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("truecase")
    write(folder / "captions.tsv", rows)
    captions(imagepivot, folder / "captions.tsv", folder / "captions", "--workers", "1")
    return folder


def captions(imagepivot, table, output, *arguments, code=0):
    return imagepivot(
        "captions", table, output, "--format", "table", "--recipe", "moses-truecase", "--shards", "3", *arguments, code=code
    )


@pytest.fixture(scope="module")
def learned(rows) -> dict[str, dict[str, int]]:
    recipe = RECIPES["moses-truecase"]
    return {
        language: learn(prepare(row[5], language, recipe) for row in rows if row[1] == language and row[4] == "train")
        for language in ("en", "de", "fr", "cs")
    }


@pytest.mark.parametrize("language", ["en", "de", "fr", "cs"])
def test_truecaser_equals_the_reference(folder, learned, language):
    text = (folder / "captions" / "_truecaser" / f"{language}.model").read_text(encoding="utf-8")
    assert text == model_text(learned[language])


def reference_tokens(rows, learned) -> dict[tuple[str, str, str, int], list[str]]:
    recipe = RECIPES["moses-truecase"]
    forms = {language: (best_forms(counts), set(counts)) for language, counts in learned.items()}
    return {
        (image_id, language, portion, int(index)): reference_truecase(
            " ".join(prepare(text, language, recipe)), *forms[language]
        ).split()
        for image_id, language, portion, index, _, text in rows
    }


def tokens_of(path: Path) -> dict[tuple[str, str, str, int], list[str]]:
    table = open_dataset(path).table().to_pylist()
    return {(row["image_id"], row["language"], row["portion"], row["index"]): row["tokens"] for row in table}


def test_tokens_are_those_of_the_reference(folder, rows, learned):
    expected = reference_tokens(rows, learned)
    assert tokens_of(folder / "captions") == expected
    recipe = RECIPES["moses-truecase"]
    before = {key: prepare(row[5], row[1], recipe) for key, row in zip(expected, rows, strict=True)}
    assert sum(expected[key] != before[key] for key in expected) > 500


def test_splits_to_learn_from_can_be_named(folder, rows, imagepivot):
    captions(imagepivot, folder / "captions.tsv", folder / "val", "--workers", "1", "--train-splits", "val")
    recipe = RECIPES["moses-truecase"]
    counts = learn(prepare(row[5], "de", recipe) for row in rows if row[1] == "de" and row[4] == "val")
    assert (folder / "val" / "_truecaser" / "de.model").read_text(encoding="utf-8") == model_text(counts)


@pytest.mark.cluster
def test_truecaser_can_be_used_again(folder, rows, imagepivot, learned, tmp_path):
    others = [row for row in rows if row[4] != "train"]
    table = write(tmp_path / "others.tsv", others)
    captions(imagepivot, table, tmp_path / "o", "--truecaser", folder / "captions", "--workers", "1")
    assert tokens_of(tmp_path / "o") == reference_tokens(others, learned)
    dataset = open_dataset(tmp_path / "o")
    assert {f"truecaser/{language}.model" for language in learned} < {entry["name"] for entry in dataset.manifest.inputs}
    assert validate(tmp_path / "o") == []
    for language in learned:
        name = f"_truecaser/{language}.model"
        assert (tmp_path / "o" / name).read_bytes() == (folder / "captions" / name).read_bytes()
