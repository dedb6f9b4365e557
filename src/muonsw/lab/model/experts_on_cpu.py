"""Experts on a CPU: one after the other, each with all that it computes still in the cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from muonsw.lab.model.precision import product_dtype


def expert_by_expert(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Down projection of the gated up projection, for each group of rows with the matrices of its expert.

    Args:
        rows_RD: rows, sorted by expert.
        gate_up_EFD: gate and up projections of each expert, one below the other.
        down_EDF: down projections.
        ends_E: where each expert's rows end; the last is R. Groups may be empty.
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
