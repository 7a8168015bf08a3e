import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from tests.train.trainings import CONFIG, DAN, MHA_D, MLMME, SCAN, events, weights
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, SearchJob
from train.models.retrieval_model import Encoded
from train.runs.checkpoints import BEST, weights_digest
from train.runs.run import open_run

TEXTS = {
    "vse": CONFIG,
    "mha-d": MHA_D,
    "dan": DAN,
    "mlmme": MLMME.replace('scoring = "general"', 'scoring = "dot"'),
    "mlmme-general": MLMME,
    "scan-t2i": SCAN,
    "scan-i2t": SCAN.replace("t2i", "i2t"),
}
WIDTHS = {"vse": 6, "mha-d": 2 * 6, "dan": 3 * 8, "mlmme": 6, "mlmme-general": 3 * 6}
CORPORA = {
    **dict.fromkeys(("mha-d", "dan"), "toy_regions"),
    **dict.fromkeys(("scan-t2i", "scan-i2t"), "four_languages_regions"),
}
every_kind = pytest.mark.parametrize("kind", TEXTS)

pytestmark = pytest.mark.slow


@pytest.fixture
def corpus(request, kind):
    return request.getfixturevalue(CORPORA.get(kind, "toy"))


@pytest.fixture
def train_kind(kind, corpus, train_toy):
    def run(name: str, steps: int, rate: float = 0.01, **fields):
        text = TEXTS[kind].replace("max_steps = 44", f"max_steps = {steps}")
        return train_toy(text.replace("learning_rate = 0.01", f"learning_rate = {rate}"), name, corpus=corpus, **fields)

    return run


def sum_of_recalls(corpus, *runs, portions: tuple[str, ...]) -> float:
    job = EvaluateJob(tuple(map(str, runs)), corpus.captions, corpus.features, splits=("train",), portions=portions)
    return sum(score.retrieval.sum_of_recalls for score in evaluate(job))


@pytest.mark.cluster
@every_kind
def test_training_improves_recall(kind, train_kind, corpus, tmp_path):
    # After 44 steps the gain depends on the rounding of the processor; after 132 it is at least 212 with seeds 0, 1 and 4.
    train_kind("trained", 132)
    train_kind("untrained", 44, rate=1e-9)
    portions = () if "scan" in kind else ("comparable",)
    trained, untrained = (sum_of_recalls(corpus, tmp_path / name, portions=portions) for name in ("trained", "untrained"))
    assert trained > untrained + 75  # Of 600 for each language and portion.
    assert sum_of_recalls(corpus, tmp_path / "trained", tmp_path / "untrained", portions=portions) != trained


@pytest.mark.parametrize("kind", WIDTHS)
def test_vectors_are_embedded_and_searched(kind, train_kind, corpus, tmp_path):
    train_kind("run", 17)
    run, width = open_run(tmp_path / "run"), WIDTHS[kind]
    embed(EmbedJob(run.folder.location, str(tmp_path / "vectors"), features=corpus.features, captions=corpus.captions))
    images = open_dataset(str(tmp_path / "vectors" / "images"))
    stored = np.stack(images.table().to_pandas()["feature"])
    assert stored.shape[1] == run.model.width == width
    if kind in ("vse", "mlmme", "mha-d"):
        np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, rtol=1e-5)
    from_features, from_vectors = (
        search(SearchJob(str(tmp_path / "run"), "en1 en2", "en", **{place: folder}, tokenized=True, device="cpu"))
        for place, folder in (("features", corpus.features), ("embeddings", str(tmp_path / "vectors" / "images")))
    )
    assert [hit.image_id for hit in from_features] == [hit.image_id for hit in from_vectors]
    captions = open_dataset(str(tmp_path / "vectors" / "captions"))
    rows = [row for row in captions.table().to_pylist() if row["language"] == "en"]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert vectors.shape[1] == width
    # What is stored is all that a score needs: an inner product.
    scores = run.model.scores(Encoded(torch.from_numpy(stored)), Encoded(torch.from_numpy(vectors[:1])))[:, 0]
    np.testing.assert_allclose(stored @ vectors[0], scores, rtol=1e-5, atol=1e-5)


@every_kind
def test_init_from_another_run(train_kind, tmp_path):
    train_kind("first", 2)
    train_kind("second", 1, init_from=str(tmp_path / "first"))
    (line,) = events(tmp_path / "second", "started_from")
    assert line["weights_sha256"] == weights_digest(weights(tmp_path / "first", BEST))
    train_kind("plain", 1)
    first, second, plain = (weights(tmp_path / name) for name in ("first", "second", "plain"))
    for name in (name for name in first if name.endswith("next_seed")):  # As many masks in each step.
        assert first[name] > plain[name]
        assert second[name] - first[name] == first[name] - plain[name]


@every_kind
def test_training_in_bfloat16(train_kind, tmp_path):
    train_kind("full", 3)
    train_kind("low", 3, precision="bf16")
    full, low = weights(tmp_path / "full"), weights(tmp_path / "low")
    assert all(values.dtype == full[name].dtype for name, values in low.items())
    name = "sentences.0.words.weight"
    assert 0 < (low[name] - full[name]).norm() < 0.2 * full[name].norm()
