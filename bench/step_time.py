"""Time one optimizer step against other Muons: same process, same tensors, interleaved, medians.

    python bench/step_time.py                          # this machine's CPU
    python bench/step_time.py --device cuda --sets w1024

Ours holds experts as stacks `(8, out, in)` with fused gate and up projections, as the lab's model does; the
others get the same matrices as lists, which is all they take. Before anything is timed, one step of ours
is checked against one step of `torch.optim.Muon`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muonsw import MuonSW

LR, LAMBDA = 1e-3, 0.1


class Case(NamedTuple):
    """A set of matrices: how ours holds them, with group options, and as plain 2-D shapes for the others."""

    ours: list[tuple[tuple[int, ...], dict]]
    plain: list[tuple[int, int]]


def moe(width: int, ff: int, layers: int = 12, experts: int = 8) -> Case:
    """The hidden matrices of the paper's mixture-of-experts decoder."""
    fused = {"matrix": "stack", "split_sizes": (ff, ff)}
    ours = [((width, width), {})] * (4 * layers)
    ours += [((experts, 2 * ff, width), fused), ((experts, width, ff), {"matrix": "stack"})] * layers
    plain = [(width, width)] * (4 * layers)
    plain += ([(ff, width)] * (2 * experts) + [(width, ff)] * experts) * layers
    return Case(ours, plain)


def listed(shapes: list[tuple[int, int]]) -> Case:
    return Case([(shape, {}) for shape in shapes], shapes)


CASES = {
    "small": listed([(64, 64), (64, 192)] * 100),
    "square512": listed([(512, 512)] * 8),
    "wide": listed([(256, 1024)] * 16),
    "w256": moe(256, 768),
    "w1024": moe(1024, 2816),
}


def parameters(shapes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(s, generator=generator, device=device)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device=device)
    return params


def our_groups(case: Case, params: list[nn.Parameter]) -> list[dict]:
    groups: dict[str, dict] = {}
    for (_, options), param in zip(case.ours, params, strict=True):
        groups.setdefault(repr(options), {**options, "params": []})["params"].append(param)
    return list(groups.values())


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Contender = Callable[[Case, str], tuple[torch.optim.Optimizer, list[nn.Parameter]]]


