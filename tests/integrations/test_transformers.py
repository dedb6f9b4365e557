"""Hugging Face's Trainer, with tiny models and every setting that touches the optimizer."""

import logging

import pytest
import torch

pytest.importorskip("transformers")
from transformers import Trainer, TrainerCallback, TrainingArguments, get_cosine_schedule_with_warmup

from muonsw import AdamWSW, MuonSW, ScheduleFree
from muonsw.integrations.transformers import ModelFactory, TelemetryCallback, for_model
from muonsw.lab.diagnose import Findings
from muonsw.telemetry import MlflowSink
from tests.common.problems import assert_same
from tests.integrations.models import MODELS, Tokens

STEPS = 6
LR = 0.02


def trainer_of(folder, model="llama", *, weights_from=None, optimizer=None, callbacks=(), **arguments):
    torch.manual_seed(0)
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    built = MODELS[model]()
    return Trainer(
        model=built if weights_from is None else type(built).from_pretrained(weights_from),
        args=TrainingArguments(output_dir=str(folder), **{**defaults, **arguments}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer or for_model(lr=LR, weight_decay=0.1),
    )


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def batches_of(trainer):
    """Train, and return the batches in the order in which the model saw them."""
    seen, step = [], trainer.training_step

    def remember(model, inputs, *args, **kwargs):
        seen.append({key: value.clone() for key, value in inputs.items()})
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = remember
    trainer.train()
    return seen


def by_hand(model, batches, *, accumulate=1, clip=1.0):
    """Warmup, cosine, accumulation and clipping in a plain loop."""
    torch.manual_seed(0)
    model = MODELS[model]().train()
    optimizer = MuonSW.for_model(model, lr=LR, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    for number, batch in enumerate(batches, start=1):
        (model(**batch).loss / accumulate).backward()
        if number % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.5), (2, 1.0)], ids=["clipped", "accumulated"])
def test_the_trainers_steps_are_those_of_a_plain_loop(tmp_path, model, accumulate, clip):
    """Up to rounding: the Trainer averages losses over tokens and not over batches."""
    trainer = trainer_of(tmp_path, model, gradient_accumulation_steps=accumulate, max_grad_norm=clip)
    batches = batches_of(trainer)
    assert len(batches) == STEPS * accumulate
    expected = by_hand(model, batches, accumulate=accumulate, clip=clip)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
    assert {group["resolved_peak_lr"] for group in trainer.optimizer.optimizer.param_groups} == {LR}


def test_under_bf16_autocast_weights_and_state_stay_float32(tmp_path):
    trainer = trainer_of(tmp_path, bf16=True)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    assert optimizer.skipped_steps == 0
    assert {group["highest_lr"] for group in optimizer.param_groups} == {LR}


