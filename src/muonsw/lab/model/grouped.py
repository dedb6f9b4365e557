"""Rows sorted by expert times their expert's matrices: the one place that decides how.

Nothing here makes a GPU wait: group sizes stay on the device as offsets.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable
from torch.nn import functional

from muonsw import kernels
from muonsw.lab.model.layers import product_dtype

# Grouped GEMM kernels want rows that start at multiples of 16 bytes.
ALIGNMENT_BYTES = 16
# Their tiles, and how many a GPU works on at once (an H100's or H200's multiprocessors).
TILE_ROWS, TILE_COLUMNS, TILES_AT_ONCE = 128, 256, 132


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group of rows with its own matrix: `out[r] = weight[e] @ x[r]` for the rows r of group e.

    Rows are sorted by group; `ends_E` says where each group ends, int32. Groups may be empty.
    """
    dtype = product_dtype(x_RD)
    x, weight = x_RD.to(dtype), weight_EFD.to(dtype)
    if takes_grouped_gemm(x, dtype, weight):
        return grouped_gemm(x, weight, ends_E)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = pairwise([0, *ends_E.tolist()])  # on a GPU the host would wait for these
        return torch.cat([x[start:end] @ matrix.T for (start, end), matrix in zip(bounds, weight, strict=True)])
    # Every expert on all rows with the others' rows zeroed: E times the work, but shapes that depend on no data.
    row = torch.arange(x.shape[0], device=x.device)
    group = (row[:, None] >= ends_E).sum(dim=1, keepdim=True)
    products = [functional.linear(x * (group == e), matrix) for e, matrix in enumerate(weight.unbind(0))]
    return torch.stack(products).sum(dim=0)


def takes_grouped_gemm(x_RD: Tensor, dtype: torch.dtype, *weights_EFD: Tensor) -> bool:
    """Whether there is one kernel for all groups, where tensors like these are cast to this dtype."""
    return (
        x_RD.is_cuda
        and dtype == torch.bfloat16
        and all(size * dtype.itemsize % ALIGNMENT_BYTES == 0 for w in weights_EFD for size in w.shape[1:])
        and hasattr(functional, "grouped_mm")
    )


