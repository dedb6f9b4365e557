"""Time one optimizer step beside others': same process, same tensors, one step of each in turn, medians.

    python bench/step_time.py                          # this machine's CPU
    python bench/step_time.py --device cuda --sets w1024
    python bench/step_time.py --device cuda --sets w1024 --profile

Ours holds experts as stacks `(8, out, in)` with fused gate and up projections, as the lab's model does; dion gets
stacks of single projections, the others get the same matrices as lists, which is all they take. Before anything is
timed, steps of ours are compared with those of torch's own optimizers. Of dion, pytorch-optimizer, heavyball and
muon-optimizer those that are installed are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muonsw import SGDSW, AdamWSW, MuonSW, ScheduleFree
from muonsw.addons.replay import SETTLED
from muonsw.registry import unknown
from timing import (
    WARMING_ROUNDS,
    chosen_device,
    environment,
    in_turn,
    milliseconds,
    peak_extra_bytes,
    save,
    synchronize,
)

LR, LAMBDA = 1e-3, 0.1


class Matrices(NamedTuple):
    """A set of matrices: as ours holds them, with group options; as stacks; and as plain 2-D shapes."""

    ours: list[tuple[tuple[int, ...], dict[str, Any]]]
    stacks: list[tuple[int, ...]]
    plain: list[tuple[int, ...]]


def moe(width: int, ff: int, layers: int = 12, experts: int = 8) -> Matrices:
    """The hidden matrices of the paper's mixture-of-experts decoder."""
    square: list[tuple[int, ...]] = [(width, width)] * (4 * layers)
    ours: list[tuple[tuple[int, ...], dict[str, Any]]] = [(shape, {}) for shape in square]
    fused = ((experts, 2 * ff, width), {"matrix": "stack", "split_sizes": (ff, ff)})
    ours += [fused, ((experts, width, ff), {"matrix": "stack"})] * layers
    stacks = square + ([(experts, ff, width)] * 2 + [(experts, width, ff)]) * layers
    plain = square + ([(ff, width)] * (2 * experts) + [(width, ff)] * experts) * layers
    return Matrices(ours, stacks, plain)


def listed(shapes: list[tuple[int, ...]]) -> Matrices:
    """Matrices that everyone holds in the same way."""
    return Matrices([(shape, {}) for shape in shapes], list(shapes), shapes)


SETS: Mapping[str, Matrices] = MappingProxyType(
    {
        "small": listed([(64, 64), (64, 192)] * 100),
        "square512": listed([(512, 512)] * 8),
        "wide": listed([(256, 1024)] * 16),
        "w256": moe(256, 768),
        "w512": moe(512, 1408),
        "w768": moe(768, 2048),
        "w1024": moe(1024, 2816),
    }
)


class MatrixSource(NamedTuple):
    """Where and in which precision a set of matrices is made."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    def make(self, shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
        """Parameters with gradients, the same for everyone."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        params = [nn.Parameter((0.02 * draw(shape)).to(self.dtype)) for shape in shapes]
        for param in params:
            param.grad = draw(tuple(param.shape)).to(self.dtype)
        return params


Built = tuple[Optimizer, list[nn.Parameter]]
Contender = Callable[[Matrices, MatrixSource], Built]


