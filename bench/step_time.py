"""Time one optimizer step against others', with more choices than `muonsw bench` has.

    python bench/step_time.py                          # this machine's CPU
    python bench/step_time.py --device cuda --sets w1024
    python bench/step_time.py --device cuda --sets w1024 --profile

What is timed, and how, is in `muonsw.lab.bench.steps`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from muonsw.lab.bench.steps import PACKAGES, PEERS, SETS, Matrices, MatrixSource, check, contenders, measure, ours
from muonsw.lab.bench.timing import chosen_device, environment, save, synchronize

MUONS = (
    "muonsw",
    "muonsw plain",
    "muonsw unchecked",
    "muonsw captured",
    "muonsw eager",
    "muonsw gram",
    "torch.optim.Muon",
)


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
    found, missing = contenders(args.only or (*MUONS, *PEERS))
    checked = check(device) if dtype == torch.float32 else {}
    record = {"environment": environment(device, PACKAGES), "dtype": args.dtype, "check": checked, "results": {}}
    for name in sets:
        print(f"timing {name} ...", flush=True)
        record["results"][name] = measure(SETS[name], MatrixSource(device, dtype), args.rounds, found)
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