def test_a_compiled_model_is_routed_trained_and_resumed_like_the_plain_one(tmp_path):
    """The backend traces the model, which changes names and parameters, and generates no code."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    whole = trainer_of(tmp_path / "whole", save_strategy="steps", save_steps=4, **compiled)
    whole.train()
    plain = trainer_of(tmp_path / "plain")
    plain.train()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(whole)[name], value, rtol=1e-3, atol=1e-5)
    assert whole.optimizer.optimizer.routing() == plain.optimizer.optimizer.routing()
    resumed = trainer_of(tmp_path / "resumed", **compiled)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize(
    ("model", "options"),
    [*((model, {}) for model in MODELS), ("llama", {"bf16": True}), ("llama", {"gradient_accumulation_steps": 2})],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, model, options):
    arguments = {"save_strategy": "steps", "save_steps": 4, **options}
    whole = trainer_of(tmp_path / "whole", model, **arguments)
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    # transformers saves experts under other names and does not restore them
    weights_from = checkpoint if model == "mixtral" else None
    resumed = trainer_of(tmp_path / "resumed", model, weights_from=weights_from, **arguments)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same(weights(whole), weights(resumed))
    groups = resumed.optimizer.optimizer.param_groups
    assert {group["resolved_peak_lr"] for group in groups} == {LR}
    assert [group["name"] for group in groups] == [group["name"] for group in whole.optimizer.optimizer.param_groups]


def test_options_reach_the_optimizer(tmp_path):
    patterns = {"role:embedding": {"lr": 0.001}}
    options = for_model(lr=LR, decay="constant", patterns=patterns, adamw={"betas": (0.8, 0.9)}, ns_steps=4)
    trainer = trainer_of(tmp_path, optimizer=options)
    groups = trainer.create_optimizer().param_groups
    assert {group["decay"] for group in groups} == {"constant"}
    assert {group["ns_steps"] for group in groups if group["algorithm"] == "muon"} == {4}
    assert {group["betas"] for group in groups if group["algorithm"] == "adamw"} == {(0.8, 0.9)}
    assert {group["lr"] for group in groups if group["role"] == "embedding"} == {0.001}
    assert isinstance(trainer_of(tmp_path, optimizer=for_model(lr=LR, optimizer=AdamWSW)).create_optimizer(), AdamWSW)


@pytest.mark.parametrize("options", [{"preset": "normuon"}, {"preset": "soap"}, {"algorithm": "sgd"}], ids=str)
def test_the_trainer_takes_every_option_of_for_model(tmp_path, options):
    trainer = trainer_of(tmp_path, optimizer=for_model(lr=LR, **options))
    expected = MuonSW.for_model(trainer.model, lr=LR, **options)
    assert trainer.create_optimizer().routing() == expected.routing()


def test_axolotl_passes_its_training_arguments_second(tmp_path):
    """Its trainers call a factory as `factory()(model, training_args, **kwargs)`."""
    factory, options = for_model(lr=None, weight_decay=0.2)
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.01, use_cpu=True)
    optimizer = factory()(MODELS["llama"](), arguments, **options)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    with pytest.raises(ValueError, match="needs lr="):
        ModelFactory()(MODELS["llama"](), **options)


class Seen(TrainerCallback):
    """Record what reaches a reporter."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def test_telemetry_reaches_the_log_without_removing_other_entries(tmp_path):
    seen = Seen()
    trainer = trainer_of(tmp_path, "mixtral", callbacks=[seen])
    callback = TelemetryCallback(trainer, every=2)
    trainer.add_callback(callback)
    trainer.train()
    losses = [step for step, logs in seen.logs if "loss" in logs]
    assert losses == list(range(1, STEPS + 1))
    sampled = {step: logs for step, logs in seen.logs if "telemetry/experts/weight_rms" in logs}
    assert list(sampled) == [1, 2, 4, 6]
    # The third step is at the peak of the warmup, the fourth past it: decay is lambda lr^2 / peak.
    lrs = {step: logs["learning_rate"] for step, logs in seen.logs if "learning_rate" in logs}
    for step, logs in sampled.items():
        assert logs["telemetry/hidden/decay"] == pytest.approx(0.1 * lrs[step] ** 2 / LR, abs=1e-12)
    without = trainer_of(tmp_path, "mixtral")
    without.train()
    assert_same(weights(trainer), weights(without))


def test_telemetry_continues_counting_in_a_resumed_run(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path, **saving).train()
    resumed = trainer_of(tmp_path, **saving)
    callback = TelemetryCallback(resumed, every=2)
    resumed.add_callback(callback)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [record["step"] for record in callback.telemetry.records] == [4, 6]


def test_findings_and_routing_are_logged_and_findings_counted(tmp_path, caplog):
    """A learning rate that changes a third of the weights per step is reported."""
    constant = {"max_steps": 8, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    trainer = trainer_of(tmp_path, optimizer=for_model(lr=0.1), **constant)
    trainer.add_callback(TelemetryCallback(trainer, every=1, findings=Findings()))
    with caplog.at_level(logging.INFO, logger="transformers"):  # as set_verbosity_info does
        trainer.train()
    assert "routing of the parameters" in caplog.text
    counted = [entry["telemetry/findings"] for entry in trainer.state.log_history if "telemetry/findings" in entry]
    assert counted[0] == 0 < counted[-1] == caplog.text.count("which replaces them")


def test_mlflow_keeps_telemetry(tmp_path, monkeypatch):
    """Through the sink; the tests above cover the Trainer's `log`, which also reaches MLflow."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        trainer = trainer_of(tmp_path)
        trainer.add_callback(TelemetryCallback(trainer, every=2, sink=MlflowSink(mlflow)))
        trainer.train()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "telemetry/roles/hidden/weight_rms")
    assert [metric.step for metric in history] == [1, 2, 4, 6]


def schedule_free(model, **options):
    """What Trainer calls to build the optimizer: `optimizer_cls_and_kwargs=(lambda: schedule_free, {...})`."""
    inner = MuonSW.for_model(model, **{"lr": LR, "weight_decay": 0.1, "decay": "constant", **options})
    return ScheduleFree(inner, warmup_steps=2)


def test_schedule_free_is_evaluated_and_saved_at_its_average_and_resumes(tmp_path):
    """Trainer switches to evaluation mode where it evaluates, and saves after that; gradients are at y."""
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 3}
    settings |= {"save_strategy": "steps", "save_steps": 3, "optimizer": (lambda: schedule_free, {})}
    trainer = trainer_of(tmp_path / "a", **settings)
    trainer.train()
    inner = trainer.optimizer.optimizer
    assert isinstance(inner, ScheduleFree)
    assert not inner.training
    half = tmp_path / "a" / "checkpoint-3"
    resumed = trainer_of(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(half))
    assert_same(weights(trainer), weights(resumed))
