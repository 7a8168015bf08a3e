"""A gated recurrent unit over packed captions, on a CPU.

There, torch's own packed GRU spends a third of its time filling gradients with zeros: the slice of the input projection for each
time step gets a gradient as large as the whole. Here the gradients of the gates share one buffer, and the recurrent weight gets its
gradient in one product after the last step. Each distinct prefix is processed once (see `train.data.packing`), and each distinct
token is projected once. A GPU would start some twenty kernels for each time step: there torch's is used, which is cuDNN's
(`train.models.encoders`).

Letters in shapes: ``B`` captions, ``P`` distinct prefixes, ``S`` prefixes of one time step, ``V`` distinct tokens, ``W`` word
width, ``H`` units. The gates stand in torch's order: reset, update, new.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from train.data.packing import PackedCaptions

_aten = torch.ops.aten


def read_prefixes(gru: nn.GRU, words: Tensor, captions: PackedCaptions) -> Tensor:
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
    of_words, recurrent, of_words_bias, bias = (
        getattr(gru, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    device = words.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else words.dtype
    projected = linear(words, of_words, of_words_bias).to(words.dtype)  # [V, 3H]
    with torch.autocast(device, enabled=False):
        final: Tensor = _Recurrence.apply(projected, recurrent, bias, captions, dtype, torch.is_grad_enabled())
    return final


class _Step(NamedTuple):
    """Values that a time step keeps for its gradients, each ``[S, H]``."""

    before: Tensor
    recurrent_new: Tensor
    reset: Tensor
    update: Tensor
    new: Tensor


class _Recurrence(torch.autograd.Function):
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
        captions: PackedCaptions,
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
            recurrent = _affine(before, turned, bias)  # [S, 3H]
            steps.append(_advance(before, recurrent, projected.index_select(0, tokens), out=states[start:end]))
            if not differentiable:
                steps.clear()
        ctx.save_for_backward(projected, weight)
        ctx.captions, ctx.dtype, ctx.steps = captions, dtype, steps
        return states.index_select(0, captions.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_final: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_final.device.type, enabled=False):
            return (*_gradients(ctx, d_final), None, None, None)


def _advance(before: Tensor, recurrent: Tensor, gates: Tensor, *, out: Tensor) -> _Step:
    """Write the states after a token ``[S, H]`` to ``out``, and the gates over their inputs x ``[S, 3H]``."""
    units = before.shape[1]
    gates[:, : 2 * units].add_(recurrent[:, : 2 * units]).sigmoid_()
    reset, update, new = gates.split(units, dim=1)
    new.addcmul_(reset, recurrent[:, 2 * units :]).tanh_()
    torch.lerp(new, before, update, out=out)
    return _Step(before, recurrent[:, 2 * units :], reset, update, new)


def _gradients(ctx: Any, d_final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the projected tokens, the recurrent weight and its bias."""
    projected, weight = ctx.saved_tensors
    captions, (units, count) = ctx.captions, (weight.shape[1], len(ctx.captions.parents))
    turned = weight.to(ctx.dtype)
    d_states = projected.new_zeros(1 + count, units).index_add_(0, captions.ends, d_final)
    d_recurrent = projected.new_empty(count, 3 * units)
    d_new = projected.new_empty(count, units)
    per_step = zip(*map(captions.steps, (captions.parents, d_states[1:], d_recurrent, d_new)), ctx.steps, strict=True)
    for parents, d_state, d_gates, d_input, step in reversed(list(per_step)):
        _retreat(step, d_state, d_gates=d_gates, d_input=d_input)
        d_states.index_add_(0, parents, _affine(d_gates, turned, d_state * step.update))
    before = torch.cat([step.before for step in ctx.steps]) if ctx.steps else d_new
    d_weight = (d_recurrent.to(ctx.dtype).T @ before.to(ctx.dtype)).to(weight.dtype)
    d_bias = d_recurrent.sum(0)
    d_recurrent[:, 2 * units :] = (
        d_new  # The reset gate separates g_n from x_n; in the other gates g and x get the same gradient.
    )
    return torch.zeros_like(projected).index_add_(0, captions.last_tokens, d_recurrent), d_weight, d_bias


def _retreat(step: _Step, d_state: Tensor, *, d_gates: Tensor, d_input: Tensor) -> None:
    """Turn the gradient of the states ``[S, H]`` into those of g ``[S, 3H]`` and x_n ``[S, H]``."""
    d_reset, d_update, d_new = d_gates.split(d_input.shape[1], dim=1)
    torch.addcmul(d_state, d_state, step.update, value=-1, out=d_input)
    _aten.tanh_backward.grad_input(d_input, step.new, grad_input=d_input)
    torch.mul(d_input, step.reset, out=d_new)
    torch.mul(d_input, step.recurrent_new, out=d_reset)
    _aten.sigmoid_backward.grad_input(d_reset, step.reset, grad_input=d_reset)
    torch.sub(step.before, step.new, out=d_update).mul_(d_state)
    _aten.sigmoid_backward.grad_input(d_update, step.update, grad_input=d_update)


def _affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``rows @ weight + bias`` in the type of ``rows``, multiplied in the type of ``weight``."""
    if rows.dtype == weight.dtype:
        return torch.addmm(bias, rows, weight)
    return (rows.to(weight.dtype) @ weight).to(rows.dtype).add_(bias)
