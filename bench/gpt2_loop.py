"""Time a common training loop with each optimizer: Hugging Face's GPT-2 124M, compiled, bfloat16 autocast.

    PYTHONPATH=src python bench/gpt2_loop.py                # ms per step of the whole loop
    PYTHONPATH=src python bench/gpt2_loop.py --fsdp         # the same under FSDP2, over a mesh of one rank
    PYTHONPATH=src python bench/gpt2_loop.py --host         # host time and launches of one step

Gradients are clipped, and freed after every step. Dion and pytorch-optimizer are timed if installed. All contenders
start from the same weights and see the same batches; one whose loss is not close to that of torch's optimizer is not
timed. The others take turns, several steps each, on one compiled model.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
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
from timing import chosen_device, environment, in_turn, milliseconds, save, synchronize

BATCHES = (16, 4)
LR, LAMBDA, BETAS = 1e-3, 0.1, (0.9, 0.95)
CHECKED, BLOCKS, STEPS = 12, 7, 10

# Allowed distance of the loss after `CHECKED` steps from that of torch's optimizer: kernels round differently, and
# other Muons scale and route differently.
CLOSE = {"AdamWSW": 0.05, "MuonSW": 0.3}

Build = Callable[[nn.Module], list[Optimizer]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences in a batch")
    parser.add_argument("--only", nargs="+", default=None, help="names of contenders")
    parser.add_argument("--fsdp", action="store_true", help="shard the model with FSDP2")
    parser.add_argument("--host", action="store_true", help="time one step on the host instead")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpt2_loop.json"))
    args = parser.parse_args()
    device = chosen_device(args.device)
    tiny = {"n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 64} if args.small else {}
    config = GPT2Config(use_cache=False, **tiny)  # GPT-2 124M as Hugging Face configures it
    print(json.dumps(environment(device, ("transformers", "dion", "pytorch-optimizer"))), flush=True)
    chosen = {name: build for name, build in contenders().items() if not args.only or name in args.only}
    if args.host:
        for name, build in chosen.items():
            model = GPT2LMHeadModel(config).to(device)
            time_host(name, build, sharded(model, device) if args.fsdp else model, device)
        return
    record = {"environment": environment(device), "results": {}}
    for rows in args.batches:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).to(device)
        loop = Loop(sharded(model, device) if args.fsdp else model, rows, device)
        record["results"][rows] = loop.measure(chosen)
        for name, result in record["results"][rows].items():
            print(f"{rows:3} x {loop.length}  {name:22} {json.dumps(result)}", flush=True)
        save(record, args.json)
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """The model under FSDP2 on a single rank: blocks are compiled, then sharded."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh(device.type, (1,))
    for block in model.transformer.h:
        if device.type == "cuda":
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def contenders() -> dict[str, Build]:
    """Each installed optimizer with its usual settings; every Muon gets the matrices that ours gets."""
    settings = {"lr": LR, "weight_decay": LAMBDA}
    builds: dict[str, Build] = {
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
            builds[name] = build
        except ImportError as error:
            print(f"skipping {name}: {error}")
    return builds


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices for Muon, and the rest."""
    params: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
    for group in MuonSW.for_model(model, lr=LR).param_groups:
        params[group["algorithm"]] += group["params"]
    return params["muon"], params["adamw"]


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
    """A compiled model that every contender trains from the same weights."""

    def __init__(self, model: nn.Module, rows: int, device: torch.device) -> None:
        self.model, self.device, self.length = model, device, model.config.n_positions
        is_sharded = isinstance(model, FSDPModule)  # its blocks are compiled already
        self.compiled = torch.compile(model, dynamic=False) if device.type == "cuda" and not is_sharded else model
        self.start = [param.detach().clone() for param in model.parameters()]
        draws = torch.rand(8, rows, self.length, generator=torch.Generator().manual_seed(1))
        # Not uniform, so there is something to learn.
        self.batches = (model.config.vocab_size * draws**3).long().to(device)

    def measure(self, chosen: dict[str, Build]) -> dict[str, dict[str, float | str]]:
        """Milliseconds per step of the loop, for each optimizer with a correct loss."""
        results: dict[str, dict[str, float | str]] = {}
        trained: dict[str, list[Optimizer]] = {}
        losses: dict[str, float] = {}
        for name, build in chosen.items():
            try:
                trained[name], losses[name] = self.begin(build)
                require_close(name, losses)
            except Exception as error:  # peers may raise anything
                trained.pop(name, None)
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        times = in_turn({name: partial(self.block, optimizers) for name, optimizers in trained.items()}, BLOCKS, 1)
        for name, optimizers in trained.items():
            replay = getattr(optimizers[0], "_replay", None)
            share = {} if replay is None else {"replayed": replay._replays}
            spread = {"ms": round(statistics.median(times[name]), 2), "least": round(min(times[name]), 2)}
            results[name] = {**spread, "loss": round(losses[name], 3), **share}
        return results

    def begin(self, build: Build) -> tuple[list[Optimizer], float]:
        """Take some steps from the initial weights; return the optimizers and the loss."""
        gc.collect()
        with torch.no_grad():
            for param, start in zip(self.model.parameters(), self.start, strict=True):
                param.copy_(start)
                param.grad = None
        torch.manual_seed(2)  # of dropout
        optimizers = build(self.model)
        for number in range(CHECKED):
            loss = self.step(optimizers, number)
        return optimizers, float(loss.detach())

    def step(self, optimizers: list[Optimizer], number: int) -> torch.Tensor:
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
        """Mean milliseconds per step over several steps."""
        return milliseconds(lambda: [self.step(optimizers, n) for n in range(STEPS)], self.device) / STEPS


def require_close(name: str, losses: dict[str, float]) -> None:
    """Raise if the loss is not close to that of torch's optimizer."""
    loss = losses[name]
    twin = losses.get("torch AdamW" if name.startswith("AdamW") else "torch Muon + AdamW", loss)
    bound = next((bound for kind, bound in CLOSE.items() if name.startswith(kind)), 1.0)
    if not math.isfinite(loss) or abs(loss - twin) > bound:
        raise RuntimeError(f"loss {loss:.3f} after {CHECKED} steps, torch's {twin:.3f}: not timed")


def time_host(name: str, build: Build, model: nn.Module, device: torch.device) -> None:
    """Print the host time of `step` and its launches."""
    torch.manual_seed(0)
    params, optimizers = list(model.parameters()), build(model)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def new_gradients() -> None:
        """Allocate new gradients, as in a loop that frees them."""
        for param in params:
            param.grad = torch.randn_like(param)

    def host_ms(before: Callable[[], None]) -> float:
        """Median milliseconds until `step` returns, starting on an idle device."""
        times = []
        for _ in range(30):
            before()
            synchronize(device)
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    new_gradients()
    for _ in range(8):
        step()
    settled, moving = host_ms(lambda: None), host_ms(new_gradients)
    launches = {}
    if device.type == "cuda":
        with torch.profiler.profile() as launched:
            step()
            synchronize(device)
        calls = ("cudaLaunch", "cuLaunch", "cudaGraph", "cudaMemcpy", "cudaMemset")
        launches = {event.key: event.count for event in launched.key_averages() if event.key.startswith(calls)}
    replays = getattr(getattr(optimizers[0], "_replay", None), "_replays", 0)
    print(f"\n{name}: host ms a step {settled:.2f}, gradients moving {moving:.2f}; {replays} steps replayed")
    print(f"launches {launches}")


if __name__ == "__main__":
    main()
