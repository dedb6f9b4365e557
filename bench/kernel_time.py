"""Time each Triton kernel alone, against its torch twin and against the chip's own limits. Needs a CUDA device.

    PYTHONPATH=src python bench/kernel_time.py --json out/bench/kernel_time.json

Everything is checked against its twin before it is timed. Rates count what the mathematics needs: a symmetric
product half of a dense one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from muonsw.algorithms import base
from muonsw.kernels import adamw, common, elementwise, finite, momentum, move
from muonsw.kernels import normalize as normalize_kernels
from muonsw.kernels.symmetric import Tiles, symmetric_product
from muonsw.lab.model import kernels as model
from muonsw.lab.model.decoder import rotary_table
from muonsw.lab.model.grouped import gated
from muonsw.lab.model.moe import plan_routes
from muonsw.nonfinite import Flag
from muonsw.orthogonalize import normalize
from timing import device_milliseconds as milliseconds
from timing import save

TILES = [
    Tiles(128, 1, 64, 4, 3), Tiles(128, 1, 64, 8, 3), Tiles(128, 1, 64, 8, 4), Tiles(128, 1, 64, 4, 4),
    Tiles(128, 2, 64, 8, 3), Tiles(128, 2, 64, 8, 4), Tiles(128, 1, 128, 4, 2), Tiles(64, 2, 64, 4, 4),
    Tiles(128, 1, 64, 4, 3, True), Tiles(128, 1, 64, 4, 4, True), Tiles(128, 1, 64, 8, 3, True),
    Tiles(128, 2, 64, 8, 3, True), Tiles(128, 2, 64, 8, 4, True), Tiles(128, 1, 128, 4, 2, True),
    Tiles(64, 1, 64, 4, 3, True), Tiles(64, 1, 64, 4, 4, True), Tiles(64, 2, 64, 4, 3, True),
    Tiles(64, 2, 64, 4, 4, True), Tiles(64, 1, 128, 4, 3, True), Tiles(128, 1, 32, 4, 4, True),
]  # fmt: skip
SHAPES = [(40, 1024, 2816), (96, 768, 2048), (96, 512, 1408), (192, 256, 768)]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def guarded(name: str, work: Callable[[], dict]) -> dict:
    """One failing variant must not lose the others."""
    try:
        result = work()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    print(name, {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
    return result


def products(shape: tuple[int, int, int], turned: bool, tiles: Tiles | None) -> dict:
    """X X^T and the polynomial of it, by our kernel or (tiles None) by torch."""
    batch, rows, inner = shape
    X = torch.randn(batch, inner, rows, device="cuda").mT if turned else torch.randn(batch, rows, inner, device="cuda")
    X = (X / inner**0.5 / rows**0.5).half()
    R = X[:2].float() @ X[:2].float().mT
    if tiles is None:
        ms, G = milliseconds(lambda: torch.bmm(X, X.mT)), torch.bmm(X, X.mT)
        dense = milliseconds(lambda: torch.bmm(G, X, out=torch.empty_like(X)))
        return {
            "ms": ms,
            "useful": batch * rows**2 * inner / ms / 1e9,
            "QX ms": dense,
            "QX rate": 2 * batch * rows**2 * inner / dense / 1e9,
            "square ms": milliseconds(lambda: torch.baddbmm(G, G, G, beta=-4.775, alpha=2.0315)),
        }
    G = symmetric_product(X, X, tiles=tiles)
    Z = symmetric_product(G, G, alpha=2.0315, term=G, beta=-4.775, diagonal=3.4445, tiles=tiles)
    g = G[:2].float()
    wanted = 2.0315 * g @ g - 4.775 * g + 3.4445 * torch.eye(rows, device="cuda")
    errors = (distance(G[:2], R), distance(Z[:2], wanted))
    if not max(errors) < 2e-3:
        return {"error": f"wrong by {errors}"}
    ms = milliseconds(lambda: symmetric_product(X, X, tiles=tiles))
    square = milliseconds(
        lambda: symmetric_product(G, G, alpha=2.0315, term=G, beta=-4.775, diagonal=3.4445, tiles=tiles)
    )
    return {
        "ms": ms,
        "useful": batch * rows**2 * inner / ms / 1e9,
        "square ms": square,
        "square useful": batch * rows**3 / square / 1e9,
        "error": max(errors),
    }


def passes(block: int, warps: int, by_four: bool = True) -> dict:
    """The passes over memory: milliseconds and TB/s."""
    common.MIXED_BY_FOUR = by_four
    momentum.BLOCK = elementwise.BLOCK = move.BLOCK = block
    finite.BLOCK_BYTES = 4 * block
    momentum.WARPS = elementwise.WARPS = move.WARPS = finite.WARPS = warps
    shape = (8, 1024, 2816)
    grads = [torch.randn(shape, device="cuda") for _ in range(5)]
    momenta = [torch.randn(shape, device="cuda") for _ in range(5)]
    twins = [m.clone() for m in momenta]
    flag = Flag(torch.zeros((), device="cuda"))
    options = {"form": "ema", "beta": 0.95, "nesterov": True, "maximize": False, "flag": flag, "dtype": torch.float16}
    X = momentum.normalized_momentum(grads, momenta, **options)
    base.advance_momentum("ema", twins, grads, 0.95, None)
    ahead = [torch.empty_like(m) for m in twins]
    base.look_ahead("ema", twins, grads, 0.95, out=ahead)
    errors = [distance(momenta[0], twins[0]), distance(X[:8], normalize(ahead[0]))]
    del twins, ahead
    count = 40 * 1024 * 2816
    eta, phi = torch.tensor(1e-3, device="cuda"), torch.tensor(1e-4, device="cuda")
    motion = elementwise.Motion(eta, phi, flag, 2.0, False)
    weights = [torch.randn(shape, device="cuda") for _ in range(5)]
    expected = (1 - 1e-4) * weights[0] - 2e-3 * X[:8].float()
    move.move(elementwise.Weights(weights), list(X.split(8)), motion)
    errors.append(distance(weights[0], expected))
    squares = [torch.rand(shape, device="cuda") for _ in range(5)]
    steps = [torch.ones((), device="cuda") for _ in range(5)]
    result = {"errors": [f"{e:.1e}" for e in errors]}
    times = {
        "momentum": (lambda: momentum.normalized_momentum(grads, momenta, **options), 14 + 4),
        "move": (lambda: move.move(elementwise.Weights(weights), list(X.split(8)), motion), 10),
        "finite": (lambda: finite.find_bad(grads, flag.bad), 4),
        "adamw": (
            lambda: adamw.adamw(
                elementwise.Weights(weights), grads, momenta, squares, steps, (0.9, 0.95), 1e-8, False, motion
            ),
            28,
        ),
    }
    for name, (work, size) in times.items():
        ms = milliseconds(work)
        result |= {f"{name} ms": ms, f"{name} TB/s": size * count / ms / 1e9}
    fused = milliseconds(
        lambda: torch._fused_adamw_(
            weights,
            grads,
            momenta,
            squares,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    )
    norms = milliseconds(lambda: torch.stack(torch._foreach_norm(grads, float("inf"))))
    return result | {"torch fused adamw ms": fused, "torch norm ms": norms}


def low_precision(block: int, warps: int, by_four: bool) -> dict:
    """AdamW of bfloat16 weights and gradients with float32 state, stochastic rounding; and torch's, all in bfloat16."""
    elementwise.BLOCK, elementwise.WARPS, common.MIXED_BY_FOUR = block, warps, by_four
    shape, some = (16, 1024, 2816), range(5)
    weights, grads = ([torch.randn(shape, device="cuda").bfloat16() for _ in some] for _ in range(2))
    averages, squares = ([torch.rand(shape, device="cuda") for _ in some] for _ in range(2))
    steps = [torch.ones((), device="cuda") for _ in some]
    flag, count = Flag(torch.zeros((), device="cuda")), 5 * 16 * 1024 * 2816
    eta, phi = torch.tensor(1e-3, device="cuda"), torch.tensor(1e-4, device="cuda")
    motion = elementwise.Motion(eta, phi, flag, 1.0, False)
    rounded = elementwise.Weights(weights, "stochastic", counters=steps, keys=list(some))
    ours = milliseconds(lambda: adamw.adamw(rounded, grads, averages, squares, steps, (0.9, 0.95), 1e-8, False, motion))
    check = milliseconds(lambda: finite.find_bad(grads, flag.bad))
    both = {"adamw ms": ours, "adamw TB/s": 22 * count / ours / 1e9, "finite ms": check}
    low = [[t.bfloat16() for t in tensors] for tensors in (averages, squares)]
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    fused = milliseconds(
        lambda: torch._fused_adamw_(weights, grads, *low, [], steps, **hyper, amsgrad=False, maximize=False)
    )
    return both | {"finite TB/s": 2 * count / check / 1e9, "torch fused bfloat16 ms": fused}


