"""The backward pass of the fake GPU: torch's own asks the driver for the streams of the GPU.

It goes through the same nodes and calls them. Hooks, and gradients of gradients, are left out.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
    roots = [output.grad_fn for output in outputs]
    expected = _edges_into_nodes(roots)
    received: dict[Any, dict[int, Tensor]] = {}
    ready = []
    for output, gradient in zip(outputs, gradients, strict=True):
        _receive(received, output.grad_fn, output.output_nr, gradient)
        ready += [output.grad_fn] if not expected[output.grad_fn] else []
    with torch.no_grad():
        while ready:
            node = ready.pop()
            for (following, number), gradient in _carry_out(node, received.pop(node, {})):
                if gradient is not None:
                    _receive(received, following, number, gradient)
                expected[following] -= 1
                ready += [] if expected[following] else [following]
    return ()


def _edges_into_nodes(roots: Sequence[Any]) -> Counter[Any]:
    expected: Counter[Any] = Counter()
    seen, open_nodes = set(roots), list(dict.fromkeys(roots))
    while open_nodes:
        for following, _ in open_nodes.pop().next_functions:
            if following is not None:
                expected[following] += 1
                if following not in seen:
                    seen.add(following)
                    open_nodes.append(following)
    return expected


def _receive(received: dict[Any, dict[int, Tensor]], node: Any, number: int, gradient: Tensor) -> None:
    """Give a node a gradient, of the type and shape that it expects, besides those that it has."""
    expected = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    gradient = gradient.to(expected.dtype)
    before = received.setdefault(node, {})
    before[number] = before[number] + gradient if number in before else gradient


def _carry_out(node: Any, gradients: dict[int, Tensor]) -> list[tuple[tuple[Any, int], Tensor | None]]:
    """Call a node, and return where its results go."""
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        if gradients and leaf.grad is None:
            leaf.grad = gradients[0]
        elif gradients:
            leaf.grad += gradients[0]
        return []
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if not gradients:
        return [(edge, None) for edge in edges]
    numbers = range(len(node._input_metadata))
    if not hasattr(node, "needs_input_grad"):
        results = node(*(gradients.get(number) for number in numbers))
        results = results if isinstance(results, tuple) else (results,)
        return [(edge, result) for edge, result in zip(node.next_functions, results, strict=True) if edge[0] is not None]
    # A function of Python gets zeros for what has no gradient, and returns one for each argument.
    filled = []
    for number, expected in zip(numbers, node._input_metadata, strict=True):
        zeros = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device) if number not in gradients else None
        filled.append(gradients[number] if zeros is None else zeros)
    results = node.apply(*filled)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [result for result, needed in zip(results, node.needs_input_grad, strict=True) if needed]
    return list(zip(edges, wanted, strict=True))
