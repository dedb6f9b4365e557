"""Time one optimizer step against other libraries: same process, same tensors, steps in turn, medians.

    python bench/step_time.py                          # this machine's CPU
    python bench/step_time.py --device cuda --sets w1024

Ours holds experts as stacks `(8, out, in)` with fused gate and up projections, as in the lab's model. Dion gets stacks
of single projections; the others accept only lists of the same matrices. Before anything is timed, our steps are
compared with those of torch's optimizers. Dion and pytorch-optimizer are timed if installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muonsw import SGDSW, AdamWSW, MuonSW, ScheduleFree
from muonsw.addons.replay import SETTLED
from muonsw.registry import unknown
from timing import WARMING_ROUNDS, chosen_device, environment, in_turn, milliseconds, save
from timing import peak_extra_bytes as extra_bytes

LR, LAMBDA = 1e-3, 0.1

Shape = tuple[int, ...]
# Makes parameters and gradients of these shapes, equal for all optimizers.
Make = Callable[[Sequence[Shape]], list[nn.Parameter]]
Built = tuple[Optimizer, list[nn.Parameter]]


class Matrices(NamedTuple):
    """One set of matrices in three forms: ours, with group options; stacks; and 2-D shapes."""

    ours: list[tuple[Shape, dict[str, Any]]]
    stacks: list[Shape]
    plain: list[Shape]


Contender = Callable[[Matrices, Make], Built]


def moe(width: int, ff: int, layers: int = 12, experts: int = 8) -> Matrices:
    """The hidden matrices of the paper's mixture-of-experts decoder."""
    square: list[Shape] = [(width, width)] * (4 * layers)
    ours: list[tuple[Shape, dict[str, Any]]] = [(shape, {}) for shape in square]
    fused = ((experts, 2 * ff, width), {"matrix": "stack", "split_sizes": (ff, ff)})
    ours += [fused, ((experts, width, ff), {"matrix": "stack"})] * layers
    stacks = square + ([(experts, ff, width)] * 2 + [(experts, width, ff)]) * layers
    plain = square + ([(ff, width)] * (2 * experts) + [(width, ff)] * experts) * layers
    return Matrices(ours, stacks, plain)


def listed(shapes: list[Shape]) -> Matrices:
    """Matrices that all optimizers hold in the same way."""
    return Matrices([(shape, {}) for shape in shapes], shapes, shapes)


SETS: dict[str, Matrices] = {
    "small": listed([(64, 64), (64, 192)] * 100),
    "square512": listed([(512, 512)] * 8),
    "wide": listed([(256, 1024)] * 16),
    "w256": moe(256, 768),
    "w512": moe(512, 1408),
    "w768": moe(768, 2048),
    "w1024": moe(1024, 2816),
}


def maker(device: torch.device, dtype: torch.dtype = torch.float32) -> Make:
    def make(shapes: Sequence[Shape]) -> list[nn.Parameter]:
        generator = torch.Generator(device).manual_seed(0)
        params = []
        for scale in (0.02, 1.0):
            tensors = [(scale * torch.randn(s, generator=generator, device=device)).to(dtype) for s in shapes]
            params = params or [nn.Parameter(tensor) for tensor in tensors]
        for param, grad in zip(params, tensors, strict=True):
            param.grad = grad
        return params

    return make


