"""What of a step ``--compile`` covers: one graph, after the captions are read."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from train.config.models import DanConfig, MhaDConfig, MlmmeConfig, VseConfig
from train.config.sections import LossConfig
from train.data.batches import CaptionBatch
from train.distributed import Processes
from train.models.catalogue import build_model
from train.models.dimensions import Dimensions
from train.models.retrieval_model import ImageBatch
from train.objectives.terms import Inputs, Objective, terms_of

VECTORS, REGIONS = (8,), (6, 8)
KINDS = {
    "vse": (VseConfig(embed_dim=4, word_dim=3), VECTORS, LossConfig()),
    "vse-order": (VseConfig(embed_dim=4, word_dim=3, shared_encoder=False, similarity="order"), VECTORS, LossConfig()),
    "vse-max": (VseConfig(embed_dim=4, word_dim=3, text_encoder="bilstm", pooling="max"), VECTORS, LossConfig()),
    "mha-d": (
        MhaDConfig(embed_dim=4, word_dim=3, num_heads=2, attention_dim=5, context_dim=3),
        REGIONS,
        LossConfig(diversity_weight=0.5),
    ),
    "dan": (DanConfig(embed_dim=4, word_dim=3, attention_dim=5, dropout=0.5), REGIONS, LossConfig()),
    "mlmme": (MlmmeConfig(embed_dim=4, word_dim=3, hidden_size=5, scoring="general"), VECTORS, LossConfig()),
}
# Images, tokens of the longest caption: the last batch of an epoch is smaller, and captions have any length.
BATCHES = [(5, 6), (5, 9), (3, 7), (4, 11), (5, 5)]
# One for the first sizes, and one more for each size that is found to change: tokens, then images.
MOST_GRAPHS = 3


class Graphs:
    """A compiler that counts: how many graphs there are, and how often one of them runs."""

    def __init__(self) -> None:
        self.made = 0
        self.runs = 0

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*values):
            self.runs += 1
            return graph(*values)

        return run


def batch_of(shape: tuple[int, ...], images: int, tokens: int) -> Inputs:
    rng = np.random.default_rng(images + 10 * tokens)
    captions = []
    for _ in range(2):
        lengths = [tokens, *rng.integers(3, tokens + 1, images - 1)]
        captions.append(CaptionBatch(rng.integers(3, 9, sum(lengths)), np.cumsum([0, *lengths]), np.arange(images)))
    mask = torch.arange(6) < torch.from_numpy(rng.integers(1, 7, (images, 1))) if len(shape) > 1 else None
    features = torch.from_numpy(rng.standard_normal((images, *shape), np.float32))
    return Inputs("images", torch.arange(images), ImageBatch(features, mask), tuple(captions), ("en", "de"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_graph_with_the_loss_and_gradients_of_the_plain_one(kind):
    config, shape, loss = KINDS[kind]
    config.check_compile()
    model = build_model(config, Dimensions(("en", "de"), 9, shape), seed=0)
    plain, compiled = (Objective(each, terms_of(loss, each), whole=Processes().whole) for each in (model, deepcopy(model)))
    torch._dynamo.reset()
    graphs = Graphs()
    compiled.compile(backend=graphs)
    for number, sizes in enumerate(BATCHES, start=1):
        gradients = []
        for objective in (plain, compiled):
            objective.zero_grad()
            value, terms = objective(batch_of(shape, *sizes), "max")
            value.backward()
            gradients.append([value, terms, {name: parameter.grad for name, parameter in objective.named_parameters()}])
        torch.testing.assert_close(*gradients)
        assert graphs.runs == number
    assert graphs.made <= MOST_GRAPHS
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=0, atol=0)  # Seeds of dropout, too.
