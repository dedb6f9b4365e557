"""Time SOAP, Shampoo, Online KL-Shampoo and ASGO against their authors' code and other packages.

    python bench/factor_time.py --device cuda --set w512 --clones CLONES
    python bench/factor_time.py --device cuda --set w512 --only soap --profile
    python bench/factor_time.py --device cuda --qr

CLONES is a folder with clones of nikhilvyas/SOAP, facebookresearch/optimizers, tilde-research/online-kl-shampoo-release
and infinity-stars/ASGO under those last names; peers that are not there or not installed are left out. What is timed is
the mean of `--frequency` steps, of which one refreshes what a rule refreshes now and then.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from muonsw.algorithms.factors import cholesky_qr
from muonsw.lab.bench import steps
from muonsw.lab.bench.steps import LAMBDA, LR, SETS, Matrices, MatrixSource
from muonsw.lab.bench.timing import chosen_device, environment, in_turn, milliseconds, save, synchronize
from muonsw.machine import full_float32

Build = Callable[[list[nn.Parameter]], Any]
QR_SIZES = ((168, 128), (1, 512), (8, 512), (144, 512), (8, 1024), (1, 2048), (1, 4096))
SHARED: dict[str, Any] = {"lr": LR, "weight_decay": LAMBDA}


def theirs(clone: Path | None, frequency: int) -> dict[str, dict[str, Callable[[], Build]]]:
    """Other code for each algorithm, loaded when it is called."""
    f = frequency

    def from_clone(folder: str, module: str, build: Callable[[ModuleType, list[nn.Parameter]], Any]) -> Build:
        if clone is None or not (clone / folder).is_dir():
            raise ImportError(f"no clone {folder}")
        sys.path.insert(0, str(clone / folder))
        sys.modules.setdefault("config", ModuleType("config"))  # ASGO imports it and uses nothing of it
        loaded = importlib.import_module(module)
        return lambda params: build(loaded, params)

    def from_package(module: str, build: Callable[[ModuleType, list[nn.Parameter]], Any]) -> Build:
        loaded = importlib.import_module(module)
        return lambda params: build(loaded, params)

    def meta(loaded: ModuleType, params: list[nn.Parameter]) -> Any:
        graft = loaded.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8)
        options = {"betas": (0.9, 0.999), "precondition_frequency": f, "max_preconditioner_dim": 1024}
        return loaded.DistributedShampoo(params, **SHARED, **options, grafting_config=graft)

    return {
        "soap": {
            "authors": lambda: from_clone("SOAP", "soap", lambda m, p: m.SOAP(p, **SHARED, precondition_frequency=f)),
            "pytorch-optimizer": lambda: from_package(
                "pytorch_optimizer", lambda m, p: m.SOAP(p, **SHARED, precondition_frequency=f)
            ),
            "heavyball": lambda: from_package("heavyball", lambda m, p: m.SOAP(p, **SHARED, precondition_frequency=f)),
        },
        "shampoo": {"authors": lambda: from_clone("optimizers", "distributed_shampoo", meta)},
        "kl_shampoo": {
            "authors": lambda: from_clone(
                "online-kl-shampoo-release", "okls.okls_optim", lambda m, p: m.OnlineKLShampoo(p, **SHARED)
            )
        },
        "asgo": {"authors": lambda: from_clone("ASGO", "optimizers.utils.utils", lambda m, p: m.asgo(p, LR))},
    }


def ours(algorithm: str, frequency: int, matrices: Matrices, source: MatrixSource) -> Optimizer:
    own = {"precondition_frequency": frequency} if algorithm in ("soap", "shampoo") else {}
    return steps.ours(own={"algorithm": algorithm, **own})(matrices, source)[0]


def state_bytes(optimizer: Optimizer) -> int:
    """Of all tensors in the state, however deep."""

    def counted(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return sum(map(counted, inner))

    return sum(counted(state) for state in optimizer.state.values())


def measure(algorithm: str, args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    matrices, source = SETS[args.set], MatrixSource(device)
    optimizers = {"muonsw": ours(algorithm, args.frequency, matrices, source)}
    grads: dict[str, list[tuple[nn.Parameter, Any]]] = {"muonsw": []}
    for name, load in theirs(args.clones, args.frequency)[algorithm].items():
        try:
            params = source.make(matrices.plain)
            gradients = [param.grad for param in params]
            optimizers[name] = load()(params)
            grads[name] = list(zip(params, gradients, strict=True))
            optimizers[name].step()
        except Exception as error:  # whatever a peer may raise
            optimizers.pop(name, None)
            print(f"{algorithm}: {name} left out: {type(error).__name__}: {str(error)[:200]}")

    def step(name: str) -> float:
        for param, grad in grads[name]:  # some take the gradients away
            param.grad = grad
        return milliseconds(optimizers[name].step, device)

    def mean(name: str) -> float:
        return sum(step(name) for _ in range(args.frequency)) / float(args.frequency)

    ways = {name: lambda name=name: mean(name) for name in optimizers}
    times = in_turn(ways, args.rounds)
    size = matrices.parameters()
    return {
        name: {"ms": statistics.median(taken), "state_bytes_per_parameter": state_bytes(optimizers[name]) / size}
        for name, taken in times.items()
    }


def profile(algorithm: str, args: argparse.Namespace, device: torch.device) -> str:
    optimizer = ours(algorithm, args.frequency, SETS[args.set], MatrixSource(device))
    for _ in range(args.frequency):
        optimizer.step()
    with torch.profiler.profile() as profiler:
        for _ in range(args.frequency):
            optimizer.step()
        synchronize(device)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=by, row_limit=18, max_name_column_width=60))


def bases(device: torch.device) -> list[dict[str, float]]:
    """How bases of a batch are orthonormalized: by Cholesky decompositions, and by torch's QR; and how exactly."""
    rows = []
    for count, d in QR_SIZES:
        falling = torch.logspace(0, -4, d, dtype=torch.float32, device=device)
        X = torch.randn(count, d, d, dtype=torch.float32, device=device) * falling
        identity = torch.eye(d, dtype=torch.float32, device=device).expand_as(X)
        with full_float32():
            Q, expected = cholesky_qr(X, identity)[:1].double(), torch.linalg.qr(X[:1].double()).Q
            error = (Q * (Q * expected).sum(-2, keepdim=True).sign() - expected).abs().max().item()
            ways = {
                "cholesky": lambda X=X, basis=identity: cholesky_qr(X, basis),
                "qr": lambda X=X: torch.linalg.qr(X).Q,
            }
            times = in_turn({name: lambda way=way: milliseconds(way, device) for name, way in ways.items()}, 5)
        row = {name: statistics.median(taken) for name, taken in times.items()}
        print(f"{count:4} of {d:4}: cholesky {row['cholesky']:8.2f} ms, qr {row['qr']:8.2f} ms, error {error:.1e}")
        rows.append({"count": count, "d": d, **row, "error": error})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--set", default="square512", choices=SETS)
    parser.add_argument("--only", nargs="+", default=["soap", "shampoo", "kl_shampoo", "asgo"])
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clones", type=Path, default=None)
    parser.add_argument("--profile", action="store_true", help="show where our steps spend their time, and stop")
    parser.add_argument("--qr", action="store_true", help="time how bases are orthonormalized, and stop")
    parser.add_argument("--json", type=Path, default=Path("out/bench/factor_time.json"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = chosen_device(args.device)
    record: dict[str, Any] = {"environment": environment(device), "set": args.set, "frequency": args.frequency}
    if args.qr:
        record["qr"] = bases(device)
    for algorithm in [] if args.qr else args.only:
        if args.profile:
            print(profile(algorithm, args, device))
            continue
        record[algorithm] = measure(algorithm, args, device)
        for name, row in record[algorithm].items():
            print(f"{algorithm:12} {name:18} {row['ms']:9.2f} ms  {row['state_bytes_per_parameter']:6.1f} B/parameter")
    if not args.profile:
        save(record, args.json)


if __name__ == "__main__":
    main()
