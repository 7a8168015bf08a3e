"""Duplicates that are planted among real photographs and in synthetic features, and captions that differ in spelling."""

import io
import shutil
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors.request import ExtractorRequest
from pipelines.datasets import duplicates as search
from pipelines.datasets.duplicates import count_table, find_duplicates, fold
from pipelines.demo.run import trained_weights
from pipelines.demo.scenes import draw, make_scenes
from pipelines.features.extraction import extract_features
from pipelines.jobs import DuplicatesJob, FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.storage.folder import Folder
from schemas.writing.records import Record, Source, write_record
from tests.builders import region_row, write_encoded, write_rows

KEY = {"language": "en", "portion": "comparable", "index": 0}


def pairs_of(duplicates) -> set[frozenset[str]]:
    groups = defaultdict(list)
    for duplicate in duplicates:
        groups[duplicate.group].append(duplicate.image_id)
    return {frozenset(pair) for members in groups.values() for pair in combinations(members, 2)}


def write_features(folder: Path, vectors: dict[str, np.ndarray]) -> str:
    rows = [{"image_id": name, "feature": vector.astype(np.float32)} for name, vector in vectors.items()]
    width = len(next(iter(vectors.values())))
    write_rows(folder / "features", "features", rows, FeatureSpec("toy", (width,)), shards=2)
    return str(folder / "features")


def write_captions(folder: Path, texts: dict[tuple[str, str, str], str]) -> str:
    """Write captions by image id, language and split."""
    rows = [
        {"image_id": image_id, **KEY, "language": language, "split": split, "text": text, "tokens": text.lower().split()}
        for (image_id, language, split), text in texts.items()
    ]
    write_rows(folder / "captions", "captions", rows)
    write_encoded(folder, rows)
    return str(folder / "captions")


def random_vectors(names: str, width: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(width) for name in names}


# --- photographs -----------------------------------------------------------------------------------------------------


def encode(picture: Image.Image, quality: int) -> bytes:
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=quality)
    return data.getvalue()


