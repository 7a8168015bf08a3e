"""Gradient accumulation and clipping, against a float64 reference."""

import numpy as np
import pytest
import torch
from torch import Tensor

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from tests.train.trainings import CONFIG, ENGLISH, assert_equal, events, weights
from train.config.sections import from_toml
from train.loop.training_data import load_training_inputs
from train.models.catalogue import build_model
from train.runs.checkpoints import LAST, read_checkpoint

RATE, EPSILON, CLIPPING = 0.01, 1e-3, 3.0
SETTINGS = f"learning_rate = {RATE}\nepsilon = {EPSILON}\nmax_grad_norm = {CLIPPING}\n"


def several(text: str, batches: int) -> str:
    return text.replace("[schedule]", f"[schedule]\ngrad_accum_steps = {batches}")


class Reference:
    """The model ``vse``, its loss and Adam, in float64 and from the papers' formulas.

    Args:
        start: initial weights.
        units: width of the embeddings.
        words: width of the word vectors.
    """

    def __init__(self, start: dict[str, Tensor], units: int, words: int) -> None:
        self.weights = {name: value.double().requires_grad_() for name, value in start.items()}
        self.gru = torch.nn.GRU(words, units, batch_first=True).double()
        self.moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in self.weights.items()}
        self.step = 0

    def caption(self, ids: list[int]) -> Tensor:
        prefix = "sentences.0.reader.gru."
        given = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        states, _ = torch.func.functional_call(self.gru, given, (self.weights["sentences.0.words.weight"][ids][None],))
        return states[0, -1] / states[0, -1].norm()

    def image(self, features: np.ndarray) -> Tensor:
        vector = self.weights["images.weight"] @ torch.from_numpy(features).double() + self.weights["images.bias"]
        return vector / vector.norm()

    def loss(self, a: list[Tensor], b: list[Tensor], images: list[int]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for r in range(len(a)):
            for c in range(len(a)):
                if images[c] != images[r]:
                    total = total + (0.2 - a[r] @ b[r] + a[r] @ b[c]).clamp_min(0)
                    total = total + (0.2 - a[r] @ b[r] + a[c] @ b[r]).clamp_min(0)
        return total

    def learn(self, losses: list[Tensor]) -> float:
        """Do a step of Adam on the sum of the losses of several batches; return the norm of the gradient."""
        gradients = torch.autograd.grad(sum(losses), list(self.weights.values()), allow_unused=True)
        norm = float(torch.sqrt(sum((gradient**2).sum() for gradient in gradients if gradient is not None)))
        self.step += 1
        for (name, value), gradient in zip(self.weights.items(), gradients, strict=True):
            gradient = (torch.zeros_like(value) if gradient is None else gradient) * min(1.0, CLIPPING / norm)
            first, second = self.moments[name]
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            self.moments[name] = first, second
            change = (first / (1 - 0.9**self.step)) / ((second / (1 - 0.999**self.step)).sqrt() + EPSILON)
            self.weights[name] = (value - RATE * change).detach().requires_grad_()
        return norm


@pytest.mark.cluster
@pytest.mark.parametrize(("text", "batches"), [(ENGLISH, 4), (CONFIG, 5)], ids=["one language", "tasks"])
def test_accumulated_steps_equal_a_reference_in_float64(toy, train_toy, tmp_path, text, batches):
    text = several(text, batches).replace("learning_rate = 0.01\n", SETTINGS).replace("max_steps = 44", "max_steps = 10")
    train_toy(text)
    config = from_toml(text, "test")
    training_inputs = load_training_inputs(config, toy, seed=0)
    captions, features = training_inputs.training.captions, training_inputs.training.features[:]
    sampler = training_inputs.sampler(config, 0)
    reference = Reference(dict(build_model(config.model, training_inputs.dimensions, 0).state_dict()), 6, 4)
    epochs, queries, named, total = 0, 0, {}, 0.0
    for _ in range(10):
        losses = []
        while len(losses) < batches:
            batch = sampler.next()
            sides = [
                [reference.caption(captions.token_ids[slice(*captions.offsets[row : row + 2])].tolist()) for row in rows]
                for rows in batch.captions
            ]
            a, b = sides if batch.task == "c2c" else ([reference.image(features[n]) for n in batch.images], sides[0])
            losses.append(reference.loss(a, b, batch.images.tolist()))
            queries += 2 * len(batch.images)
            name = "c2c/en-de" if batch.task == "c2c" else f"c2i/{batch.languages[0]}"
            named.setdefault(name, []).append((float(losses[-1].detach()), 2 * len(batch.images)))
            if sampler.epoch > epochs:  # An epoch ends with a step of what is left.
                epochs = sampler.epoch
                break
        total += float(sum(losses).detach())
        norm = reference.learn(losses)
    assert epochs > 0
    (line,) = events(tmp_path / "run", "step")
    assert line["loss"] == pytest.approx(total / queries, rel=1e-4)  # Over all ten steps since the start.
    assert line["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert line["terms"] == {
        name: pytest.approx(sum(loss for loss, _ in parts) / sum(count for _, count in parts), rel=1e-4)
        for name, parts in named.items()
    }
    assert set(line["task"].split("+")) == {name.partition("/")[0] for name in named}
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value.double(), reference.weights[name].detach(), rtol=1e-3, atol=1e-5, msg=name)


def test_accumulation_counts_optimizer_steps(train_toy, tmp_path):
    text = several(ENGLISH, 4).replace("eval_every_steps = 17", "").replace("max_steps = 44", "max_epochs = 3")
    result = train_toy(text + "lr_step_epochs = 1\nlr_step_factor = 0.5")
    # 14 batches an epoch: steps of 4, 4, 4 and 2 batches.
    assert (result.progress.step, result.progress.stop_reason) == (12, "epochs")
    assert [line["step"] for line in events(tmp_path / "run", "evaluation")] == [4, 8, 12]
    assert [line["learning_rate"] for line in events(tmp_path / "run", "step")] == pytest.approx([0.0025])
    assert read_checkpoint(Folder(str(tmp_path / "run")), LAST).sampler["step"] == 42
    assert [line["steps"] for line in events(tmp_path / "run", "timing")] == [4, 4, 4]


@pytest.mark.slow
def test_accumulation_resumes_bit_for_bit(train_toy, tmp_path):
    text = several(CONFIG, 3)
    train_toy(text, "whole")
    train_toy(text.replace("max_steps = 44", "max_steps = 13"), "parts")  # Between two lines of losses.
    train_toy(text, "parts", resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert events(tmp_path / "parts", "step") == events(tmp_path / "whole", "step")
    with pytest.raises(DatasetError, match=r"holds another run \(schedule\.grad_accum_steps: was 3, now 2"):
        train_toy(several(CONFIG, 2), "parts", resume=True)
