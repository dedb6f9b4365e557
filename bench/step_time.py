"""Time one optimizer step against others': same process, same tensors, interleaved, medians.

    python bench/step_time.py                          # this machine's CPU
    python bench/step_time.py --device cuda --sets w1024

Ours holds experts as stacks `(8, out, in)` with fused gate and up projections, as the lab's model does; dion gets
stacks of single projections, the others get the same matrices as lists, which is all they take. Peers that are not
installed are left out. Before anything is timed, steps of ours are checked against steps of torch's optimizers.
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

from muonsw import SGDSW, AdamWSW, MuonSW

LR, LAMBDA = 1e-3, 0.1


class Case(NamedTuple):
    """A set of matrices: as ours holds them, with group options; as stacks; and as plain 2-D shapes."""

    ours: list[tuple[tuple[int, ...], dict]]
    stacks: list[tuple[int, ...]]
    plain: list[tuple[int, int]]


def moe(width: int, ff: int, layers: int = 12, experts: int = 8) -> Case:
    """The hidden matrices of the paper's mixture-of-experts decoder."""
    fused = {"matrix": "stack", "split_sizes": (ff, ff)}
    square = [(width, width)] * (4 * layers)
    ours = [(shape, {}) for shape in square]
    ours += [((experts, 2 * ff, width), fused), ((experts, width, ff), {"matrix": "stack"})] * layers
    stacks = square + ([(experts, ff, width)] * 2 + [(experts, width, ff)]) * layers
    plain = square + ([(ff, width)] * (2 * experts) + [(width, ff)] * experts) * layers
    return Case(ours, stacks, plain)


def listed(shapes: list[tuple[int, int]]) -> Case:
    return Case([(shape, {}) for shape in shapes], list(shapes), shapes)


CASES = {
    "small": listed([(64, 64), (64, 192)] * 100),
    "square512": listed([(512, 512)] * 8),
    "wide": listed([(256, 1024)] * 16),
    "w256": moe(256, 768),
    "w512": moe(512, 1408),
    "w768": moe(768, 2048),
    "w1024": moe(1024, 2816),
}


DTYPE = torch.float32


