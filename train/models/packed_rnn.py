"""GRU and LSTM over the prefix trie of a batch of captions, for CPUs.

The state after some tokens depends on these tokens alone. All captions begin with ``<start>``, and many
continue with "a man": a shared prefix is processed once, and no padding at all. This saves work, too:

* each distinct token is projected once;
* the gradients of the gates share one buffer, where torch fills a zero gradient for each time step;
* the recurrent weight gets its gradient in one matrix product after the last step.

Results equal torch's up to rounding, and are reproducible with the same number of threads. Under
``torch.autocast`` the matrix products use its type.

GPUs use cuDNN instead (`train.models.encoders.uses_packed_rnn`).

Shapes: ``B`` captions, ``T`` tokens of the longest, ``P`` distinct prefixes, ``S`` prefixes of one time step, ``V`` distinct
tokens, ``W`` width of a word vector, ``H`` hidden size. Gates have torch's order: reset, update, new; input, forget, cell, output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from train.data.batches import CaptionBatch

_aten = torch.ops.aten


@dataclass(frozen=True)
class PrefixTrie:
    """Prefix trie of captions, numbered by length; prefix 0 is empty.

    Attributes:
        tokens: int64 ``[V]``, distinct token ids, ascending.
        last_tokens: int64 ``[P]``, the last token of each prefix, as an index into ``tokens``.
        parents: int64 ``[P]``, index of each prefix without its last token.
        ends: int64 ``[B]``, index of the prefix that is the whole caption, in batch order.
        level_sizes: number of prefixes of each length, from 1; their sum is P.
    """

    tokens: Tensor
    last_tokens: Tensor
    parents: Tensor
    ends: Tensor
    level_sizes: tuple[int, ...]

    def levels(self, *values: Tensor) -> list[tuple[Tensor, ...]]:
        """Return values of prefixes ``[P, ...]`` by prefix length."""
        return list(zip(*(item.split(self.level_sizes) for item in values), strict=True))


def build_trie(captions: CaptionBatch) -> PrefixTrie:
    """Build the prefix trie of captions, on the CPU."""
    grid = captions.padded(-1)  # [B, steps]
    order = np.lexsort(grid.T[::-1]) if grid.size else np.arange(len(captions))
    grid = grid[order]
    # Among sorted captions a prefix is new if anything in it differs from the previous caption.
    new = np.ones(grid.shape, bool)
    new[1:] = np.logical_or.accumulate(grid[1:] != grid[:-1], axis=1)
    new &= grid >= 0
    indices = new.T.cumsum().reshape(new.T.shape)  # [steps, B]
    parents = np.concatenate([np.zeros_like(indices[:1]), indices[:-1]])[new.T]
    ends = np.empty(len(captions), dtype=np.int64)
    ends[order] = indices[captions.lengths[order] - 1, np.arange(len(captions))]
    tokens, last_tokens = np.unique(grid.T[new.T], return_inverse=True)
    return PrefixTrie(
        tokens=torch.from_numpy(tokens),
        last_tokens=torch.from_numpy(last_tokens),
        parents=torch.from_numpy(parents),
        ends=torch.from_numpy(ends),
        level_sizes=tuple(new.sum(axis=0).tolist()),
    )


def gru_over_trie(gru: nn.GRU, words: Tensor, trie: PrefixTrie) -> Tensor:
    """Run a unidirectional GRU over the vectors ``[V, W]`` of ``trie.tokens``.

    Returns:
        ``[B, H]``, the state of each caption after its last token.
    """
    input_weight, recurrent_weight, input_bias, recurrent_bias = _layer_parameters(gru)
    return _apply(_GruRecurrence, words, input_weight, input_bias, (recurrent_weight, recurrent_bias, trie))


def _layer_parameters(network: nn.GRU | nn.LSTM, suffix: str = "") -> list[Tensor]:
    return [getattr(network, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def _apply(recurrence: Any, words: Tensor, weight: Tensor, bias: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Apply a recurrence to projected words ``[V, W]``."""
    device = words.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else words.dtype
    projected = linear(words, weight, bias).to(words.dtype)
    with torch.autocast(device, enabled=False):
        states: Tensor = recurrence.apply(projected, *arguments, dtype, torch.is_grad_enabled())
    return states


