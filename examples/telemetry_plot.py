"""Show what decay does to the weights: telemetry of a plain loop, written as JSON lines and plotted.

Run it: `python examples/telemetry_plot.py`. It also needs matplotlib, and writes
`telemetry-constant.jsonl`, `telemetry-scaled.jsonl` and `weight-norm.png`. With the lab installed,
`muonsw diagnose telemetry-*.jsonl` explains the records.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from muonsw import MuonSW, Telemetry
from muonsw.telemetry import JsonlSink


def train(decay: str, steps: int, path: Path) -> list[dict]:
    """Train a small model under one decay rule; return its telemetry, which is also written to the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=2.0, decay=decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.002)
    path.unlink(missing_ok=True)  # a sink appends, because a resumed run keeps its records
    with Telemetry(optimizer, every=10, sink=JsonlSink(path)) as telemetry:
        for _ in range(steps):
            inputs = torch.randn(64, 16)
            loss = (model(inputs) - inputs[:, :1] * inputs[:, 1:2]).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return list(telemetry.records)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Plot the size of the decayed weights over the steps, for each rule."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for decay, records in runs.items():
        steps = [record["step"] for record in records]
        axis.plot(steps, [record["decayed"]["weight_rms"] for record in records], label=f"{decay} decay")
    axis.set(xlabel="step", ylabel="weight RMS", title="What decay does while the learning rate falls")
    axis.legend()
    figure.savefig(path)


def main(steps: int = 600, folder: Path = Path()) -> dict[str, list[dict]]:
    """Train under both rules; write their records and one figure."""
    runs = {decay: train(decay, steps, folder / f"telemetry-{decay}.jsonl") for decay in ("constant", "scaled")}
    draw(runs, folder / "weight-norm.png")
    for decay, records in runs.items():
        norms = [record["decayed"]["weight_rms"] for record in records]
        print(f"{decay}: weight RMS {norms[-1]:.4f} at the end, {norms[-1] / max(norms) - 1:+.0%} since its peak")
    return runs


if __name__ == "__main__":
    main()
