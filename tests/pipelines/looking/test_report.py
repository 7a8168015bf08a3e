from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.inputs.images.opening import open_images
from pipelines.looking.exhibits import Photos
from pipelines.looking.pages import write_page
from pipelines.looking.report import dataset_chapters, duplicates_chapter
from schemas.dataset import open_dataset
from schemas.duplicates import Duplicate
from schemas.errors import InputError
from schemas.features import FeatureSpec
from schemas.storage.folder import Folder
from tests.builders import region_row, write_encoded, write_rows
from tests.pages import Page, colour_of, write_photos

IMAGES = [f"img-{number:02d}" for number in range(40)]
WIDTH = 8
ZERO, CONSTANT = 2, 5
NO_PHOTOS = Photos()


def split_of(image_id: str) -> str:
    return ("train", "train", "val", "test")[int(image_id[-2:]) % 4]


def caption(image_id: str, language: str, text: str, tokens: list[str]) -> dict:
    key = {"image_id": image_id, "language": language, "portion": "comparable", "index": 0, "split": split_of(image_id)}
    return {**key, "text": text, "tokens": tokens}


@pytest.fixture
def captions(tmp_path):
    """Captions in three languages: French is missing in val, Czech in test and train; three images have none at all."""
    rows = []
    for image_id in IMAGES[:37]:
        rows.append(caption(image_id, "en", f"A dog of {image_id}.", ["a", "dog", "of", f"w{int(image_id[-2:]) % 7}"]))
        if split_of(image_id) != "val":
            rows.append(caption(image_id, "fr", f"Un chien {image_id}", ["un", "chien"]))
        else:
            rows.append(caption(image_id, "cs", f"Pes {image_id}", ["pes"] * 9))
    write_rows(tmp_path / "captions", "captions", rows, shards=2)
    return open_dataset(tmp_path / "captions")


def feature_rows(image_ids) -> list[dict]:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((len(image_ids), WIDTH)).astype(np.float32)
    vectors[:, ZERO], vectors[:, CONSTANT] = 0, 0.25
    return [{"image_id": image_id, "feature": vector} for image_id, vector in zip(image_ids, vectors, strict=True)]


def failure(key: str, reason: str = "truncated", message: str = "the file ends early") -> dict[str, str]:
    return {"key": key, "uri": f"{key}.png", "stage": "decode", "reason": reason, "message": message}


def write_features(folder: Path, rows, failures=()):
    write_rows(folder, "features", rows, FeatureSpec("toy", (WIDTH,)), failures=failures, shards=2)
    return open_dataset(folder)


def report(datasets, target: Path, photos: Photos = NO_PHOTOS) -> Page:
    write_page(Folder(str(target.parent)), target.name, "report", [*dataset_chapters(datasets, photos)])
    return Page(target)


def remarks_of(dataset, *others, photos: Photos = NO_PHOTOS) -> list[str]:
    return list(next(dataset_chapters([dataset, *others], photos)).remarks)


def test_report_names_languages_missing_in_a_split(captions):
    assert remarks_of(captions) == [
        "split 'test' has no captions in cs",
        "split 'train' has no captions in cs",
        "split 'val' has no captions in fr",
    ]


def test_report_names_images_without_captions_and_the_reverse(captions, tmp_path):
    features = write_features(tmp_path / "features", feature_rows([*IMAGES[2:], "extra"]))
    *_, without, lacking = remarks_of(captions, features)
    location = str(tmp_path / "features")
    assert without == f"4 images of {location!r} without captions: extra, img-37, img-38, img-39"
    assert lacking == f"2 images with captions that {location!r} lacks: img-00, img-01"


@pytest.mark.slow
def test_report_counts_captions_and_tokens(captions, tmp_path):
    words = [row for row in captions.table().to_pylist() if row["tokens"][-1] not in ("w3", "w4")]
    write_encoded(tmp_path, [row for row in words if row["language"] != "cs"])
    page = report([captions, open_dataset(tmp_path / "vocabulary")], tmp_path / "report.html")
    english = [split_of(image_id) for image_id in IMAGES[:37]]
    counts = [f"{english.count(split)} ({english.count(split)})" for split in ("test", "train", "val")]
    assert "\n".join(["language", "test", "train", "val"]).replace("\n", "") in page.text.replace("\n", "")
    assert f"en{''.join(counts)}" in page.text.replace("\n", "")
    fours = sum(int(image_id[-2:]) % 7 in (3, 4) for image_id in IMAGES[:37])
    assert f"{fours / (4 * 37):.2%}" in page.text
    threes = sum(int(image_id[-2:]) % 7 == 3 for image_id in IMAGES[:37])
    assert f"w3 {threes}" in page.text
    assert f"pes {9 * 9}" in page.text
    [lengths, growth, *_] = [image["alt"] for image in page.all("img")]
    assert lengths == "lengths of captions. Medians in tokens: cs 9, en 4, fr 2"
    assert growth == "growth of the vocabulary. Distinct tokens in the end: cs 1 of 81, en 10 of 148, fr 2 of 56"