def grouped_gemm(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """All groups in one kernel."""
    return functional.grouped_mm(x_RD, weight_EFD.transpose(-2, -1), offs=ends_E)


def expert_by_expert(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Down projection of the gated up projection, for each group of rows with the matrices of its expert.

    For CPUs: one expert after the other, each with all that it computes still in the cache.
    """
    dtype, ends = product_dtype(rows_RD), ends_E.tolist()
    tensors = (tensor.to(dtype) for tensor in (rows_RD, gate_up_EFD, down_EDF))
    return cast("Tensor", cast("Any", _ExpertByExpert).apply(*tensors, tuple(pairwise([0, *ends]))))


class _ExpertByExpert(torch.autograd.Function):
    """Keeps the fused projection of each expert; its gate is cheaper to apply again than to keep."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, bounds: tuple[tuple[int, int], ...]
    ) -> Tensor:
        out_RD = torch.empty_like(rows_RD)
        fused = []
        for expert, (start, end) in enumerate(bounds):
            fused.append(rows_RD[start:end] @ gate_up_EFD[expert].T)
            gate, up = fused[-1].chunk(2, dim=-1)
            torch.mm(functional.silu(gate).mul_(up), down_EDF[expert].T, out=out_RD[start:end])
        ctx.save_for_backward(rows_RD, gate_up_EFD, down_EDF, *fused)
        ctx.bounds = bounds
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gate_up_EFD, down_EDF, *fused = ctx.saved_tensors
        inputs = (rows_RD, gate_up_EFD, down_EDF)
        grad_rows, grad_gate_up, grad_down = (torch.empty_like(tensor) for tensor in inputs)
        for expert, (start, end) in enumerate(ctx.bounds):
            grad_out, (gate, up) = grads[0][start:end], fused[expert].chunk(2, dim=-1)
            opened = functional.silu(gate)
            torch.mm(grad_out.T, opened * up, out=grad_down[expert])
            grad_gated = grad_out @ down_EDF[expert]
            # the gradients of gate and up are written side by side: joining them would take a pass of its own
            grad_fused = torch.empty_like(fused[expert])
            grad_gate, grad_up = grad_fused.chunk(2, dim=-1)
            torch.mul(opened, grad_gated, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_gated.mul_(up), gate, grad_input=grad_gate)
            torch.mm(grad_fused.T, rows_RD[start:end], out=grad_gate_up[expert])
            torch.mm(grad_fused, gate_up_EFD[expert], out=grad_rows[start:end])
        return grad_rows, grad_gate_up, grad_down, None


def gated(fused: Tensor) -> Tensor:
    """SwiGLU: the second half of the last axis, let through by the first."""
    gate, up = fused.chunk(2, dim=-1)
    return functional.silu(gate) * up


def grouped_experts(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """What `expert_by_expert` computes, for GPUs: all experts in each kernel.

    The weights are cast here, so that their gradients can be float32 whatever the products are.
    """
    dtype = product_dtype(rows_RD)
    return cast("Tensor", cast("Any", _GroupedExperts).apply(rows_RD.to(dtype), gate_up_EFD, down_EDF, ends_E))


class _GroupedExperts(torch.autograd.Function):
    """Keeps the fused projection; its gate is cheaper to apply again than to keep."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
        gate_up, down = gate_up_EFD.to(rows_RD.dtype), down_EDF.to(rows_RD.dtype)
        fused_RF = grouped_gemm(rows_RD, gate_up, ends_E)
        ctx.save_for_backward(rows_RD, gate_up, down, fused_RF, ends_E)
        return grouped_gemm(gate_on_gpu(fused_RF), down, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gate_up, down, fused_RF, ends_E = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_gated = functional.grouped_mm(grad_out, down, offs=ends_E)
        grad_fused, gated_RF = gate_backward_on_gpu(grad_gated, fused_RF)
        grad_rows = functional.grouped_mm(grad_fused, gate_up, offs=ends_E)
        grad_gate_up = weight_gradient(grad_fused, rows_RD, ends_E)
        return grad_rows, grad_gate_up, weight_gradient(grad_out, gated_RF, ends_E), None


def weight_gradient(grad_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """`grad.T @ x` of each group, (E, F, D), in float32."""
    outputs, inputs = grad_RF.shape[1], x_RD.shape[1]
    parts = row_parts(ends_E.shape[0] * -(-outputs // TILE_ROWS) * -(-inputs // TILE_COLUMNS))
    products = functional.grouped_mm(grad_RF.mT, x_RD, offs=part_ends(ends_E, parts))
    return products.view(-1, parts, outputs, inputs).sum(dim=1, dtype=torch.float32)


def row_parts(tiles: int) -> int:
    """Into how many parts, added up afterwards, the rows of each group are cut for so many tiles of results.

    The sums over rows are long and the results small: with few tiles, or a few more than fill the GPU once or twice,
    many multiprocessors would wait for some.

    Examples:
        >>> row_parts(48), row_parts(96), row_parts(704), row_parts(1408)
        (2, 4, 2, 1)
    """
    best = 1
    for parts in (2, 4):
        if _rounds(tiles, parts) < 0.95 * _rounds(tiles, best):
            best = parts
    return best


def _rounds(tiles: int, parts: int) -> float:
    return -(-tiles * parts // TILES_AT_ONCE) / parts


def part_ends(ends_E: Tensor, parts: int) -> Tensor:
    """Where the parts of each group end if groups are cut evenly.

    Examples:
        >>> part_ends(torch.tensor([4, 4, 10], dtype=torch.int32), 2).tolist()
        [2, 4, 4, 4, 7, 10]
    """
    starts_E = functional.pad(ends_E, (1, -1))
    steps = torch.arange(1, parts + 1, device=ends_E.device)
    cuts = starts_E[:, None] + (ends_E - starts_E)[:, None] * steps // parts
    return cuts.flatten().to(torch.int32)


@library.custom_op("muonsw::gate", mutates_args=())
def gate_on_gpu(fused_RF: Tensor) -> Tensor:
    """`gated` in one kernel."""
    if not kernels.available(fused_RF.device):
        return gated(fused_RF)
    from muonsw.lab.model.kernels import gate

    return gate(fused_RF)


@gate_on_gpu.register_fake
def _(fused_RF: Tensor) -> Tensor:
    return fused_RF.new_empty(fused_RF.shape[0], fused_RF.shape[1] // 2)


@library.custom_op("muonsw::gate_backward", mutates_args=())
def gate_backward_on_gpu(grad_RF: Tensor, fused_RF: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the fused projection, and its gated output once more."""
    if kernels.available(fused_RF.device):
        from muonsw.lab.model.kernels import gate_backward

        return gate_backward(grad_RF, fused_RF)
    gate_RF, up_RF = fused_RF.chunk(2, dim=-1)
    opened = functional.silu(gate_RF)
    grad_gate = torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF)
    return torch.cat([grad_gate, grad_RF * opened], dim=-1), opened * up_RF


@gate_backward_on_gpu.register_fake
def _(grad_RF: Tensor, fused_RF: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(fused_RF), torch.empty_like(grad_RF)
