"""Record what Meta's Shampoo does: `python -m tests.family.record.shampoo CLONE`.

Writes tests/family/recorded/shampoo.json. CLONE is a clone of https://github.com/facebookresearch/optimizers at commit
f606606; its distributed_shampoo runs in float64 as it stands, except for corrections of averages, which it keeps in
float32: here torch's default dtype is float64.
"""

import json
import sys
from pathlib import Path

import torch

from tests.family.gradients import gradient, start

RECORDED = Path(__file__).parents[1] / "recorded" / "shampoo.json"
SOURCE = "facebookresearch/optimizers f606606 distributed_shampoo"
STEPS = 9
LR = 2**-6  # Meta's code keeps it in float32
CASES = [
    {"shape": (6, 6), "block_size": 3, "frequency": 1, "betas": (0.9, 0.95), "grafting": "adam"},
    {"shape": (5, 7), "block_size": 8, "frequency": 2, "betas": (0.8, 0.9), "grafting": "sgd"},
    {"shape": (7, 8), "block_size": 4, "frequency": 3, "betas": (0.9, 0.999), "grafting": None},
    {"shape": (4, 4), "block_size": 8, "frequency": 1, "betas": (0.9, 1.0), "grafting": None},
]


def weights(shape, block_size, frequency, betas, grafting):
    """The weight after every step, without decay."""
    import distributed_shampoo as meta

    grafts = {
        "adam": meta.AdamPreconditionerConfig(beta2=betas[1], epsilon=1e-8),
        "sgd": meta.SGDPreconditionerConfig(),
        None: None,
    }
    config = meta.RootInvShampooPreconditionerConfig(
        factor_matrix_dtype=torch.float64, inv_factor_matrix_dtype=torch.float64
    )
    param = torch.nn.Parameter(start(shape))
    optimizer = meta.DistributedShampoo(
        [param],
        lr=LR,
        betas=betas,
        epsilon=1e-12,
        weight_decay=0.0,
        max_preconditioner_dim=block_size,
        precondition_frequency=frequency,
        grafting_config=grafts[grafting],
        preconditioner_config=config,
    )
    seen = []
    for step in range(STEPS):
        param.grad = gradient(shape, step)
        optimizer.step()
        seen.append(param.tolist())
    return seen


def main(clone):
    sys.path.insert(0, clone)
    torch.set_default_dtype(torch.float64)
    runs = [{**case, "weights": weights(**case)} for case in CASES]
    RECORDED.write_text(json.dumps({"source": SOURCE, "lr": LR, "runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
