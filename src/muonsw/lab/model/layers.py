"""The layers of a decoder: linear, norm, and SwiGLU experts with top-k routing.

Routing is dropless: tokens are sorted by expert and none is dropped. Group sizes stay on the device, so the host never
waits for a GPU. `initialize` initializes the layers. Products use autocast's precision if it is on; statistics use at
least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, library, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from muonsw import kernels
from muonsw.lab.model.config import ModelConfig, scalings


class Linear(nn.Module):
    """Bias-free linear layer whose weight is (out, in)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class RMSNorm(nn.RMSNorm):
    """RMSNorm with a gain and float32 statistics."""

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return functional.rms_norm(wide, self.normalized_shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for this tensor's device; the meta device has none."""
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products with this tensor, for functions that autocast does not know."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class FeedForwardOutput(NamedTuple):
    """The output of a feed-forward layer, and the losses of its router."""

    x: Tensor
    balance: Tensor
    z: Tensor


class Routes(NamedTuple):
    """The order of rows at the experts."""

    order: Tensor  # sorts the N*K (token, choice) pairs by expert
    places: Tensor  # the inverse of `order`: the row of each pair, (N, K)
    ends: Tensor  # of each expert's rows, int32


class MoE(nn.Module):
    """Experts as stacked tensors, gate and up projections fused in one.

    The router's logits are float32; each token takes the `top_k` experts with the largest logits, weighted by the
    softmax over those alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(config.width, config.experts)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.ff_width, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.ff_width))
        self.router_multiplier = scalings(config)["router"].multiplier
        self.over_ranks: Callable[[Tensor], Tensor] | None = None  # averages over the ranks that share a batch

    def forward(self, x_BTD: Tensor) -> FeedForwardOutput:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router_logits(x_ND)
        top_NK, chosen_NK = logits_NE.topk(self.config.top_k, dim=-1)
        routes = plan_routes(chosen_NK, self.config.experts)
        rows_RD = cast("Any", _CopyToExperts).apply(x_ND.to(product_dtype(x_ND)), routes.order, routes.places)
        rows_RD = swiglu_experts(rows_RD, self.gate_up, self.down, routes.ends)
        out_ND = cast("Any", _Combine).apply(rows_RD, top_NK.softmax(dim=-1), routes.order, routes.places)
        over_ranks = self.over_ranks if torch.is_grad_enabled() else None
        balance = balance_loss(logits_NE, chosen_NK, over_ranks)
        z = logits_NE.logsumexp(dim=-1).square().mean()  # keeps logits small
        return FeedForwardOutput(out_ND.view_as(x_BTD), balance, z)

    def router_logits(self, x_ND: Tensor) -> Tensor:
        """Logits in float32, whatever autocast says."""
        with without_autocast(x_ND):
            x = at_least_float32(x_ND)
            return functional.linear(x, self.router.weight.to(x.dtype)) * self.router_multiplier


def swiglu_experts(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Apply to each group of rows its expert; expert e has the rows from `ends_E[e - 1]` to `ends_E[e]` (int32)."""
    if rows_RD.device.type == "cpu" and not torch.compiler.is_compiling():
        return expert_by_expert(rows_RD, gate_up_EFD, down_EDF, ends_E)
    dtype = product_dtype(rows_RD)
    sizes = (*gate_up_EFD.shape[1:], *down_EDF.shape[1:])
    if rows_RD.is_cuda and dtype == torch.bfloat16 and all(size % ALIGNMENT == 0 for size in sizes):
        return cast("Tensor", cast("Any", _GroupedExperts).apply(rows_RD.to(dtype), gate_up_EFD, down_EDF, ends_E))
    return grouped_linear(gated(grouped_linear(rows_RD, gate_up_EFD, ends_E)), down_EDF, ends_E)


def balance_loss(logits_NE: Tensor, chosen_NK: Tensor, over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Load-balance loss `E * mean_e(f_e * P_e)`.

    f is the fraction of tokens that selected the expert, P the mean probability that the router gives it; a balanced
    router has the loss K/E. If ranks share the tokens, f is averaged over ranks. Since the loss is linear in P, the
    mean of the ranks' losses and gradients is then that of all tokens.
    """
    experts = logits_NE.shape[1]
    share_E = _one_hot(chosen_NK, experts).sum(dim=1).to(logits_NE.dtype).mean(dim=0)
    share_E = share_E if over_ranks is None else over_ranks(share_E)
    return experts * (share_E * logits_NE.softmax(dim=-1).mean(dim=0)).mean()


def plan_routes(chosen_NK: Tensor, experts: int) -> Routes:
    """Sort the (token, choice) pairs by expert without waiting for the device."""
    chosen_R = chosen_NK.flatten()
    order = chosen_R.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ends = _one_hot(chosen_R, experts).sum(dim=0).cumsum(dim=0)
    return Routes(order, inverse.view_as(chosen_NK), ends.to(torch.int32))


def _one_hot(index: Tensor, size: int) -> Tensor:
    # Not torch.bincount, which waits for the device.
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


class _CopyToExperts(torch.autograd.Function):
    """Copies token rows to the sorted places of their choices; backward gathers, so it needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return x_ND.index_select(0, order_R // places_NK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places_NK,) = ctx.saved_tensors
        return add_choices(grads[0], places_NK, None), None, None


class _Combine(torch.autograd.Function):
    """Adds up the weighted rows of each token's choices; backward gathers, too."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_NK: Tensor, order_R: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_NK, order_R, places_NK)
        return add_choices(rows_RD, places_NK, weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_NK, order_R, places_NK = ctx.saved_tensors
        grad_ND, top_k = grads[0], places_NK.shape[1]
        weights_R = weights_NK.to(grad_ND.dtype).flatten().index_select(0, order_R)
        grad_rows = grad_ND.index_select(0, order_R // top_k) * weights_R[:, None]
        rows_NKD = rows_RD.index_select(0, places_NK.flatten()).view(*places_NK.shape, -1)
        grad_weights = (rows_NKD * grad_ND[:, None]).sum(dim=-1)
        return grad_rows, grad_weights.to(weights_NK.dtype), None, None


def add_choices(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """Sum the rows at each token's places, weighted if there are weights."""
    on_gpu = rows_RD.is_cuda and rows_RD.dtype != torch.float64
    return (add_choices_on_gpu if on_gpu else _add_choices)(rows_RD, places_NK, weights_NK)


def _add_choices(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    rows_NKD = rows_RD.index_select(0, places_NK.flatten()).view(*places_NK.shape, -1)
    if weights_NK is not None:
        rows_NKD = rows_NKD * weights_NK.to(rows_RD.dtype).unsqueeze(-1)
    return rows_NKD.sum(dim=1)


@library.custom_op("muonsw::add_choices", mutates_args=())
def add_choices_on_gpu(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """`_add_choices` in one kernel.

    A custom operator, because the compiler would fuse the sum with the norm that follows it: one loop over a row stores
    what the next loop reads, without a barrier between them (pytorch/pytorch#190517, in torch 2.11 to 2.13). Depending
    on autotuning, gradients were then thousands of times too large.
    """
    if not kernels.available(rows_RD.device):
        return _add_choices(rows_RD, places_NK, weights_NK)
    from muonsw.lab.model.kernels import add_rows

    weights = None if weights_NK is None else weights_NK.contiguous()
    return add_rows(rows_RD.contiguous(), places_NK.contiguous(), weights)


@add_choices_on_gpu.register_fake
def _(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:  # noqa: ARG001
    return rows_RD.new_empty(places_NK.shape[0], rows_RD.shape[1])


# Rows of grouped GEMM kernels must start at multiples of 16 bytes, which hold this many elements of bfloat16.
ALIGNMENT = 8
# The size of a tile of these kernels, and the number of multiprocessors of an H100 or H200.
TILE_ROWS, TILE_COLUMNS, TILES_AT_ONCE = 128, 256, 132


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group of rows by its matrix: `out[r] = weight[e] @ x[r]` for the rows r of group e.

    It multiplies all rows by every matrix, with the rows of other groups zeroed: E times the work, but shapes do not
    depend on data, and the host does not wait for the ends of the groups.
    """
    row = torch.arange(x_RD.shape[0], device=x_RD.device)
    group = (row[:, None] >= ends_E).sum(dim=1, keepdim=True)
    products = [functional.linear(x_RD * (group == e), matrix) for e, matrix in enumerate(weight_EFD.unbind(0))]
    return torch.stack(products).sum(dim=0)


def expert_by_expert(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Apply the expert of each group, for CPUs: one expert at a time, so that its weights stay in the cache."""
    dtype, ends = product_dtype(rows_RD), ends_E.tolist()
    tensors = (tensor.to(dtype) for tensor in (rows_RD, gate_up_EFD, down_EDF))
    return cast("Tensor", cast("Any", _ExpertByExpert).apply(*tensors, tuple(pairwise([0, *ends]))))


class _ExpertByExpert(torch.autograd.Function):
    """Saves the fused projection of each expert; recomputing its gate is cheaper than saving it."""

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
            # Write the gradients of gate and up side by side, to save a pass that concatenates them.
            grad_fused = torch.empty_like(fused[expert])
            grad_gate, grad_up = grad_fused.chunk(2, dim=-1)
            torch.mul(opened, grad_gated, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_gated.mul_(up), gate, grad_input=grad_gate)
            torch.mm(grad_fused.T, rows_RD[start:end], out=grad_gate_up[expert])
            torch.mm(grad_fused, gate_up_EFD[expert], out=grad_rows[start:end])
        return grad_rows, grad_gate_up, grad_down, None


def gated(fused: Tensor) -> Tensor:
    """SwiGLU: the first half of the last axis gates the second."""
    gate, up = fused.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _GroupedExperts(torch.autograd.Function):
    """`expert_by_expert` for GPUs, with all experts in each kernel.

    It casts the weights itself, so their gradients are float32 whatever the dtype of the products. It saves the fused
    projection; recomputing its gate is cheaper than saving it.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
        gate_up, down = gate_up_EFD.to(rows_RD.dtype), down_EDF.to(rows_RD.dtype)
        fused_RF = functional.grouped_mm(rows_RD, gate_up.mT, offs=ends_E)
        ctx.save_for_backward(rows_RD, gate_up, down, fused_RF, ends_E)
        return functional.grouped_mm(gated(fused_RF), down.mT, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gate_up, down, fused_RF, ends_E = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_gated = functional.grouped_mm(grad_out, down, offs=ends_E)
        gate_RF, up_RF = fused_RF.chunk(2, dim=-1)
        opened = functional.silu(gate_RF)
        grad_gate = torch.ops.aten.silu_backward(grad_gated * up_RF, gate_RF)
        grad_fused, gated_RF = torch.cat([grad_gate, grad_gated * opened], dim=-1), opened * up_RF
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
    """The number of parts into which to cut each group's rows; the products of the parts are then summed.

    The sums over rows are long and the results small. With few tiles, or slightly more tiles than fill the GPU once or
    twice, most multiprocessors would be idle.

    Examples:
        >>> row_parts(48), row_parts(96), row_parts(704), row_parts(1408)
        (2, 4, 2, 1)
    """
    rounds = {parts: -(-tiles * parts // TILES_AT_ONCE) / parts for parts in (1, 2, 4)}
    best = 1
    for parts in (2, 4):
        if rounds[parts] < 0.95 * rounds[best]:
            best = parts
    return best


def part_ends(ends_E: Tensor, parts: int) -> Tensor:
    """The ends of the parts if each group is cut evenly.

    Examples:
        >>> part_ends(torch.tensor([4, 4, 10], dtype=torch.int32), 2).tolist()
        [2, 4, 4, 4, 7, 10]
    """
    starts_E = functional.pad(ends_E, (1, -1))
    steps = torch.arange(1, parts + 1, device=ends_E.device)
    cuts = starts_E[:, None] + (ends_E - starts_E)[:, None] * steps // parts
    return cuts.flatten().to(torch.int32)
