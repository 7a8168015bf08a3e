"""GRU and LSTM over the captions of a batch as a tree of prefixes, on a CPU: no padding, and a shared prefix is processed once.

The state of a GRU after some tokens depends on these tokens alone. All captions begin with ``<start>``, and many continue with "a
man": on average, 128 English captions of Multi30K (comparable) have 1,965 tokens and 1,650 distinct prefixes.

On a CPU, torch's own packed GRU spends a third of its time filling gradients with zeros: the slice of the input projection for each
time step gets a gradient as large as the whole. Its LSTM spends most of its time outside matrix products. Here the gradients of the
gates share one buffer, the recurrent weight gets its gradient in one product after the last step, and each distinct token is
projected once. A GPU would start some twenty kernels for each time step: there torch's are used, which are cuDNN's
(`train.models.encoders`).

Letters in shapes: ``B`` captions, ``T`` tokens of the longest, ``P`` distinct prefixes, ``S`` prefixes of one time step, ``V``
distinct tokens, ``W`` word width, ``H`` units. The gates have torch's order: reset, update, new; input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from train.data.batches import CaptionBatch


@dataclass(frozen=True)
class PrefixTrie:
    """Captions as a tree of their prefixes. Prefix 0 is empty; from 1 on come those of one token, then those of two, and so on.

    Attributes:
        tokens: int64 ``[V]``, the distinct token ids, ascending.
        last_tokens: int64 ``[P]``, the last token of each prefix as an index into ``tokens``.
        parents: int64 ``[P]``, the number of each prefix without its last token.
        ends: int64 ``[B]``, the number of each whole caption, in the requested order.
        level_sizes: number of prefixes of one token, of two tokens, and so on; they add up to P.
    """

    tokens: Tensor
    last_tokens: Tensor
    parents: Tensor
    ends: Tensor
    level_sizes: tuple[int, ...]

    def steps(self, of_prefixes: Tensor) -> tuple[Tensor, ...]:
        """Split ``[P, ...]`` into the prefixes of one token, of two tokens, and so on."""
        return of_prefixes.split(self.level_sizes)


def build_trie(captions: CaptionBatch) -> PrefixTrie:
    """Pack captions; the result is on the CPU, and in the order of the batch."""
    grid = captions.padded(-1)  # [B, steps]
    order = np.lexsort(grid.T[::-1]) if grid.size else np.arange(len(captions))
    grid = grid[order]
    # Among sorted captions a prefix is new if anything in it differs from the previous caption.
    new = np.ones(grid.shape, bool)
    new[1:] = np.logical_or.accumulate(grid[1:] != grid[:-1], axis=1)
    new &= grid >= 0
    numbers = new.T.cumsum().reshape(new.T.shape)  # [steps, B]
    parents = np.concatenate([np.zeros_like(numbers[:1]), numbers[:-1]])[new.T]
    ends = np.empty(len(captions), dtype=np.int64)
    ends[order] = numbers[captions.lengths[order] - 1, np.arange(len(captions))]
    tokens, last_tokens = np.unique(grid.T[new.T], return_inverse=True)
    return PrefixTrie(
        tokens=torch.from_numpy(tokens),
        last_tokens=torch.from_numpy(last_tokens),
        parents=torch.from_numpy(parents),
        ends=torch.from_numpy(ends),
        level_sizes=tuple(new.sum(axis=0).tolist()),
    )


_aten = torch.ops.aten


def gru_over_trie(gru: nn.GRU, words: Tensor, captions: PrefixTrie) -> Tensor:
    """Read captions with the parameters of a GRU of one layer and one direction.

    The results are those of the GRU over padded or packed captions up to the rounding of their type, and the same bytes from run to
    run with the same number of threads. Under ``torch.autocast`` the matrix products use its type.

    Args:
        gru: the parameters.
        words: ``[V, W]``, the vectors of ``captions.tokens``.
        captions: the captions to read.

    Returns:
        ``[B, H]``, the state of each caption after its last token.
    """
    of_words, recurrent, of_words_bias, bias = _parameters(gru)
    return _apply(_GruRecurrence, words, of_words, of_words_bias, (recurrent, bias, captions))


def _parameters(network: nn.GRU | nn.LSTM, suffix: str = "") -> list[Tensor]:
    return [getattr(network, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def _apply(recurrence: Any, words: Tensor, weight: Tensor, bias: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Project words ``[V, W]``, and apply a recurrence to them; its products have the type of autocast, if that is on."""
    device = words.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else words.dtype
    projected = linear(words, weight, bias).to(words.dtype)
    with torch.autocast(device, enabled=False):
        states: Tensor = recurrence.apply(projected, *arguments, dtype, torch.is_grad_enabled())
    return states


