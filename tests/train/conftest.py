"""Fixtures: small datasets of synthetic images and captions, and an untrained run on them."""

import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.storage.folder import Folder
from tests.builders import write_encoded, write_rows
from tests.integration.processes import ForkedSteps
from tests.train.trainings import ALL_PORTIONS, CONFIG, region_row, rewrite
from train.config import models as config_models
from train.config.models import VseConfig
from train.config.sections import from_toml
from train.data.captions import Captions
from train.data.splits import open_data
from train.jobs import Corpus, TrainJob, TrainResult
from train.loop.training import train
from train.models import catalogue
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions
from train.runs.checkpoints import BEST, Checkpoint, TrainingProgress, write_checkpoint

SPLITS = {"train": 40, "val": 12, "test": 9}
# Number of captions per image, by language and portion.
COLLECTIONS = {("en", "comparable"): 3, ("de", "comparable"): 2, ("en", "translation"): 1, ("fr", "translation"): 1}
WORDS = 30
LACKING = {*(f"train-{n:03d}" for n in (3, 5, 7, 11, 13, 17, 19)), "val-002", "val-009", "test-004"}
SHARDS = 3


@pytest.fixture(scope="module", autouse=True)  # A package without a file __init__ is the session.
def forked_steps() -> Iterator[None]:
    """Fork the processes of rows; their imports take longer than their trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schemas.process.steps.run_command", ForkedSteps())
        yield


def write_dataset(folder: Path, kind: str, rows: list[dict], *, parameters: dict, spec=None, inputs=(), shards=SHARDS) -> str:
    """Write rows to their shards, sorted by key, as a dataset; return its fingerprint."""
    return write_rows(folder, kind, rows, spec, parameters=parameters, inputs=inputs, shards=shards).fingerprint


def write_toy(folder: Path, seed: int = 0, test: str = "test", translations: str = "", collections=COLLECTIONS) -> Corpus:
    """Write images with a topic each, and captions with words near the topic; ``test`` and ``translations`` name the test split."""
    names = {"comparable": test, "translation": translations or test}
    rng = np.random.default_rng(seed)
    images = {f"{split}-{n:03d}": (split, int(rng.integers(WORDS))) for split, count in SPLITS.items() for n in range(count)}
    captions = []
    for image_id, (split, topic) in images.items():
        for (language, portion), count in collections.items():
            for index in range(count):
                words = [(topic + int(step)) % WORDS for step in rng.integers(0, 3, size=rng.integers(1, 7))]
                tokens = [f"{language}{word}" for word in words]
                key = {"image_id": image_id, "language": language, "portion": portion, "index": index}
                captions.append({**key, "split": names[portion] if split == "test" else split, "tokens": tokens})
    write_encoded(folder, captions, seed=seed, shards=SHARDS)
    table = rng.standard_normal((WORDS, 8)).astype(np.float32)
    features = [
        {"image_id": image_id, "feature": table[topic] + 0.3 * rng.standard_normal(8).astype(np.float32)}
        for image_id, (_, topic) in images.items()
    ]
    write_dataset(folder / "features", "features", features, parameters={}, spec=FeatureSpec("toy", (8,)))
    return Corpus(str(folder / "encoded"), str(folder / "features"), str(folder / "vocabulary"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Datasets of images, captions and a vocabulary; read-only."""
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def with_equal_features(tmp_path: Path) -> Callable[[Corpus], Corpus]:
    """Write nearly equal features, from which no ranking is learned."""

    def write(corpus: Corpus) -> Corpus:
        rng = np.random.default_rng(0)

        def equal(rows: list[dict]) -> list[dict]:
            return [row | {"feature": (1 + 0.01 * rng.standard_normal(8)).astype(np.float32)} for row in rows]

        return replace(corpus, features=rewrite(corpus.features, tmp_path / "equal", equal))

    return write


