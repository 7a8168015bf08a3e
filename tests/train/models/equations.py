"""The equations of Huang et al. 2019 in numpy float64, as loops over vectors."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from train.data.batches import CaptionBatch


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(words, w_ih, w_hh, b_ih, b_hh):
    """Return the state after each word ``[T, W]``; the gates are input, forget, cell, output."""
    units = w_hh.shape[1]
    state, cell, states = np.zeros(units), np.zeros(units), []
    for word in words:
        i, f, g, o = np.split(w_ih @ word + b_ih + w_hh @ state + b_hh, 4)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        state = sigmoid(o) * np.tanh(cell)
        states.append(state)
    return np.stack(states)


def both_ways(words, parameters):
    """Return the states of both directions ``[T, H]``, from the parameters of a bidirectional LSTM by torch's names."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ahead, back = ([parameters[f"{name}_l0{suffix}"] for name in names] for suffix in ("", "_reverse"))
    return lstm(words, *ahead), lstm(words[::-1], *back)[::-1]


def attended(items, contexts, of_contexts, of_items):
    """Return the heads ``[K, H]`` of items ``[M, H]``: equations 1 and 2."""
    heads = []
    for context, of_context, of_item in zip(contexts, of_contexts, of_items, strict=True):
        query = np.tanh(of_context @ context)
        exponentials = [np.exp(query @ np.tanh(of_item @ item)) for item in items]
        head = np.zeros(items.shape[1])
        for exponential, item in zip(exponentials, items, strict=True):
            head = head + exponential / sum(exponentials) * item
        heads.append(head)
    return np.stack(heads)


def cosine(a, b):
    return a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)


def diversity(a, b, margin):
    """Equation 5 over heads ``[B, K, H]``, with the distance 1 - s in place of s."""
    total = 0.0
    for p in range(len(a)):
        for k in range(a.shape[1]):
            for r in range(b.shape[1]):
                if r != k:
                    total += max(0.0, margin - (1 - cosine(a[p, k], b[p, r])))
    return total


def batch_of(captions: list[list[int]], rows=None) -> CaptionBatch:
    """Return captions in the order of ``rows``, or in their own."""
    rows = np.array(range(len(captions)) if rows is None else rows, np.int64)
    return CaptionBatch(np.concatenate([np.zeros(0, int), *captions]), np.cumsum([0, *map(len, captions)]), rows)


def parameters_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def drawn(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Draw captions of two to eight tokens."""
    return [[1, *rng.integers(3, 9, rng.integers(0, 7)).tolist(), 2] for _ in range(count)]


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Record of the sizes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes.extend(t.numel() for t in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(t))
        return result


def gradcheck_model(model: nn.Module, function: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Compare the gradients of inputs and parameters with finite differences."""
    model.zero_grad()
    function(*inputs).sum().backward()
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    shell = nn.Module()
    shell.model, shell.forward = model, function

    def of_values(*values: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in zip(names, values[len(inputs) :], strict=True)}
        return torch.func.functional_call(shell, named, values[: len(inputs)])

    return torch.autograd.gradcheck(of_values, (*inputs, *(model.get_parameter(name) for name in names)))
