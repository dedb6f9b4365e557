"""A user's own task: what is refused before anything is trained, and what its run promises."""

import random
import re
import shutil

import numpy as np
import pytest
import torch

from muonsw.lab.cli import main
from muonsw.lab.errors import UsageError
from muonsw.lab.launch import run_tasks
from muonsw.lab.tasks import (
    TaskConfig,
    UserTask,
    check_task,
    load_functions,
    rows_of,
    same,
)
from muonsw.lab.train.checkpoint import load
from muonsw.lab.train.loop import train
from muonsw.lab.train.state import Training, with_fingerprint
from tests.faults.commands import refused
from tests.lab.small_tasks import task_file, task_run
from tests.lab.train.ranks import NEEDED, on_ranks, run, run_well
from tests.lab.train.small_runs import assert_same_run, losses, stop_at, weights

# The same batches, in each of the ways in which a file may give them.
LIST = "def batches(split, seed):\n    return [(x, x[:, :3].argmax(1)) for x in torch.randn(5, 12, 4)]\n"
GENERATOR = """
def batches(split, seed):
    while True:
        x = torch.randn(12, 4) * random.random() + np.random.normal()
        yield x, x[:, :3].argmax(1)
"""
LOADER = """
def batches(split, seed):
    x = torch.arange(480.0).view(120, 4).sin()
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    return torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(x, x[:3].argmax()) for x in torch.randn(60, 4)])

def batches(split, seed):
    return torch.utils.data.DataLoader(Stream(), batch_size=12)
"""
WORKERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, place):
        return torch.randn(4) + place

def batches(split, seed):
    def collate(rows):
        x = torch.stack(rows)
        return x, x[:, :3].argmax(1)

    return torch.utils.data.DataLoader(Rows(), batch_size=12, shuffle=True, num_workers=1, collate_fn=collate)
"""
MIXED = """
def loss(model, batch):
    share = np.random.beta(1.0, 1.0) + random.random()
    return nn.functional.cross_entropy(model(share * batch[0]), batch[1])
