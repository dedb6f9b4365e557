"""What a user writes, with the types that they may rely on; checked by `mypy --strict` and run.

`make types` checks it against the source, `make test-package` checks and runs it with the installed wheel.
"""

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import muonsw
from muonsw import (
    SGDSW,
    AdamWSW,
    MuonSW,
    Telemetry,
    clip_optimizer_grads_,
    convert_weight_decay,
    scale_weight_decay,
)
from muonsw.addons.scale_weight_decay import ScaledWeightDecay
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.optimizer import Summary


def small_model() -> nn.Sequential:
    """An embedding, a matrix, a norm and a head."""
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 16))


def train() -> MuonSW:
    """A loop with everything that people import."""
    model = small_model()
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1, decay="scaled", patterns={"role:head": {"lr": 0.01}})
    assert_type(optimizer, MuonSW)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with Telemetry(optimizer, every=2) as telemetry:
        assert_type(telemetry, Telemetry)
        for _ in range(4):
            tokens = torch.randint(16, (4, 4))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            assert_type(clip_optimizer_grads_(optimizer, 1.0), Tensor)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_type(optimizer.routing(), str)
    assert_type(optimizer.summary(), Summary)
    assert optimizer.summary().matrices == 1
    assert_type(optimizer.skipped_steps, int)
    assert_type(optimizer.state_dict(), dict[str, Any])
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def closure_and_groups() -> None:
    """The two forms of a step, and groups of one's own."""
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}]
    optimizer = MuonSW(groups, lr=0.02, momentum=0.95, peak_lr=0.02, maximize=True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight @ bias).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert_type(optimizer.step(closure), float)
    assert_type(AdamWSW([weight], lr=1e-3, betas=(0.9, 0.95)), AdamWSW)
    assert_type(SGDSW([weight], lr=0.1, momentum=0.9), SGDSW)


def around_it() -> None:
    """Conversions, the decay of other optimizers, records."""
    assert_type(convert_weight_decay(0.1, "independent", "scaled", 0.02), float)
    assert_type(peak_lr_for_horizon(20_000, base_lr=0.02), float)
    other = torch.optim.AdamW(small_model().parameters(), lr=0.1)
    driver = scale_weight_decay(other, "scaled")
    assert_type(driver, ScaledWeightDecay)
    driver.remove()
    assert_type(muonsw.__version__, str)


def main() -> None:
    """Run all of it."""
    optimizer = train()
    around_it()
    closure_and_groups()
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.02
    print(f"muonsw {muonsw.__version__} works with torch {torch.__version__}")


if __name__ == "__main__":
    main()
