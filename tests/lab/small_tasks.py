"""Tasks that take a second, as the text of their files."""

from pathlib import Path

from muonsw.lab.tasks import TaskConfig, check_task
from muonsw.lab.train.config import OptimizerConfig, RunConfig

MODEL = """
def model(seed):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
"""
BATCHES = """
def batches(split, seed):
    def number(i):
        x = torch.randn(12, 4)
        return x, x[:, :3].argmax(1)
    return number
"""
LOSS = """
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
METRICS = """
def metrics(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean(), "rows": len(batch[0])}
"""
IMPORTS = "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n"


def task_file(folder, *, model=MODEL, batches=BATCHES, loss=LOSS, metrics=METRICS, more=""):
    path = Path(folder) / "small_task.py"
    path.write_text(IMPORTS + more + model + batches + loss + metrics, encoding="utf-8")
    return path


def task_run(path, *, options=(), optimizer=None, **settings):
    task = TaskConfig(str(path), options)
    defaults = {"steps": 12, "eval_every": 4, "checkpoint_every": 4, "telemetry_every": 2, "threads": 1}
    chosen = OptimizerConfig(**{"ns_dtype": "float32", **(optimizer or {})})
    return RunConfig(task=task, batch=check_task(task).rows, optimizer=chosen, **{**defaults, **settings})
