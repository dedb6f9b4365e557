"""Steps of lucidrains' Lion in float64: `python -m tests.family.record.lion CLONES` writes them."""

import sys

from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from tests.family.record.authors import Clone, gaussian, save

SHAPES, STEPS = [(3, 4), (5,)], 5
OPTIONS = {"lr": 1e-2, "weight_decay": 0.3}


def main(clones):
    file = Clone(clones, "lucidrains/lion-pytorch", "6a74fdc", "lion_pytorch/lion_pytorch.py")
    lion = file.load("Lion", "exists", "update_fn", Optimizer=Optimizer)[0]
    params = [Parameter(gaussian(*shape, seed=seed)) for seed, shape in enumerate(SHAPES)]
    grads = [[gaussian(*shape, seed=10 * step + n + 2) for n, shape in enumerate(SHAPES)] for step in range(STEPS)]
    weights = [[param.detach().clone() for param in params]]
    optimizer = lion(params, **OPTIONS)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad
        optimizer.step()
        weights.append([param.detach().clone() for param in params])
    save("lion", {"source": file.source, "options": OPTIONS, "grads": grads, "weights": weights})


if __name__ == "__main__":
    main(sys.argv[1])
