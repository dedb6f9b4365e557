"""Steps of an optimizer on small problems, written down; `authors.py` has what loads its code in float64."""

import torch.distributed as dist
from torch import nn

from tests.family.record.authors import gaussian, save

SHAPES = ((5, 3), (3, 4))


def problem(shapes, steps):
    """Weights and, for each step, gradients; large ones, beside which the epsilons under authors' norms are small."""
    weights = [gaussian(*shape, seed=number) for number, shape in enumerate(shapes)]
    drawn = [[gaussian(*shape, seed=10 * step + n) for n, shape in enumerate(shapes)] for step in range(1, steps + 1)]
    return weights, [[1e4 * grad for grad in step] for step in drawn]


def single_process():
    """A process group of one rank, for code that asks for one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def record(name, source, build, options, shapes=SHAPES, steps=3):
    """Take the steps and write down weights, gradients and the weights after each step, with their source."""
    weights, grads = problem(shapes, steps)
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build(params, **options)
    after = []
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        after.append([param.tolist() for param in params])
    save(name, {"source": {**source, "options": options}, "weights": weights, "grads": grads, "after": after})