def ours(orthogonalizer: str = "auto", own: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Contender:
    """Muon-SW; or a relative, by `own` options of its groups."""

    def make(matrices: Matrices, tensors: MatrixSource) -> Built:
        params = tensors.make([shape for shape, _ in matrices.ours])
        groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
        for (_, settings), param in zip(matrices.ours, params, strict=True):
            key = tuple(sorted(settings.items()))
            groups.setdefault(key, {**settings, **own, "params": []})["params"].append(param)
        build = MuonSW(list(groups.values()), lr=LR, weight_decay=LAMBDA, orthogonalizer=orthogonalizer, **options)
        return build, params

    return make


def theirs(build: Callable[[list[nn.Parameter]], Any], *, stacked: bool = False) -> Contender:
    """An optimizer that takes a list of parameters."""

    def make(matrices: Matrices, tensors: MatrixSource) -> Built:
        params = tensors.make(matrices.stacks if stacked else matrices.plain)
        return cast("Optimizer", build(params)), params

    return make


def stacked(kind: Callable[..., Optimizer], **options: Any) -> Contender:
    """An optimizer that moves stacks element by element."""
    return theirs(lambda params: kind(params, lr=LR, weight_decay=LAMBDA, **options), stacked=True)


def _schedule_free(params: list[nn.Parameter]) -> ScheduleFree:
    optimizer = ScheduleFree(AdamWSW(params, lr=LR, weight_decay=LAMBDA, decay="constant", betas=(0.0, 0.95)))
    optimizer.train()
    return optimizer


def _dion(**options: Any) -> Contender:
    from dion import Muon

    settings: dict[str, Any] = {"nesterov": True, "adjust_lr": "rms_norm", **options}
    return theirs(lambda p: Muon(p, lr=LR, weight_decay=LAMBDA, **settings), stacked=True)


def _pytorch_optimizer() -> Contender:
    from pytorch_optimizer import Muon

    return theirs(lambda p: Muon([{"params": p, "use_muon": True}], lr=LR, weight_decay=LAMBDA))


def _heavyball() -> Contender:
    from heavyball import Muon

    return theirs(lambda p: Muon(p, lr=LR, weight_decay=LAMBDA))


def _muon_optimizer() -> Contender:
    from muon import SingleDeviceMuon

    return theirs(lambda p: SingleDeviceMuon(p, lr=LR, weight_decay=LAMBDA))


# By the names of their packages; loading one that is not installed fails.
PEERS: Mapping[str, Callable[[], Contender]] = MappingProxyType(
    {
        "dion": _dion,
        "dion triton": lambda: _dion(use_triton=True),
        "pytorch-optimizer": _pytorch_optimizer,
        "heavyball": _heavyball,
        "muon-optimizer": _muon_optimizer,
    }
)
PACKAGES = ("dion", "pytorch-optimizer", "heavyball", "muon-optimizer")

OURS_AND_TORCHS: Mapping[str, Contender] = MappingProxyType(
    {
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
        **{name: ours(own={"algorithm": name}) for name in ("soap", "shampoo", "kl_shampoo", "asgo", "dion2", "lion")},
        "hyperball": ours(norm="hyperball"),
        "muonsw bfloat16": ours(state_dtype="bfloat16"),
        "muonsw int8": ours(state_dtype="int8"),
        "muonsw offload": ours(offload=True),
        "muonsw int8 offload": ours(state_dtype="int8", offload=True),
        "torch.optim.Muon": theirs(
            lambda p: torch.optim.Muon(p, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw")
        ),
        "AdamWSW": stacked(AdamWSW),
        "AdamWSW unchecked": stacked(AdamWSW, nonfinite="propagate"),
        "AdamWSW eager": stacked(AdamWSW, replay=False),
        "AdamWSW bfloat16": stacked(AdamWSW, state_dtype="bfloat16"),
        "AdamWSW int8": stacked(AdamWSW, state_dtype="int8"),
        "AdamWSW offload": stacked(AdamWSW, offload=True),
        "schedule_free": theirs(_schedule_free, stacked=True),
        "torch AdamW fused": stacked(torch.optim.AdamW, betas=(0.9, 0.95), fused=True),
        "SGDSW": stacked(SGDSW, momentum=0.9),
        "SGDSW unchecked": stacked(SGDSW, momentum=0.9, nonfinite="propagate"),
        "SGDSW eager": stacked(SGDSW, momentum=0.9, replay=False),
        "torch SGD fused": stacked(torch.optim.SGD, momentum=0.9, fused=True),
    }
)
USUAL = ("muonsw", "muonsw eager", "muonsw plain", "torch.optim.Muon", "AdamWSW", "torch AdamW fused", "SGDSW",
         "torch SGD fused")  # fmt: skip


def contenders(only: Sequence[str] | None = None) -> tuple[dict[str, Contender], list[str]]:
    """Return whom to time, by default the usual ones and all peers, and the names of peers that are not installed."""
    known = (*OURS_AND_TORCHS, *PEERS)
    wrong = [name for name in only or () if name not in known]
    if wrong:
        raise SystemExit(unknown("optimizer", wrong[0], list(known)))
    chosen = {name: make for name, make in OURS_AND_TORCHS.items() if name in (only or USUAL)}
    missing = []
    for name, load in PEERS.items():
        if only is None or name in only:
            try:
                chosen[name] = load()
            except ImportError:
                missing.append(name)
    return chosen, missing


class Pair(NamedTuple):
    """Two optimizers that must agree, and by how much of their step they may differ."""

    ours: Callable[[list[nn.Parameter]], Optimizer]
    torchs: Callable[[list[nn.Parameter]], Optimizer]
    bound: float


PAIRS: Mapping[str, Pair] = MappingProxyType(
    {
        "muon": Pair(
            lambda p: MuonSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"),
            lambda p: torch.optim.Muon(p, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw"),
            0.03,  # theirs multiplies in bfloat16
        ),
        "adamw": Pair(
            lambda p: AdamWSW(p, lr=LR, weight_decay=LAMBDA, decay="constant"),
            lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=LAMBDA, betas=(0.9, 0.95), fused=True),
            1e-4,
        ),
    }
)
CHECKED_SHAPES = [(64, 64), (64, 192), (256, 768), (768, 256), (512, 512), (600, 1000)]


def check(device: torch.device, shapes: Sequence[tuple[int, ...]] = CHECKED_SHAPES) -> dict[str, float]:
    """Largest relative distance between three steps of ours and of torch's, over these shapes.

    Raises:
        SystemExit: If it is too large: the time of a wrong step means nothing.
    """
    distances = {}
    for name, pair in PAIRS.items():
        distances[name] = _distance(pair, MatrixSource(device), shapes)
        if not distances[name] < pair.bound:
            raise SystemExit(f"our {name} step differs from torch's by {distances[name]:.1%}; nothing was timed")
    return distances


def _distance(pair: Pair, tensors: MatrixSource, shapes: Sequence[tuple[int, ...]]) -> float:
    mine, other = tensors.make(shapes), tensors.make(shapes)
    start = [param.detach().clone() for param in mine]
    for optimizer in (pair.ours(mine), pair.torchs(other)):
        for _ in range(3):
            optimizer.step()
    gaps = [(x - y).norm() / (y - s).norm() for x, y, s in zip(mine, other, start, strict=True)]
    return float(torch.stack(gaps).detach().max())


def measure(
    matrices: Matrices, tensors: MatrixSource, rounds: int, chosen: Mapping[str, Contender]
) -> dict[str, dict[str, Any]]:
    """Median milliseconds of a step for each contender; one that fails is left out, with its error."""
    running: dict[str, Callable[[], float]] = {}
    optimizers: dict[str, Built] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, make in chosen.items():
        try:
            optimizers[name] = make(matrices, tensors)
            running[name] = _stepper(*optimizers[name], tensors.device)
            results[name] = {"first_step_s": 1e-3 * running[name]()}
        except Exception as error:  # whatever a peer may raise
            running.pop(name, None)
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    warming = SETTLED + 1 if tensors.device.type == "cuda" else WARMING_ROUNDS  # until steps are replayed
    for name, taken_by_one in in_turn(running, rounds, warming).items():
        optimizer, params = optimizers[name]
        results[name] |= {
            "ms": statistics.median(taken_by_one),
            "ms_min": min(taken_by_one),
            "extra_bytes": peak_extra_bytes(optimizer.step, tensors.device),
            "state_bytes_per_parameter": _state_bytes(optimizer) / sum(param.numel() for param in params),
        }
    return results


def _stepper(optimizer: Optimizer, params: list[nn.Parameter], device: torch.device) -> Callable[[], float]:
    """A step that is timed; some optimizers take the gradients away, so they are put back before it."""
    grads = [param.grad for param in params]

    def step() -> float:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return milliseconds(optimizer.step, device)

    return step


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    args = arguments()
    device, dtype = chosen_device(args.device), getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    usual = ["small", "wide", "w1024"] if device.type == "cuda" else ["small", "square512", "wide", "w256"]
    sets = args.sets or usual
    if args.profile:
        print(profile(SETS[sets[0]], MatrixSource(device, dtype)))
        return
    chosen, missing = contenders(args.only)
    checked = check(device) if dtype == torch.float32 else {}
    record = {"environment": environment(device, PACKAGES), "dtype": args.dtype, "check": checked, "results": {}}
    for name in sets:
        print(f"timing {name} ...", flush=True)
        record["results"][name] = measure(SETS[name], MatrixSource(device, dtype), args.rounds, chosen)
        save(record, args.json)
    print(json.dumps(record["environment"]))
    print(f"our steps are within {checked} of torch's; not installed: {missing}; written to {args.json}")
    print(table(record["results"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of weights and gradients")
    parser.add_argument("--profile", action="store_true", help="show where our step spends its time, and stop")
    parser.add_argument("--json", type=Path, default=Path("out/bench/step_time.json"))
    return parser.parse_args()


def profile(matrices: Matrices, tensors: MatrixSource) -> str:
    """Where the time of our step goes, kernel by kernel."""
    optimizer, _ = ours()(matrices, tensors)
    for _ in range(3):
        optimizer.step()
    with torch.profiler.profile() as profiler:
        optimizer.step()
        synchronize(tensors.device)
    by = "self_cuda_time_total" if tensors.device.type == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=by, row_limit=18, max_name_column_width=60))


def table(results: dict[str, dict[str, dict]]) -> str:
    lines = [
        f"{'set':10} {'optimizer':20} {'ms/step':>9} {'extra MiB':>10} {'state B/param':>14} {'first step, s':>14}"
    ]
    for name, rows in results.items():
        lines += [f"{name:10} {who:20} failed: {row['error']}" for who, row in rows.items() if "error" in row]
        lines += [
            f"{name:10} {who:20} {row['ms']:9.2f} {(row['extra_bytes'] or 0) / 2**20:10.1f} "
            f"{row['state_bytes_per_parameter']:14.2f} {row['first_step_s']:14.2f}"
            for who, row in rows.items()
            if "ms" in row
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
