"""Time what telemetry costs in training: whole steps with and without it, in one process, in turns, medians.

    OMP_NUM_THREADS=1 python bench/telemetry_cost.py
    python bench/telemetry_cost.py --device cuda --preset w256 --batch 32

The lab's model is trained on random tokens, forward, backward and step. A round times one step of each way of
training, in changing order, so that what else the machine does hits all of them alike; what counts is the
median of the differences within rounds. At `every=n` an n-th of a sampled step's cost falls on each step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from muonsw import MuonSW, Telemetry
from muonsw.lab.bench.timing import in_turn, save, synchronize
from muonsw.lab.model import Decoder, preset

VOCAB, LONGEST = 1024, 256
TARGETS = {1: 0.05, 50: 0.002}


class Training:
    """A model of its own, with telemetry at every step, at none of those timed, or without any."""

    def __init__(self, size: str, device: str, every: int | None, **options: bool) -> None:
        self.model = Decoder(replace(preset(size), vocab=VOCAB)).to(device)
        self.device = torch.device(device)
        splits = {name: {"split_sizes": sizes} for name, sizes in self.model.fused_projections().items()}
        self.optimizer = MuonSW.for_model(self.model, lr=1e-3, weight_decay=0.1, patterns=splits)
        self.telemetry = Telemetry(self.optimizer, every=every, **options) if every else None

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """Seconds of one training step, and of the optimizer in it."""
        synchronize(self.device)
        begin = time.perf_counter()
        self.model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        synchronize(self.device)
        middle = time.perf_counter()
        self.optimizer.step()
        synchronize(self.device)
        end = time.perf_counter()
        self.optimizer.zero_grad()
        return end - begin, end - middle


def measure(size: str, device: str, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step for each way, and of what it adds to the optimizer's part."""
    ways = {
        "none": Training(size, device, None),
        "between samples": Training(size, device, 10**9),
        "sampled": Training(size, device, 1),
        "sampled, spectral norms": Training(size, device, 1, spectral_norm=True),
    }
    generator, length = torch.Generator().manual_seed(0), min(LONGEST, preset(size).sequence)
    tokens = torch.randint(0, VOCAB, (batch, length + 1), generator=generator).to(device)
    seconds = in_turn({name: partial(way.step, tokens) for name, way in ways.items()}, rounds)
    base = seconds["none"]
    step = statistics.median(total for total, _ in base)
    results = {}
    for name, times in seconds.items():
        # the forward and backward passes are the same code; their noise would hide what is measured
        added = statistics.median(own - without for (_, own), (_, without) in zip(times, base, strict=True))
        results[name] = {
            "step_ms": 1e3 * statistics.median(total for total, _ in times),
            "optimizer_ms": 1e3 * statistics.median(own for _, own in times),
            "added_ms": 1e3 * added,
            "added_fraction": added / step,
        }
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    lines = [f"{'telemetry':24} {'step ms':>9} {'optimizer ms':>13} {'added ms':>9} {'of a step':>10}"]
    for name, row in results.items():
        lines.append(
            f"{name:24} {row['step_ms']:9.1f} {row['optimizer_ms']:13.2f} {row['added_ms']:9.2f} "
            f"{row['added_fraction']:10.2%}"
        )
    for every, target in TARGETS.items():
        share = results["sampled"]["added_fraction"] / every
        verdict = "met" if share <= target else "MISSED"
        lines.append(f"every={every}: {share:.3%} of training time, target {target:.1%}: {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo", help="size of the lab's model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=12, help=f"sequences, of at most {LONGEST} tokens")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, default=None, help="write the numbers to this file")
    args = parser.parse_args()
    results = measure(args.preset, args.device, args.batch, args.rounds)
    record = {"preset": args.preset, "device": args.device, "batch": args.batch}
    record |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    save({**record, "results": results}, args.json)
    print(table(results))


if __name__ == "__main__":
    main()
