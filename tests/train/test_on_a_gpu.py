"""Training, evaluation and embedding on a fake GPU: nothing mixes devices, and what a step may cost is bounded.

The budgets are what is reached now: operations that start kernels, and waits of the host, of the dearest step. Where one is
exceeded, the message names the operations and lines.
"""

import pytest
import torch

from tests.fake_gpu import fake_gpu
from tests.train.trainings import CONFIG, DAN, MHA_D, MLMME, assert_same_embeddings, events, weights
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.jobs import EmbedJob, EvaluateJob, TrainJob
from train.loop.training import _Loop, train

SCAN = MHA_D.split("[model]")[0] + (
    '[model]\nkind = "scan"\nembed_dim = 6\nword_dim = 4\n[loss]\nhinges = "max"\n[optimizer]\nlearning_rate = 0.01\n'
    "[schedule]\nbatch_size = 9\neval_every_steps = 4\nmax_steps = 4\n"
)
# The gradient of a map's bias is nothing but rounding there; with the default epsilon Adam would make long steps of it.
MLMME = MLMME.replace("learning_rate = 0.01", "learning_rate = 0.01\nepsilon = 0.01")
KINDS = {"vse": CONFIG, "mha-d": MHA_D, "scan": SCAN, "dan": DAN, "mlmme": MLMME}
# Launches and waits of a step with batches of 9 rows and captions of at most 8 tokens.
BUDGETS = {
    ("vse", "fp32"): (130, 0),
    ("vse", "bf16"): (162, 0),
    ("mha-d", "fp32"): (764, 0),
    ("mha-d", "bf16"): (900, 0),
    ("scan", "fp32"): (295, 3),
    ("scan", "bf16"): (324, 3),
    ("dan", "fp32"): (642, 0),
    ("dan", "bf16"): (789, 0),
    ("mlmme", "fp32"): (246, 0),
    ("mlmme", "bf16"): (310, 0),
}
# Of a whole run: evaluation of nine images in two languages, embedding of 61 images and their captions in three shards.
EVALUATION = (409, 17)
EMBEDDING = (85, 14)


def config_of(kind):
    text = KINDS[kind].replace("max_steps = 44", "max_steps = 4").replace("eval_every_steps = 17", "eval_every_steps = 4")
    return from_toml(text, kind)


def steps_of(gpu, monkeypatch):
    """Return launches, waits and report of each step, as they are taken."""
    steps, step = [], _Loop._step

    def counted(loop):
        gpu.reset()
        done = step(loop)
        steps.append((gpu.launches.total(), gpu.waits.total(), gpu.report()))
        return done

    monkeypatch.setattr(_Loop, "_step", counted)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_step_keeps_its_budget(kind, precision, corpus_of, tmp_path, monkeypatch):
    corpus, output = corpus_of(kind), tmp_path / "run"
    with fake_gpu() as gpu:
        steps = steps_of(gpu, monkeypatch)
        train(TrainJob(config_of(kind), corpus, str(output), device="cuda", precision=precision, curves=False))
    assert len(steps) == 4
    launches, waits = BUDGETS[kind, "bf16" if precision == "bf16" else "fp32"]
    assert max(found for found, *_ in steps) <= launches, max(steps)[2]
    assert max(waited for _, waited, _ in steps) <= waits, max(steps, key=lambda step: step[1])[2]
    monkeypatch.undo()
    train(TrainJob(config_of(kind), corpus, str(tmp_path / "cpu"), device="cpu", curves=False))
    expected = weights(tmp_path / "cpu")
    for name, found in weights(output).items():
        assert found.device == torch.device("cpu")
        assert found.isfinite().all()
        if precision != "bf16":  # Adam's first steps are as long whatever the gradient, so that a sign makes a difference.
            torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5)
    (on_gpu,), (on_cpu,) = (events(folder, "evaluation") for folder in (output, tmp_path / "cpu"))
    assert precision == "bf16" or on_gpu["score"] == on_cpu["score"]


@pytest.mark.slow
def test_evaluation_and_embedding_on_a_fake_gpu_equal_cpu(toy, finished_run, tmp_path):
    run = str(finished_run[0])
    evaluation = {"run": run, "captions": toy.captions, "features": toy.features, "splits": ("test",), "cross_lingual": True}
    embedding = {"run": run, "captions": toy.captions, "features": toy.features}
    with fake_gpu() as gpu:
        scores = evaluate(EvaluateJob(**evaluation, device="cuda"))
        assert gpu.waits.total() <= EVALUATION[1], gpu.report()
        assert gpu.launches.total() <= EVALUATION[0], gpu.report()
        gpu.reset()
        embed(EmbedJob(**embedding, output=str(tmp_path / "gpu"), device="cuda"))
        assert gpu.waits.total() <= EMBEDDING[1], gpu.report()
        assert gpu.launches.total() <= EMBEDDING[0], gpu.report()
    assert [score.to_dict() for score in scores] == [
        score.to_dict() for score in evaluate(EvaluateJob(**evaluation, device="cpu"))
    ]
    embed(EmbedJob(**embedding, output=str(tmp_path / "cpu"), device="cpu"))
    assert_same_embeddings(tmp_path / "gpu", tmp_path / "cpu", atol=1e-6)
