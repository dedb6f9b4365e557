"""Triton kernels of the model on a GPU.

| function | one visit for | its torch twin |
|---|---|---|
| `softmax_losses_` | losses of a chunk of logits, and the gradient in their place | `loss._visit` |
| `choose_experts` | the largest logits of each token, and where its rows go | `torch.topk`, `moe.plan_routes` |
| `add_rows` | rows of each token's choices, gathered, weighted and added up | `moe.add_choices` |
| `gate`, `gate_backward` | SwiGLU's gate; its gradients and its output once more | `grouped.gated` |
| `rotate_heads`, `join_heads` | q, k and v cut apart and rotated; the same backwards | `decoder.rotate` |

The module imports Triton, so it is imported where `muonsw.kernels.available` has said yes and nowhere else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on

SOFTMAX_BLOCK, SOFTMAX_WARPS = 4096, 8
# Tokens of one program; the second kernel reads the counts of all programs, so there should not be too many.
ROUTE_BLOCK, ROUTE_WARPS = 256, 4
# Rows and columns of one program where a kernel works entry by entry.
ENTRY_ROWS, ENTRY_COLUMNS, ENTRY_WARPS = 8, 256, 4
HEAD_ROWS, HEAD_PAIRS, HEAD_WARPS = 16, 64, 4


@triton.jit
def _softmax(
    logits, targets, losses, scale, grad_scale, columns, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: its loss, then softmax minus one-hot over the logits, which the second reading finds in the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    right = tl.load(logits + target).to(tl.float32) * scale
    peak = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(z, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), axis=0)
        peak = higher
    tl.store(losses + row, tl.log(total) + peak - right)
    if GRADIENT:
        factor = grad_scale / total
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
            grad = tl.exp(z - peak) * factor
            grad = tl.where(column == target, grad - grad_scale, grad)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < columns)


def softmax_losses_(
    logits_NV: Tensor, targets_N: Tensor, losses_N: Tensor, scale: float, grad_scale: float | None
) -> None:
    """Write the float32 cross-entropy of each row of `scale * logits` into `losses_N`.

    Its gradient with respect to the multiplied logits, times `grad_scale`, replaces the logits, which are contiguous.
    """
    rows, columns = logits_NV.shape
    block = min(SOFTMAX_BLOCK, triton.next_power_of_2(columns))
    sizes = {"GRADIENT": grad_scale is not None, "BLOCK": block, "num_warps": SOFTMAX_WARPS}
    given = (logits_NV, targets_N, losses_N, scale, grad_scale or 0.0, columns)
    launch_on(logits_NV.device, _softmax, (rows,), *given, **sizes)


@triton.jit
def _choose(
    logits, chosen, counts, tokens, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The experts of a block of tokens, and how many rows each expert gets from them."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDE)
    inside = token < tokens
    z = tl.load(
        logits + token[:, None] * EXPERTS + expert[None, :],
        mask=inside[:, None] & (expert < EXPERTS)[None, :],
        other=-float("inf"),
    )
    z = tl.where(z == z, z, -float("inf"))  # threads that compare NaNs would not agree
    rows = tl.zeros((WIDE,), tl.int32)
    for choice in tl.static_range(TOP_K):
        # a row without any number must not end outside
        best = tl.minimum(tl.argmax(z, axis=1), EXPERTS - 1)
        taken = expert[None, :] == best[:, None]
        z = tl.where(taken, -float("inf"), z)
        rows += tl.sum((taken & inside[:, None]).to(tl.int32), axis=0)
        tl.store(chosen + token * TOP_K + choice, best.to(tl.int64), mask=inside)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, rows, mask=expert < EXPERTS)


@triton.jit
def _place(
    chosen,
    counts,
    order,
    inverse,
    ends,
    tokens,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the rows of a block of tokens go: after all rows of lower experts, and of earlier tokens of the same."""
    program = tl.program_id(0)
    expert = tl.arange(0, WIDE)
    block = tl.arange(0, BLOCKS)
    count = tl.load(
        counts + block[:, None] * EXPERTS + expert[None, :],
        mask=(block < tl.num_programs(0))[:, None] & (expert < EXPERTS)[None, :],
        other=0,
    )
    whole = tl.sum(count, axis=0)
    end = tl.cumsum(whole, axis=0)
    first = end - whole + tl.sum(tl.where((block < program)[:, None], count, 0), axis=0)
    if program == 0:
        tl.store(ends + expert, end, mask=expert < EXPERTS)
    token = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    selected = tl.zeros((BLOCK, WIDE), tl.int32)
    for choice in tl.static_range(TOP_K):
        mine = tl.load(chosen + token * TOP_K + choice, mask=inside, other=-1)
        selected += (expert[None, :] == mine[:, None]).to(tl.int32)
    before = tl.cumsum(selected, axis=0) - selected + first[None, :]
    for choice in tl.static_range(TOP_K):
        mine = tl.load(chosen + token * TOP_K + choice, mask=inside, other=-1)
        at = (expert[None, :] == mine[:, None]).to(tl.int32)
        place = tl.sum(at * before, axis=1).to(tl.int64)
        before += at
        tl.store(inverse + token * TOP_K + choice, place, mask=inside)
        tl.store(order + place, token * TOP_K + choice, mask=inside)


