"""Does state in less memory train worse? The lab's decoder with each form of state, over the same seeds and batches.

    OMP_NUM_THREADS=1 python bench/state_loss.py                       # minutes on one core
    python bench/state_loss.py --device cuda --preset mini-dense --steps 1500 --batch 16

Each token depends on the classes of the two before it, so attention is needed, and no batch is seen twice. What counts
is the mean of the differences to float32 within seeds beside their standard error, and beside how far seeds differ.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from muonsw import AdamWSW, MuonSW
from muonsw.lab.bench.timing import environment, save
from muonsw.lab.model import Decoder, ModelConfig, preset

VOCAB, CLASSES = 64, 8
EVALUATED = 16  # batches
ALGORITHMS = {
    "muon": (MuonSW, {"lr": 0.01, "adamw": {"lr": 0.01}}),
    "adamw": (AdamWSW, {"lr": 0.01, "betas": (0.9, 0.999)}),
    "soap": (MuonSW, {"lr": 0.01, "preset": "soap", "adamw": {"lr": 0.01}}),
}
FORMS = {
    "float32": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "bfloat16, nearest": {"state_dtype": "bfloat16", "rounding": "nearest"},
    "int8": {"state_dtype": "int8"},
    "int8, nearest": {"state_dtype": "int8", "rounding": "nearest"},
}


class Chain:
    """Tokens of which each depends on the classes of the two before it."""

    def __init__(self, device: torch.device) -> None:
        logits = 2.0 * torch.randn(CLASSES * CLASSES, VOCAB, generator=torch.Generator().manual_seed(0))
        self.odds = logits.softmax(-1).to(device)

    def batch(self, rows: int, length: int, seed: int) -> Tensor:
        """Rows of tokens, a function of the seed."""
        generator = torch.Generator(self.odds.device).manual_seed(seed)
        tokens = [torch.randint(VOCAB, (rows,), generator=generator, device=self.odds.device) for _ in range(2)]
        for _ in range(length - 1):
            odds = self.odds[tokens[-2] % CLASSES * CLASSES + tokens[-1] % CLASSES]
            tokens.append(torch.multinomial(odds, 1, generator=generator)[:, 0])
        return torch.stack(tokens[1:], 1)


def loss_after(config: ModelConfig, algorithm: str, form: dict, seed: int, args: argparse.Namespace) -> float:
    """The loss on held-out batches after training with a form of state."""
    device = torch.device(args.device)
    chain, model = Chain(device), Decoder(config, seed=seed).to(device)
    kind, options = ALGORITHMS[algorithm]
    splits = {name: {"split_sizes": sizes} for name, sizes in model.fused_projections().items()}
    patterns = {} if algorithm == "adamw" else {"patterns": splits}
    optimizer = kind.for_model(model, weight_decay=0.1, **options, **patterns, **form)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        tokens = chain.batch(args.batch, config.sequence + 1, seed=10**6 * (seed + 1) + step)
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        held_out = [chain.batch(args.batch, config.sequence + 1, seed=number) for number in range(EVALUATED)]
        return statistics.fmean(float(model(tokens[:, :-1], tokens[:, 1:]).cross_entropy) for tokens in held_out)


def main() -> None:
    args = arguments()
    config = replace(preset(args.preset), vocab=VOCAB)
    if args.preset == "demo-dense":
        config = replace(config, layers=2, sequence=64)
    record = {"environment": environment(torch.device(args.device)), "settings": vars(args) | {"json": str(args.json)}}
    for algorithm in args.algorithms:
        losses: dict[str, list[float]] = {name: [] for name in FORMS}
        for seed in range(args.seeds):
            for name, form in FORMS.items():
                losses[name].append(loss_after(config, algorithm, form, seed, args))
        record[algorithm] = losses
        save(record, args.json)
        base = losses["float32"]
        print(
            f"{algorithm}: float32 {statistics.fmean(base):.4f}, between seeds {statistics.stdev(base):.4f}", flush=True
        )
        for name, values in losses.items():
            differences = [value - other for value, other in zip(values, base, strict=True)]
            error = statistics.stdev(differences) / len(differences) ** 0.5
            print(f"  {name:18} {statistics.fmean(differences):+.4f} +- {error:.4f}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="demo-dense")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["muon", "adamw"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/bench/state_loss.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