@pytest.fixture(scope="session")
def write_words(toy: Corpus) -> Callable[..., str]:
    """Write word vectors ``[4]`` of English and German, similar for neighbouring topics, without some words."""

    def write(folder: Path, *, seed: int = 0, vocabulary: str = toy.vocabulary) -> str:
        dataset, rng = open_dataset(vocabulary), np.random.default_rng(seed)
        words, rows = dataset.vocabulary(), []
        for number, (token, counts) in enumerate(zip(words.tokens, words.counts, strict=True)):
            angle = 2 * np.pi * int("".join(filter(str.isdigit, token)) or 0) / WORDS
            vector = [np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)] + 0.01 * rng.standard_normal(4)
            rows += [
                {"language": language, "id": number, "token": token, "vector": vector.astype(np.float32)}
                for language in counts
                if language in ("en", "de") and number % 7
            ]
        write_dataset(
            folder,
            "word-vectors",
            rows,
            parameters={"languages": ["de", "en"], "lookup": f"seed {seed}"},
            spec=FeatureSpec("word-vectors", (4,)),
            inputs=({"name": "vocabulary", "fingerprint": dataset.fingerprint},),
            shards=1,
        )
        return str(folder)

    return write


@pytest.fixture(scope="session")
def toy_words(toy: Corpus, write_words: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The toy with word vectors; read-only."""
    return replace(toy, word_vectors=write_words(tmp_path_factory.mktemp("words") / "vectors"))


@pytest.fixture(scope="session")
def toy_2016(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Similar datasets with the test split of Multi30K."""
    return write_toy(tmp_path_factory.mktemp("toy-2016"), test="test_2016")


@pytest.fixture(scope="session")
def multi30k(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Similar datasets with the two test splits of Multi30K, of comparable captions and of translations."""
    return write_toy(tmp_path_factory.mktemp("multi30k"), test="test_2016", translations="test_2016_flickr")


@pytest.fixture(scope="session")
def four_languages(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Similar datasets with captions of all languages and portions of Multi30K, and one vocabulary for them."""
    collections = COLLECTIONS | {(language, "translation"): 1 for language in ("en", "de", "fr", "cs")}
    return write_toy(tmp_path_factory.mktemp("four"), 2, "test_2016", "test_2016_flickr", collections)


@pytest.fixture(scope="session")
def other_toy(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Similar datasets with other words, and features from another extractor."""
    other = write_toy(tmp_path_factory.mktemp("other"), seed=1)
    folder = Path(other.features).with_name("others")
    rows = [{"image_id": f"test-{n:03d}", "feature": np.ones(8, np.float32)} for n in range(SPLITS["test"])]
    write_dataset(folder, "features", rows, parameters={}, spec=FeatureSpec("other", (8,)))
    return Corpus(other.captions, str(folder), other.vocabulary)


@pytest.fixture(scope="session")
def without_features() -> Callable[[Corpus, Path], Corpus]:
    """Write the features of a corpus into another folder, without those of `LACKING`."""

    def write(corpus: Corpus, folder: Path) -> Corpus:
        def present(rows: list[dict]) -> list[dict]:
            return [row for row in rows if row["image_id"] not in LACKING]

        return replace(corpus, features=rewrite(corpus.features, folder / "features", present))

    return write


def write_several_features(corpus: Corpus, folder: Path) -> Corpus:
    """Write features ``[3, 8]`` for a corpus: its own at a random position, and noise at the others."""
    rows, rng = open_dataset(corpus.features).table().to_pylist(), np.random.default_rng(0)
    for row in rows:
        places = rng.standard_normal((3, 8)).astype(np.float32)
        places[rng.integers(3)] = row["feature"]
        row["feature"] = places.ravel()
    write_dataset(folder, "features", rows, parameters={}, spec=FeatureSpec("several", (3, 8)))
    return replace(corpus, features=str(folder))


@pytest.fixture(scope="session")
def write_tokens(toy: Corpus) -> Callable[..., str]:
    """Write noisy token vectors ``[4]`` of encoded captions, similar for neighbouring topics."""

    def write(
        folder: Path, *, seed: int = 0, corpus: Corpus = toy, dtype: str = "float32", model: str = "", cut: int = 99
    ) -> str:
        encoded, rng = open_dataset(corpus.captions), np.random.default_rng(seed)
        tokens, rows = open_dataset(corpus.vocabulary).vocabulary().tokens, []
        for row in encoded.table().to_pylist():
            ids = [*row["token_ids"][: cut + 1], 2] if row["length"] > cut + 2 else row["token_ids"]
            numbers = [int("".join(filter(str.isdigit, tokens[number])) or -1) for number in ids]
            angles = 2 * np.pi * np.array(numbers) / WORDS
            vectors = np.stack([np.sin(angles), np.cos(angles), np.sin(2 * angles), np.cos(2 * angles)], axis=1)
            vectors = (vectors + 0.1 * rng.standard_normal(vectors.shape)).astype(dtype)
            key = {name: row[name] for name in ("image_id", "language", "portion", "index", "split")}
            rows.append({**key, "length": len(ids), "vectors": vectors})
        write_dataset(
            folder / "tokens",
            "token-features",
            rows,
            parameters={"model_fingerprint": model or "f" * 64, "seed": seed},
            spec=FeatureSpec("bert", (4,), dtype),
            inputs=({"name": "captions", "fingerprint": "c" * 64},),
        )
        return str(folder / "tokens")

    return write


@pytest.fixture(scope="session")
def toy_tokens(toy: Corpus, write_tokens: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The toy with vectors of its tokens."""
    return replace(toy, token_features=write_tokens(tmp_path_factory.mktemp("tokens")))


@pytest.fixture(scope="session")
def four_languages_regions(four_languages: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Captions in four languages of images with three features each."""
    return write_several_features(four_languages, tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="session")
def toy_regions(toy: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The toy with three features an image."""
    return write_several_features(toy, tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="session")
def gappy(toy: Corpus, without_features: Callable[[Corpus, Path], Corpus], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The toy without the features of seven training, two validation and one test image."""
    return without_features(toy, tmp_path_factory.mktemp("gappy"))


REGIONS = FeatureSpec("regions", (4, 8), "float16")


@pytest.fixture(scope="session")
def write_regions(toy: Corpus) -> Callable[..., Corpus]:
    """Write regions of the images of the toy, one to four of them in use: the feature of the image, and noise."""

    def write(folder: Path, padding: float = 0.0, without: Collection[str] = (), lacking: Collection[str] = ()) -> Corpus:
        rng, rows = np.random.default_rng(5), []
        for image in open_dataset(toy.features).table().to_pylist():
            values = (np.array(image["feature"]) + rng.standard_normal(REGIONS.shape)).astype(REGIONS.dtype)
            used = int(rng.integers(1, 5)) * (image["image_id"] not in without)
            values[used:] = padding
            rows += [region_row(image["image_id"], used, values)] if image["image_id"] not in lacking else []
        write_dataset(folder / "regions", "regions", rows, parameters={"extractor_fingerprint": "toy"}, spec=REGIONS)
        return Corpus(toy.captions, str(folder / "regions"), toy.vocabulary)

    return write


@pytest.fixture(scope="session")
def regions(write_regions: Callable[..., Corpus], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The toy with regions; read-only."""
    return write_regions(tmp_path_factory.mktemp("regions"))


@pytest.fixture
def corpus_of(toy: Corpus, regions: Corpus) -> Callable[[str], Corpus]:
    """Return the training data of a model kind: the toy, or its regions."""
    return lambda kind: toy if kind in ("vse", "mlmme") else regions


@pytest.fixture
def write_run(toy: Corpus, tmp_path: Path) -> Callable[..., str]:
    """Write the best checkpoint of an untrained model for the toy."""

    def write(name: str = "run", *, languages=("en", "de"), seed: int = 0, l2: bool = False, similarity: str = "cosine") -> str:
        text = f"""
            description = "a toy"
            [data]
            portions = {{ {", ".join(f"{language} = ['comparable']" for language in languages)} }}
            l2_features = {str(l2).lower()}
            [model]
            embed_dim = 6
            word_dim = 4
            similarity = "{similarity}"
        """
        data = open_data(toy.captions, toy.features, toy.vocabulary, split="test", portions=ALL_PORTIONS)
        vocabulary = open_dataset(toy.vocabulary).vocabulary()
        config = from_toml(text, "toy")
        dimensions = Dimensions(tuple(languages), len(vocabulary), (8,))
        checkpoint = Checkpoint(
            config=text,
            dimensions=dimensions,
            model=build_model(config.model, dimensions, seed).state_dict(),
            tokens=vocabulary.tokens,
            fingerprints=data.fingerprints,
            captions={"text": {"recipe": "raw"}},
            seed=seed,
            precision="fp32",
            progress=TrainingProgress(step=7),
        )
        (tmp_path / name).mkdir()
        write_checkpoint(Folder(str(tmp_path / name)), BEST, checkpoint)
        return str(tmp_path / name)

    return write


@pytest.fixture
def train_toy(toy: Corpus, tmp_path: Path) -> Callable[..., TrainResult]:
    """Train on the toy; keywords are fields of `TrainJob`, and ``on_report``, ``on_warning`` and ``on_log`` those of `train`."""

    def run(text: str = CONFIG, name: str = "run", *, corpus: Corpus = toy, **fields) -> TrainResult:
        calls = {call: fields.pop(call) for call in ("on_report", "on_warning", "on_log") if call in fields}
        fields = {"curves": False, **fields}  # Drawing takes longer than such a training.
        return train(TrainJob(from_toml(text, "test"), corpus, str(tmp_path / name), device="cpu", **fields), **calls)

    return run


# A module of a user with a kind of model, ``counts``.
EDGES = """
from dataclasses import dataclass
from typing import ClassVar

import torch

import imagepivot


@dataclass(frozen=True)
class Counts(imagepivot.ModelConfig):
    kind: ClassVar[str] = "counts"
    width: int = 3


class CountsModel(imagepivot.RetrievalModel):
    similarity = "dot"

    def __init__(self, config, dimensions):
        super().__init__()
        self.languages, self.width = dimensions.languages, config.width
        self.images = torch.nn.Linear(*dimensions.feature_shape, config.width)
        self.words = torch.nn.EmbeddingBag(dimensions.vocabulary_size, config.width, padding_idx=0)

    def encode_images(self, images):
        return imagepivot.Encoded(self.images(images.features))

    def encode_captions(self, captions, language):
        return imagepivot.Encoded(self.words(torch.from_numpy(captions.padded(0))))

    def scores(self, a, b):
        return a.values @ b.values.T


imagepivot.register_model(Counts, CountsModel)
"""


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kinds of model that a test registers."""
    monkeypatch.setattr(config_models, "_SECTIONS", {VseConfig.kind: VseConfig})
    monkeypatch.setattr(catalogue, "_BUILDERS", dict(catalogue._BUILDERS))


@pytest.fixture(scope="session")
def finished_run(toy: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """A run of `CONFIG` with the default seed, and the result of its training; read-only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train(TrainJob(from_toml(CONFIG, "test"), toy, str(folder), device="cpu", curves=False))


@pytest.fixture
def copied_run(finished_run: tuple[Path, TrainResult], tmp_path: Path) -> Path:
    """A copy of the finished run in the folder ``run``, where `train_toy` finds it."""
    return shutil.copytree(finished_run[0], tmp_path / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a disk of a size in KiB, or change its size."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = False

    def mount(size: int) -> Path:
        nonlocal mounted
        options = f"remount,size={size}k" if mounted else f"size={size}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this account cannot mount a small disk: {done.stderr.strip()}")
        mounted = True
        return path

    yield mount
    if mounted:
        subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="session")
def new_dataset() -> Callable[..., str]:
    return write_dataset


def captions_of(rows: list[tuple[str, str, str, int, list[int]]], languages: tuple[str, ...] = ()) -> Captions:
    """Build captions in memory, in the order of ``rows``: image id, language, portion, index, token ids."""
    image_ids = {image_id: number for number, image_id in enumerate(sorted({row[0] for row in rows}))}
    languages = languages or tuple(sorted({row[1] for row in rows}))
    portions = tuple(sorted({row[2] for row in rows}))
    return Captions(
        token_ids=np.array([token for row in rows for token in row[4]], np.int32),
        offsets=np.cumsum([0, *(len(row[4]) for row in rows)], dtype=np.int64),
        images=np.array([image_ids[row[0]] for row in rows], np.int32),
        languages=np.array([languages.index(row[1]) for row in rows], np.int8),
        portions=np.array([portions.index(row[2]) for row in rows], np.int8),
        indices=np.array([row[3] for row in rows], np.int16),
        image_ids=tuple(image_ids),
        language_names=languages,
        portion_names=portions,
        split="train",
    )


@pytest.fixture(scope="session")
def new_captions() -> Callable[..., Captions]:
    return captions_of