class _GruStep(NamedTuple):
    """Values that a time step keeps for its gradients, each ``[S, H]``."""

    before: Tensor
    recurrent_new: Tensor
    reset: Tensor
    update: Tensor
    new: Tensor


class _GruRecurrence(torch.autograd.Function):
    """The recurrence from projected tokens ``[V, 3H]`` to final states ``[B, H]``.

    With x the projection of a token, h the state before it, g = W h + b, and the gates r = sigmoid(x_r + g_r),
    z = sigmoid(x_z + g_z), n = tanh(x_n + r g_n), the state after it is (1 - z) n + z h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor,
        captions: PrefixTrie,
        dtype: torch.dtype,
        differentiable: bool,
    ) -> Tensor:
        turned = weight.to(dtype).T
        states = projected.new_zeros(1 + len(captions.parents), weight.shape[1])
        steps = []
        end = 1
        for tokens, parents in zip(captions.steps(captions.last_tokens), captions.steps(captions.parents), strict=True):
            start, end = end, end + len(tokens)
            before = states.index_select(0, parents)  # [S, H]
            recurrent = _sum(bias, before, turned)  # [S, 3H]
            steps.append(_gru_advance(before, recurrent, projected.index_select(0, tokens), out=states[start:end]))
            if not differentiable:
                steps.clear()
        ctx.save_for_backward(projected, weight)
        ctx.captions, ctx.dtype, ctx.steps = captions, dtype, steps
        return states.index_select(0, captions.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_final: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_final.device.type, enabled=False):
            return (*_gru_gradients(ctx, d_final), None, None, None)


def _gru_advance(before: Tensor, recurrent: Tensor, gates: Tensor, *, out: Tensor) -> _GruStep:
    """Write the states after a token ``[S, H]`` to ``out``, and the gates over their inputs x ``[S, 3H]``."""
    units = before.shape[1]
    gates[:, : 2 * units].add_(recurrent[:, : 2 * units]).sigmoid_()
    reset, update, new = gates.split(units, dim=1)
    new.addcmul_(reset, recurrent[:, 2 * units :]).tanh_()
    torch.lerp(new, before, update, out=out)
    return _GruStep(before, recurrent[:, 2 * units :], reset, update, new)


def _gru_gradients(ctx: Any, d_final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the projected tokens, the recurrent weight and its bias."""
    projected, weight = ctx.saved_tensors
    captions, (units, count) = ctx.captions, (weight.shape[1], len(ctx.captions.parents))
    turned = weight.to(ctx.dtype)
    d_states = projected.new_zeros(1 + count, units).index_add_(0, captions.ends, d_final)
    d_recurrent = projected.new_empty(count, 3 * units)
    d_new = projected.new_empty(count, units)
    per_step = zip(*map(captions.steps, (captions.parents, d_states[1:], d_recurrent, d_new)), ctx.steps, strict=True)
    for parents, d_state, d_gates, d_input, step in reversed(list(per_step)):
        _gru_retreat(step, d_state, d_gates=d_gates, d_input=d_input)
        d_states.index_add_(0, parents, _sum(d_state * step.update, d_gates, turned))
    before = torch.cat([step.before for step in ctx.steps]) if ctx.steps else d_new
    d_weight = (d_recurrent.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
    d_bias = d_recurrent.sum(0)
    # The reset gate separates g_n from x_n; in the other gates g and x get the same gradient.
    d_recurrent[:, 2 * units :] = d_new
    return torch.zeros_like(projected).index_add_(0, captions.last_tokens, d_recurrent), d_weight, d_bias


def _gru_retreat(step: _GruStep, d_state: Tensor, *, d_gates: Tensor, d_input: Tensor) -> None:
    """Turn the gradient of the states ``[S, H]`` into those of g ``[S, 3H]`` and x_n ``[S, H]``."""
    d_reset, d_update, d_new = d_gates.split(d_input.shape[1], dim=1)
    torch.addcmul(d_state, d_state, step.update, value=-1, out=d_input)
    _aten.tanh_backward.grad_input(d_input, step.new, grad_input=d_input)
    torch.mul(d_input, step.reset, out=d_new)
    torch.mul(d_input, step.recurrent_new, out=d_reset)
    _aten.sigmoid_backward.grad_input(d_reset, step.reset, grad_input=d_reset)
    torch.sub(step.before, step.new, out=d_update).mul_(d_state)
    _aten.sigmoid_backward.grad_input(d_update, step.update, grad_input=d_update)


def bilstm_over_trie(lstm: nn.LSTM, words: Callable[[Tensor], Tensor], captions: CaptionBatch) -> tuple[Tensor, Tensor]:
    """Read captions with the parameters of a bidirectional LSTM of one layer.

    The results are those of the LSTM over packed captions up to the rounding of their type, and the same bytes from run to run
    with the same number of threads. Under ``torch.autocast`` the matrix products use its type.

    Args:
        lstm: the parameters.
        words: from the ids of distinct tokens ``[V]`` to their vectors ``[V, W]``.
        captions: the captions to read, one or more.

    Returns:
        The state after each token, ``[B, T, H]``, of the forward and of the backward direction; zeros after the end of a caption.
    """
    ahead, back = build_trie(captions), build_trie(_reversed(captions))
    vectors = words(ahead.tokens)  # The other direction has the same distinct tokens.
    steps = int(captions.lengths.max())
    rest = torch.from_numpy(captions.lengths)[:, None] - 1 - torch.arange(steps)  # [B, T]
    forward = _shortened(ahead, steps).gather(1, rest.clamp(min=0)).masked_fill(rest < 0, 0)  # [B, T]
    return (
        _states(lstm, "", vectors, ahead).index_select(0, forward.flatten()).unflatten(0, forward.shape),
        _states(lstm, "_reverse", vectors, back).index_select(0, _shortened(back, steps).flatten()).unflatten(0, forward.shape),
    )


def _reversed(captions: CaptionBatch) -> CaptionBatch:
    """Return captions with their last token first."""
    lengths = captions.lengths
    offsets = np.concatenate([[0], lengths.cumsum()])
    last = captions.offsets[captions.rows + 1] - 1  # The position of each caption's last token.
    positions = np.repeat(last + offsets[:-1], lengths) - np.arange(offsets[-1])
    return CaptionBatch(captions.token_ids[positions], offsets, np.arange(len(captions)))


def _shortened(captions: PrefixTrie, steps: int) -> Tensor:
    """Return int64 ``[B, T]``: the prefix that is the whole caption, that without its last token, and so on to the empty one."""
    parents = torch.cat([captions.parents.new_zeros(1), captions.parents])
    prefixes = [captions.ends]
    while len(prefixes) < steps:
        prefixes.append(parents[prefixes[-1]])
    return torch.stack(prefixes, dim=1)


def _states(lstm: nn.LSTM, suffix: str, words: Tensor, captions: PrefixTrie) -> Tensor:
    """Return the states ``[1 + P, H]`` after each prefix, the empty one included, of one direction over words ``[V, W]``."""
    of_words, recurrent, *biases = _parameters(lstm, suffix)
    return _apply(_LstmRecurrence, words, of_words, biases[0] + biases[1], (recurrent, captions))


class _LstmStep(NamedTuple):
    """Values that a time step keeps for its gradients, the gates ``[S, 4H]`` and the others ``[S, H]``."""

    gates: Tensor
    cell_before: Tensor
    squashed: Tensor


class _LstmRecurrence(torch.autograd.Function):
    """The recurrence from projected tokens ``[V, 4H]`` to states ``[1 + P, H]``.

    With x the projection of a token, h and c state and cell before it, and the gates i = sigmoid(x_i + W_i h), f, o likewise and
    g = tanh(x_g + W_g h), the cell after it is c' = f c + i g, and the state is o tanh(c').
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, captions: PrefixTrie, dtype: torch.dtype, differentiable: bool
    ) -> Tensor:
        turned = weight.to(dtype).T
        states = projected.new_zeros(1 + len(captions.parents), weight.shape[1])
        cells = torch.zeros_like(states)
        steps = []
        end = 1
        for tokens, parents in zip(captions.steps(captions.last_tokens), captions.steps(captions.parents), strict=True):
            start, end = end, end + len(tokens)
            gates = _sum(projected.index_select(0, tokens), states.index_select(0, parents), turned)  # [S, 4H]
            step = _lstm_advance(gates, cells.index_select(0, parents), cell=cells[start:end], state=states[start:end])
            if differentiable:
                steps.append(step)
        ctx.save_for_backward(projected, weight, states)
        ctx.captions, ctx.dtype, ctx.steps = captions, dtype, steps
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_states.device.type, enabled=False):
            return (*_lstm_gradients(ctx, d_states), None, None, None)


def _lstm_advance(gates: Tensor, cell_before: Tensor, *, cell: Tensor, state: Tensor) -> _LstmStep:
    """Write cell and state after a token ``[S, H]``, and the gates over their inputs ``[S, 4H]``."""
    units = cell.shape[1]
    gates[:, : 2 * units].sigmoid_()
    gates[:, 2 * units : 3 * units].tanh_()
    gates[:, 3 * units :].sigmoid_()
    come, stay, new, out = gates.split(units, dim=1)
    torch.mul(stay, cell_before, out=cell)
    cell.addcmul_(come, new)
    squashed = cell.tanh()
    torch.mul(out, squashed, out=state)
    return _LstmStep(gates, cell_before, squashed)


def _lstm_gradients(ctx: Any, d_after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projected tokens and the recurrent weight."""
    projected, weight, states = ctx.saved_tensors
    captions, units = ctx.captions, weight.shape[1]
    turned = weight.to(ctx.dtype)
    d_states, d_cells = d_after.clone(), torch.zeros_like(d_after)
    d_gates = projected.new_empty(len(captions.parents), 4 * units)
    per_step = zip(*map(captions.steps, (captions.parents, d_states[1:], d_cells[1:], d_gates)), ctx.steps, strict=True)
    for parents, d_state, d_cell, d_gate, step in reversed(list(per_step)):
        _lstm_retreat(step, d_state, d_cell, d_gates=d_gate)
        d_cells.index_add_(0, parents, d_cell * step.gates[:, units : 2 * units])
        d_states.index_add_(0, parents, (d_gate.to(turned.dtype) @ turned).to(d_states.dtype))
    before = states.index_select(0, captions.parents)
    d_weight = (d_gates.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
    return torch.zeros_like(projected).index_add_(0, captions.last_tokens, d_gates), d_weight


def _lstm_retreat(step: _LstmStep, d_state: Tensor, d_cell: Tensor, *, d_gates: Tensor) -> None:
    """Turn the gradient of the states ``[S, H]`` into that of the gates' inputs ``[S, 4H]``, and add it to that of the cells."""
    come, stay, new, out = step.gates.split(d_state.shape[1], dim=1)
    d_come, d_stay, d_new, d_out = d_gates.split(d_state.shape[1], dim=1)
    d_cell.add_(_aten.tanh_backward(d_state * out, step.squashed))
    for gate, d_gate, factor in ((come, d_come, new), (stay, d_stay, step.cell_before)):
        torch.mul(d_cell, factor, out=d_gate)
        _aten.sigmoid_backward.grad_input(d_gate, gate, grad_input=d_gate)
    torch.mul(d_cell, come, out=d_new)
    _aten.tanh_backward.grad_input(d_new, new, grad_input=d_new)
    torch.mul(d_state, step.squashed, out=d_out)
    _aten.sigmoid_backward.grad_input(d_out, out, grad_input=d_out)


def _sum(inputs: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``inputs + rows @ weight`` in the type of the rows, multiplied in the type of ``weight``."""
    if rows.dtype == weight.dtype:
        return torch.addmm(inputs, rows, weight)
    return (rows.to(weight.dtype) @ weight).to(rows.dtype).add_(inputs)
