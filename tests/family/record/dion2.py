"""Steps of the authors' Dion2 in float64: `python -m tests.family.record.dion2 CLONES` writes them."""

import math
import sys

import torch

from tests.family.record.authors import Clone, gaussian, save

SHAPES, STEPS = [(6, 8), (8, 5)], 3
OPTIONS = {"lr": 0.01, "fraction": 0.25, "ef_decay": 0.95, "weight_decay": 0.01}
REPOSITORY = ("microsoft/dion", "0a059a4")


def main(clones):
    file = Clone(clones, *REPOSITORY, "dion/dion2.py")
    before, after = file.load("dion2_pre_orthogonalize", "dion2_post_orthogonalize", math=math)
    polar, _ = Clone(clones, *REPOSITORY, "dion/polar_express.py").load("polar_express", "_POLAR_EXPRESS_COEFFS")
    (scaled,) = Clone(clones, *REPOSITORY, "dion/megabatch_base.py").load("adjust_lr_spectral_norm", math=math)
    lr, decay, kept = (torch.tensor(OPTIONS[key], dtype=torch.float64) for key in ("lr", "weight_decay", "ef_decay"))
    runs = []
    for seed, shape in enumerate(SHAPES):
        W, M = gaussian(*shape, seed=seed), torch.zeros(shape, dtype=torch.float64)
        side = -2 if shape[0] <= shape[1] else -1
        # large, so that the authors' epsilon of 1e-8 beside the norm does not show in float64
        grads = [2.0**20 * gaussian(*shape, seed=10 * seed + step + 1) for step in range(STEPS)]
        weights, momenta = [W.clone()], []
        for grad in grads:
            selected, places = before([grad], [M], OPTIONS["fraction"], kept, side)
            U = [polar(one, epsilon=1e-8) for one in selected]
            after([W], U, places, lr, scaled(lr, shape, flatten=False), decay, side)
            weights.append(W.clone())
            momenta.append(M.clone())
        runs.append({"weights": weights, "momenta": momenta, "grads": grads})
    save("dion2", {"source": file.source, "options": OPTIONS, "runs": runs})


if __name__ == "__main__":
    main(sys.argv[1])