class _GruStep(NamedTuple):
    """Values of a time step for the backward pass, each ``[S, H]``."""

    before: Tensor
    recurrent_new: Tensor
    reset: Tensor
    update: Tensor
    new: Tensor


class _GruRecurrence(torch.autograd.Function):
    """The recurrence from projected tokens ``[V, 3H]`` to final states ``[B, H]``.

    With x the projection of a token, h the state before it, g = W h + b, and the gates r = sigmoid(x_r +
    g_r), z = sigmoid(x_z + g_z), n = tanh(x_n + r g_n), the state after it is (1 - z) n + z h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor,
        trie: PrefixTrie,
        dtype: torch.dtype,
        differentiable: bool,
    ) -> Tensor:
        transposed = weight.to(dtype).T
        states = projected.new_zeros(1 + len(trie.parents), weight.shape[1])
        steps = []
        for tokens, parents, state in trie.levels(trie.last_tokens, trie.parents, states[1:]):
            before = states.index_select(0, parents)  # [S, H]
            recurrent = _addmm(bias, before, transposed)  # [S, 3H]
            step = _gru_forward(before, recurrent, projected.index_select(0, tokens), out=state)
            if differentiable:
                steps.append(step)
        ctx.save_for_backward(projected, weight)
        ctx.trie, ctx.dtype, ctx.steps = trie, dtype, steps
        return states.index_select(0, trie.ends)

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    @once_differentiable
    def backward(ctx: Any, d_final: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight = ctx.saved_tensors
        trie, (size, count) = ctx.trie, (weight.shape[1], len(ctx.trie.parents))
        recurrent_weight = weight.to(ctx.dtype)
        d_states = projected.new_zeros(1 + count, size).index_add_(0, trie.ends, d_final)
        d_recurrent = projected.new_empty(count, 3 * size)
        d_new = projected.new_empty(count, size)
        levels = trie.levels(trie.parents, d_states[1:], d_recurrent, d_new)
        for (parents, d_state, d_gates, d_input), step in zip(reversed(levels), reversed(ctx.steps), strict=True):
            _gru_backward(step, d_state, d_gates=d_gates, d_input=d_input)
            d_states.index_add_(0, parents, _addmm(d_state * step.update, d_gates, recurrent_weight))
        before = torch.cat([step.before for step in ctx.steps]) if ctx.steps else d_new
        d_weight = (d_recurrent.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
        d_bias = d_recurrent.sum(0)
        # The reset gate separates g_n from x_n; in the other gates g and x get the same gradient.
        d_recurrent[:, 2 * size :] = d_new
        d_projected = torch.zeros_like(projected).index_add_(0, trie.last_tokens, d_recurrent)
        return d_projected, d_weight, d_bias, None, None, None


def _gru_forward(before: Tensor, recurrent: Tensor, gates: Tensor, *, out: Tensor) -> _GruStep:
    """Write the states ``[S, H]`` to ``out``, and gates over the inputs ``[S, 3H]``."""
    size = before.shape[1]
    gates[:, : 2 * size].add_(recurrent[:, : 2 * size]).sigmoid_()
    reset, update, new = gates.split(size, dim=1)
    new.addcmul_(reset, recurrent[:, 2 * size :]).tanh_()
    torch.lerp(new, before, update, out=out)
    return _GruStep(before, recurrent[:, 2 * size :], reset, update, new)


def _gru_backward(step: _GruStep, d_state: Tensor, *, d_gates: Tensor, d_input: Tensor) -> None:
    """Compute the gradients of g ``[S, 3H]`` and x_n ``[S, H]`` from ``d_state``."""
    d_reset, d_update, d_new = d_gates.split(d_input.shape[1], dim=1)
    torch.addcmul(d_state, d_state, step.update, value=-1, out=d_input)
    _aten.tanh_backward.grad_input(d_input, step.new, grad_input=d_input)
    torch.mul(d_input, step.reset, out=d_new)
    torch.mul(d_input, step.recurrent_new, out=d_reset)
    _aten.sigmoid_backward.grad_input(d_reset, step.reset, grad_input=d_reset)
    torch.sub(step.before, step.new, out=d_update).mul_(d_state)
    _aten.sigmoid_backward.grad_input(d_update, step.update, grad_input=d_update)


def bilstm_over_trie(lstm: nn.LSTM, words: Callable[[Tensor], Tensor], captions: CaptionBatch) -> tuple[Tensor, Tensor]:
    """Run a bidirectional LSTM of one layer on one or more captions.

    ``words`` maps distinct token ids ``[V]`` to their vectors ``[V, W]``.

    Returns:
        The states of the forward and of the backward direction, ``[B, T, H]`` each; zeros after the end of a caption.
    """
    trie, reversed_trie = build_trie(captions), build_trie(_reverse(captions))
    vectors = words(trie.tokens)  # Both tries have the same distinct tokens.
    steps = int(captions.lengths.max())
    remaining = torch.from_numpy(captions.lengths)[:, None] - 1 - torch.arange(steps)  # [B, T]
    forward = _ancestors(trie, steps).gather(1, remaining.clamp(min=0)).masked_fill(remaining < 0, 0)  # [B, T]
    backward = _ancestors(reversed_trie, steps)  # [B, T]
    return (
        _lstm_states(lstm, "", vectors, trie).index_select(0, forward.flatten()).unflatten(0, forward.shape),
        _lstm_states(lstm, "_reverse", vectors, reversed_trie).index_select(0, backward.flatten()).unflatten(0, forward.shape),
    )


def _reverse(captions: CaptionBatch) -> CaptionBatch:
    """Reverse the tokens of each caption."""
    lengths = captions.lengths
    offsets = np.concatenate([[0], lengths.cumsum()])
    last = captions.offsets[captions.rows + 1] - 1  # Position of each caption's last token.
    positions = np.repeat(last + offsets[:-1], lengths) - np.arange(offsets[-1])
    return CaptionBatch(captions.token_ids[positions], offsets, np.arange(len(captions)))


def _ancestors(trie: PrefixTrie, steps: int) -> Tensor:
    """Return each caption's prefix and its ancestors, int64 ``[B, T]``, then zeros."""
    parents = torch.cat([trie.parents.new_zeros(1), trie.parents])
    prefixes = [trie.ends]
    while len(prefixes) < steps:
        prefixes.append(parents[prefixes[-1]])
    return torch.stack(prefixes, dim=1)


