"""Vectors of any model, by import: both sides, and their scores against brute force."""

import json
from pathlib import Path

import numpy as np
import pytest

import imagepivot
from pipelines.commands import app as cli
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError
from schemas.writing.validation import validate
from tests.builders import shard_by_hand, write_rows
from train.evaluation.ranks import read_ranks

IMAGES = [f"folder/{n:02d}" for n in range(12)]
KEYS = [(image, language, "comparable", index, "test") for image in IMAGES for language in ("en", "de") for index in range(11)]
WIDTH = 4


@pytest.fixture
def captions(tmp_path) -> str:
    columns = ("image_id", "language", "portion", "index", "split")
    rows = [dict(zip(columns, key, strict=True)) | {"text": f"text {n}", "tokens": ["text"]} for n, key in enumerate(KEYS)]
    write_rows(tmp_path / "captions", "captions", rows, parameters={"recipe": "raw"}, shards=2)
    return str(tmp_path / "captions")


@pytest.fixture
def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Vectors of images and captions, of any length."""
    rng = np.random.default_rng(3)
    images = rng.standard_normal((len(IMAGES), WIDTH))
    texts = np.stack([images[IMAGES.index(key[0])] + 1.5 * rng.standard_normal(WIDTH) for key in KEYS])
    return images * rng.uniform(0.1, 9, (len(images), 1)), texts * rng.uniform(0.1, 9, (len(texts), 1))


def id_of(key: tuple) -> str:
    return "/".join(map(str, key[:4]))


@pytest.fixture
def text_job(tmp_path, captions, vectors):
    """Write the vectors of captions in a random order, without the first one, and return the job of their import."""
    order = np.random.default_rng(1).permutation(np.arange(1, len(KEYS)))
    np.save(tmp_path / "texts.npy", vectors[1][order].astype(np.float32))
    (tmp_path / "texts.txt").write_text("".join(f"{id_of(KEYS[n])}\n" for n in order))

    def job(name: str = "texts", **options) -> ImportJob:
        sources = (str(tmp_path / "texts.npy"),)
        return ImportJob(sources, str(tmp_path / name), name="mine", captions=captions, shards=3, **options)

    return job


@pytest.fixture
def images(tmp_path, vectors) -> Path:
    np.save(tmp_path / "images.npy", vectors[0].astype(np.float32))
    (tmp_path / "images.txt").write_text("".join(f"{image}\n" for image in IMAGES))
    return tmp_path / "images.npy"


def import_images(source: Path, name: str, **options) -> str:
    import_features(ImportJob((str(source),), str(source.with_name(name)), name="mine", id_rule="exact", **options))
    return str(source.with_name(name))


def test_vectors_of_captions_keep_keys_and_values(text_job, captions, vectors):
    job = text_job(space="mine")
    import_features(job)
    assert validate(job.output) == []
    dataset = open_dataset(job.output, kind="embeddings")
    rows = {tuple(row.values())[:5]: row["embedding"] for row in dataset}
    assert rows.keys() == set(KEYS[1:])
    assert all(np.array_equal(rows[key], vectors[1][n].astype(np.float32)) for n, key in enumerate(KEYS) if n)
    for shard in range(3):
        keys = [tuple(row.values())[:4] for row in dataset.shard(shard).to_pylist()]
        assert keys == sorted(key[:4] for key in KEYS[1:] if shard_by_hand(key[0], 3) == shard)
    assert dataset.manifest.inputs[-1] == {"name": "captions", "fingerprint": open_dataset(captions).fingerprint}
    assert dataset.manifest.parameters["space"] == "mine"


@pytest.mark.slow
def test_scores_of_own_vectors_equal_brute_force(text_job, images, vectors, tmp_path, capsys):
    job = text_job(space="mine")
    import_features(job)
    places = ("--captions", job.output, "--features", import_images(images, "out", space="mine"))
    cli.app(["evaluate", *places, "--output", str(tmp_path / "scores"), "--device", "cpu"], standalone_mode=False)
    printed = capsys.readouterr()
    assert "training data unknown, overlap not checked" in printed.err
    assert printed.out.count("space mine") == 3  # Below scores, means and all correct items.
    scores = {score["language"]: score for score in json.loads((tmp_path / "scores" / "evaluation.json").read_text())["scores"]}
    ranks = {
        (row["direction"], row["query_id"]): row["rank"]
        for row in read_ranks(str(tmp_path / "scores")).to_pylist()
        if row["language"] == "de"
    }
    unit = [array / np.linalg.norm(array, axis=1, keepdims=True) for array in vectors]
    german = [n for n, key in enumerate(KEYS) if key[1] == "de"]
    similarities, own = unit[0] @ unit[1][german].T, np.array([IMAGES.index(KEYS[n][0]) for n in german])
    of_texts = {
        id_of(KEYS[n]): 1 + (column > column[own[i]]).sum()
        for i, (n, column) in enumerate(zip(german, similarities.T, strict=True))
    }
    of_images = {
        image: 1 + (row > row[own == n].max()).sum() for n, (image, row) in enumerate(zip(IMAGES, similarities, strict=True))
    }
    assert ranks == {("text_to_image", key): rank for key, rank in of_texts.items()} | {
        ("image_to_text", key): rank for key, rank in of_images.items()
    }
    found = np.array(list(of_texts.values()))
    assert scores["de"]["text_to_image"]["recall_at_5"] == pytest.approx(100 * np.mean(found <= 5))
    assert len(set(found)) > 5  # Neither perfect nor equal.
    assert scores["de"]["space"] == "mine"


@pytest.mark.slow
def test_sides_without_a_common_space_are_refused(text_job, images):
    texts = {space: text_job(f"texts-{space}", space=space) for space in ("", "one", "two")}
    for job in texts.values():
        import_features(job)
    pairs = [("", ""), ("one", ""), ("", "one"), ("one", "two")]
    for space, other in pairs:
        features = import_images(images, f"images-{other}", space=other)
        with pytest.raises(DatasetError) as error:
            imagepivot.evaluate(captions=texts[space].output, features=features, device="cpu")
        named = [texts[space].output, features, *(f"space {name!r}" for name in (space, other) if name)]
        assert all(name in str(error.value) for name in named), (space, other)
        assert str(error.value).count("'mine' of an unknown checkpoint") == 2


@pytest.mark.slow
def test_sides_of_different_widths_are_refused(text_job, images, vectors):
    job = text_job(space="mine")
    import_features(job)
    np.save(images, vectors[0][:, :3].astype(np.float32))
    with pytest.raises(DatasetError, match=r"hold vectors \[4\] and \[3\], expected one width"):
        imagepivot.evaluate(captions=job.output, features=import_images(images, "out", space="mine"), device="cpu")


def test_keys_that_the_captions_lack_are_refused(text_job, tmp_path):
    lines = (tmp_path / "texts.txt").read_text().splitlines()
    (tmp_path / "texts.txt").write_text("\n".join(["folder/00/en/comparable/99", *lines[1:]]))
    with pytest.raises(InputError, match="has no caption 'folder/00/en/comparable/99'"):
        import_features(text_job())
    (tmp_path / "texts.txt").write_text("\n".join([lines[1], *lines[1:]]))
    with pytest.raises(InputError, match=r"caption .* occurs at texts\.npy, row 0 and again, .* at texts\.npy, row 1"):
        import_features(text_job())
    assert not (tmp_path / "texts").exists() or not list((tmp_path / "texts").iterdir())