def parameters(shapes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter((0.02 * torch.randn(s, generator=generator, device=device)).to(DTYPE)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device=device).to(DTYPE)
    return params


def our_groups(case: Case, params: list[nn.Parameter]) -> list[dict]:
    groups: dict[str, dict] = {}
    for (_, options), param in zip(case.ours, params, strict=True):
        groups.setdefault(repr(options), {**options, "params": []})["params"].append(param)
    return list(groups.values())


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Contender = Callable[[Case, str], tuple[torch.optim.Optimizer, list[nn.Parameter]]]


def ours(orthogonalizer: str = "auto", **options: object) -> Contender:
    def make(case: Case, device: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        params = parameters([shape for shape, _ in case.ours], device)
        groups = our_groups(case, params)
        return MuonSW(groups, lr=LR, weight_decay=LAMBDA, orthogonalizer=orthogonalizer, **options), params

    return make


def captured(contender: Contender) -> Contender:
    """The same step, replayed from a CUDA graph."""

    def make(case: Case, device: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        if device != "cuda":
            raise ValueError("graphs are captured on CUDA devices")
        optimizer, params = contender(case, device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        optimizer.step = graph.replay  # type: ignore[method-assign]
        return optimizer, params

    return make


def theirs(build: Build, stacked: bool = False) -> Contender:
    def make(case: Case, device: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        params = parameters(list(case.stacks if stacked else case.plain), device)
        return build(params), params

    return make


def _dion(**options: object) -> Contender:
    from dion import Muon

    return theirs(
        lambda p: Muon(p, lr=LR, weight_decay=LAMBDA, nesterov=True, adjust_lr="rms_norm", **options), stacked=True
    )


def _pytorch_optimizer() -> Contender:
    from pytorch_optimizer import Muon

    return theirs(lambda p: Muon([{"params": p, "use_muon": True}], lr=LR, weight_decay=LAMBDA))


def _heavyball() -> Contender:
    from heavyball import Muon

    return theirs(lambda p: Muon(p, lr=LR, weight_decay=LAMBDA))


def _muon_optimizer() -> Contender:
    from muon import SingleDeviceMuon

    return theirs(lambda p: SingleDeviceMuon(p, lr=LR, weight_decay=LAMBDA))


PEERS: dict[str, Callable[[], Contender]] = {
    "dion": _dion,
    "dion triton": lambda: _dion(use_triton=True),
    "pytorch-optimizer": _pytorch_optimizer,
    "heavyball": _heavyball,
    "muon-optimizer": _muon_optimizer,
}

OURS_AND_TORCHS: dict[str, Contender] = {
    "muonsw": ours(),
    "muonsw plain": ours("newton_schulz"),
    "muonsw unchecked": ours(nonfinite="propagate"),
    "muonsw captured": captured(ours(capturable=True)),
    "muonsw gram": ours("gram_newton_schulz"),
    "torch.optim.Muon": theirs(
        lambda p: torch.optim.Muon(p, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw")
    ),
}

ELEMENTWISE: dict[str, Contender] = {
    "AdamWSW": theirs(lambda p: AdamWSW(p, lr=LR, weight_decay=LAMBDA), stacked=True),
    "AdamWSW unchecked": theirs(lambda p: AdamWSW(p, lr=LR, weight_decay=LAMBDA, nonfinite="propagate"), stacked=True),
    "torch AdamW fused": theirs(
        lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=LAMBDA, betas=(0.9, 0.95), fused=True), stacked=True
    ),
    "SGDSW": theirs(lambda p: SGDSW(p, lr=LR, weight_decay=LAMBDA, momentum=0.9), stacked=True),
    "SGDSW unchecked": theirs(
        lambda p: SGDSW(p, lr=LR, weight_decay=LAMBDA, momentum=0.9, nonfinite="propagate"), stacked=True
    ),
    "torch SGD fused": theirs(
        lambda p: torch.optim.SGD(p, lr=LR, weight_decay=LAMBDA, momentum=0.9, fused=True), stacked=True
    ),
}


def contenders(only: list[str] | None) -> dict[str, Contender]:
    """Everyone who is asked for and installed; by default all Muons."""
    found = OURS_AND_TORCHS | ELEMENTWISE if only else dict(OURS_AND_TORCHS)
    for name, load in PEERS.items():
        with contextlib.suppress(ImportError):
            if only is None or name in only:
                found[name] = load()
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


def check(device: str) -> dict[str, float]:
    """Largest relative distance between three steps of ours and of torch's, over all shapes; too far is an end."""
    shapes = [(64, 64), (64, 192), (256, 768), (768, 256), (512, 512), (600, 1000)]
    pairs = {
        "muon": (
            lambda p: MuonSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"),
            lambda p: torch.optim.Muon(p, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw"),
            0.03,  # theirs multiplies in bfloat16
        ),
        "adamw": (
            lambda p: AdamWSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"),
            lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=LAMBDA, betas=(0.9, 0.95), fused=True),
            1e-4,
        ),
    }
    distances = {}
    for name, (build, build_theirs, bound) in pairs.items():
        a, b = parameters(shapes, device), parameters(shapes, device)
        start = [p.detach().clone() for p in a]
        mine, other = build(a), build_theirs(b)
        for _ in range(3):
            mine.step()
            other.step()
        far = max(float(((x - y).norm() / (y - s).norm()).detach()) for x, y, s in zip(a, b, start, strict=True))
        if not far < bound:
            raise SystemExit(f"our {name} step differs from torch's by {far:.1%}; nothing was timed")
        distances[name] = far
    return distances


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
    """Median milliseconds of a step for each contender, one step of each in turn; one that fails is named and left."""
    running: dict[str, tuple[torch.optim.Optimizer, list[nn.Parameter], list[Tensor | None]]] = {}
    results: dict[str, dict] = {}
    for name, make in chosen.items():
        try:
            optimizer, params = make(case, device)
            grads = [p.grad for p in params]
            first = timed_step(optimizer, params, grads, device)
            running[name] = (optimizer, params, grads)
            results[name] = {"first_step_s": first / 1e3}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, results[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in running}
    for round_number in range(rounds + 2):
        for name, entry in running.items():
            taken = timed_step(*entry, device)
            if round_number >= 2:  # the first two warm up
                times[name].append(taken)
    for name, (optimizer, params, _) in running.items():
        results[name] |= {
            "ms": statistics.median(times[name]),
            "ms_min": min(times[name]),
            "extra_bytes": peak_extra_bytes(optimizer.step, device),
            "state_bytes_per_parameter": state_bytes(optimizer) / sum(p.numel() for p in params),
        }
    return results


def timed_step(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[Tensor | None], device: str
) -> float:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad  # some optimizers take the gradient away
    synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def environment(device: str) -> dict:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            cpu,
        )
    versions = {}
    for package in ("torch", "triton", *PEERS):
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
    header = f"{'set':10} {'optimizer':20} {'ms/step':>9} {'extra MiB':>10} {'state B/param':>14} {'first step, s':>14}"
    lines = [header]
    for case, rows in results.items():
        lines += [
            f"{case:10} {name:20} {row['ms']:9.2f} {row['extra_bytes'] / 2**20:10.1f} "
            f"{row['state_bytes_per_parameter']:14.2f} {row['first_step_s']:14.2f}"
            for name, row in rows.items()
            if "ms" in row
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sets", nargs="+", choices=CASES, default=None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of weights and gradients")
    parser.add_argument("--profile", action="store_true", help="show where our step spends its time, and stop")
    parser.add_argument("--json", type=Path, default=Path("out/bench/step_time.json"))
    args = parser.parse_args()
    global DTYPE  # noqa: PLW0603
    DTYPE = getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    sets = args.sets or (
        ["small", "wide", "w1024"] if args.device == "cuda" else ["small", "square512", "wide", "w256"]
    )
    if args.profile:
        print(profile(CASES[sets[0]], args.device))
        return
    chosen = contenders(args.only)
    checked = check(args.device) if torch.float32 == DTYPE else {}
    record = {"environment": environment(args.device), "dtype": args.dtype, "check": checked, "results": {}}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for name in sets:
        print(f"timing {name} ...", flush=True)
        record["results"][name] = measure(CASES[name], args.device, args.rounds, chosen)
        args.json.write_text(json.dumps(record, indent=1))
    print(json.dumps(record["environment"]))
    print(f"our steps are within {checked} of torch's; written to {args.json}")
    print(table(record["results"]))


if __name__ == "__main__":
    main()