def slots(short: int, long: int, warps: int) -> dict:
    """What members of the two slots add to Muon: milliseconds and TB/s of what must be read and written."""
    normalize_kernels.SHORT, normalize_kernels.LONG, normalize_kernels.WARPS = short, long, warps
    shape, result = (40, 1024, 2816), {}
    U = torch.randn(shape, device="cuda").half()
    V, rows, columns = (torch.rand(s, device="cuda") for s in (shape, (40, 1024, 1), (40, 1, 2816)))
    grads, momenta, squares = (list(torch.rand(shape, device="cuda").split(8)) for _ in range(3))
    options = {"form": "ema", "beta": 0.95, "nesterov": True, "maximize": False, "flag": None}
    snapped = {"beta2": 0.95, "eps": 1e-10, "snap": False, "flag": None}

    def preconditioned(*chosen: object) -> Callable[[], Tensor]:
        first = momentum.Precondition(*chosen) if chosen else None
        return lambda: momentum.normalized_momentum(grads, momenta, **options, dtype=torch.float16, precondition=first)

    times = {
        "normuon rows": (lambda: normalize_kernels.normuon_(U, [rows], by_row=True, **snapped), 6),
        "normuon columns": (lambda: normalize_kernels.normuon_(U, [columns], by_row=False, **snapped), 6),
        "muon_plus": (lambda: normalize_kernels.muon_plus_(U), 6),
        "adamuon": (lambda: normalize_kernels.adamuon_(U, [V], beta2=0.95, eps=1e-8, flag=None), 16),
        "momentum": (preconditioned(), 18),
        "sign": (preconditioned("sign"), 18),
        "muon2": (preconditioned("muon2", squares, 0.95, 1e-10), 26),
        "equalize": (preconditioned("equalize"), 18),
        "momentum alone": (lambda: momentum.advance_momenta(grads, momenta, squares, **options), 16),
    }
    for name, (work, size) in times.items():
        ms = milliseconds(work)
        result |= {f"{name} ms": ms, f"{name} TB/s": size * U.numel() / ms / 1e9}
    return result