@pytest.fixture(scope="module")
def planted(photos, tmp_path_factory) -> Path:
    """The photographs with three copies of each: the same bytes, JPEG of quality 75, and half the size."""
    folder = tmp_path_factory.mktemp("planted")
    for file in sorted((photos / "images").iterdir()):
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        shutil.copyfile(file, folder / file.name)
        shutil.copyfile(file, folder / f"{file.stem}+bytes{file.suffix}")
        (folder / f"{file.stem}+q75.jpg").write_bytes(encode(picture, 75))
        (folder / f"{file.stem}+half.jpg").write_bytes(encode(picture.resize((picture.width // 2, picture.height // 2)), 90))
    return folder


def expected_pairs(image_ids) -> set[frozenset[str]]:
    photograph = {image_id: image_id.partition("+")[0].removesuffix("_gray") for image_id in image_ids}
    return {frozenset(pair) for pair in combinations(image_ids, 2) if photograph[pair[0]] == photograph[pair[1]]}


@pytest.mark.slow
def test_planted_copies_of_photographs_are_found_and_no_others(planted, tmp_path):
    image_ids = sorted(path.stem for path in planted.iterdir())
    features = write_features(tmp_path, {name: np.random.default_rng(n).random(64) for n, name in enumerate(image_ids)})
    duplicates = find_duplicates(DuplicatesJob(features, images=str(planted)))
    assert pairs_of(duplicates) == expected_pairs(image_ids)
    assert {duplicate.image_id.partition("+")[2]: duplicate.kind for duplicate in duplicates} == {
        "": "bytes",
        "bytes": "bytes",
        "q75": "hash",
        "half": "hash",
    }
    # Of the 153 pairs of photographs one is of the same picture, in grey.
    originals = [duplicate for duplicate in duplicates if "+" not in duplicate.image_id]
    assert pairs_of(originals) == {frozenset(("cat", "cat_gray"))}


def write_trained_features(folder: Path, images: Path) -> str:
    """Write features of EfficientNet-Lite0, without Beam."""
    if (weights := trained_weights()) is None:
        pytest.skip("needs pip install 'imagepivot[demo]'")
    extractor = extractors.load_extractor("timm:tf_efficientnet_lite0", weights=str(weights), device="cpu")
    paths, vectors = sorted(images.iterdir()), []
    for start in range(0, len(paths), 32):
        inputs = [extractor.preprocess(extractors.decode_image(path.read_bytes())) for path in paths[start : start + 32]]
        vectors += list(extractor.extract(torch.stack(inputs)))
    return write_features(folder, {path.stem: vector for path, vector in zip(paths, vectors, strict=True)})


@pytest.mark.slow
def test_features_of_trained_weights_find_copies_without_pictures(planted, tmp_path):
    features = write_trained_features(tmp_path, planted)
    expected = expected_pairs([path.stem for path in planted.iterdir()])
    duplicates = find_duplicates(DuplicatesJob(features), on_warning=lambda remark: None)
    assert pairs_of(duplicates) <= expected
    found = Counter(duplicate.image_id.partition("+")[2] for duplicate in duplicates)
    assert found["bytes"] == 18
    assert found["q75"] >= 13
    lower = pairs_of(find_duplicates(DuplicatesJob(features, min_cosine=0.65), on_warning=lambda remark: None))
    assert lower <= expected
    assert {frozenset((path.stem, path.stem.partition("+")[0])) for path in planted.iterdir() if "+" in path.stem} <= lower


@pytest.mark.slow
def test_untrained_features_join_only_equal_ones(tmp_path):
    request = ExtractorRequest("resnet50-pool", weights="random:0")
    pictures = {f"scene-{n}": draw(scene) for n, (_, scene) in enumerate(make_scenes(6))}
    (tmp_path / "images").mkdir()
    for name, picture in {**pictures, "copy": pictures["scene-0"]}.items():
        picture.save(tmp_path / "images" / f"{name}.png", compress_level=1 if name == "copy" else 9)
    extract_features(
        FeaturesJob(str(tmp_path / "images"), str(tmp_path / "features"), request, device="cpu"), Execution(workers=1)
    )
    duplicates = find_duplicates(DuplicatesJob(str(tmp_path / "features")))  # Without a warning: digests of files are known.
    assert [(duplicate.image_id, duplicate.kind) for duplicate in duplicates] == [("copy", "cosine"), ("scene-0", "cosine")]


def test_digests_of_files_in_records_need_no_pictures(tmp_path):
    folder = Folder(write_features(tmp_path, random_vectors("abc")))
    for entry in open_dataset(folder.location).manifest.shards:
        sources = [Source(name, f"{name}.jpg", 1, "", "0" * 64 if name in "ab" else "1" * 64) for name in "abc"]
        write_record(folder, entry.path, Record(entry.bytes, entry.sha256, "", sources=sources))
    duplicates = find_duplicates(DuplicatesJob(folder.location))
    assert [(duplicate.image_id, duplicate.kind) for duplicate in duplicates] == [("a", "bytes"), ("b", "bytes")]


def test_equal_pixels_in_files_of_other_formats_are_joined(tmp_path):
    features = write_features(tmp_path, random_vectors("abc"))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    (tmp_path / "photos").mkdir()
    noise.save(tmp_path / "photos" / "a.png")
    noise.save(tmp_path / "photos" / "b.bmp")
    noise.transpose(Image.Transpose.TRANSPOSE).save(tmp_path / "photos" / "c.png")
    duplicates = find_duplicates(DuplicatesJob(features, images=str(tmp_path / "photos")))
    assert [(duplicate.image_id, duplicate.kind) for duplicate in duplicates] == [("a", "pixels"), ("b", "pixels")]


def test_missing_and_undecodable_pictures_are_left_to_the_features(tmp_path):
    features = write_features(tmp_path, random_vectors("abcd"))
    (tmp_path / "photos").mkdir()
    for name in "ab":
        (tmp_path / "photos" / f"{name}.jpg").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "c.png")
    remarks = []
    duplicates = find_duplicates(DuplicatesJob(features, images=str(tmp_path / "photos")), on_warning=remarks.append)
    assert [(duplicate.image_id, duplicate.kind) for duplicate in duplicates] == [("a", "bytes"), ("b", "bytes")]
    photos = str(tmp_path / "photos")
    assert remarks == [f"1 of 4 images, e.g. 'd', have no picture in {photos!r}: only their features are compared"]


# --- features --------------------------------------------------------------------------------------------------------


def all_pairs(vectors: np.ndarray, min_cosine: float) -> dict[tuple[int, int], float]:
    parts = list(search.near_pairs(vectors, min_cosine))
    return {(int(a), int(b)): cosine for part in parts for a, b, cosine in zip(*part, strict=True)}


def test_near_pairs_equal_brute_force(monkeypatch):
    monkeypatch.setattr(search, "_TILE", 7)
    vectors = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    products = {
        pair: sum(float(x) * float(y) for x, y in zip(*vectors[list(pair)], strict=True)) for pair in combinations(range(60), 2)
    }
    expected = {pair: pytest.approx(cosine, abs=1e-6) for pair, cosine in products.items() if cosine >= 0.7}
    assert all_pairs(vectors, 0.7) == expected
    assert len(expected) > 20


def test_search_by_faiss_finds_the_pairs_of_the_exact_search(monkeypatch):
    pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3000, 32)).astype(np.float32)
    vectors[1500:] = vectors[:1500] + rng.standard_normal((1500, 32)).astype(np.float32) * np.linspace(0.05, 0.4, 1500)[:, None]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = {}
    for limit in (3000, 2999):
        monkeypatch.setattr(search, "MAX_EXACT", limit)
        pairs[limit] = all_pairs(vectors, 0.93)
    assert pairs[2999].keys() <= pairs[3000].keys()
    assert len(pairs[2999]) >= 0.99 * len(pairs[3000]) > 1000


def test_groups_are_connected_components_with_the_strongest_match(tmp_path):
    vectors = random_vectors("abcdefgh")
    vectors["b"], vectors["g"] = vectors["a"], vectors["a"] + 0.1
    vectors["d"] = vectors["c"] + 0.02
    duplicates = find_duplicates(DuplicatesJob(write_features(tmp_path, vectors)), on_warning=lambda remark: None)
    assert [(item.group, item.kind, item.image_id) for item in duplicates] == [
        *((0, "cosine", name) for name in "abg"),
        *((1, "cosine", name) for name in "cd"),
    ]
    assert [duplicate.similarity == 1 for duplicate in duplicates] == [True, True, False, False, False]


def test_equal_features_of_all_images_are_one_group(tmp_path):
    """They have no deviations by which they could be compared."""
    features = write_features(tmp_path, dict.fromkeys("abc", np.arange(4.0)))
    assert len(pairs_of(find_duplicates(DuplicatesJob(features), on_warning=lambda remark: None))) == 3


@pytest.mark.filterwarnings("error")
def test_features_of_zeros_only_are_no_duplicates(tmp_path):
    features = write_features(tmp_path, dict.fromkeys("abc", np.zeros(4)))
    assert find_duplicates(DuplicatesJob(features), on_warning=lambda remark: None) == []


def test_regions_are_averaged_without_their_padding(tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 3, 8)).astype(np.float32)
    values[5, 0] = values[0].mean(0)
    used = dict(zip("abcdef", (3, 3, 2, 0, 0, 1), strict=True))
    rows = [region_row(name, np.zeros((3, 4)), value, used[name]) for name, value in zip(used, values, strict=True)]
    write_rows(tmp_path / "regions", "regions", rows, FeatureSpec("toy", (3, 8)))
    duplicates = find_duplicates(DuplicatesJob(str(tmp_path / "regions")), on_warning=lambda remark: None)
    assert [duplicate.image_id for duplicate in duplicates] == ["a", "f"]  # Nor are images without regions alike.


