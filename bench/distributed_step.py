"""Time the optimizer's step on many ranks, against unsharded tensors, dion and torch's AdamW.

    python bench/distributed_step.py                                   # 1, 2, 4, 8, ... GPUs of this machine
    python bench/distributed_step.py --ranks 1 --set gpt2              # what sharding costs one GPU
    python bench/distributed_step.py --ranks 1 2 --set tiny            # processes on CPUs (gloo)
    torchrun --nnodes 2 --nproc-per-node 8 ... bench/distributed_step.py --worker   # several machines, one size

Each number of ranks is one `torchrun` of this file. The matrices of a decoder are plain tensors that every rank updates
alone (`whole`), sharded as by FSDP2 (`fsdp`), or copied as by DDP with the work shared (`ddp`). Contenders take
turns on the same gradients. It prints medians of the slowest rank: a step that starts on an idle device, its host time,
and a step among others in a row; and each rank's state. Before anything is timed, steps are checked against the same
steps on one rank.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonsw import AdamWSW, MuonSW, machine
from muonsw.addons.replay import SETTLED
from timing import in_turn, save, synchronize


def decoder(width: int, layers: int) -> list[tuple[int, ...]]:
    """Attention and a gated feed-forward network of 8/3 the width."""
    inner = -(-8 * width // 3 // 64) * 64
    return ([(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]) * layers


GPT2 = [(768, 768)] * 48 + [(768, 3072)] * 24
W1024 = [(1024, 1024)] * 48 + [(8, 2816, 1024), (8, 2816, 1024), (8, 1024, 2816)] * 12
SETS: dict[str, list[tuple[int, ...]]] = {
    "tiny": decoder(64, 4), "small": decoder(512, 8), "gpt2": GPT2, "w1024": W1024,
    "1b": decoder(2048, 24), "7b": decoder(4096, 32),
}  # fmt: skip
STRATEGIES = ["whole", "fsdp", "ddp"]
LR, WARMUP, IN_A_ROW = 1e-3, 10, 10

Build = Callable[[list[Tensor], DeviceMesh], torch.optim.Optimizer]


def ours(params: list[Tensor], mesh: DeviceMesh) -> torch.optim.Optimizer:
    del mesh
    return MuonSW(params, lr=LR, matrix="stack")


def ours_divided(params: list[Tensor], mesh: DeviceMesh) -> torch.optim.Optimizer:
    return MuonSW(params, lr=LR, matrix="stack", process_group=mesh.get_group())


def dion(params: list[Tensor], mesh: DeviceMesh) -> torch.optim.Optimizer:
    from dion import Muon

    sharded = hasattr(params[0], "device_mesh")
    return Muon(
        params, mesh if sharded else mesh.get_group(), lr=LR, nesterov=True, use_triton=mesh.device_type == "cuda"
    )


def dion_in_graph(params: list[Tensor], mesh: DeviceMesh) -> torch.optim.Optimizer:
    from dion.cuda_graph import CudaGraphOptimizer

    return CudaGraphOptimizer(dion(params, mesh), warmup_steps=3)


def contenders(strategy: str, device: str) -> dict[str, Build]:
    adamw: dict[str, Build] = {
        "AdamWSW": lambda params, _: AdamWSW(params, lr=LR),
        "torch.optim.AdamW(fused=True)": lambda params, _: torch.optim.AdamW(params, lr=LR, fused=True),
    }
    if strategy == "whole":
        return {"muonsw": ours, **adamw}
    chosen: dict[str, Build] = {"muonsw": ours if strategy == "fsdp" else ours_divided}
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("dion")
        chosen["dion Muon"] = dion
        if device == "cuda":
            chosen["dion Muon in its CUDA graph"] = dion_in_graph
    return {**chosen, **(adamw if strategy == "fsdp" else {})}


def parameters(shapes: list[tuple[int, ...]], mesh: DeviceMesh, strategy: str) -> list[Tensor]:
    """The same weights and gradients on every rank, or their shards."""
    params: list[Tensor] = []
    generator = torch.Generator(mesh.device_type).manual_seed(0)
    for shape in shapes:
        weight, grad = (torch.randn(shape, generator=generator, device=mesh.device_type) for _ in range(2))
        if strategy == "fsdp":
            weight, grad = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (weight, grad))
        param = nn.Parameter(0.02 * weight)
        param.grad = grad
        params.append(param)
    return params


def check(build: Build, shapes: list[tuple[int, ...]], mesh: DeviceMesh, strategy: str) -> None:
    """Check that steps on all ranks equal steps on a single rank."""
    few = list(dict.fromkeys(shapes))
    spread, alone = parameters(few, mesh, strategy), parameters(few, mesh, "whole")
    pairs = build(spread, mesh), ours(alone, mesh)
    for _ in range(SETTLED + 3):  # the last steps are replayed if possible
        for optimizer in pairs:
            optimizer.step()
    for a, b in zip(spread, alone, strict=True):
        full = a.detach().full_tensor() if hasattr(a, "full_tensor") else a.detach()
        assert (full - b).abs().max() < 1e-2 * LR * max(b.shape), "steps on many ranks differ from those on one"


def timed(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> list[float]:
    """Seconds on the slowest rank: one step from an idle device, its host time, and each of several steps in a row."""
    device = torch.device(mesh.device_type)

    def seconds(steps: int) -> tuple[float, float]:
        dist.barrier()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        host = time.perf_counter() - begun
        synchronize(device)
        return time.perf_counter() - begun, host

    taken = torch.tensor([*seconds(1), seconds(IN_A_ROW)[0] / IN_A_ROW], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.tolist()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)


def worker(options: argparse.Namespace) -> None:
    device = "cuda" if machine.gpus() and not options.cpu else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shapes = SETS[options.set]
    for strategy in options.strategies:
        builds = contenders(strategy, device)
        check(builds["muonsw"], shapes, mesh, strategy)
        running = {name: build(parameters(shapes, mesh, strategy), mesh) for name, build in builds.items()}
        ways = {name: partial(timed, optimizer, mesh) for name, optimizer in running.items()}
        times = in_turn(ways, options.rounds, WARMUP)
        for name, optimizer in running.items():
            seconds, host, each = map(statistics.median, zip(*times[name], strict=True))
            row = {"strategy": strategy, "ranks": mesh.size(), "contender": name, "device": device}
            row |= {"ms": 1000 * seconds, "host_ms": 1000 * host, "in_a_row_ms": 1000 * each}
            row["state_mib"] = state_bytes(optimizer) / 2**20
            if dist.get_rank() == 0:
                print("RESULT " + json.dumps(row), flush=True)
            if hasattr(optimizer, "release"):  # dion's graph would keep the process group alive
                optimizer.release()
    dist.destroy_process_group()


def launch(options: argparse.Namespace, ranks: int) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    passed = ["--worker", "--set", options.set, "--rounds", str(options.rounds), "--strategies", *options.strategies]
    passed += ["--cpu"] if options.cpu else []
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    printed = subprocess.run(command + passed, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default: 1, 2, 4, ... up to all GPUs")
    parser.add_argument("--set", choices=SETS, help="the matrices; default: 1b on GPUs, tiny on CPUs")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="use CPUs even if there are GPUs")
    parser.add_argument("--worker", action="store_true", help="run as one rank of a torchrun")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    gpus = 0 if options.cpu else machine.gpus()
    options.set = options.set or ("1b" if gpus else "tiny")
    if options.worker:
        worker(options)
        return
    numbers = options.ranks or [n for n in (1, 2, 4, 8, 16) if n <= max(gpus, 2)]
    rows = [row for ranks in numbers for row in launch(options, ranks)]
    total = sum(map(math.prod, SETS[options.set]))
    print(f"{options.set}: {total / 1e6:.1f}M parameters, torch {torch.__version__}, {rows[0]['device']}")
    print(
        f"{'strategy':9} {'ranks':>5}  {'contender':30} {'ms a step':>9} {'host':>9} {'in a row':>9} {'state, MiB':>11}"
    )
    for row in sorted(rows, key=lambda r: (r["strategy"], r["contender"], r["ranks"])):
        times = f"{row['ms']:9.2f} {row['host_ms']:9.2f} {row['in_a_row_ms']:9.2f}"
        print(f"{row['strategy']:9} {row['ranks']:5}  {row['contender']:30} {times} {row['state_mib']:11.1f}")
    save(rows, options.out)


if __name__ == "__main__":
    main()
