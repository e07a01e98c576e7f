"""Matrix products and SiLU over rows sorted by expert, with bits that do not depend on the EP size.

With `rows [R, A]`, `weights [e, A, B]` and `expert_offsets [e]` (int32 inclusive ends), group i is
`rows[expert_offsets[i - 1]:expert_offsets[i]]`, its product `group @ weights[i]`, and the gradient of `weights[i]` is
`group.T @ gradient`. An expert without rows gets a gradient of zeros. Rows behind the last offset are read by nothing
and their outputs are uninitialised.

    rows of 3 experts, counts (2, 0, 1), one row of tail:   expert_offsets = [2, 2, 3]
    row 0, 1 -> weights[0]    row 2 -> weights[2]    row 3 -> nothing    gradient of weights[1] = 0

Products are torch's `grouped_mm` where it serves, else a loop over experts.

On a CPU what an expert computes depends on its own rows and weights alone, not on its neighbours, to the bit. Each of
these was measured to break that (torch 2.13, MKL and AVX-512) and is why the code below is as it is:

* A product's bits depend on its shape, so every expert has a product of its own, inside `grouped_mm` too.
* With a transposed right operand in float32 and float64 they depend on whether a group starts at a multiple of
  16 bytes, hence `_ALIGNMENT_BYTES`.
* SiLU in float32 rounds the elements that fill no whole vector differently, and where those lie depends on the size of
  the whole tensor and the number of threads, hence one SiLU an expert.

On a GPU torch promises no such thing; on an H200 (torch 2.11) the tests found the same bits in all dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

# A whole cache line, four times what was measured to matter.
_ALIGNMENT_BYTES = 64

# Compute capabilities on which `grouped_mm` is one kernel; elsewhere it is a loop that reads the offsets on the host.
_FUSED_CAPABILITIES = (9, 10)


def reads_counts_on_host(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether a product of matrices that are `widths` elements wide reads `expert_offsets` on the host.

    On a GPU that is a synchronisation, and it cannot be captured in a graph; on a CPU it costs nothing.
    """
    return device.type != "cuda" or not _grouped_mm_serves(device, dtype, widths)


@torch.library.custom_op("crossdock::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, expert_offsets: Tensor) -> Tensor:
    """`rows[group i] @ weights[i]` for every group, differentiable in `rows` and `weights`.

    Args:
        rows: `[R, A]`, sorted by expert; R may be 0.
        weights: `[e, A, B]`, of the same dtype.
        expert_offsets: `[e]` int32: inclusive ends of the groups, at most R.

    Returns:
        `[R, B]`; rows behind the last offset are uninitialised, and so are those of the gradient for `rows`.
    """
    rows = rows.contiguous()
    if _grouped_mm_serves(rows.device, rows.dtype, weights.shape[1:]):
        return grouped_mm(rows, weights, offs=expert_offsets)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, start, end in _groups(expert_offsets):
        out[start:end] = _aligned(rows[start:end]) @ _aligned(weights[expert])
    return out


@torch.library.custom_op("crossdock::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(rows: Tensor, grad: Tensor, expert_offsets: Tensor) -> Tensor:
    """`rows[group i].T @ grad[group i]`: `[e, A, B]` from `rows [R, A]` and `grad [R, B]`, both contiguous."""
    if _grouped_mm_serves(rows.device, rows.dtype, (rows.shape[1], grad.shape[1])):
        return grouped_mm(rows.mT, grad, offs=expert_offsets)
    out = rows.new_zeros(expert_offsets.shape[0], rows.shape[1], grad.shape[1])
    for expert, start, end in _groups(expert_offsets):
        out[expert] = _aligned(rows[start:end]).mT @ _aligned(grad[start:end])
    return out


@torch.library.custom_op("crossdock::silu_by_expert", mutates_args=())
def silu_by_expert(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """SiLU of `rows [R, B]`, expert after expert; rows behind the last offset are uninitialised."""
    out = torch.empty_like(rows)
    for _, start, end in _groups(expert_offsets):
        out[start:end] = silu(rows[start:end])
    return out


@torch.library.custom_op("crossdock::silu_by_expert_gradient", mutates_args=())
def silu_by_expert_gradient(grad: Tensor, rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """The gradient of `silu_by_expert` for `rows`."""
    out = torch.empty_like(rows)
    for _, start, end in _groups(expert_offsets):
        out[start:end] = torch.ops.aten.silu_backward(grad[start:end], rows[start:end])
    return out


def _grouped_mm_serves(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Whether torch's `grouped_mm` takes the operands, without a loop on a GPU, without unaligned groups on a CPU."""
    if dtype != torch.bfloat16:
        return False
    if device.type != "cuda":
        return all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)
    fused = torch.cuda.get_device_capability(device)[0] in _FUSED_CAPABILITIES
    return fused and all(width * dtype.itemsize % 16 == 0 for width in widths)


def _groups(expert_offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Expert, first row and end of every group that has rows; reads the offsets on the host."""
    start = 0
    for expert, end in enumerate(expert_offsets.tolist()):
        if end > start:
            yield expert, start, end
        start = end


def _aligned(operand: Tensor) -> Tensor:
    """The operand, copied if it does not start where an allocation could."""
    return operand.clone() if operand.data_ptr() % _ALIGNMENT_BYTES else operand


@grouped_product.register_fake
def _(rows: Tensor, weights: Tensor, expert_offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_weight_gradient.register_fake
def _(rows: Tensor, grad: Tensor, expert_offsets: Tensor) -> Tensor:
    return rows.new_empty(expert_offsets.shape[0], rows.shape[1], grad.shape[1])


@silu_by_expert.register_fake
def _(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    return torch.empty_like(rows)


@silu_by_expert_gradient.register_fake
def _(grad: Tensor, rows: Tensor, expert_offsets: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, expert_offsets = ctx.saved_tensors
    grad = grad.contiguous()  # a sum's gradient has stride 0, which `grouped_mm` refuses
    grad_rows = grouped_product(grad, weights.mT, expert_offsets) if ctx.needs_input_grad[0] else None
    grad_weights = grouped_weight_gradient(rows.contiguous(), grad, expert_offsets) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weights, None


def _silu_by_expert_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    rows, expert_offsets = ctx.saved_tensors
    return silu_by_expert_gradient(grad.contiguous(), rows, expert_offsets), None


grouped_product.register_autograd(_grouped_product_backward, setup_context=_save_inputs)
silu_by_expert.register_autograd(_silu_by_expert_backward, setup_context=_save_inputs)