"""
SHARED = """
def model(seed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight.data = model[0].weight.data
    model.register_buffer("rows", model[0].weight.data[:2])
    return model
"""
NAN_HELD_OUT = """
def batches(split, seed):
    part = 1.0 if split == "train" else float("nan")
    return lambda i: (part * torch.randn(12, 4), torch.zeros(12).long())
"""
UNSEEDED = """
def batches(split, seed):
    x = torch.from_numpy(np.random.default_rng().normal(size=(12, 4))).float()
    return lambda i: (x + torch.randn(12, 1), torch.zeros(12).long())
"""


@pytest.mark.parametrize(
    "parts",
    [{}, {"batches": LIST}, {"batches": GENERATOR}, {"batches": LOADER}, {"batches": STREAM}, {"loss": MIXED},
     {"model": SHARED}],
    ids=["function", "list", "generator", "loader", "stream", "drawing-loss", "shared-memory"],
)  # fmt: skip
def test_a_stopped_run_resumes_with_equal_bits(parts, tmp_path):
    path = task_file(tmp_path, **parts)
    config = task_run(path)
    train(config, tmp_path / "undisturbed")
    stop_at(7, config, tmp_path / "run")
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run", 12)


def train_in(job):
    train(*job)


def test_a_loader_with_workers_serves_a_run_in_a_process_of_a_pool(tmp_path):
    config = task_run(task_file(tmp_path, batches=WORKERS), steps=4)
    run_tasks(train_in, {name: (config, tmp_path / name) for name in "ab"}, lambda _name, _result: None, workers=2)
    train(config, tmp_path / "here")
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "here")


def test_metrics_are_means_over_the_rows_of_all_validation_batches(tmp_path):
    uneven = "def batches(split, seed):\n    return [(torch.ones(n, 4), torch.full((n,), n % 3)) for n in (12, 6, 2)]\n"
    metrics = "def metrics(model, batch):\n    return {'label': batch[1].double().mean(), 'training': model.training}\n"
    training = Training(with_fingerprint(task_run(task_file(tmp_path, batches=uneven, metrics=metrics))))
    training.evaluate()
    assert training.metrics == {"label": pytest.approx(2 * 2 / 20), "training": 0.0}
    metrics = "def metrics(model, batch):\n    return {f'of {len(batch[0])} rows': 1.0}\n"
    with pytest.raises(UsageError, match="for one validation batch and"):
        Training(with_fingerprint(task_run(task_file(tmp_path, batches=uneven, metrics=metrics)))).evaluate()


def test_a_step_in_micro_batches_is_that_of_the_whole_batch(tmp_path):
    model = "def model(seed):\n    return nn.Linear(4, 3).double()\n"
    batches = "def batches(split, seed):\n    return lambda i: (torch.randn(12, 4).double(), torch.arange(12) % 3)\n"
    path = task_file(tmp_path, model=model, metrics="", batches=batches)

    def gradient(accumulation):
        training = Training(with_fingerprint(task_run(path, accumulation=accumulation)))
        training.forward_backward(next(training.batches()))
        return training.model.weight.grad

    torch.testing.assert_close(gradient(3), gradient(1), rtol=1e-12, atol=1e-14)
    task = UserTask(TaskConfig(str(path)), batch=12, seed=0)
    assert rows_of(next(task.micro_batches(0, ranks=2, rank=1, accumulation=2))) == 3
    with pytest.raises(UsageError, match="batch 0 has 12 rows, not a multiple of 5 ranks x 1 micro-batches"):
        task.micro_batches(0, ranks=5, rank=0, accumulation=1)


def test_seeds_differ_and_validation_is_the_same_for_all(tmp_path):
    tasks = [UserTask(TaskConfig(str(task_file(tmp_path))), batch=12, seed=seed) for seed in (0, 1)]
    generators = torch.get_rng_state()
    first, second = (next(task.micro_batches(0, ranks=1, rank=0, accumulation=1)) for task in tasks)
    assert torch.equal(torch.get_rng_state(), generators), "drawing batches leaves torch's generators alone"
    assert not same(first, second)
    held_out = [[batch for batch, _ in task.validation(ranks=1, rank=0)] for task in tasks]
    assert same(*held_out)
    assert not same(*(task.model(seed).state_dict() for seed, task in enumerate(tasks)))


def test_ranks_validate_every_batch_once_in_as_many_passes(tmp_path):
    task = UserTask(TaskConfig(str(task_file(tmp_path, batches=LIST))), batch=12, seed=0)
    shares = [[rows for _, rows in task.validation(ranks=3, rank=rank)] for rank in range(3)]
    assert shares == [[12, 12], [12, 12], [12, 0]]


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    tied = """
def model(seed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model
"""
    config = task_run(task_file(tmp_path, model=tied), steps=4)
    train(config, tmp_path / "run")
    assert "1.weight" not in weights(tmp_path / "run", 4)
    resumed = Training(with_fingerprint(config))
    resumed.load(load(tmp_path / "run" / "checkpoints" / "step-00000004"))
    assert resumed.model[1].weight is resumed.model[0].weight
    assert torch.equal(resumed.model[0].weight, weights(tmp_path / "run", 4)["0.weight"])


def test_code_that_changed_is_refused_before_any_of_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = task_file(tmp_path)
    commands = (
        ["train", "--task", str(path), "--steps", "2"],
        ["train", "--config", "out/train/small_task/config.json", "--out", "out/train/small_task"],
        ["compare", "--task", str(path), "--steps", "2", "--seeds", "1", "--workers", "1"],
    )
    assert [main(words) for words in commands] == [0, 0, 0]
    task_file(tmp_path, more="print('executed')\n")
    for words in commands:
        printed = refused(*words)
        assert "executed" not in printed
        assert "small_task.py has changed since this run was started" in printed
    with pytest.raises(UsageError, match=r"(?s)other settings; .*task\.fingerprint:"):
        train(task_run(path, steps=2), tmp_path / "out/train/small_task")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "loss = 3\n"}, "small_task.py has no loss(model, batch)"),
        ({"loss": "def loss(model):\n    return 0\n"}, "cannot be called as loss(model, batch): too many positional"),
        ({"model": "def model(seed):\n    return nn.ReLU()\n"}, "no trainable parameters"),
        ({"model": "def model(seed):\n    return 1 / 0\n"}, "small_task.py, line 6, in model: ZeroDivisionError"),
        ({"model": "def model(seed):\n    m = nn.Linear(4, 3)\n    m.register_buffer('odd', torch.eye(3).to_sparse())\n"
          "    return m\n"}, "odd of its state_dict cannot be saved"),
        ({"batches": "def batches(split, seed):\n    return torch.utils.data.TensorDataset(torch.ones(3, 4))\n"},
         "a Dataset needs a DataLoader"),
        ({"batches": "def batches(split, seed):\n    return ['a']\n"}, "expected tensors"),
        ({"batches": "def batches(split, seed):\n    yield torch.ones(3, 4), torch.ones(3).long()\n"}, "ended after 1"),
        ({"loss": "def loss(model, batch):\n    return model(batch[0])\n"}, "a tensor of shape (12, 3)"),
        ({"metrics": "def metrics(model, batch):\n    return {'loss': 1}\n"}, "kind, step, loss"),
        ({"batches": NAN_HELD_OUT}, "'validation'; expected a finite scalar"),
        ({"more": "raise SystemExit('usage')\n"}, "line 5, in <module>: SystemExit: usage"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(UsageError, match=re.escape(message)):
        check_task(TaskConfig(str(task_file(tmp_path, **changes))))


FAILS_LATE = """
calls = []
def loss(model, batch):
    calls.append(batch)
    if len(calls) > 12:
        raise IndexError("too late")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_an_error_during_training_names_the_line(tmp_path):
    config = task_run(task_file(tmp_path, loss=FAILS_LATE), steps=20)
    with pytest.raises(UsageError, match=r"small_task\.py, line \d+, in loss: IndexError: too late"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, None),
        ({"batches": GENERATOR}, None),
        ({"batches": LOADER}, None),
        ({"model": "def model(seed):\n    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))\n"}, None),
        ({"batches": UNSEEDED}, "not a function of"),
        ({"batches": "def batches(split, seed):\n    x = torch.ones(3, 4)\n    return lambda i: (x, x[:, 0].long())\n"},
         "'train' and 'validation' are the same"),
        ({"model": "def model(seed):\n    m = nn.Linear(4, 3)\n    m.extra = nn.Linear(1, 1)\n    return m\n"},
         "does not depend on 2 parameters (extra.weight, extra.bias)"),
        ({"model": "def model(seed):\n    m = nn.Linear(4, 3)\n    m.bias.data += np.random.default_rng().random()\n"
          "    return m\n"}, "model(seed) gives different weights each time"),
    ],
)  # fmt: skip
def test_what_is_odd_about_a_file_is_noted(changes, note, tmp_path):
    notes = check_task(TaskConfig(str(task_file(tmp_path, **changes)))).notes
    assert notes == () if note is None else any(note in line for line in notes)


