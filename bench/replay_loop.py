"""A plain training loop with and without `replay=True`: how many steps are replayed, and what an update takes.

    PYTHONPATH=src python bench/replay_loop.py

Gradients are freed after every step, as `zero_grad` does by default, so each backward pass puts them where it finds
room. The loop is torch's own Transformer encoder in bfloat16 autocast; the time of an update is that of the whole loop.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings

import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from muonsw.lab.bench.machine import chosen_device, environment

WARM, TIMED, BLOCKS = 60, 40, 9
LENGTHS = {"one length": (128,), "four lengths": (96, 128, 160, 200)}


def main() -> None:
    device = chosen_device("cuda")
    warnings.filterwarnings("ignore", message="replay=True")  # it says what the table shows
    print(json.dumps(environment(device)))
    print(f"{'optimizer':10} {'batches':14} {'replay':7} {'ms an update':>13} {'replayed':>9}")
    for kind in (MuonSW, AdamWSW):
        for name, lengths in LENGTHS.items():
            loops = [Loop(kind, lengths, replay) for replay in (False, True)]
            times: list[list[float]] = [[], []]
            for _ in range(BLOCKS):  # in turn: a host's speed changes from minute to minute
                for loop, taken in zip(loops, times, strict=True):
                    taken.append(loop.block())
            for loop, taken in zip(loops, times, strict=True):
                told = f"{loop.optimizer.replay!s:7} {statistics.median(taken):13.2f} {loop.share_replayed:9.0%}"
                print(f"{kind.__name__:10} {name:14} {told}", flush=True)


class Loop:
    """A model in training, warmed up."""

    def __init__(self, kind: type[MuonSW] | type[AdamWSW], lengths: tuple[int, ...], replay: bool) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1)
        self.model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
        self.optimizer = kind.for_model(self.model, lr=1e-3, replay=replay)
        steps = WARM + BLOCKS * TIMED
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.lengths = [lengths[i] for i in torch.randint(len(lengths), (steps,)).tolist()]
        for _ in range(WARM):
            self.update()
        self.replayed_before = self.optimizer._replay._replays

    def update(self) -> None:
        """One batch, one step."""
        batch = torch.randn(16, self.lengths.pop(), 256, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def block(self) -> float:
        """The milliseconds of an update, over some."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TIMED):
            self.update()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / TIMED

    @property
    def share_replayed(self) -> float:
        """Of the steps since it was warm."""
        return (self.optimizer._replay._replays - self.replayed_before) / (BLOCKS * TIMED)


if __name__ == "__main__":
    main()
