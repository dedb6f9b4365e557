"""Scaled decay for any other optimizer: `scale_weight_decay` on torch's AdamW.

Run it: `python examples/other_optimizer.py`. It works the same way for torch's Muon and the decoupled optimizers of
timm and dion. Only `weight_decay` is set before each step; the optimizer does the rest.
"""

import torch
from torch import nn

from muonsw import scale_weight_decay

PEAK, LAMBDA = 3e-3, 0.1


def main(steps: int = 200) -> list[tuple[float, float]]:
    """Train, and return the learning rate and the decay of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=LAMBDA)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=PEAK / 10)
    scale_weight_decay(optimizer)

    inputs = torch.randn(256, 8)
    targets = inputs.square().sum(1, keepdim=True)
    decays = []
    for step in range(steps):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        (group,) = optimizer.param_groups
        decays.append((group["lr"], group["lr"] * group["weight_decay"]))
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {loss.item():7.3f}, lr {decays[-1][0]:.2e}, decay {decays[-1][1]:.2e}")
    return decays


if __name__ == "__main__":
    main()