KEYWORDS = """
def model(seed, width: int = 8, rate=0.5, sizes=(1, 2), name=None, odd: "NoSuch" = 1):
    return nn.Linear(4, width)
"""


def test_options_come_from_keywords(tmp_path):
    path = str(task_file(tmp_path, model=KEYWORDS))
    chosen = ("width=5", "rate=1e-3", "name=x", "odd=2")
    assert load_functions(TaskConfig(path)).calls["model"](0).out_features == 8
    assert load_functions(TaskConfig(path, chosen)).calls["model"](0).out_features == 5
    wrong = {"widht=5": "did you mean 'width'", "width=wide": "must be of type int", "sizes=3": "of type tuple"}
    for option, message in wrong.items():
        with pytest.raises(UsageError, match=message):
            load_functions(TaskConfig(path, (option,)))


NO_DROPOUT = """
def model(seed):
    norm = nn.BatchNorm1d(8) if BATCH_NORM else nn.LayerNorm(8)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ModuleList([nn.Linear(8, 8)])[0], nn.GELU(), nn.Linear(8, 3))
"""


def scalars(folder):
    records = (record for record in losses(folder) if record["kind"] != "telemetry")
    return [{key: value for key, value in record.items() if key != "kind"} for record in records]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
class TestRanks:
    pytestmark = NEEDED

    def test_two_ranks_train_the_same_model_as_one(self, strategy, tmp_path):
        config = task_run(task_file(tmp_path, model=NO_DROPOUT, more="BATCH_NORM = False\n"), steps=4)
        train(config, tmp_path / "one")
        run_well(2, on_ranks(config, strategy=strategy), tmp_path / "two")
        for ours, theirs in zip(scalars(tmp_path / "two"), scalars(tmp_path / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)

    def test_buffers_of_ranks_are_kept_equal_or_refused(self, strategy, tmp_path):
        config = on_ranks(
            task_run(task_file(tmp_path, model=NO_DROPOUT, more="BATCH_NORM = True\n"), steps=4, checkpoint_every=2),
            strategy=strategy,
        )
        if strategy == "fsdp":
            ended = run(2, config, tmp_path / "run")
            assert {rank.code for rank in ended} == {2}
            assert "buffers (model.1.running_mean)" in ended[0].text
            return
        run_well(2, config, tmp_path / "run")
        before = losses(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
        run_well(2, config, tmp_path / "run")
        assert losses(tmp_path / "run") == before


PATTERNS = """
def patterns(model, weight_decay, flat=False):
    return {'0.weight': {'algorithm': 'adamw', 'weight_decay': weight_decay / 2}}
"""


def test_a_file_may_say_how_its_parameters_are_routed(tmp_path):
    path = task_file(tmp_path, more=PATTERNS)
    training = Training(with_fingerprint(task_run(path, optimizer={"weight_decay": 0.2})))
    groups = {group["weight_decay"]: group["algorithm"] for group in training.optimizer.param_groups}
    assert groups == {0.2: "muon", 0.1: "adamw", 0.0: "adamw"}
