"""Record the authors' Schedule-Free AdamW: python -m tests.family.record.schedule_free CLONE.

CLONE is facebookresearch/schedule_free at 70785b5; its reference is run in float64.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import torch

RECORDED = Path(__file__).parents[1] / "recorded" / "schedule_free.json"
FILE = "schedulefree/adamw_schedulefree_reference.py"
SHAPES, STEPS = ((4, 3), (5,)), 12
CASES = {
    "defaults": {"lr": 0.05},
    "decay at y": {"lr": 0.05, "weight_decay": 0.4},
    "decay at z": {"lr": 0.05, "weight_decay": 0.4, "decay_at_z": True, "warmup_steps": 5},
    "weighted": {"lr": 0.02, "betas": (0.95, 0.9), "r": 0.75, "weight_lr_power": 1.0, "warmup_steps": 3, "eps": 1e-4},
    "inner momentum": {"lr": 0.02, "weight_decay": 0.1, "inner_momentum": 0.8},
}


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64)


def gradient(y, step):
    """A gradient that depends on where it is taken."""
    generator = torch.Generator().manual_seed(31 * step + len(y))
    return y - 1 + 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


def run(build, options):
    params = [torch.nn.Parameter(start(shape)) for shape in SHAPES]
    optimizer = build(params, **options)
    with contextlib.redirect_stdout(None):
        optimizer.train()
        for step in range(STEPS):
            for param in params:
                param.grad = gradient(param.detach(), step)
            optimizer.step()
        y = [param.tolist() for param in params]
        optimizer.eval()
    return {"options": options, "y": y, "x": [param.tolist() for param in params]}


def main(clone):
    command = ["git", "-C", clone, "show", f"70785b5:{FILE}"]
    known = {}
    exec(subprocess.run(command, capture_output=True, text=True, check=True).stdout, known)
    runs = {name: run(known["AdamWScheduleFreeReference"], options) for name, options in CASES.items()}
    record = {"source": f"facebookresearch/schedule_free 70785b5 {FILE}", "runs": runs}
    RECORDED.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