def test_features_that_are_not_finite_are_an_error(tmp_path):
    features = write_features(tmp_path, random_vectors("ab") | {"c": np.full(64, np.nan)})
    with pytest.raises(DatasetError, match="has NaN or infinite features of 'c'"):
        find_duplicates(DuplicatesJob(features), on_warning=lambda remark: None)


# --- captions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ("A dog, running!", "a dog running", True),
        ("Zwei Straßen", "zwei STRASSEN", True),
        ("cafe\u0301  au\u00a0lait", "Café au lait.", True),
        ("ﬁve “dogs”", "five dogs", True),
        ("a dog", "a cat", False),
        ("a `big` dog", "a big dog", True),
        ("का", "की", False),  # Vowel signs are no letters, but no punctuation.
        ("costs $", "costs €", True),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467 a family", "a family", True),  # Joined.
        ("a \u2764\ufe0f dog \U0001f44d\U0001f3fd", "a dog", True),  # With a variation selector, and of a skin colour.
        ("1\ufe0f\u20e3 dog", "1 dog", True),
        ("the dog\u00b4s ball\u00a8", "the dog's ball", True),
        ("\uff04 a dog \uff5e", "a dog", True),
        ("20 \u2103", "20 \u00b0C", True),
        ("5 dogs", "6 dogs", False),
    ],
)
def test_fold_ignores_case_punctuation_symbols_space_and_unicode_form(first, second, are_equal):
    assert (fold(first) == fold(second)) is are_equal


