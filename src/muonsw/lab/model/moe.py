"""SwiGLU experts with top-k routing, dropless: tokens are sorted by expert and no token is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, library, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from muonsw import kernels
from muonsw.lab.model.config import ModelConfig, scalings
from muonsw.lab.model.grouped import expert_by_expert, gated, grouped_experts, grouped_linear, takes_grouped_gemm
from muonsw.lab.model.layers import Linear, at_least_float32, product_dtype, without_autocast


class FeedForwardOutput(NamedTuple):
    """What a feed-forward layer gives back: output, the two losses of its router, and each expert's share of rows."""

    x: Tensor
    balance: Tensor
    z: Tensor
    load: Tensor


class Routes(NamedTuple):
    """Which rows go where: `order` sorts the N*K (token, choice) pairs by expert, `inverse` undoes it."""

    order: Tensor
    inverse: Tensor
    ends: Tensor


class MoE(nn.Module):
    """Experts as stacked tensors, gate and up projections fused in one.

    The router's logits are float32; each token takes the `top_k` experts with the largest, weighted by the softmax
    over those alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(config.width, config.experts)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.ff_width, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.ff_width))
        self.router_multiplier = scalings(config)["router"].multiplier
        # Averages over ranks that each see a part of the batch; set by a trainer on several.
        self.over_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_BTD: Tensor) -> FeedForwardOutput:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router_logits(x_ND)
        kept_NK, chosen_NK, routes = choose(logits_NE, self.config.top_k)
        places_NK = routes.inverse.view_as(chosen_NK)
        rows_RD = cast("Any", _CopyToExperts).apply(x_ND.to(product_dtype(x_ND)), routes.order, places_NK)
        rows_RD = swiglu_experts(rows_RD, self.gate_up, self.down, routes.ends)
        out_ND = cast("Any", _Combine).apply(rows_RD, kept_NK.softmax(dim=-1), routes.order, places_NK)
        groups = x_BTD.shape[0] if self.config.balance_over == "sequence" else 1
        over_ranks = self.over_ranks if torch.is_grad_enabled() else None
        balance = balance_loss(logits_NE, chosen_NK, groups=groups, over_ranks=over_ranks)
        load_E = torch.diff(routes.ends, prepend=routes.ends.new_zeros(1)) / chosen_NK.numel()
        return FeedForwardOutput(out_ND.view_as(x_BTD), balance, z_loss(logits_NE), load_E)

    def router_logits(self, x_ND: Tensor) -> Tensor:
        """Logits in float32, whatever autocast says."""
        with without_autocast(x_ND):
            x = at_least_float32(x_ND)
            return functional.linear(x, self.router.weight.to(x.dtype)) * self.router_multiplier


class DenseFeedForward(nn.Module):
    """The same layer with one expert: nothing to route, so no router and no router losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * config.ff_width, config.width))
        self.down = nn.Parameter(torch.empty(config.width, config.ff_width))

    def forward(self, x_BTD: Tensor) -> FeedForwardOutput:
        zero = torch.zeros((), device=x_BTD.device, dtype=torch.promote_types(x_BTD.dtype, torch.float32))
        out_BTD = functional.linear(gated(functional.linear(x_BTD, self.gate_up)), self.down)
        return FeedForwardOutput(out_BTD, zero, zero, torch.ones_like(zero)[None])


