"""Record what the authors' SOAP does: `python -m tests.family.record.soap CLONE`.

Writes tests/family/recorded/soap.json. CLONE is a clone of https://github.com/nikhilvyas/SOAP at commit a1e5535. Its
soap.py casts factors to float32 before it decomposes them; here `Tensor.float` leaves them in float64, so that the rule
itself is what is compared.
"""

import importlib.util
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.family.gradients import gradient, start

RECORDED = Path(__file__).parents[1] / "recorded" / "soap.json"
SOURCE = "nikhilvyas/SOAP a1e5535 soap.py"
STEPS = 9
# Square, or one side alone: of a rectangular gradient one factor is singular, and rounding chooses its null space.
CASES = [
    {"shape": (5, 5), "precondition_frequency": 2},
    {"shape": (4, 7), "precondition_frequency": 3, "max_precond_dim": 5, "betas": (0.9, 0.8), "shampoo_beta": 0.7},
    {"shape": (6, 3), "precondition_frequency": 1, "max_precond_dim": 5, "eps": 1e-3},
]


def weights(module, shape, **options):
    """The weight after every step, without decay."""
    param = torch.nn.Parameter(start(shape))
    optimizer = module.SOAP([param], lr=0.01, weight_decay=0.0, **options)
    seen = []
    for step in range(STEPS):
        param.grad = gradient(shape, step)
        optimizer.step()
        seen.append(param.tolist())
    return seen


def main(clone):
    spec = importlib.util.spec_from_file_location("soap", Path(clone) / "soap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(torch.Tensor, "float", lambda tensor: tensor):
        runs = [{**case, "weights": weights(module, **case)} for case in CASES]
    RECORDED.write_text(json.dumps({"source": SOURCE, "lr": 0.01, "runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