@pytest.mark.slow
def test_report_shows_pictures_beside_captions(captions, tmp_path):
    photos = Photos(open_images(write_photos(tmp_path / "photos", IMAGES)))
    page = report([captions], tmp_path / "report.html", photos)
    assert len(page.photos) == 8
    for image_id, pixels in page.photos.items():
        np.testing.assert_allclose(pixels[15, 20], colour_of(image_id), atol=6)
        assert f"A dog of {image_id}." in page.text
    with pytest.raises(InputError, match=r"has no image of the ids wanted, e.g. 'img-00': its ids look like 'other'"):
        report([captions], tmp_path / "no.html", Photos(open_images(write_photos(tmp_path / "others", ["other"]))))
    assert not (tmp_path / "no.html").exists()


def test_report_names_constant_and_zero_dimensions_and_vectors(tmp_path):
    rows = feature_rows(IMAGES)
    assert remarks_of(write_features(tmp_path / "a", rows)) == [
        f"1 of {WIDTH} dimensions is zero: {ZERO}",
        f"1 of {WIDTH} dimensions is constant: {CONSTANT}",
    ]
    rows[7]["feature"] = np.zeros(WIDTH, np.float32)
    assert remarks_of(write_features(tmp_path / "b", rows)) == [
        f"1 of {WIDTH} dimensions is zero: {ZERO}",
        "1 image with a vector of zeros: img-07",
    ]


@pytest.mark.slow
def test_report_names_failures_and_shows_what_decodes(tmp_path):
    folder = write_photos(tmp_path / "photos", IMAGES)
    (folder / "img-39.png").write_bytes(b"\x89PNG")
    failures = [failure(f"img-{number}") for number in range(20, 40)]
    features = write_features(tmp_path / "features", feature_rows(IMAGES[:20]), failures)
    page = report([features], tmp_path / "report.html", Photos(open_images(folder)))
    assert all(page.text.count(f"img-{number}.png") == 1 for number in range(20, 40))
    assert "20 failures" in page.text
    assert "the image ends too early" in page.text
    assert sorted(page.photos) == [f"img-{number}" for number in range(20, 39)]


@pytest.mark.slow
def test_report_shows_five_labelled_boxes(tmp_path):
    write_photos(tmp_path / "photos", ["a"])
    Image.new("RGB", (400, 300), (255, 255, 255)).save(tmp_path / "photos" / "b.png")
    boxes = np.array([[40 * n, 30 * n, 40 * n + 30, 30 * n + 25] for n in range(9)], np.float32)
    scores = np.arange(9, 0, -1) / 10
    rows = [
        region_row(image_id, boxes, np.ones((9, 4), np.float32), 9, width=width, height=height, class_ids=np.arange(1, 10))
        | {"class_scores": scores.astype(np.float32)}
        for image_id, width, height in (("a", 999, 30), ("b", 400, 300))
    ]
    names = {"_names/classes": "".join(f"thing{n}\n" for n in range(1, 10)).encode()}
    write_rows(tmp_path / "regions", "regions", rows, FeatureSpec("toy", (9, 4)), files=names)
    page = report([open_dataset(tmp_path / "regions")], tmp_path / "report.html", Photos(open_images(tmp_path / "photos")))
    [pixels] = [page.photos[name] for name in page.photos if name == "b"]
    assert [f"thing{n} 0.{10 - n}" in page.text for n in range(1, 10)] == [True] * 5 + [False] * 4
    assert "a" not in page.photos, "the picture has another size than its regions"
    scale = pixels.shape[1] / 400
    for number, box in enumerate(boxes):
        x, y = (box[:2] * scale).astype(int)
        is_drawn = (pixels[y : y + 8, x : x + 8].astype(int).min(2) < 128).any()
        assert is_drawn == (number < 5)


def test_report_names_every_group_of_duplicates(tmp_path):
    pairs = [[f"img-{2 * n:02d}", f"img-{2 * n + 1:02d}"] for n in range(50)]
    members = [Duplicate(group, "pixels", 1.0, image_id, "train") for group, names in enumerate(pairs) for image_id in names]
    photos = Photos(open_images(write_photos(tmp_path / "photos", ["img-00", "img-01", "img-02"])))
    write_page(Folder(str(tmp_path)), "report.html", "report", [duplicates_chapter("d.csv", members, photos)])
    page = Page(tmp_path / "report.html")
    assert "50 groups of duplicates" in page.text
    assert all(", ".join(names) in page.text for names in pairs)
    assert sorted(page.photos) == ["img-00", "img-01", "img-02"]


def test_report_disarms_hostile_captions(tmp_path):
    text = "</bdi></style><script>alert(1)</script><img src=x onerror=alert(1)> \u202eevil\u2066\x00 " + "word " * 20_000
    rows = [caption(image_id, "en", text, [text]) for image_id in IMAGES]
    write_rows(tmp_path / "captions", "captions", rows)
    photos = Photos(open_images(write_photos(tmp_path / "photos", IMAGES)))
    page = report([open_dataset(tmp_path / "captions")], tmp_path / "report.html", photos)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not page.all("script")
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not [image for image in page.all("img") if not image["src"].startswith("data:")]
    assert not set("\u202e\u2066\x00") & set(html)
    assert page.text.count(r"<script>alert(1)</script>") == 9, "eight pictures and the list of tokens"
    assert len(html) < 100_000


def test_report_needs_no_rows(tmp_path):
    write_rows(tmp_path / "captions", "captions", [])
    datasets = [open_dataset(tmp_path / "captions"), write_features(tmp_path / "features", [])]
    page = report(datasets, tmp_path / "report.html")
    assert "there are no vectors" in page.text
    assert "there are no captions" in page.text