def _lstm_states(lstm: nn.LSTM, suffix: str, words: Tensor, trie: PrefixTrie) -> Tensor:
    """Return the states ``[1 + P, H]`` of prefixes, from words ``[V, W]``."""
    input_weight, recurrent_weight, *biases = _layer_parameters(lstm, suffix)
    return _apply(_LstmRecurrence, words, input_weight, biases[0] + biases[1], (recurrent_weight, trie))


class _LstmStep(NamedTuple):
    """Values of a step for the backward pass: gates ``[S, 4H]``, others ``[S, H]``."""

    gates: Tensor
    cell_before: Tensor
    tanh_cell: Tensor


class _LstmRecurrence(torch.autograd.Function):
    """The recurrence from projected tokens ``[V, 4H]`` to states ``[1 + P, H]``.

    With x the projection of a token, h and c state and cell before it, the gates i = sigmoid(x_i + W_i h), f and o in the same way,
    and g = tanh(x_g + W_g h), the cell after it is c' = f c + i g, and the state is o tanh(c').
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, trie: PrefixTrie, dtype: torch.dtype, differentiable: bool
    ) -> Tensor:
        transposed = weight.to(dtype).T
        states = projected.new_zeros(1 + len(trie.parents), weight.shape[1])
        cells = torch.zeros_like(states)
        steps = []
        for tokens, parents, state, cell in trie.levels(trie.last_tokens, trie.parents, states[1:], cells[1:]):
            gates = _addmm(projected.index_select(0, tokens), states.index_select(0, parents), transposed)  # [S, 4H]
            step = _lstm_forward(gates, cells.index_select(0, parents), cell=cell, state=state)
            if differentiable:
                steps.append(step)
        ctx.save_for_backward(projected, weight, states)
        ctx.trie, ctx.dtype, ctx.steps = trie, dtype, steps
        return states

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    @once_differentiable
    def backward(ctx: Any, d_after: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, states = ctx.saved_tensors
        trie, size = ctx.trie, weight.shape[1]
        recurrent_weight = weight.to(ctx.dtype)
        d_states, d_cells = d_after.clone(), torch.zeros_like(d_after)
        d_gates = projected.new_empty(len(trie.parents), 4 * size)
        levels = trie.levels(trie.parents, d_states[1:], d_cells[1:], d_gates)
        for (parents, d_state, d_cell, d_gate), step in zip(reversed(levels), reversed(ctx.steps), strict=True):
            _lstm_backward(step, d_state, d_cell, d_gates=d_gate)
            d_cells.index_add_(0, parents, d_cell * step.gates[:, size : 2 * size])
            d_states.index_add_(0, parents, (d_gate.to(ctx.dtype) @ recurrent_weight).to(d_states.dtype))
        before = states.index_select(0, trie.parents)
        d_weight = (d_gates.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
        d_projected = torch.zeros_like(projected).index_add_(0, trie.last_tokens, d_gates)
        return d_projected, d_weight, None, None, None


def _lstm_forward(gates: Tensor, cell_before: Tensor, *, cell: Tensor, state: Tensor) -> _LstmStep:
    """Write cell and state ``[S, H]``, and gates over the inputs ``[S, 4H]``."""
    size = cell.shape[1]
    gates[:, : 2 * size].sigmoid_()
    gates[:, 2 * size : 3 * size].tanh_()
    gates[:, 3 * size :].sigmoid_()
    input_gate, forget_gate, new, output_gate = gates.split(size, dim=1)
    torch.mul(forget_gate, cell_before, out=cell)
    cell.addcmul_(input_gate, new)
    tanh_cell = cell.tanh()
    torch.mul(output_gate, tanh_cell, out=state)
    return _LstmStep(gates, cell_before, tanh_cell)


def _lstm_backward(step: _LstmStep, d_state: Tensor, d_cell: Tensor, *, d_gates: Tensor) -> None:
    """Compute the gradient of the inputs ``[S, 4H]``, and add to that of the cells."""
    input_gate, forget_gate, new, output_gate = step.gates.split(d_state.shape[1], dim=1)
    d_input, d_forget, d_new, d_output = d_gates.split(d_state.shape[1], dim=1)
    d_cell.add_(_aten.tanh_backward(d_state * output_gate, step.tanh_cell))
    for gate, d_gate, factor in ((input_gate, d_input, new), (forget_gate, d_forget, step.cell_before)):
        torch.mul(d_cell, factor, out=d_gate)
        _aten.sigmoid_backward.grad_input(d_gate, gate, grad_input=d_gate)
    torch.mul(d_cell, input_gate, out=d_new)
    _aten.tanh_backward.grad_input(d_new, new, grad_input=d_new)
    torch.mul(d_state, step.tanh_cell, out=d_output)
    _aten.sigmoid_backward.grad_input(d_output, output_gate, grad_input=d_output)


def _addmm(inputs: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``inputs + rows @ weight`` in the rows' type, multiplied in the weight's."""
    if rows.dtype == weight.dtype:
        return torch.addmm(inputs, rows, weight)
    return (rows.to(weight.dtype) @ weight).to(rows.dtype).add_(inputs)