def choose_experts(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `top_k` experts of each token, largest float32 logit first, and the three tensors of `moe.Routes`."""
    tokens, experts = logits_NE.shape
    blocks, wide = triton.cdiv(tokens, ROUTE_BLOCK), triton.next_power_of_2(experts)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_NE.device)
    order, inverse = (torch.empty_like(chosen).view(-1) for _ in range(2))
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=logits_NE.device)
    ends = torch.empty(experts, dtype=torch.int32, device=logits_NE.device)
    shared = {"EXPERTS": experts, "TOP_K": top_k, "WIDE": wide, "BLOCK": ROUTE_BLOCK, "num_warps": ROUTE_WARPS}
    device = logits_NE.device
    launch_on(device, _choose, (blocks,), logits_NE, chosen, counts, tokens, **shared)
    many = triton.next_power_of_2(blocks)
    launch_on(device, _place, (blocks,), chosen, counts, order, inverse, ends, tokens, BLOCKS=many, **shared)
    return chosen, order, inverse, ends


@triton.jit
def _add_rows(
    rows, places, weights, out, tokens, width, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens) & (column < width)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + choice, mask=token < tokens, other=0)
        row = tl.load(rows + place * width + column, mask=inside).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * TOP_K + choice, mask=token < tokens, other=0.0)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def add_rows(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """The sum of the rows at each token's places, contiguous; weighted, in float32, if there are weights."""
    (tokens, top_k), width = places_NK.shape, rows_RD.shape[1]
    out = rows_RD.new_empty(tokens, width)
    grid = (triton.cdiv(tokens, ENTRY_ROWS), triton.cdiv(width, ENTRY_COLUMNS))
    sizes = {"TOP_K": top_k, "ROWS": ENTRY_ROWS, "COLUMNS": ENTRY_COLUMNS, "num_warps": ENTRY_WARPS}
    launch_on(rows_RD.device, _add_rows, grid, rows_RD, places_NK, weights_NK, out, tokens, width, **sizes)
    return out


@triton.jit
def _gate(fused, gated, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    gate = tl.load(fused + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(fused + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(gated + row * width + column, (gate * tl.sigmoid(gate) * up).to(gated.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(grad, fused, grad_fused, gated, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    g = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    gate = tl.load(fused + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(fused + row * 2 * width + width + column, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(gate)
    silu = gate * open_
    slope = open_ * (1 + gate * (1 - open_))
    dtype = fused.dtype.element_ty
    tl.store(grad_fused + row * 2 * width + column, (g * up * slope).to(dtype), mask=inside)
    tl.store(grad_fused + row * 2 * width + width + column, (g * silu).to(dtype), mask=inside)
    tl.store(gated + row * width + column, (silu * up).to(dtype), mask=inside)


def gate(fused_RF: Tensor) -> Tensor:
    """`silu(gate) * up` of rows that hold both side by side, contiguous."""
    rows, width = fused_RF.shape[0], fused_RF.shape[1] // 2
    gated = fused_RF.new_empty(rows, width)
    grid = (triton.cdiv(rows, ENTRY_ROWS), triton.cdiv(width, ENTRY_COLUMNS))
    sizes = {"ROWS": ENTRY_ROWS, "COLUMNS": ENTRY_COLUMNS, "num_warps": ENTRY_WARPS}
    launch_on(fused_RF.device, _gate, grid, fused_RF, gated, rows, width, **sizes)
    return gated


def gate_backward(grad_RF: Tensor, fused_RF: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of what `gate` was given, and what `gate` gave, which is cheaper to compute again than to keep."""
    rows, width = grad_RF.shape
    grad_fused, gated = torch.empty_like(fused_RF), torch.empty_like(grad_RF)
    grid = (triton.cdiv(rows, ENTRY_ROWS), triton.cdiv(width, ENTRY_COLUMNS))
    sizes = {"ROWS": ENTRY_ROWS, "COLUMNS": ENTRY_COLUMNS, "num_warps": ENTRY_WARPS}
    launch_on(grad_RF.device, _gate_backward, grid, grad_RF, fused_RF, grad_fused, gated, rows, width, **sizes)
    return grad_fused, gated


@triton.jit
def _copy_rotated(qkv, away, cos, sin, inside, HALF: tl.constexpr, JOIN: tl.constexpr):
    """From fused rows to heads, or (JOIN) back with the angles reversed, which is the gradient."""
    source, target = qkv, away
    if JOIN:
        source, target = away, qkv
        sin = -sin
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)
    tl.store(target, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _heads(
    qkv,
    q,
    k,
    v,
    cosines,
    sines,
    rows,
    length,
    width,
    q_sequence,
    q_head,
    q_position,
    k_sequence,
    k_head,
    k_position,
    v_sequence,
    v_head,
    v_position,
    HALF: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Some rows and pairs of q, k and v; only the first two have angles."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    inside = (row < rows) & (pair < width // 2)
    sequence, position, head, angle = row // length, row % length, pair // HALF, pair % HALF
    cos = tl.load(cosines + position * HALF + angle, mask=inside)
    sin = tl.load(sines + position * HALF + angle, mask=inside)
    qkv += row * 3 * width + head * 2 * HALF + angle
    q += sequence * q_sequence + head * q_head + position * q_position + angle
    k += sequence * k_sequence + head * k_head + position * k_position + angle
    v += sequence * v_sequence + head * v_head + position * v_position + angle
    _copy_rotated(qkv, q, cos, sin, inside, HALF, JOIN)
    _copy_rotated(qkv + width, k, cos, sin, inside, HALF, JOIN)
    _copy_rotated(qkv + 2 * width, v, 1.0, 0.0, inside, HALF, JOIN)


def _move_heads(qkv_BTD: Tensor, parts: list[Tensor], cos_TC: Tensor, sin_TC: Tensor, *, join: bool) -> None:
    batch, length, fused = qkv_BTD.shape
    rows, width = batch * length, fused // 3
    grid = (triton.cdiv(rows, HEAD_ROWS), triton.cdiv(width // 2, HEAD_PAIRS))
    strides = (stride for part in parts for stride in part.stride()[:3])
    given = (qkv_BTD, *parts, cos_TC, sin_TC, rows, length, width, *strides)
    sizes = {"HALF": cos_TC.shape[1], "JOIN": join, "ROWS": HEAD_ROWS, "PAIRS": HEAD_PAIRS, "num_warps": HEAD_WARPS}
    launch_on(qkv_BTD.device, _heads, grid, *given, **sizes)


def rotate_heads(qkv_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, T, C) of contiguous fused rows; q and k are rotated, in float32."""
    batch, length, fused = qkv_BTD.shape
    head_dim = 2 * cos_TC.shape[1]
    shape = (batch, length, fused // 3 // head_dim, head_dim)
    parts = [qkv_BTD.new_empty(shape).transpose(1, 2) for _ in range(3)]
    _move_heads(qkv_BTD, parts, cos_TC, sin_TC, join=False)
    return parts[0], parts[1], parts[2]


def join_heads(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """The inverse of `rotate_heads`, which is its gradient too; any layout whose last axis has no gaps."""
    batch, heads, length, head_dim = q_BHTC.shape
    qkv_BTD = q_BHTC.new_empty(batch, length, 3 * heads * head_dim)
    _move_heads(qkv_BTD, [q_BHTC, k_BHTC, v_BHTC], cos_TC, sin_TC, join=True)
    return qkv_BTD
