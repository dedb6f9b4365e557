"""A plain training loop with and without `replay=True`: how many steps are replayed, and what an update takes.

    PYTHONPATH=src python bench/replay_loop.py

Gradients are freed after every step, as `zero_grad` does by default, so each backward pass puts them where it finds
room. The loop is torch's own Transformer encoder in bfloat16 autocast; the time of an update is that of the whole loop.
"""

from __future__ import annotations

import json
import time
import warnings

import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from muonsw.lab.bench.machine import chosen_device, environment

WARM, TIMED, BLOCKS = 60, 60, 5
LENGTHS = {"one length": (128,), "four lengths": (96, 128, 160, 200)}


def main() -> None:
    device = chosen_device("cuda")
    warnings.filterwarnings("ignore", message="replay=True")  # it says what the table shows
    print(json.dumps(environment(device, ())))
    print(f"{'optimizer':10} {'batches':14} {'replay':7} {'ms an update':>13} {'replayed':>9}")
    for kind in (MuonSW, AdamWSW):
        for name, lengths in LENGTHS.items():
            for replay in (False, True):
                taken, share = loop(kind, lengths, replay)
                print(f"{kind.__name__:10} {name:14} {replay!s:7} {taken:13.2f} {share:9.0%}", flush=True)


def loop(kind: type[MuonSW] | type[AdamWSW], lengths: tuple[int, ...], replay: bool) -> tuple[float, float]:
    """The median milliseconds of an update, and the share of the steps that were replayed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = kind.for_model(model, lr=1e-3, replay=replay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WARM + BLOCKS * TIMED)
    chosen = torch.randint(len(lengths), (WARM + BLOCKS * TIMED,)).tolist()

    def update() -> None:
        batch = torch.randn(16, lengths[chosen.pop()], 256, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        update()
    before, times = optimizer._replay._replays, []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TIMED):
            update()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin) / TIMED)
    return sorted(times)[BLOCKS // 2], (optimizer._replay._replays - before) / (BLOCKS * TIMED)


if __name__ == "__main__":
    main()
