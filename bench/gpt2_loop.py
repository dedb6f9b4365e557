"""The loop that most people run, with each optimizer in turn: Hugging Face's GPT-2 124M, compiled, bfloat16 autocast.

    PYTHONPATH=src python bench/gpt2_loop.py                # ms an update of the whole loop
    PYTHONPATH=src python bench/gpt2_loop.py --fsdp         # the same under FSDP2, over a mesh of one rank
    PYTHONPATH=src python bench/gpt2_loop.py --host         # what one step takes on the host, and where

Gradients are clipped, and freed after every step. Peers take part where they are installed (dion, pytorch-optimizer).
All begin at the same weights and see the same batches; a contender whose loss is not close to that of its twin in
torch is not timed. Those that are take turns, some updates each, on one compiled model.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from muonsw import AdamWSW, MuonSW
from muonsw.routing import route
from timing import chosen_device, environment, in_turn, milliseconds, save, synchronize

BATCHES = (16, 4)
LR, LAMBDA, BETAS = 1e-3, 0.1, (0.9, 0.95)
CHECKED, BLOCKS, UPDATES = 12, 7, 10

# How far the loss after `CHECKED` updates may be from that of torch's optimizer: kernels round differently, and the
# Muons of others scale and route differently.
CLOSE = {"AdamWSW": 0.05, "MuonSW": 0.3}

Build = Callable[[nn.Module], list[Optimizer]]


def main() -> None:
    args = arguments()
    device = chosen_device(args.device)
    print(json.dumps(environment(device, ("transformers", "dion", "pytorch-optimizer"))), flush=True)
    chosen = {name: build for name, build in contenders().items() if not args.only or name in args.only}
    if args.host:
        for name, build in chosen.items():
            model = GPT2LMHeadModel(config(args)).to(device)
            profile_host(name, build, sharded(model, device) if args.fsdp else model, device, args.top)
        return
    record = {"environment": environment(device), "results": {}}
    for rows in args.batches:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config(args)).to(device)
        loop = Loop(sharded(model, device) if args.fsdp else model, rows, device)
        record["results"][rows] = loop.measure(chosen)
        for name, result in record["results"][rows].items():
            print(f"{rows:3} x {loop.length}  {name:22} {json.dumps(result)}", flush=True)
        save(record, args.json)
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """The model as FSDP2 divides it among ranks, of which there is one: blocks are compiled, then sharded."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh(device.type, (1,))
    for block in model.transformer.h:
        if device.type == "cuda":
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences in a batch")
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--fsdp", action="store_true", help="shard the model with FSDP2")
    parser.add_argument("--host", action="store_true", help="profile one step on the host instead")
    parser.add_argument("--top", type=int, default=25, help="functions that the profile shows")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpt2_loop.json"))
    return parser.parse_args()