def ours(orthogonalizer: str = "newton_schulz", **options: object) -> Contender:
    def make(case: Case, device: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        params = parameters([shape for shape, _ in case.ours], device)
        groups = our_groups(case, params)
        return MuonSW(groups, lr=LR, weight_decay=LAMBDA, orthogonalizer=orthogonalizer, **options), params

    return make


def theirs(build: Build) -> Contender:
    def make(case: Case, device: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        params = parameters(list(case.plain), device)
        return build(params), params

    return make


def _dion() -> Build:
    from dion import Muon

    return lambda p: Muon(p, lr=LR, weight_decay=LAMBDA, nesterov=True, adjust_lr="rms_norm")


def _pytorch_optimizer() -> Build:
    from pytorch_optimizer import Muon

    return lambda p: Muon([{"params": p, "use_muon": True}], lr=LR, weight_decay=LAMBDA)


def _heavyball() -> Build:
    from heavyball import Muon

    return lambda p: Muon(p, lr=LR, weight_decay=LAMBDA)


def _muon_optimizer() -> Build:
    from muon import SingleDeviceMuon

    return lambda p: SingleDeviceMuon(p, lr=LR, weight_decay=LAMBDA)


PEERS = {
    "dion": _dion,
    "pytorch-optimizer": _pytorch_optimizer,
    "heavyball": _heavyball,
    "muon-optimizer": _muon_optimizer,
}


def contenders(only: list[str] | None) -> dict[str, Contender]:
    """Everyone who is asked for and installed; a peer that is not is left out."""
    found: dict[str, Contender] = {
        "muonsw": ours(),
        "muonsw gram": ours("gram_newton_schulz"),
        "torch.optim.Muon": theirs(
            lambda p: torch.optim.Muon(p, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw")
        ),
    }
    for name, load in PEERS.items():
        with contextlib.suppress(ImportError):
            if only is None or name in only:
                found[name] = theirs(load())
    return {name: make for name, make in found.items() if only is None or name in only}


def profile(case: Case, device: str) -> str:
    """Where the time of our step goes, kernel by kernel."""
    optimizer, _ = ours()(case, device)
    for _ in range(3):
        optimizer.step()
    with torch.profiler.profile() as profiler:
        optimizer.step()
        synchronize(device)
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=by, row_limit=18, max_name_column_width=60))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check(device: str) -> float:
    """Largest relative distance between one step of ours and one of torch's, over all shapes."""
    shapes = [(64, 64), (64, 192), (256, 768)]
    a, b = parameters(shapes, device), parameters(shapes, device)
    start = [p.detach().clone() for p in a]
    MuonSW(a, lr=LR, weight_decay=LAMBDA, decay="constant").step()
    torch.optim.Muon(b, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw").step()
    distance = max(float(((x - y).norm() / (y - s).norm()).detach()) for x, y, s in zip(a, b, start, strict=True))
    if not distance < 0.03:
        raise SystemExit(f"our step differs from torch's by {distance:.1%}; nothing was timed")
    return distance


def resident_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def peak_extra_bytes(step: Callable[[], object], device: str) -> int:
    """Memory that a step takes beyond what it leaves behind."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    step()
    return max(0, resident_bytes("VmHWM") - before)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(case: Case, device: str, rounds: int, chosen: dict[str, Contender]) -> dict[str, dict]:
    """Median milliseconds of a step for each contender, one step of each in turn."""
    optimizers = {name: make(case, device) for name, make in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    grads = {name: [p.grad for p in params] for name, (_, params) in optimizers.items()}
    for round_number in range(rounds + 2):
        for name, (optimizer, params) in optimizers.items():
            for p, grad in zip(params, grads[name], strict=True):
                p.grad = grad  # some optimizers take the gradient away
            synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            synchronize(device)
            if round_number >= 2:  # the first two warm up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {
            "ms": statistics.median(times[name]),
            "ms_min": min(times[name]),
            "extra_bytes": peak_extra_bytes(optimizer.step, device),
            "state_bytes_per_parameter": state_bytes(optimizer) / sum(p.numel() for p in params),
        }
        for name, (optimizer, params) in optimizers.items()
    }


def environment(device: str) -> dict:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            cpu,
        )
    versions = {}
    for package in ("torch", *PEERS):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict[str, dict[str, dict]]) -> str:
    lines = [f"{'set':10} {'optimizer':18} {'ms/step':>9} {'vs torch':>9} {'extra MiB':>10} {'state B/param':>14}"]
    for case, rows in results.items():
        base = rows.get("torch.optim.Muon", next(iter(rows.values())))["ms"]
        for name, row in rows.items():
            lines.append(
                f"{case:10} {name:18} {row['ms']:9.2f} {base / row['ms']:8.2f}x "
                f"{row['extra_bytes'] / 2**20:10.1f} {row['state_bytes_per_parameter']:14.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sets", nargs="+", choices=CASES, default=None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--profile", action="store_true", help="show where our step spends its time, and stop")
    parser.add_argument("--json", type=Path, default=Path("out/bench/step_time.json"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    sets = args.sets or (
        ["small", "wide", "w1024"] if args.device == "cuda" else ["small", "square512", "wide", "w256"]
    )
    if args.profile:
        print(profile(CASES[sets[0]], args.device))
        return
    chosen = contenders(args.only)
    record = {"environment": environment(args.device), "check": check(args.device), "results": {}}
    for name in sets:
        print(f"timing {name} ...", flush=True)
        record["results"][name] = measure(CASES[name], args.device, args.rounds, chosen)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1))
    print(json.dumps(record["environment"]))
    print(f"one step of ours is within {record['check']:.2%} of torch's; written to {args.json}")
    print(table(record["results"]))


if __name__ == "__main__":
    main()
