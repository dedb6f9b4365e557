"""Steps of the authors' Aurora in float64: `python -m tests.family.record.aurora CLONES` writes them."""

import sys

import torch

from tests.family.record.authors import Clone, gaussian, save

SHAPES, STEPS = [(6, 3), (3, 5), (4, 4)], 3
REPOSITORY = ("tilde-research/aurora-release", "3d79a5c")


def main(clones):
    (polar,) = Clone(clones, *REPOSITORY, "src/polar.py").load("polar")
    file = Clone(clones, *REPOSITORY, "src/aurora.py")
    (aurora,) = file.load("aurora", polar=polar)
    runs = []
    for seed, shape in enumerate(SHAPES):
        W, momentum = gaussian(*shape, seed=seed), torch.zeros(shape, dtype=torch.float64)
        grads = [gaussian(*shape, seed=10 * seed + step + 1) for step in range(STEPS)]
        weights = [W.clone()]
        for grad in grads:
            aurora(W, grad.clone(), momentum)
            weights.append(W.clone())
        runs.append({"weights": weights, "grads": grads})
    save("aurora", {"source": file.source, "runs": runs})


if __name__ == "__main__":
    main(sys.argv[1])
