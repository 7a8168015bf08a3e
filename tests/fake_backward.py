"""The backward pass of the fake GPU: torch's own asks the driver for the streams of the GPU.

It goes through the same nodes, the last one first, and calls them. Hooks, and gradients of gradients, are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Received = dict[Any, dict[int, Tensor]]
"""The gradients of the outputs of nodes, by number."""


def run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
    **choices: bool,
) -> tuple[Tensor, ...]:
    """Add up the gradients of leaves; takes what ``torch.autograd.graph._engine_run_backward`` does.

    Returns:
        Nothing: gradients of chosen ``inputs``, as ``torch.autograd.grad`` asks for them, are left out.
    """
    assert not inputs
    assert not create_graph
    received: Received = {}
    with torch.no_grad():
        for output, gradient in zip(outputs, gradients, strict=True):
            _receive(received, output.grad_fn, output.output_nr, gradient)
        while received:
            node = max(received, key=lambda node: node._sequence_nr())
            for (following, number), result in _carry_out(node, received.pop(node)):
                if following is not None and result is not None:
                    _receive(received, following, number, result)
    return ()


def _receive(received: Received, node: Any, number: int, gradient: Tensor) -> None:
    """Add a gradient, in the type and shape that the node expects, to those of a node, or to that of its leaf."""
    expected = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    gradient = gradient.to(expected.dtype)
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
        return
    before = received.setdefault(node, {})
    before[number] = before[number] + gradient if number in before else gradient


def _carry_out(node: Any, gradients: dict[int, Tensor]) -> Iterator[tuple[tuple[Any, int], Tensor | None]]:
    """Call a node, and return its results with the nodes and numbers that they go to."""
    if not hasattr(node, "needs_input_grad"):
        results = node(*(gradients.get(number) for number in range(len(node._input_metadata))))
        edges = node.next_functions
    else:  # A function of Python gets zeros for what has no gradient, and returns one for each argument.
        filled = [
            gradients[number]
            if number in gradients
            else torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
            for number, expected in enumerate(node._input_metadata)
        ]
        results = node.apply(*filled)
        results = results if isinstance(results, tuple) else (results,)
        results = tuple(result for result, needed in zip(results, node.needs_input_grad, strict=True) if needed)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
    return zip(edges, results if isinstance(results, tuple) else (results,), strict=True)
