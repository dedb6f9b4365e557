"""A plain training loop with and without `replay=True`: how many steps are replayed, and what an update takes.

    PYTHONPATH=src python bench/replay_loop.py

Gradients are freed after every step, as `zero_grad` does by default, so each backward pass puts them where it finds
room. The loop is torch's own Transformer encoder in bfloat16 autocast; the time of an update is that of the whole loop.
"""

from __future__ import annotations

import json
import statistics
import warnings

import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from muonsw.lab.bench.timing import chosen_device, environment, in_turn, milliseconds

WARM, TIMED, BLOCKS = 60, 40, 9
LENGTHS = {"one length": (128,), "four lengths": (96, 128, 160, 200)}


def main() -> None:
    device = chosen_device("cuda")
    warnings.filterwarnings("ignore", message="replay=True")  # it says what the table shows
    print(json.dumps(environment(device)))
    print(f"{'optimizer':10} {'batches':14} {'replay':7} {'ms an update':>13} {'replayed':>9}")
    for kind in (MuonSW, AdamWSW):
        for name, lengths in LENGTHS.items():
            loops = {str(replay): Loop(kind, lengths, replay) for replay in (False, True)}
            times = in_turn({replay: loop.block for replay, loop in loops.items()}, BLOCKS, warming=0)
            for replay, loop in loops.items():
                row = f"{replay:7} {statistics.median(times[replay]):13.2f} {loop.share_replayed:9.0%}"
                print(f"{kind.__name__:10} {name:14} {row}", flush=True)


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
        return milliseconds(lambda: [self.update() for _ in range(TIMED)], torch.device("cuda")) / TIMED

    @property
    def share_replayed(self) -> float:
        """Of the steps since it was warm."""
        return (self.optimizer._replay._replays - self.replayed_before) / (BLOCKS * TIMED)


if __name__ == "__main__":
    main()