def config(args: argparse.Namespace) -> GPT2Config:
    """GPT-2 124M as Hugging Face configures it."""
    tiny = {"n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 64} if args.small else {}
    return GPT2Config(use_cache=False, **tiny)


def contenders() -> dict[str, Build]:
    """Each optimizer with its usual settings, Muon on the matrices that ours is given; absent peers are left out."""
    settings = {"lr": LR, "weight_decay": LAMBDA}
    found: dict[str, Build] = {
        "torch AdamW": lambda model: [torch.optim.AdamW(model.parameters(), **settings, betas=BETAS, fused=True)],
        "AdamWSW": lambda model: [AdamWSW.for_model(model, **settings)],
        "AdamWSW eager": lambda model: [AdamWSW.for_model(model, **settings, replay=False)],
        "torch Muon + AdamW": torch_muon,
        "MuonSW": lambda model: [MuonSW.for_model(model, **settings)],
        "MuonSW eager": lambda model: [MuonSW.for_model(model, **settings, replay=False)],
    }
    for name, package, build in (("pytorch-optimizer", "pytorch_optimizer", peer_po), ("dion", "dion", peer_dion)):
        try:
            __import__(package)
            found[name] = build
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices that Muon gets, and the rest."""
    groups = route(model, "muon", patterns={}, adamw={}).groups
    by = {True: [], False: []}
    for group in groups:
        by[group.get("algorithm", "muon") == "muon"] += [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    return by[True], by[False]


def torch_muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=LAMBDA, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=LR, weight_decay=0.0, betas=BETAS, fused=True)]


def peer_po(model: nn.Module) -> list[Optimizer]:
    from pytorch_optimizer import Muon

    matrices, rest = split(model)
    groups = [
        {"params": matrices, "use_muon": True, "lr": LR, "weight_decay": LAMBDA},
        {"params": rest, "use_muon": False, "lr": LR, "betas": BETAS, "weight_decay": 0.0},
    ]
    return [Muon(groups, use_adjusted_lr=True)]


def peer_dion(model: nn.Module) -> list[Optimizer]:
    from dion import Muon

    matrices, rest = split(model)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "weight_decay": 0.0}]
    mesh = getattr(matrices[0], "device_mesh", None)
    return [Muon(groups, mesh, lr=LR, weight_decay=LAMBDA, betas=BETAS, nesterov=True, adjust_lr="rms_norm")]


class Loop:
    """One compiled model that every contender trains from the same weights."""

    def __init__(self, model: nn.Module, rows: int, device: torch.device) -> None:
        self.model, self.device, self.length = model, device, model.config.n_positions
        is_sharded = isinstance(model, FSDPModule)  # its blocks are compiled already
        self.compiled = torch.compile(model, dynamic=False) if device.type == "cuda" and not is_sharded else model
        self.start = [param.detach().clone() for param in model.parameters()]
        generator = torch.Generator().manual_seed(1)
        words = (
            model.config.vocab_size * torch.rand(8, rows, self.length, generator=generator) ** 3
        )  # some are frequent
        self.batches = words.long().to(device)
        self.losses: dict[str, float] = {}

    def measure(self, chosen: dict[str, Build]) -> dict[str, dict[str, float | str]]:
        """Milliseconds of an update with each optimizer whose loss is right."""
        results: dict[str, dict[str, float | str]] = {}
        trained: dict[str, list[Optimizer]] = {}
        for name, build in chosen.items():
            try:
                trained[name] = self.checked(name, build)
            except Exception as error:  # whatever a peer may raise
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        times = in_turn({name: partial(self.block, optimizers) for name, optimizers in trained.items()}, BLOCKS, 1)
        for name, optimizers in trained.items():
            replay = getattr(optimizers[0], "_replay", None)
            share = {} if replay is None else {"replayed": replay._replays}
            spread = {"ms": round(statistics.median(times[name]), 2), "least": round(min(times[name]), 2)}
            results[name] = {**spread, "loss": round(self.losses[name], 3), **share}
        return results

    def checked(self, name: str, build: Build) -> list[Optimizer]:
        """Optimizers that have taken some steps, and reached the loss that was expected."""
        optimizers = self.begin(build)
        for number in range(CHECKED):
            loss = self.update(optimizers, number)
        self.losses[name] = float(loss.detach())
        self.check(name)
        return optimizers

    def begin(self, build: Build) -> list[Optimizer]:
        """Optimizers on the model as it was at the start."""
        gc.collect()
        with torch.no_grad():
            for param, start in zip(self.model.parameters(), self.start, strict=True):
                param.copy_(start)
                param.grad = None
        torch.manual_seed(2)  # of dropout
        return build(self.model)

    def update(self, optimizers: list[Optimizer], number: int) -> torch.Tensor:
        """The loop: forward, backward, clip, step."""
        batch = self.batches[number % len(self.batches)]
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss

    def block(self, optimizers: list[Optimizer]) -> float:
        """Milliseconds of an update, over some."""
        return milliseconds(lambda: [self.update(optimizers, n) for n in range(UPDATES)], self.device) / UPDATES

    def check(self, name: str) -> None:
        """Refuse a loss that is not what torch's optimizer reaches."""
        own = self.losses[name]
        twin = self.losses.get("torch AdamW" if name.startswith("AdamW") else "torch Muon + AdamW", own)
        bound = next((bound for kind, bound in CLOSE.items() if name.startswith(kind)), 1.0)
        if not math.isfinite(own) or abs(own - twin) > bound:
            raise RuntimeError(f"loss {own:.3f} after {CHECKED} updates, torch's {twin:.3f}: not timed")


def profile_host(name: str, build: Build, model: nn.Module, device: torch.device, top: int) -> None:
    """How long `step` takes to return, its launches, and the functions that it spends its time in."""
    torch.manual_seed(0)
    params, optimizers = list(model.parameters()), build(model)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def moved() -> None:
        """Gradients elsewhere, as a loop that frees them finds them."""
        for param in params:
            param.grad = torch.randn_like(param)

    moved()
    for _ in range(8):
        step()
    settled = host_times(step, device)
    moving = host_times(step, device, moved)
    replays = getattr(getattr(optimizers[0], "_replay", None), "_replays", 0)
    print(f"\n{name}: host ms a step {settled:.2f}, gradients moving {moving:.2f}; {replays} steps replayed")
    print(f"launches {launches(step, device)}")
    if top:
        profiler = cProfile.Profile()
        for _ in range(30):
            moved()
            synchronize(device)
            profiler.runcall(step)
        stats = pstats.Stats(profiler)
        stats.sort_stats("tottime").print_stats(top)


def host_times(step: Callable[[], None], device: torch.device, before: Callable[[], None] = lambda: None) -> float:
    """Median milliseconds until `step` returns, the device idle when it begins."""
    times = []
    for _ in range(30):
        before()
        synchronize(device)
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def launches(step: Callable[[], None], device: torch.device) -> dict[str, int]:
    """How often one step calls the driver to launch or to copy."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile() as profiler:
        step()
        synchronize(device)
    calls = ("cudaLaunch", "cuLaunch", "cudaGraph", "cudaMemcpy", "cudaMemset")
    return {one.key: one.count for one in profiler.key_averages() if one.key.startswith(calls)}


if __name__ == "__main__":
    main()
