"""A long short-term memory over packed captions in both directions, on a CPU.

There, torch's own spends most of its time outside matrix products. Here each distinct prefix is read once, and backward each
distinct suffix; each distinct token is projected once; and the recurrent weight gets its gradient in one product after the last
step. A GPU would start some twenty kernels for each time step: there torch's is used, which is cuDNN's (`train.models.encoders`).

Letters in shapes: ``B`` captions, ``T`` tokens of the longest, ``P`` distinct prefixes, ``S`` prefixes of one time step, ``V``
distinct tokens, ``W`` word width, ``H`` units. The gates stand in torch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from train.data.batches import CaptionBatch
from train.data.packing import PackedCaptions, pack

_aten = torch.ops.aten


def read_both_ways(lstm: nn.LSTM, words: Callable[[Tensor], Tensor], captions: CaptionBatch) -> tuple[Tensor, Tensor]:
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
    ahead, back = pack(captions), pack(_reversed(captions))
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


def _shortened(captions: PackedCaptions, steps: int) -> Tensor:
    """Return int64 ``[B, T]``: the prefix that is the whole caption, that without its last token, and so on to the empty one."""
    parents = torch.cat([captions.parents.new_zeros(1), captions.parents])
    prefixes = [captions.ends]
    while len(prefixes) < steps:
        prefixes.append(parents[prefixes[-1]])
    return torch.stack(prefixes, dim=1)


def _states(lstm: nn.LSTM, suffix: str, words: Tensor, captions: PackedCaptions) -> Tensor:
    """Return the states ``[1 + P, H]`` after each prefix, the empty one included, of one direction over words ``[V, W]``."""
    of_words, recurrent, *biases = (
        getattr(lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    device = words.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else words.dtype
    projected = linear(words, of_words, sum(biases)).to(words.dtype)  # [V, 4H]
    with torch.autocast(device, enabled=False):
        return _Recurrence.apply(projected, recurrent, captions, dtype, torch.is_grad_enabled())


class _Step(NamedTuple):
    """Values that a time step keeps for its gradients, the gates ``[S, 4H]`` and the others ``[S, H]``."""

    gates: Tensor
    cell_before: Tensor
    squashed: Tensor


class _Recurrence(torch.autograd.Function):
    """The recurrence from projected tokens ``[V, 4H]`` to states ``[1 + P, H]``.

    With x the projection of a token, h and c state and cell before it, and the gates i = sigmoid(x_i + W_i h), f, o likewise and
    g = tanh(x_g + W_g h), the cell after it is c' = f c + i g, and the state is o tanh(c').
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, captions: PackedCaptions, dtype: torch.dtype, differentiable: bool
    ) -> Tensor:
        turned = weight.to(dtype).T
        states = projected.new_zeros(1 + len(captions.parents), weight.shape[1])
        cells = torch.zeros_like(states)
        steps = []
        end = 1
        for tokens, parents in zip(captions.steps(captions.last_tokens), captions.steps(captions.parents), strict=True):
            start, end = end, end + len(tokens)
            gates = _sum(projected.index_select(0, tokens), states.index_select(0, parents), turned)  # [S, 4H]
            step = _advance(gates, cells.index_select(0, parents), cell=cells[start:end], state=states[start:end])
            if differentiable:
                steps.append(step)
        ctx.save_for_backward(projected, weight, states)
        ctx.captions, ctx.dtype, ctx.steps = captions, dtype, steps
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_states.device.type, enabled=False):
            return (*_gradients(ctx, d_states), None, None, None)


def _advance(gates: Tensor, cell_before: Tensor, *, cell: Tensor, state: Tensor) -> _Step:
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
    return _Step(gates, cell_before, squashed)


def _gradients(ctx: Any, d_after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projected tokens and the recurrent weight."""
    projected, weight, states = ctx.saved_tensors
    captions, units = ctx.captions, weight.shape[1]
    turned = weight.to(ctx.dtype)
    d_states, d_cells = d_after.clone(), torch.zeros_like(d_after)
    d_gates = projected.new_empty(len(captions.parents), 4 * units)
    per_step = zip(*map(captions.steps, (captions.parents, d_states[1:], d_cells[1:], d_gates)), ctx.steps, strict=True)
    for parents, d_state, d_cell, d_gate, step in reversed(list(per_step)):
        _retreat(step, d_state, d_cell, d_gates=d_gate)
        d_cells.index_add_(0, parents, d_cell * step.gates[:, units : 2 * units])
        d_states.index_add_(0, parents, (d_gate.to(turned.dtype) @ turned).to(d_states.dtype))
    before = states.index_select(0, captions.parents)
    d_weight = (d_gates.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
    return torch.zeros_like(projected).index_add_(0, captions.last_tokens, d_gates), d_weight


def _retreat(step: _Step, d_state: Tensor, d_cell: Tensor, *, d_gates: Tensor) -> None:
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
    """Return ``inputs + rows @ weight`` in the type of the inputs, multiplied in the type of ``weight``."""
    if rows.dtype == weight.dtype:
        return torch.addmm(inputs, rows, weight)
    return (rows.to(weight.dtype) @ weight).to(inputs.dtype).add_(inputs)