def swiglu_experts(rows_RD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Each group of rows through its own expert."""
    if rows_RD.device.type == "cpu" and not torch.compiler.is_compiling():
        return expert_by_expert(rows_RD, gate_up_EFD, down_EDF, ends_E)
    if takes_grouped_gemm(rows_RD, product_dtype(rows_RD), gate_up_EFD, down_EDF):
        return grouped_experts(rows_RD, gate_up_EFD, down_EDF, ends_E)
    return grouped_linear(gated(grouped_linear(rows_RD, gate_up_EFD, ends_E)), down_EDF, ends_E)


def balance_loss(
    logits_NE: Tensor, chosen_NK: Tensor, *, groups: int = 1, over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Load-balance loss `E * mean_e(f_e * P_e)`, averaged over equal groups of tokens.

    f is the share of tokens that selected the expert (a token counts once for each of its experts), P the mean
    probability that the router gives it; at balance the loss is K/E. Where each rank has a part of the tokens, f is
    averaged over them; the loss is linear in P, so the mean of the ranks' losses and gradients is then that of all
    tokens.

    Examples:
        >>> logits = torch.zeros(8, 8)
        >>> chosen = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8], dim=1)
        >>> balance_loss(logits, chosen).item()
        0.25
    """
    experts = logits_NE.shape[1]
    selected_NE = _one_hot(chosen_NK, experts).sum(dim=1).to(logits_NE.dtype)
    share_GE = selected_NE.view(groups, -1, experts).mean(dim=1)
    share_GE = share_GE if over_ranks is None else over_ranks(share_GE)
    probability_GE = logits_NE.softmax(dim=-1).view(groups, -1, experts).mean(dim=1)
    return experts * (share_GE * probability_GE).mean()


def z_loss(logits_NE: Tensor) -> Tensor:
    """Mean squared log-partition function of the router, which keeps its logits small."""
    return logits_NE.logsumexp(dim=-1).square().mean()


def choose(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Routes]:
    """The largest logits of each token, the experts they belong to, and the way there."""
    if not logits_NE.is_cuda:
        kept_NK, chosen_NK = logits_NE.topk(top_k, dim=-1)
        return kept_NK, chosen_NK, plan_routes(chosen_NK, logits_NE.shape[1])
    chosen_NK, *routes = choose_on_gpu(logits_NE.detach(), top_k)
    # Selected by a mask, whose gradient is one too: that of a gather is a scatter with atomics.
    kept_NKE = torch.where(_one_hot(chosen_NK, logits_NE.shape[1]), logits_NE.unsqueeze(1), 0.0)
    return kept_NKE.sum(dim=-1), chosen_NK, Routes(*routes)


@library.custom_op("muonsw::choose_experts", mutates_args=())
def choose_on_gpu(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts of each token, largest logit first, and the fields of `Routes`; two kernels instead of a sort."""
    if kernels.available(logits_NE.device):
        from muonsw.lab.model.kernels import choose_experts

        return choose_experts(logits_NE.contiguous(), top_k)
    chosen_NK = logits_NE.topk(top_k, dim=-1).indices
    return chosen_NK, *plan_routes(chosen_NK, logits_NE.shape[1])


@choose_on_gpu.register_fake
def _(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits_NE.shape
    chosen_NK = logits_NE.new_empty(tokens, top_k, dtype=torch.int64)
    order, inverse = (chosen_NK.new_empty(tokens * top_k) for _ in range(2))
    return chosen_NK, order, inverse, chosen_NK.new_empty(experts, dtype=torch.int32)


def plan_routes(chosen_NK: Tensor, experts: int) -> Routes:
    """Sort the (token, choice) pairs by expert, without the host ever asking for a size."""
    chosen_R = chosen_NK.flatten()
    order = chosen_R.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ends = _one_hot(chosen_R, experts).sum(dim=0).cumsum(dim=0)
    return Routes(order, inverse, ends.to(torch.int32))


def _one_hot(index: Tensor, size: int) -> Tensor:
    # Counted by comparing: torch.bincount would make the host wait for the device.
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


class _CopyToExperts(torch.autograd.Function):
    """Token rows copied to the sorted places of their choices; backward gathers, so it needs no atomics."""

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
    """The rows of each token's choices, weighted and added up; backward gathers, too."""

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
    """The sum of the rows at each token's places, weighted if there are weights."""
    on_gpu = rows_RD.is_cuda and rows_RD.dtype != torch.float64
    return (add_choices_on_gpu if on_gpu else _add_choices)(rows_RD, places_NK, weights_NK)


def _add_choices(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    rows_NKD = rows_RD.index_select(0, places_NK.flatten()).view(*places_NK.shape, -1)
    if weights_NK is not None:
        rows_NKD = rows_NKD * weights_NK.to(rows_RD.dtype).unsqueeze(-1)
    return rows_NKD.sum(dim=1)


@library.custom_op("muonsw::add_choices", mutates_args=())
def add_choices_on_gpu(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """The same in one kernel.

    An operator, because a compiler would make it part of the norm that follows: one loop over a row that stores what
    the next loop reads back, without a barrier between them (pytorch/pytorch#190517, in torch 2.11 to 2.13). In some
    processes, by the tile that their timing chose, gradients were then thousands of times too large.
    """
    if not kernels.available(rows_RD.device):
        return _add_choices(rows_RD, places_NK, weights_NK)
    from muonsw.lab.model.kernels import add_rows

    weights = None if weights_NK is None else weights_NK.contiguous()
    return add_rows(rows_RD.contiguous(), places_NK.contiguous(), weights)


@add_choices_on_gpu.register_fake
def _(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:  # noqa: ARG001
    return rows_RD.new_empty(places_NK.shape[0], rows_RD.shape[1])
