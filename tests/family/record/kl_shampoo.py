"""Record what the authors' Online KL-Shampoo does: `python -m tests.family.record.kl_shampoo CLONE`.

Writes tests/family/recorded/kl_shampoo.json. CLONE is a clone of
https://github.com/tilde-research/online-kl-shampoo-release at commit 8f38771. Its roots multiply float16 into float32
by a form of `torch.baddbmm` that CPUs lack: here it is `beta * input + alpha * (A.float() @ B.float())`. A second
series has float64 throughout: casts do nothing in it, so that the rule itself is what is compared.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from tests.family.gradients import gradient, start

RECORDED = Path(__file__).parents[1] / "recorded" / "kl_shampoo.json"
SOURCE = "tilde-research/online-kl-shampoo-release 8f38771 okls/okls_step.py"
STEPS = 7
CASES = [
    {"shape": (5, 5), "lr": 0.01, "betas": (0.9684, 0.9482), "eps": 1e-9},
    {"shape": (4, 7), "lr": 0.01, "betas": (0.9, 0.8), "eps": 1e-6},
    {"shape": (6, 3), "lr": 0.01, "betas": (0.95, 0.5), "eps": 1e-6},
]


def product(added, A, B, dtype=None, *, beta, alpha):
    """`torch.baddbmm` with operands in float16."""
    found = alpha * (A.float() @ B.float())
    found = found if beta == 0 else found + beta * added
    return found.half() if dtype is None else found


def weights(okls_step, shape, lr, betas, eps, dtype):
    """The weight after every step, without decay."""
    m, n = shape
    packed = {key: torch.zeros(1, d * (d + 1) // 2, dtype=dtype) for key, d in
              (("S_a", m), ("S_b", n), ("P_a", m), ("P_b", n))}  # fmt: skip
    weight, momentum, seen = start(shape).to(dtype)[None], torch.zeros(1, m, n, dtype=dtype), []
    for step in range(STEPS):
        weight = okls_step(
            param=weight,
            grad=gradient(shape, step).to(dtype)[None],
            momentum=momentum,
            **packed,
            step=step,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            lr=lr,
            weight_decay=0.0,
            lr_peak=lr,
        )
        seen.append(weight[0].tolist())
    return seen


def main(clone):
    sys.path.insert(0, clone)
    from okls.okls_step import okls_step

    runs = []
    for case in CASES:
        with mock.patch.object(torch, "baddbmm", product):
            single = weights(okls_step, **case, dtype=torch.float32)
        with ExitStack() as stack:
            for cast in ("half", "float"):
                stack.enter_context(mock.patch.object(torch.Tensor, cast, lambda tensor: tensor))
            stack.enter_context(mock.patch.object(torch, "baddbmm", product))
            double = weights(okls_step, **case, dtype=torch.float64)
        runs.append({**case, "float16": single, "float64": double})
    RECORDED.write_text(json.dumps({"source": SOURCE, "runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
