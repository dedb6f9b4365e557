"""Record what the authors' ASGO does: `python -m tests.family.record.asgo CLONE`.

Writes tests/family/recorded/asgo.json. CLONE is a clone of https://github.com/infinity-stars/ASGO at commit d3ef14b.
Its optimizers/asgo.py imports modules that it does not use and that are not all there (`config`, `einops`, the package
itself): stand-ins take their place. It casts factors to float32; here `Tensor.float` leaves them in float64.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from tests.family.gradients import gradient, start

RECORDED = Path(__file__).parents[1] / "recorded" / "asgo.json"
SOURCE = "infinity-stars/ASGO d3ef14b optimizers/asgo.py"
STEPS = 7
CASES = [
    {"shape": (5, 5), "beta2": 0.8, "eps": 1e-10},
    {"shape": (4, 7), "beta2": 0.8, "eps": 1e-10},
    {"shape": (6, 3), "beta2": 0.95, "momentum": 0.8, "eps": 1e-3},
]


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(module, shape, **options):
    """The weight after every step, without decay."""
    param = torch.nn.Parameter(start(shape))
    optimizer = module.asgo([param], learning_rate=0.01, weight_decay=0.0, **options)
    seen = []
    for step in range(STEPS):
        param.grad = gradient(shape, step)
        optimizer.step()
        seen.append(param.tolist())
    return seen


def main(clone):
    folder = Path(clone) / "optimizers"
    roots = loaded(folder / "utils" / "matrix_decom.py", "optimizers.utils.matrix_decom")
    empty = {name: ModuleType(name) for name in ("config", "optimizers", "optimizers.utils", "optimizers.utils.utils")}
    einops = ModuleType("einops")
    einops.rearrange = None
    torch.set_default_dtype(torch.float64)
    stand_ins = {**empty, "einops": einops, "optimizers.utils.matrix_decom": roots}
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(torch.Tensor, "float", lambda tensor: tensor):
        module = loaded(folder / "asgo.py", "optimizers.asgo")
        runs = [{**case, "weights": weights(module, **case)} for case in CASES]
    RECORDED.write_text(json.dumps({"source": SOURCE, "lr": 0.01, "runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