def of_the_model(tokens: int, width: int, ff: int, vocab: int) -> dict:
    """The kernels of the lab's model: milliseconds and TB/s of what must be read and written."""
    rows, cuda = 2 * tokens, {"device": "cuda"}
    fused, grad = torch.randn(rows, 2 * ff, **cuda).bfloat16(), torch.randn(rows, ff, **cuda).bfloat16()
    qkv = torch.randn(tokens // 1024, 1024, 3 * width, **cuda).bfloat16()
    table = tuple(part.float().cuda() for part in rotary_table(1024, 64, 10000.0))
    heads = model.rotate_heads(qkv, *table)
    logits, targets = torch.randn(8192, vocab, **cuda).bfloat16(), torch.randint(vocab, (8192,), **cuda)
    losses, router = torch.empty(8192, **cuda), torch.randn(tokens, 8, **cuda)
    expected = torch.nn.functional.cross_entropy(logits[:64].float(), targets[:64], reduction="none")
    model.softmax_losses_(logits, targets, losses, 1.0, None)
    chosen, *routes = model.choose_experts(router, 2)
    result = {
        "errors": [
            f"{error:.1e}"
            for error in (
                distance(model.gate(fused[:64]), gated(fused[:64].double())),
                distance(model.join_heads(*heads, *table), qkv),
                distance(losses[:64], expected),
            )
        ],
        "routes equal": all(torch.equal(a, b) for a, b in zip(routes, plan_routes(chosen, 8), strict=True)),
    }
    times = {
        "gate": (lambda: model.gate(fused), 6 * rows * ff),
        "gate backward": (lambda: model.gate_backward(grad, fused), 12 * rows * ff),
        "rotate": (lambda: model.rotate_heads(qkv, *table), 4 * qkv.numel()),
        "join": (lambda: model.join_heads(*heads, *table), 4 * qkv.numel()),
        "softmax": (lambda: model.softmax_losses_(logits, targets, losses, 1.0, 1.0), 4 * logits.numel()),
        "choose": (lambda: model.choose_experts(router, 2), 4 * router.numel()),
    }
    for name, (work, size) in times.items():
        ms = milliseconds(work)
        result |= {f"{name} ms": ms, f"{name} TB/s": size / ms / 1e9}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("out/bench/kernel_time.json"))
    parser.add_argument("--only", nargs="+", default=["passes", "bfloat16", "slots", "model", "products"])
    args = parser.parse_args()
    record: dict[str, dict] = {}

    def add(kind: str, name: str, work: Callable[[], dict]) -> None:
        if kind in args.only:
            record[name] = guarded(name, work)

    for block, warps in ((4096, 8), (2048, 8), (2048, 4), (1024, 4), (4096, 4)):
        add("passes", f"passes {block} {warps}", lambda b=block, w=warps: passes(b, w))
    add("passes", "passes 2048 4, widths as they are", lambda: passes(2048, 4, False))
    for variant in ((2048, 4, False), (2048, 4, True), (1024, 4, True), (4096, 8, True), (4096, 4, True)):
        add("bfloat16", f"bfloat16 {variant}", lambda v=variant: low_precision(*v))
    momentum.BLOCK, momentum.WARPS = move.BLOCK, move.WARPS = elementwise.BLOCK, elementwise.WARPS = 2048, 4
    common.MIXED_BY_FOUR, finite.BLOCK_BYTES, finite.WARPS = True, 8192, 4
    for tile in ((16, 256, 4), (8, 256, 4), (32, 128, 4), (8, 512, 4), (32, 256, 8)):
        add("slots", f"slots {tile}", lambda t=tile: slots(*t))
    for sizes in ((32768, 256, 768, 4096), (65536, 256, 768, 50304), (65536, 1024, 2816, 50304)):
        add("model", f"model {sizes}", lambda s=sizes: of_the_model(*s))
    for shape in SHAPES:
        for turned in (False, True) if shape[2] == 2816 else (False,):
            for tiles in (None, *TILES):
                name = f"{shape} {'turned ' if turned else ''}{tuple(tiles) if tiles else 'torch'}"
                add("products", name, lambda s=shape, u=turned, t=tiles: products(s, u, t))
    save(record, args.json)


if __name__ == "__main__":
    main()
