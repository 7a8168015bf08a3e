"""Small configurations, and helpers to read and compare runs."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder
from tests.builders import write_rows
from train.data.batches import CaptionBatch
from train.evaluation.evaluation import Members, rank_folds
from train.evaluation.metrics import Ranks, RetrievalMetrics, Scores, bidirectional_ranks, mean_over_folds
from train.jobs import Corpus, ReproduceJob
from train.runs.checkpoints import BEST, LAST, read_checkpoint

_TEXT = """
[data]
portions = { en = ["comparable"], de = ["comparable"] }
[model]
{model}
[loss]
{loss}
[optimizer]
learning_rate = 0.01
[schedule]
{schedule}
eval_every_steps = 17
patience = 0
max_steps = 44
"""


def _text(model: str, loss: str, schedule: str = 'batches = "images"\nbatch_size = 9') -> str:
    parts = {"{model}": model, "{loss}": loss, "{schedule}": schedule}
    return reduce(lambda text, part: text.replace(part, parts[part].replace(", ", "\n")), parts, _TEXT)


CONFIG = _text("embed_dim = 6, word_dim = 4", "c2c_probability = 0.5", "batch_size = 9")
ENGLISH = CONFIG.replace("c2c_probability = 0.5", "").replace(', de = ["comparable"]', "")
ORDER = CONFIG.replace("word_dim = 4", 'word_dim = 4\nshared_encoder = false\nsimilarity = "order"')
FOREVER = CONFIG.replace("max_steps = 44", "max_steps = 1000000").replace("eval_every_steps = 17", "eval_every_steps = 1000000")
MHA_D = _text(
    'kind = "mha-d", embed_dim = 6, word_dim = 4, num_heads = 2, attention_dim = 5, context_dim = 7',
    "caption_weight = 0.6, diversity_weight = 0.5, diversity_margin = 0.4",
)
DAN = _text('kind = "dan", embed_dim = 8, word_dim = 6, attention_dim = 7, dropout = 0.2', "caption_weight = 0.0, margin = 1.0")
MLMME = _text('kind = "mlmme", embed_dim = 6, word_dim = 4, hidden_size = 5, scoring = "general"', "")
SCAN = _text(
    'kind = "scan", embed_dim = 16, word_dim = 8, attention = "t2i", pooling = "lse"', 'hinges = "max"', "batch_size = 9"
)
# Values that make a preset small.
SMALL = {
    "model.embed_dim": "6",
    "model.word_dim": "4",
    "schedule.batch_size": "8",
    "schedule.eval_every_steps": "2",
    "schedule.max_steps": "4",
}
PARALLEL = ORDER.replace("c2c_probability = 0.5", "caption_weight = 1.0").replace(
    "[schedule]", '[schedule]\nbatches = "images"'
)

_SCRIPT = """
import sys
from train.config.sections import from_toml
from train.jobs import Corpus, TrainJob
from train.loop.training import train

