"""A plain training loop: a small model learns to continue this file, character by character.

Run it: `python examples/plain_loop.py`. It needs only torch and muonsw and takes a few seconds.
"""

from pathlib import Path

import torch
from torch import nn

from muonsw import MuonSW

CONTEXT = 16


class Characters(nn.Module):
    """Predicts the next byte from the 16 before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.mix = nn.Linear(CONTEXT * width, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 256) for contexts (batch, 16)."""
        x = self.mix(self.embedding(context).flatten(1)).relu()
        return self.head(self.norm(x + self.hidden(x).relu()))


def main(steps: int = 300) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, CONTEXT + 1, 1)
    model = Characters()

    # Muon for the hidden matrices, AdamW for embedding, head, norm and biases: one optimizer, one scheduler.
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps, cycle_momentum=False)
    print(optimizer.routing())

    losses = []
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (64,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
