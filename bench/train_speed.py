"""Tokens a second of the trainer's own updates, with more choices than `muonsw bench` has.

    PYTHONPATH=src python bench/train_speed.py --presets w256 w1024

What is timed, and how, is in `muonsw.lab.bench.training`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from muonsw.lab.bench.timing import chosen_device, product_rate, save
from muonsw.lab.bench.training import Amount, TimedTraining, kernel_table
from muonsw.lab.train.records import READ_EVERY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["w256", "w1024"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="sequences in an update (the preset's; the paper's is 256)")
    parser.add_argument("--micro", type=int, help="sequences in a micro-batch")
    parser.add_argument("--blocks", type=int, default=5)
    # Every READ_EVERY updates their numbers are read back, for which the host waits.
    parser.add_argument("--updates", type=int, default=2, choices=range(1, READ_EVERY), metavar="N", help="in a block")
    parser.add_argument("--graphs", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="folder for where the time of an update goes, kernel by kernel")
    options = parser.parse_args()
    device = chosen_device(options.device)
    amount = Amount(options.batch, options.micro, options.blocks, options.updates, options.graphs)
    rate = product_rate(device) / 1e12
    rows = [measured(name, device, amount, options.profile) for name in options.presets]
    print(f"\ntorch {torch.__version__}, one large product {rate:.4g} TFLOP/s")
    print(f"{'preset':8} {'batch':>6} {'micro':>6} {'ktok/s':>8} {'ms/update':>10} {'optimizer ms':>13} {'TFLOP/s':>8}")
    for row in rows:
        print(
            f"{row['preset']:8} {row['batch']:6} {row['micro']:6} {row['tokens_per_second'] / 1e3:8.1f} "
            f"{row['ms']:10.1f} {row['optimizer_ms']:13.1f} {row['tflops']:8.3g} ({row['tflops'] / rate:.0%})"
        )
    save(rows, options.json)


def measured(name: str, device: torch.device, amount: Amount, profiles: Path | None) -> dict:
    timed = TimedTraining(name, device, amount)
    print(f"{name}: compiled in {timed.check():.0f} s", flush=True)
    row = timed.measure()
    print(row, flush=True)
    if profiles:
        profiles.mkdir(parents=True, exist_ok=True)
        (profiles / f"{name}.txt").write_text(kernel_table(timed.update), encoding="utf-8")
    return row


if __name__ == "__main__":
    main()
