"""Training, evaluation and embedding on a GPU give what they give on the CPU, but for rounding.

Each test also runs with the CPU in place of the GPU, where the same must come out bit for bit: so its code is tried everywhere.
"""

from dataclasses import replace

import pytest
import torch

from tests.train.test_on_a_gpu import KINDS
from tests.train.trainings import assert_same_embeddings, events, weights
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.jobs import EmbedJob, EvaluateJob, TrainJob
from train.loop.training import train

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
RATE, STEPS = 0.01, 4


def trained(kind, corpus, output, device, *, steps=STEPS, **more):
    """Train without dropout, which a GPU draws itself; return the weights."""
    config = from_toml(KINDS[kind].replace("dropout = 0.2", "dropout = 0.0"), kind)
    assert config.optimizer.learning_rate == RATE
    config = replace(config, schedule=replace(config.schedule, max_steps=steps, eval_every_steps=2))
    train(TrainJob(config, corpus, str(output), device=device, curves=False, **more))
    return weights(output)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_steps_equal_cpu(kind, device, corpus_of, tmp_path):
    found, expected = (trained(kind, corpus_of(kind), tmp_path / f"{name}-{n}", name) for n, name in enumerate((device, "cpu")))
    ours, theirs = (events(tmp_path / name, "validation") for name in (f"{device}-0", "cpu-1"))
    assert len(ours) == len(theirs) == STEPS // 2
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0 if device == "cpu" else 1e-2)
    assert found.keys() == expected.keys()
    near = total = 0
    for name, values in found.items():
        assert values.device == torch.device("cpu")
        difference = (values - expected[name]).abs()
        # Adam's first steps are as long whatever the gradient: where that is nearly zero, its sign is rounding.
        assert difference.max() <= (0 if device == "cpu" else 2.1 * RATE * STEPS)
        near, total = near + int((difference <= 1e-4).sum()), total + difference.numel()
    assert near >= 0.95 * total


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["vse", "scan"])
def test_gpu_run_resumes(kind, device, corpus_of, tmp_path):
    expected = trained(kind, corpus_of(kind), tmp_path / "whole", device)
    trained(kind, corpus_of(kind), tmp_path / "stopped", device, steps=2)
    found = trained(kind, corpus_of(kind), tmp_path / "stopped", device, resume=True)
    for name, values in found.items():
        # A GPU adds up the gradients of equal words in any order.
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0 if device == "cpu" else 2.1 * RATE * 2)
    ours, theirs = (events(tmp_path / name, "evaluation")[-1] for name in ("stopped", "whole"))
    assert ours["step"] == theirs["step"] == STEPS
    assert ours["score"] == pytest.approx(theirs["score"], rel=0 if device == "cpu" else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gpu_run_on_cpu(device, toy, tmp_path):
    trained("vse", toy, tmp_path / "run", device)
    data = {"run": str(tmp_path / "run"), "captions": toy.captions, "features": toy.features}
    job = EvaluateJob(**data, splits=("test",), cross_lingual=True, device="cpu")
    expected = [score.to_dict() for score in evaluate(job)]
    assert expected
    assert [score.to_dict() for score in evaluate(replace(job, device=device))] == expected
    for name in {"cpu", device}:
        embed(EmbedJob(**data, output=str(tmp_path / name), device=name))
    assert_same_embeddings(tmp_path / device, tmp_path / "cpu", atol=1e-5)
