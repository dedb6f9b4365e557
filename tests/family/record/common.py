"""Run an authors' file on small problems and write down the weights."""

import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

SHAPES, STEPS = [(5, 3), (3, 4)], 3
RECORDED = Path(__file__).parents[1] / "recorded"


def problem():
    """Weights and, for each step, gradients; large ones, beside which the epsilons under authors' norms are small."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(STEPS)]
    return weights, [[1e4 * grad for grad in step] for step in steps]


def load(clone, file):
    """The authors' module."""
    spec = importlib.util.spec_from_file_location("authors", Path(clone) / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(name, source, clone, build, options):
    """Take the steps and write weights and gradients, and the weights after each step, with their source."""
    torch.Tensor.bfloat16 = lambda tensor: tensor
    weights, grads = problem()
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build(load(clone, source["file"]), params, options)
    after = []
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        after.append([param.tolist() for param in params])
    data = {
        "source": {**source, "options": options},
        "weights": [weight.tolist() for weight in weights],
        "grads": [[grad.tolist() for grad in step] for step in grads],
        "after": after,
    }
    (RECORDED / f"{name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
