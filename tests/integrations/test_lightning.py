"""Lightning: automatic optimization with one optimizer."""

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from muonsw import MuonSW, PeakLRError
from muonsw.integrations.lightning import TelemetryCallback
from tests.common.problems import assert_same

LR, STEPS = 0.02, 8

SCHEDULERS = {
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "one_cycle": lambda o: OneCycleLR(o, LR, STEPS + 1, cycle_momentum=False),
}


class Regression(LightningModule):
    """A perceptron with an embedding, learning sums."""

    def __init__(self, scheduler="cosine"):
        super().__init__()
        self.scheduler = SCHEDULERS[scheduler]
        self.embed = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, index):
        numbers, sums = batch
        loss = (self.head(self.norm(self.hidden(self.embed(numbers).sum(1)).relu())).squeeze() - sums).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = MuonSW.for_model(self, lr=LR, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


def batches():
    """Four batches, because Lightning resumes at the first batch of an epoch even from a checkpoint in its middle."""
    numbers = torch.randint(16, (16, 3), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(numbers, numbers.sum(1) / 24)
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(folder, module=None, *, ckpt_path=None, callbacks=(), **options):
    torch.manual_seed(0)
    module = Regression() if module is None else module
    defaults = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="log"),
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    trainer = Trainer(callbacks=list(callbacks), **{**defaults, **options})
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return trainer, module


def weights(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_steps_are_those_of_a_plain_loop(tmp_path, clip):
    trainer, module = fit(tmp_path, gradient_clip_val=clip)
    torch.manual_seed(0)
    other = Regression()
    other.log = lambda *_: None
    optimizer = MuonSW.for_model(other, lr=LR, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    for batch in [*batches(), *batches()]:
        other.training_step(batch, 0).backward()
        if clip:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(module)[name], value, rtol=1e-6, atol=1e-7)
    assert {group["resolved_peak_lr"] for group in trainer.optimizers[0].param_groups} == {LR}


def test_accumulation_steps_half_as_often(tmp_path):
    callback = TelemetryCallback(every=1)
    fit(tmp_path, accumulate_grad_batches=2, max_steps=4, callbacks=[callback])
    assert [record["step"] for record in callback.telemetry.records] == [1, 2, 3, 4]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, scheduler):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    _, whole = fit(tmp_path, Regression(scheduler), callbacks=[saver])
    torch.manual_seed(5)
    resumed_from = str(next(tmp_path.glob("step=4*.ckpt")))
    trainer, resumed = fit(tmp_path, Regression(scheduler), ckpt_path=resumed_from)
    assert trainer.global_step == STEPS
    assert_same(weights(whole), weights(resumed))
    assert {group["resolved_peak_lr"] for group in trainer.optimizers[0].param_groups} == {LR}


class TwoOptimizers(Regression):
    """Lightning counts the steps of both."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [MuonSW([self.hidden.weight], lr=LR), torch.optim.SGD([self.head.weight], lr=LR)]


@pytest.mark.parametrize(("module", "per_update"), [(Regression, 1), (TwoOptimizers, 2)])
def test_telemetry_continues_counting_the_steps_of_its_optimizer(tmp_path, module, per_update):
    saver = ModelCheckpoint(dirpath=tmp_path, filename="half", every_n_train_steps=4 * per_update)
    fit(tmp_path, module(), max_steps=4 * per_update, callbacks=[saver, TelemetryCallback(every=1)])
    resumed = TelemetryCallback(every=1)
    fit(tmp_path, module(), max_steps=8 * per_update, callbacks=[resumed], ckpt_path=str(tmp_path / "half.ckpt"))
    assert [record["step"] for record in resumed.telemetry.records] == [5, 6, 7, 8]


def test_a_compiled_network_trains_and_resumes_like_the_plain_one(tmp_path):
    """The parts are compiled, because a module's `log` does not trace. The backend generates no code."""

    def compiled():
        torch.manual_seed(0)
        module = Regression()
        for part in ("embed", "hidden", "norm", "head"):
            setattr(module, part, torch.compile(getattr(module, part), backend="aot_eager"))
        return module

    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    _, whole = fit(tmp_path, compiled(), callbacks=[saver])
    _, plain = fit(tmp_path)
    for name, value in weights(plain).items():
        traced = weights(whole)[name.replace(".", "._orig_mod.")]
        torch.testing.assert_close(traced, value, rtol=1e-5, atol=1e-6)
    _, resumed = fit(tmp_path, compiled(), ckpt_path=str(next(tmp_path.glob("step=4*.ckpt"))))
    assert_same(weights(whole), weights(resumed))


def test_under_bf16_autocast_state_stays_float32(tmp_path):
    trainer, _ = fit(tmp_path, precision="bf16-mixed")
    optimizer = trainer.optimizers[0]
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert optimizer.skipped_steps == 0


def logged(folder):
    import csv

    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_learning_rate_monitor_shows_readable_names(tmp_path):
    fit(tmp_path, callbacks=[LearningRateMonitor("step")])
    names = {key for row in logged(tmp_path) for key in row if key.startswith("lr-")}
    assert names == {f"lr-MuonSW/{name}" for name in ("hidden", "embedding", "bias", "norm", "head")}


def test_telemetry_reaches_the_logger_and_changes_nothing(tmp_path):
    callback = TelemetryCallback(every=3)
    _, module = fit(tmp_path / "with", callbacks=[callback], logger=CSVLogger(tmp_path / "with", name="log"))
    _, plain = fit(tmp_path / "without")
    assert_same(weights(plain), weights(module))
    rows = logged(tmp_path / "with")
    sampled = [int(row["step"]) for row in rows if row["telemetry/hidden/weight_rms"]]
    assert sampled == [1, 3, 6]
    assert [record["step"] for record in callback.telemetry.records] == [1, 3, 6]


class FailsOnce(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2 and not hasattr(self, "done"):
            self.done = True
            raise RuntimeError("failed")


def test_telemetry_continues_with_the_same_optimizer_after_a_failure(tmp_path):
    module, callback, failing = Regression(), TelemetryCallback(every=3), FailsOnce()
    optimizers = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizers
    with pytest.raises(RuntimeError, match="failed"):
        fit(tmp_path, module, callbacks=[callback, failing])
    fit(tmp_path, module, callbacks=[callback, failing])
    assert [record["step"] for record in callback.telemetry.records] == [1, 3, 6]


def test_its_search_for_a_learning_rate_needs_a_running_peak(tmp_path):
    class Searched(Regression):
        lr, options = LR, {}

        def configure_optimizers(self):
            return MuonSW.for_model(self, lr=self.lr, **self.options)

    def search(module):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(max_epochs=8, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        return Tuner(trainer).lr_find(module, batches(), num_training=20, max_lr=0.1, early_stop_threshold=None)

    with pytest.raises(PeakLRError, match="running_max"):
        search(Searched())
    module = Searched()
    module.options = {"peak_lr": "running_max"}
    assert max(search(module).results["lr"]) > LR
