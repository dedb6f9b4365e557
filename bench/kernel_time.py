"""Time our Triton kernels against the same work in torch. Needs a CUDA device and no other package.

    PYTHONPATH=src python bench/kernel_time.py

First each kernel alone, on the matrices of one expert layer of the paper's width 1024. Then a full optimizer step for
each option before and after Muon's orthogonalizer: eager on the w1024 set, with the option's kernel and with torch in
its place; then replayed on GPT-2's matrices, which needs the kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from muonsw import MuonSW, codecs
from muonsw.addons.replay import SETTLED
from muonsw.algorithms import base
from muonsw.apply import shrink_and_move
from muonsw.kernels import normalize
from muonsw.kernels.adamw import adamw
from muonsw.kernels.finite import find_bad
from muonsw.kernels.momentum import normalized_momentum
from muonsw.kernels.move import Weights, move
from muonsw.kernels.symmetric import symmetric_product
from muonsw.nonfinite import all_finite
from muonsw.orthogonalize import NS5
from muonsw.orthogonalize import normalize as divide_by_norm
from muonsw.precision import StoredState
from muonsw.slots import PRECONDITIONERS
from muonsw.work import StepContext
from step_time import SETS, Shape, grouped

Matrices = list[tuple[Shape, dict[str, Any]]]

# Shapes and group options of GPT-2.
GPT2: Matrices = [
    ((2304, 768), {"split_sizes": (768, 768, 768)}),
    ((768, 768), {}),
    ((3072, 768), {}),
    ((768, 3072), {}),
] * 12

# Options before and after the orthogonalizer, timed with and without their kernels.
MEMBERS = {
    "NorMuon": {"normalize": "normuon"},
    "AdaMuon": {"precondition": "sign", "normalize": "adamuon"},
    "Muon+": {"normalize": "muon_plus"},
    "Muon^2": {"precondition": "muon2"},
    "MuonEq": {"precondition": "equalize"},
    "sign": {"precondition": "sign"},
}


def milliseconds(work: Callable[[], object], warming: int = 3, calls: int = 10) -> float:
    """Median device time of a call."""
    for _ in range(warming):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host launches the timed calls
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def show(name: str, ours: float, theirs: float, error: float) -> None:
    print(f"{name:<22} {ours:>9.3f} {theirs:>9.3f} {theirs / ours:>8.2f} {error:>10.1e}", flush=True)


def distance(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def compare(name: str, ours: Callable[[], object], torchs: Callable[[], object], changed: list[Tensor]) -> None:
    """Time both, and show how far apart one call of each leaves the first tensor."""
    start = [tensor.clone() for tensor in changed]
    torchs()
    expected = changed[0].clone()
    torch._foreach_copy_(changed, start)
    ours()
    error = distance(changed[0], expected)
    show(name, milliseconds(ours), milliseconds(torchs), error)


def time_kernels() -> None:
    """Each kernel alone."""
    shape, count = (8, 1024, 2816), 5
    grads, momenta, weights, squares = ([torch.rand(shape, device="cuda") for _ in range(count)] for _ in range(4))
    steps = [torch.ones((), device="cuda") for _ in range(count)]
    group = MuonSW(weights, lr=0.1, matrix="stack").param_groups[0]
    X = torch.empty(8 * count, *shape[1:], dtype=torch.float16, device="cuda")

    def ours_momentum() -> None:
        X.copy_(cast("Tensor", normalized_momentum(group, grads, momenta, (), shape[1:], X.dtype, None)))

    def torchs_momentum() -> None:
        base.advance_momentum("ema", momenta, grads, 0.95, None)
        ahead = [torch.empty_like(m) for m in momenta]
        base.look_ahead("ema", momenta, grads, 0.95, out=ahead)
        X.copy_(divide_by_norm(torch.cat(ahead), X.dtype))

    compare("momentum", ours_momentum, torchs_momentum, [X, *momenta])

    ctx, directions = StepContext(1e-3, 1e-4, 2**30), list(X.split(8))
    compare(
        "move",
        lambda: move(Weights(weights), directions, 1.0, False, ctx),
        lambda: shrink_and_move(weights, [d.float() for d in directions], 1e-3, 1e-4, False),
        weights,
    )

    def ours_adamw() -> None:
        options = {"betas": (0.9, 0.95), "eps": 1e-8, "maximize": False, "cautious": False}
        adamw(options, Weights(weights), grads, StoredState(momenta), StoredState(squares), steps, ctx)

    def torchs_adamw() -> None:
        hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(weights, grads, momenta, squares, [], steps, **hyper, amsgrad=False, maximize=False)

    compare("adamw", ours_adamw, torchs_adamw, [*weights, *momenta, *squares])

    bad = torch.zeros((), device="cuda")
    show("finite", milliseconds(lambda: find_bad(grads, bad)), milliseconds(lambda: all_finite(grads)), float(bad))

    R = symmetric_product(X, X)
    product = milliseconds(lambda: symmetric_product(X, X)), milliseconds(lambda: torch.bmm(X, X.mT))
    show("X X^T", *product, distance(R, torch.bmm(X, X.mT)))
    a, b, c = NS5

    def torchs_polynomial() -> Tensor:
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
        Z.diagonal(dim1=-2, dim2=-1).add_(a)
        return Z

    def ours_polynomial() -> Tensor:
        return symmetric_product(R, R, alpha=c, term=R, beta=b, diagonal=a)

    times = milliseconds(ours_polynomial), milliseconds(torchs_polynomial)
    show("a I + b R + c R^2", *times, distance(ours_polynomial(), torchs_polynomial()))

    x = torch.randn(8192, 2816, device="cuda")
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(x.shape[0], x.shape[1] // cast("int", codecs.block_length(tuple(x.shape))), device="cuda")
    compare(
        "8-bit codes",
        lambda: codecs.encode(x, codes, scale),
        lambda: codecs.encode(x, codes, scale, fused=False),
        [codes],
    )


def time_members(name: str, matrices: Matrices, replay: bool) -> None:
    """Time a full step with each option, and with torch in place of its kernel unless steps are replayed."""
    params = [nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape, _ in matrices]
    for param in params:
        param.grad = torch.randn_like(param)
    last, start = params[-1], params[-1].detach().clone()

    def timed(options: dict[str, str]) -> tuple[float, Tensor]:
        last.data.copy_(start)
        optimizer = MuonSW(grouped(matrices, params), lr=1e-3, weight_decay=0.1, replay=replay, **options)
        optimizer.step()
        moved = last.detach() - start
        time = milliseconds(optimizer.step, warming=SETTLED + 3)
        if replay and not optimizer._replay._replays:
            raise RuntimeError(f"steps were not replayed: {optimizer._replay._failure}")
        return time, moved

    plain, _ = timed({})
    print(f"{name + ', Muon':<22} {plain:>9.3f}")
    for member, options in MEMBERS.items():
        ours, moved = timed(options)
        if replay:
            print(f"{name + ', ' + member:<22} {ours:>9.3f}", flush=True)
            continue
        without_kernels = {key: member._replace(has_kernel=False) for key, member in PRECONDITIONERS.items()}
        with (
            mock.patch.object(normalize, "slice_factors", return_value=None),
            mock.patch.dict(PRECONDITIONERS, without_kernels),
        ):
            theirs, expected = timed(options)
        show(f"{name}, {member}", ours, theirs, distance(moved, expected))


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, milliseconds")
    print(f"{'':<22} {'kernels':>9} {'torch':>9} {'speedup':>8} {'difference':>10}")
    time_kernels()
    torch.cuda.empty_cache()
    time_members("w1024", SETS["w1024"].ours, replay=False)
    torch.cuda.empty_cache()
    time_members("GPT-2", GPT2, replay=True)


if __name__ == "__main__":
    main()