def grouped(shapes: Sequence[tuple[Shape, dict[str, Any]]], params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """A group for each kind of matrix, as `for_model` makes them."""
    groups: dict[str, dict[str, Any]] = {}
    for (_, settings), param in zip(shapes, params, strict=True):
        groups.setdefault(repr(settings), {**settings, "params": []})["params"].append(param)
    return list(groups.values())


def ours(orthogonalizer: str = "auto", group: Mapping[str, Any] | None = None, **options: Any) -> Contender:
    """MuonSW, or another algorithm through options of its groups."""

    def build(matrices: Matrices, make: Make) -> Built:
        params = make([shape for shape, _ in matrices.ours])
        groups = [{**settings, **(group or {})} for settings in grouped(matrices.ours, params)]
        optimizer = MuonSW(groups, lr=LR, weight_decay=LAMBDA, orthogonalizer=orthogonalizer, **options)
        return optimizer, params

    return build


def theirs(build: Callable[[list[nn.Parameter]], Any], *, stacked: bool = False) -> Contender:
    """An optimizer that takes a list of parameters."""

    def built(matrices: Matrices, make: Make) -> Built:
        params = make(matrices.stacks if stacked else matrices.plain)
        return build(params), params

    return built


def stacked(kind: Callable[..., Optimizer], **options: Any) -> Contender:
    """An elementwise optimizer, which accepts stacks."""
    return theirs(lambda params: kind(params, lr=LR, weight_decay=LAMBDA, **options), stacked=True)


def schedule_free(params: list[nn.Parameter]) -> ScheduleFree:
    optimizer = ScheduleFree(AdamWSW(params, lr=LR, weight_decay=LAMBDA, decay="constant", betas=(0.0, 0.95)))
    optimizer.train()
    return optimizer


def torch_muon(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon(params, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw")


def dion(**options: Any) -> Contender:
    from dion import Muon

    settings: dict[str, Any] = {"nesterov": True, "adjust_lr": "rms_norm", **options}
    return theirs(lambda p: Muon(p, lr=LR, weight_decay=LAMBDA, **settings), stacked=True)


def pytorch_optimizer() -> Contender:
    from pytorch_optimizer import Muon

    return theirs(lambda p: Muon([{"params": p, "use_muon": True}], lr=LR, weight_decay=LAMBDA))


# Each raises an ImportError if its package is not installed.
PEERS: dict[str, Callable[[], Contender]] = {
    "dion": dion,
    "dion triton": lambda: dion(use_triton=True),
    "pytorch-optimizer": pytorch_optimizer,
}
PACKAGES = ("dion", "pytorch-optimizer")

OURS_AND_TORCHS: dict[str, Contender] = {
    "muonsw": ours(),
    "muonsw plain": ours("newton_schulz"),
    "muonsw unchecked": ours(nonfinite="propagate"),
    "muonsw eager": ours(replay=False),
    "muonsw gram": ours("gram_newton_schulz"),
    "normuon": ours(normalize="normuon"),
    "muon_plus": ours(normalize="muon_plus"),
    "adamuon": ours(precondition="sign", normalize="adamuon"),
    "muon2": ours(precondition="muon2"),
    "equalize": ours(precondition="equalize"),
    "soap_muon": ours(precondition="soap"),
    "aurora": ours("aurora"),
    **{name: ours(group={"algorithm": name}) for name in ("soap", "shampoo", "kl_shampoo", "asgo", "dion2", "lion")},
    "hyperball": ours(norm="hyperball"),
    "muonsw bfloat16": ours(state_dtype="bfloat16"),
    "muonsw int8": ours(state_dtype="int8"),
    "muonsw offload": ours(offload=True),
    "muonsw int8 offload": ours(state_dtype="int8", offload=True),
    "torch.optim.Muon": theirs(torch_muon),
    "AdamWSW": stacked(AdamWSW),
    "AdamWSW unchecked": stacked(AdamWSW, nonfinite="propagate"),
    "AdamWSW eager": stacked(AdamWSW, replay=False),
    "AdamWSW bfloat16": stacked(AdamWSW, state_dtype="bfloat16"),
    "AdamWSW int8": stacked(AdamWSW, state_dtype="int8"),
    "AdamWSW offload": stacked(AdamWSW, offload=True),
    "schedule_free": theirs(schedule_free, stacked=True),
    "torch AdamW fused": stacked(torch.optim.AdamW, betas=(0.9, 0.95), fused=True),
    "SGDSW": stacked(SGDSW, momentum=0.9),
    "SGDSW unchecked": stacked(SGDSW, momentum=0.9, nonfinite="propagate"),
    "SGDSW eager": stacked(SGDSW, momentum=0.9, replay=False),
    "torch SGD fused": stacked(torch.optim.SGD, momentum=0.9, fused=True),
}
USUAL = ("muonsw", "muonsw eager", "muonsw plain", "torch.optim.Muon", "AdamWSW", "torch AdamW fused", "SGDSW",
         "torch SGD fused")  # fmt: skip


def contenders(only: Sequence[str] | None = None) -> tuple[dict[str, Contender], list[str]]:
    """The optimizers to time, by default the usual ones and all peers, and the names of missing peers."""
    names = only or (*USUAL, *PEERS)
    chosen, missing = {}, []
    for name in names:
        try:
            chosen[name] = OURS_AND_TORCHS[name] if name in OURS_AND_TORCHS else PEERS[name]()
        except KeyError:
            raise SystemExit(unknown("optimizer", name, [*OURS_AND_TORCHS, *PEERS])) from None
        except ImportError:
            missing.append(name)
    return chosen, missing


# Ours, torch's, and the relative difference allowed between their steps: torch's Muon multiplies in bfloat16.
PAIRS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer], float]] = {
    "muon": (lambda p: MuonSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"), torch_muon, 0.03),
    "adamw": (
        lambda p: AdamWSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"),
        lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=LAMBDA, betas=(0.9, 0.95), fused=True),
        1e-4,
    ),
}
CHECKED_SHAPES = [(64, 64), (64, 192), (256, 768), (768, 256), (512, 512), (600, 1000)]