captions, features, vocabulary, output, text = sys.argv[1:]
result = train(TrainJob(from_toml(text, "test"), Corpus(captions, features, vocabulary), output, device="cpu"))
print(result.progress)
"""


def train_in_two_processes(corpus: Corpus, output: Path, text: str) -> list[str]:
    """Train on the CPU in two processes, as torchrun starts them; return what each prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", _SCRIPT, corpus.captions, corpus.features, corpus.vocabulary, str(output), text]
    options = {"cwd": Path(__file__).parents[2], "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **options) for rank in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return printed


def region_row(image_id: str, num_regions: int, features: np.ndarray) -> dict:
    """Return the row of an image with regions ``[R, D]``; all but the features is constant."""
    row = {"image_id": image_id, "width": 640, "height": 480, "num_regions": num_regions, "features": features}
    row["boxes"] = np.zeros((len(features), 4), np.float32)
    for name in ("class", "attribute"):
        row |= {f"{name}_ids": np.zeros(len(features), np.int16), f"{name}_scores": np.zeros(len(features), np.float32)}
    return row


ALL_PORTIONS = {"de": ("comparable",), "en": ("comparable", "translation"), "fr": ("translation",)}
"""All portions of the toy, by language."""


def rewrite(location: str, folder: Path, change: Callable[[list[dict]], list[dict]], **options) -> str:
    """Write the changed rows of a dataset as another dataset, and return its folder."""
    dataset = open_dataset(location)
    parameters = {name: value for name, value in dataset.manifest.parameters.items() if name != "feature"}
    options = {"parameters": parameters, "inputs": dataset.manifest.inputs, "shards": 3, **options}
    write_rows(folder, dataset.kind, change([dict(row) for row in dataset]), dataset.spec, **options)
    return str(folder)


def with_other_features(corpus: Corpus, folder: Path) -> Corpus:
    """Write other features with the same fingerprint, as ``features --update`` leaves them."""
    features = rewrite(corpus.features, folder, lambda rows: [row | {"feature": row["feature"] + 1} for row in rows])
    assert open_dataset(features).fingerprint == open_dataset(corpus.features).fingerprint
    return replace(corpus, features=features)


def settings_of(overrides: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in overrides.items())


def reproduce_job(paper: str, output: str, corpus: Corpus, *more: str, overrides: dict[str, str], **fields) -> ReproduceJob:
    """Return a job for the datasets of a corpus, and more features."""
    folders = {**vars(corpus), "features": (corpus.features, *more)}
    return ReproduceJob(paper, output, **folders, settings=settings_of(overrides), **fields)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(folder: Path, name: str = LAST) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(Folder(str(folder)), name).model)


def assert_equal(a, b):
    """Check that nested values are equal, bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Check that the checkpoints of two runs are equal, bit for bit."""
    for name in (BEST, LAST):
        ours, expected = (read_checkpoint(Folder(str(folder)), name) for folder in (one, other))
        for key in ours.__dataclass_fields__:
            assert_equal(getattr(ours, key), getattr(expected, key))


def assert_same_embeddings(one: Path, other: Path, atol: float) -> None:
    """Check that two folders of embeddings hold the same rows, up to rounding."""
    for kind, column in (("images", "feature"), ("captions", "embedding")):
        found, expected = (open_dataset(folder / kind).table() for folder in (one, other))
        assert found.drop_columns([column]) == expected.drop_columns([column])
        ours, theirs = (np.stack(table[column].to_numpy()) for table in (found, expected))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def lasting_log(folder: Path) -> bytes:
    """Return the log of a run without timing events."""
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if json.loads(line)["event"] != "timing")


def events(folder: Path, event: str) -> list[dict]:
    """Return the lines of a run's log with an event."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def encode_row(model, captions, row: int, language: str):
    with torch.no_grad():
        return model.encode_captions(CaptionBatch(captions.token_ids, captions.offsets, np.array([row])), language)


def encode_ids(model, ids: list[int], language: str) -> torch.Tensor:
    """Encode the token ids of one caption by themselves, as ``[E]``."""
    with torch.no_grad():
        return model.encode_captions(CaptionBatch(np.array(ids), np.array([0, len(ids)]), np.array([0])), language).values[0]


def retrieval_ranks(scores: Scores, num_images: int, image_of_caption: torch.Tensor) -> Ranks:
    """Rank images and captions, with one row of scores per image."""
    ranks, best_wrong = bidirectional_ranks(scores, torch.arange(num_images), image_of_caption)
    return Ranks(*ranks, best_wrong, {})


def evaluate_folds(members: Members, folds: int) -> dict[str, RetrievalMetrics]:
    """Measure the mean scores of models in folds, by language."""
    captions = members[0][1].captions
    return {
        language: mean_over_folds([RetrievalMetrics.of(ranks) for _, ranks in rank_folds(members, language, folds)])
        for language in captions.language_names
        if len(captions.rows_of(language))
    }


def evaluate_ensemble(members: Members) -> dict[str, RetrievalMetrics]:
    """Measure the mean scores of models, by language."""
    return evaluate_folds(members, 1)
