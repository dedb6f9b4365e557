"""QK-clip: after a step, scale down the query and key weights of attention heads whose logits are too large.

Kimi Team, "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), whose MuonClip is Muon with QK-clip. With S_max the
largest logit of a head in the forward passes of a step and tau a threshold, gamma = min(1, tau / S_max) and

    W_q <- gamma^alpha W_q,   W_k <- gamma^(1 - alpha) W_k,   alpha = 1/2

so the same inputs would give logits of at most tau. In latent attention (MLA) all heads share the rotary keys, which
are not changed, and each head's rotary queries are multiplied by gamma. If query heads share keys (grouped-query
attention), a group is clipped by its largest logit, as in Megatron-LM d98e8a64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from muonsw.distributed.shards import local, offset, refuse_interleaved
from muonsw.machine import has_ranks
from muonsw.options import require_number, require_whole

# The state of an optimizer, by parameter.
State = Mapping[Tensor, dict[str, Any]]


class HeadRows(NamedTuple):
    """The rows of a weight or bias that compute the queries or keys of each head.

    Head h has `size` rows from row `start + h * stride`, along axis `dim`.

    Attributes:
        param: a weight or bias.
        size: rows per head; None divides the whole axis among the heads.
        start: the first row of the first head.
        stride: rows from one head to the next, `size` by default.
        dim: the output axis: 1 for weights stored as (in, out).
        by_group: whether each block holds the rows of all query heads that share a key.
    """

    param: Tensor
    size: int | None = None
    start: int = 0
    stride: int | None = None
    dim: int = 0
    by_group: bool = False

    def complete(self, heads: int) -> HeadRows:
        """Fill in the defaults, and check that the rows fit the parameter."""
        for key in ("size", "start", "stride"):
            require_whole(key, getattr(self, key) or 0, 0)
        require_whole("dim", self.dim, 0, self.param.dim() - 1)
        rows = self.param.shape[self.dim]
        size = self.size or rows // heads
        stride = self.stride or size
        last = self.start + (heads - 1) * stride + size
        if last > rows or (self.size is None and rows % heads):
            raise ValueError(
                f"{heads} heads of {size} rows from row {self.start} on, {stride} apart, do not fit axis {self.dim} of "
                f"a parameter of shape {tuple(self.param.shape)}; pass size, start and stride in HeadRows"
            )
        refuse_interleaved("a weight of QK-clip", self.param)
        return self._replace(size=size, stride=stride)

    def scale_(self, factors: Tensor, state: State) -> None:
        """Multiply this rank's rows of each head by the head's factor.

        Schedule-Free evaluates a mixture of the parameter and z, so z is scaled too.
        """
        assert self.size is not None
        assert self.stride is not None
        shard = local(self.param.detach())
        wide = torch.ones(self.param.shape[self.dim], dtype=factors.dtype, device=shard.device)
        used = wide.narrow(0, self.start, (len(factors) - 1) * self.stride + self.size)
        used.unfold(0, self.size, self.stride).copy_(factors[:, None])
        here = wide.narrow(0, offset(self.param)[self.dim], shard.shape[self.dim])
        here = here.view([-1 if axis == self.dim else 1 for axis in range(shard.dim())])
        z = state.get(self.param, {}).get("z")
        for scaled in (shard,) if z is None else (shard, local(z)):
            scaled.copy_(scaled * here)


Rows = Tensor | HeadRows | Sequence[Tensor | HeadRows]


@dataclass(eq=False)
class AttentionLogits:
    """The largest logit of each head of an attention layer since the last step, reported by its forward passes."""

    heads: int
    groups: int  # key heads
    parts: list[tuple[HeadRows, int, float]]  # rows, their number of heads, the power of gamma that scales them
    maximum: Tensor

    def observe(self, max_logits: Tensor, first_head: int = 0) -> None:
        """Report the largest logits of a forward pass, of shape (..., heads).

        Args:
            max_logits: the largest softmax inputs of every head, or of the heads that this rank computes.
            first_head: the number of the first reported head.
        """
        largest = max_logits.detach().reshape(-1, max_logits.shape[-1]).amax(0).float()
        count = len(largest)
        if first_head < 0 or first_head + count > self.heads:
            raise ValueError(
                f"logits of {count} heads from head {first_head} on do not fit an attention of {self.heads} heads"
            )
        if self.maximum.device != largest.device:  # the model is on another device now
            with torch.inference_mode(False):  # the first report may come from an evaluation
                self.maximum = torch.full_like(self.maximum, -torch.inf, device=largest.device)
        reported = self.maximum.narrow(0, first_head, count)
        torch.maximum(reported, largest.nan_to_num(-torch.inf, -torch.inf), out=reported)


class QKClip:
    """Clips a model's attention logits through its query and key weights, after each step of any torch optimizer.

    Call `step` after `optimizer.step()`, or register it as a step hook. With `ScheduleFree` it must be a hook, because
    it also scales state. It does not wait for the device. Logits that are not finite are ignored.

    Args:
        threshold: tau, the largest allowed logit; 100 in Kimi K2.
        alpha: the exponent of gamma for queries; keys get `1 - alpha`.
        process_group: ranks that share the largest logits, each with the same attention layers; None is the default
            group. Pipeline stages hold different layers, so each stage needs its own group.

    Examples:
        >>> from torch import nn
        >>> q, k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        >>> clip = QKClip(threshold=50.0)
        >>> attention = clip.add(query=q.weight, key=k.weight, heads=2)
        >>> attention.observe(torch.tensor([200.0, 10.0]))  # in the forward pass
        >>> before = q.weight.detach().clone()
        >>> clip.step().tolist()  # after optimizer.step()
        [200.0, 10.0]
        >>> (q.weight / before)[[0, 4], 0].tolist()  # a row of each head
        [0.5, 1.0]
    """

    def __init__(
        self, threshold: float = 100.0, *, alpha: float = 0.5, process_group: dist.ProcessGroup | None = None
    ) -> None:
        require_number("threshold", threshold, open_ends=True)
        require_number("alpha", alpha, 0, 1)
        self.threshold = threshold
        self.alpha = alpha
        self.process_group = process_group
        self.attentions: list[AttentionLogits] = []

    def add(
        self, query: Rows, key: Rows, *, heads: int, key_heads: int | None = None, rotary_query: Rows = ()
    ) -> AttentionLogits:
        """Add an attention layer. Its forward passes must call `observe` on the result.

        Args:
            query: the weight that computes the queries, or its rows (`HeadRows`); with a bias, a list of both.
            key: the same for the keys, without keys that all heads share, such as rotary keys of latent attention.
            heads: the number of query heads.
            key_heads: the number of key heads, if `heads / key_heads` neighbouring query heads share one.
            rotary_query: query rows for keys that all heads share; they are multiplied by gamma.
        """
        groups = key_heads or heads
        require_whole("heads", heads, 1)
        require_whole("key_heads", groups, 1)
        if heads % groups:
            raise ValueError(f"heads={heads} must be a multiple of key_heads={groups}")
        parts = []
        uses = ((query, heads, self.alpha), (key, groups, 1 - self.alpha), (rotary_query, heads, 1.0))
        for weights, count, power in uses:
            entries: list[Any] = list(weights) if type(weights) in (list, tuple) else [weights]
            for entry in entries:
                if not isinstance(getattr(entry, "param", entry), Tensor):
                    kind = type(entry).__name__
                    raise TypeError(f"QK-clip takes weights and biases or HeadRows of them, not a {kind}")
                rows: HeadRows = entry if isinstance(entry, HeadRows) else HeadRows(entry)
                units = groups if rows.by_group else count
                parts.append((rows.complete(units), units, power))
        device = local(parts[0][0].param).device
        maximum = torch.full((heads,), -torch.inf, dtype=torch.float32, device=device)
        self.attentions.append(AttentionLogits(heads, groups, parts, maximum))
        return self.attentions[-1]

    def step(self) -> Tensor:
        """Clip by the logits reported since the last step; a collective with several ranks.

        Returns:
            The largest logit of each head over all ranks, in the order of `add`; -inf if none was reported.
        """
        return self._clip({})

    def __call__(self, optimizer: Optimizer | None = None, *_: Any) -> None:
        self._clip({} if optimizer is None else optimizer.state)

    @torch.no_grad()
    def _clip(self, state: State) -> Tensor:
        if not self.attentions:
            raise RuntimeError("this QKClip has no attention to clip; call add for each attention layer first")
        device = local(self.attentions[0].parts[0][0].param).device
        maxima = torch.cat([attention.maximum.to(device) for attention in self.attentions])
        if has_ranks():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.process_group)
        by_attention = maxima.split_with_sizes([attention.heads for attention in self.attentions])
        for attention, maximum in zip(self.attentions, by_attention, strict=True):
            largest = maximum.view(attention.groups, -1).amax(1)
            gamma = torch.where(largest > self.threshold, self.threshold / largest, 1.0)
            for rows, heads, power in attention.parts:
                factors = gamma.pow(power).repeat_interleave(heads // attention.groups, output_size=heads)
                rows.scale_(factors, state)
            attention.maximum.fill_(-torch.inf)  # in place, because captured forward passes write to it
        return maxima


@torch.no_grad()
def max_attention_logits(
    query: Tensor, key: Tensor, *, scale: float | None = None, is_causal: bool = False, block: int = 1024
) -> Tensor:
    """Compute the largest logit of each head without the full matrix of logits.

    Args:
        query: (..., heads, length, size), as for `torch.nn.functional.scaled_dot_product_attention`.
        key: (..., key heads, length, size); neighbouring query heads share a key head if there are fewer.
        scale: the factor of the products, `1/sqrt(size)` by default.
        is_causal: whether each query sees only keys up to its own position.
        block: how many queries to process at a time.

    Returns:
        The maxima over batch and positions, (heads,), in float32.

    Examples:
        >>> q, k = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
        >>> max_attention_logits(q, k).tolist()
        [4.0, 4.0, 4.0, 4.0]
    """
    heads, length = query.shape[-3], query.shape[-2]
    keys = key.repeat_interleave(heads // key.shape[-3], -3) if key.shape[-3] != heads else key
    maxima = []
    for begin in range(0, length, block):
        logits = (query[..., begin : begin + block, :] @ keys.mT).float()
        if is_causal:
            unseen = torch.ones_like(logits, dtype=torch.bool).triu(begin + 1)
            logits = logits.masked_fill(unseen, -torch.inf)
        maxima.append(logits.amax((-2, -1)).view(-1, heads).amax(0))
    largest: Tensor = torch.stack(maxima).amax(0)
    return largest * (query.shape[-1] ** -0.5 if scale is None else scale)