def check(device: torch.device, shapes: Sequence[Shape] = CHECKED_SHAPES) -> dict[str, float]:
    """The largest relative distance between three of our steps and torch's; exit if it is too large."""
    distances, make = {}, maker(device)
    for name, (our, torchs, bound) in PAIRS.items():
        mine, other = make(shapes), make(shapes)
        start = [param.detach().clone() for param in mine]
        for optimizer in (our(mine), torchs(other)):
            for _ in range(3):
                optimizer.step()
        gaps = [(x - y).norm() / (y - s).norm() for x, y, s in zip(mine, other, start, strict=True)]
        distances[name] = float(torch.stack(gaps).detach().max())
        if not distances[name] < bound:
            raise SystemExit(f"our {name} step differs from torch's by {distances[name]:.1%}; nothing was timed")
    return distances


def measure(
    matrices: Matrices, make: Make, device: torch.device, rounds: int, chosen: Mapping[str, Contender]
) -> dict[str, dict[str, Any]]:
    """Median milliseconds per step of each contender, or its error."""
    steps: dict[str, Callable[[], float]] = {}
    built: dict[str, Built] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, build in chosen.items():
        try:
            built[name] = build(matrices, make)
            step = timed_step(*built[name], device)
            results[name] = {"first_step_s": 1e-3 * step()}
            steps[name] = step
        except Exception as error:  # peers may raise anything
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    warming = SETTLED + 1 if device.type == "cuda" else WARMING_ROUNDS  # then steps are replayed
    for name, times in in_turn(steps, rounds, warming).items():
        optimizer, params = built[name]
        state = [value for values in optimizer.state.values() for value in values.values()]
        results[name] |= {
            "ms": statistics.median(times),
            "ms_min": min(times),
            "extra_bytes": extra_bytes(optimizer.step, device),
            "state_bytes_per_parameter": sum(value.nbytes for value in state if isinstance(value, Tensor))
            / sum(param.numel() for param in params),
        }
    return results


def timed_step(optimizer: Optimizer, params: list[nn.Parameter], device: torch.device) -> Callable[[], float]:
    """Time a step; restore the gradients before it, because some optimizers delete them."""
    grads = [param.grad for param in params]

    def step() -> float:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return milliseconds(optimizer.step, device)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of weights and gradients")
    parser.add_argument("--json", type=Path, default=Path("out/bench/step_time.json"))
    args = parser.parse_args()
    device, dtype = chosen_device(args.device), getattr(torch, args.dtype)
    usual = ["small", "wide", "w1024"] if device.type == "cuda" else ["small", "square512", "wide", "w256"]
    sets, make = args.sets or usual, maker(device, dtype)
    chosen, missing = contenders(args.only)
    checked = check(device) if dtype == torch.float32 else {}
    record = {"environment": environment(device, PACKAGES), "dtype": args.dtype, "check": checked, "results": {}}
    for name in sets:
        print(f"timing {name} ...", flush=True)
        record["results"][name] = measure(SETS[name], make, device, args.rounds, chosen)
        save(record, args.json)
    print(json.dumps(record["environment"]))
    print(f"our steps are within {checked} of torch's; not installed: {missing}; written to {args.json}")
    print(f"{'set':10} {'optimizer':20} {'ms/step':>9} {'extra MiB':>10} {'state B/param':>14} {'first step, s':>14}")
    for name, rows in record["results"].items():
        for contender, row in sorted(rows.items(), key=lambda pair: "ms" in pair[1]):
            if "error" in row:
                print(f"{name:10} {contender:20} failed: {row['error']}")
                continue
            print(
                f"{name:10} {contender:20} {row['ms']:9.2f} {(row['extra_bytes'] or 0) / 2**20:10.1f} "
                f"{row['state_bytes_per_parameter']:14.2f} {row['first_step_s']:14.2f}"
            )


if __name__ == "__main__":
    main()