def test_captions_are_joined_by_language_across_images_and_splits(tmp_path):
    features = write_features(tmp_path, random_vectors("abcdef"))
    captions = write_captions(
        tmp_path,
        {
            ("a", "en", "train"): "A dog.",
            ("b", "en", "test"): "a  DOG",
            ("c", "en", "test"): "A dog.",
            ("d", "de", "test"): "A dog.",
            ("e", "en", "val"): "...",
            ("f", "en", "val"): "\U0001f436",
        },
    )
    duplicates = find_duplicates(DuplicatesJob(features, captions), on_warning=lambda remark: None)
    assert [(item.kind, item.image_id, item.split, item.language, item.portion, item.index) for item in duplicates] == [
        ("text", "a", "train", "en", "comparable", "0"),
        ("words", "b", "test", "en", "comparable", "0"),
        ("text", "c", "test", "en", "comparable", "0"),
    ]
    assert count_table(duplicates).values == [
        ["captions en", "test", "test", 1, 1, 1],
        ["captions en", "test", "train", 1, 2, 1],
    ]


def test_captions_of_one_image_are_no_duplicates(tmp_path):
    features = write_features(tmp_path, random_vectors("ab"))
    rows = [
        {"image_id": "a", **KEY, "index": index, "split": "train", "text": "a dog", "tokens": ["a", "dog"]}
        for index in range(2)
    ]
    write_rows(tmp_path / "captions", "captions", rows)
    assert find_duplicates(DuplicatesJob(features, str(tmp_path / "captions")), on_warning=lambda remark: None) == []


def test_an_image_in_several_splits_has_both(tmp_path):
    vectors = random_vectors("abcdef")
    vectors["b"] = vectors["a"]
    texts = {("a", "en", "train"): "one", ("a", "de", "test"): "eins", ("b", "en", "val"): "two"}
    job = DuplicatesJob(write_features(tmp_path, vectors), write_captions(tmp_path, texts))
    duplicates = find_duplicates(job, on_warning=lambda remark: None)
    assert [(duplicate.image_id, duplicate.split) for duplicate in duplicates] == [("a", "test,train"), ("b", "val")]
