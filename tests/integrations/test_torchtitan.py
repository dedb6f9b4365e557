"""torchtitan 0.3 as installed: its containers, schedulers, configuration and checkpoints.

Its models and its Trainer import Triton, which does not exist for CPUs, so a model with the names of its Llama stands
in for them; everything that touches an optimizer is torchtitan's own.
"""

import json
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan")
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ConfigManager, Configurable

from muonsw import MuonSW
from muonsw.integrations.torchtitan import ScaledDecayOptimizers, for_model
from tests.common.problems import assert_same
from tests.integrations.launching import two_processes

LR, STEPS = 0.02, 6
SCHEDULE = LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("wq", "wk", "wv", "wo")})
        self.feed_forward = nn.ModuleDict({"w1": nn.Linear(16, 24, bias=False), "w2": nn.Linear(24, 16, bias=False)})
        self.attention_norm, self.ffn_norm = nn.RMSNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        a = self.attention
        h = self.attention_norm(x)
        x = x + a["wo"](nn.functional.scaled_dot_product_attention(a["wq"](h), a["wk"](h), a["wv"](h), is_causal=True))
        return x + self.feed_forward["w2"](self.feed_forward["w1"](self.ffn_norm(x)).relu())


class Llama(nn.Module):
    """Layers and names as in torchtitan's Llama 3; a stage of a pipeline lacks some of them."""

    def __init__(self, layers=("0", "1"), *, first=True, last=True):
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 16) if first else None
        self.layers = nn.ModuleDict({name: Block() for name in layers})
        self.norm = nn.RMSNorm(16) if last else None
        self.output = nn.Linear(16, 32, bias=False) if last else None

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.output is not None else x


def llama():
    torch.manual_seed(0)
    return Llama()


def stages():
    """The same weights as two stages of a pipeline."""
    whole, parts = llama().state_dict(), [Llama("0", last=False), Llama("1", first=False)]
    for part in parts:
        part.load_state_dict({name: whole[name] for name in part.state_dict()})
    return parts


class Training:
    """Optimizers built from the configuration and schedulers from the optimizers, in torchtitan's order."""

    def __init__(self, parts, config=None):
        self.parts = parts
        self.optimizers = (config or for_model(lr=LR, weight_decay=0.1)).build(model_parts=parts)
        self.schedulers = SCHEDULE.build(optimizers=self.optimizers, training_steps=STEPS)

    def go(self, start, end):
        for step in range(start, end):
            self.optimizers.zero_grad()
            tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
            out = tokens
            for part in self.parts:
                out = part(out)
            nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
            self.optimizers.step()
            self.schedulers.step()
        return weights(self.parts)

    def saved(self):
        """Return the optimizers' state and the weights, as torchtitan would save them."""
        state = self.optimizers.state_dict()
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        return copies, weights(self.parts)

    def resume(self, state, snapshot, step):
        for part in self.parts:
            part.load_state_dict({name: snapshot[name] for name in part.state_dict()})
        self.optimizers.load_state_dict(state)
        self.schedulers.load_state_dict({"last_epoch": step})
        return self


def weights(parts):
    return {name: param.detach().clone() for part in parts for name, param in part.named_parameters()}


@dataclass(kw_only=True)
class JobConfig:
    """The part of torchtitan's `Trainer.Config` that its manager and an optimizer use."""

    hf_assets_path: str = "."
    optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
    lr_scheduler: LRSchedulersContainer.Config = field(default_factory=LRSchedulersContainer.Config)


def a_job():
    return JobConfig(optimizer=for_model(lr=LR, weight_decay=0.1, decay="constant"), lr_scheduler=SCHEDULE)


def test_its_configuration_names_the_container_and_its_command_line_changes_it():
    here = ["--module", "tests.integrations.test_torchtitan", "--config", "a_job"]
    job = ConfigManager().parse_args([*here, "--optimizer.lr", "0.01", "--optimizer.weight-decay", "0.3"])
    assert isinstance(job.optimizer, Configurable.Config)
    (optimizer,) = job.optimizer.build(model_parts=[llama()])
    assert isinstance(optimizer, MuonSW)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert {group["decay"] for group in optimizer.param_groups} == {"constant"}
    json.dumps(job.optimizer.to_dict())  # torchtitan logs its configuration


def test_its_steps_are_those_of_a_plain_loop():
    training = Training([llama()])
    actual = training.go(0, STEPS)
    plain = Training([llama()])
    plain.optimizers = MuonSW.for_model(plain.parts[0], lr=LR, weight_decay=0.1)
    (theirs,) = SCHEDULE.build(optimizers=[plain.optimizers], training_steps=STEPS)
    plain.schedulers = theirs
    assert_same(actual, plain.go(0, STEPS))
    (optimizer,) = training.optimizers
    assert {group["resolved_peak_lr"] for group in optimizer.param_groups} == {LR}
    assert optimizer.summary().matrices == 12
    assert next(iter(training.schedulers.get_metrics())) == "lr/MuonSW/0"  # the matrices


def test_the_keys_of_a_checkpoint_are_those_of_every_release():
    """A new option must not be a new key: torchtitan refuses a checkpoint that lacks one."""
    training = Training([llama()])
    training.go(0, 1)
    kinds = {key.rpartition(".")[2] for key in training.optimizers.state_dict() if key.startswith("param_groups.")}
    assert kinds == {"options"}
    kinds = {key.rpartition(".")[2] for key in training.optimizers.state_dict() if key.startswith("state.")}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_a_checkpoint_of_another_release_loads():
    training = Training([llama()])
    training.go(0, 3)
    saved, snapshot = training.saved()
    expected = training.go(3, STEPS)
    for key in [key for key in saved if key.startswith("param_groups.")]:
        options = json.loads(saved[key])
        options.pop("cautious")  # an option that the older release did not have
        saved[key] = json.dumps({**options, "of_a_later_release": 1})
    again = Training([llama()]).resume(saved, snapshot, 3)
    assert_same(expected, again.go(3, STEPS))
    (optimizer,) = again.optimizers
    assert {group["cautious"] for group in optimizer.param_groups} == {False}
    assert {group["resolved_peak_lr"] for group in optimizer.param_groups} == {LR}


@pytest.mark.parametrize(
    "options",
    [
        {"decay": "gradient_norm"},
        {"decay": "cosine", "total_steps": STEPS},
    ],
    ids=["gradient_norm", "cosine"],
)
def test_decay_rules_resume_and_the_step_that_allocates_state_is_not_counted(options):
    config = for_model(lr=LR, weight_decay=0.01, **options)
    training = Training([llama()], config)
    training.optimizers.state_dict()  # before the first step
    training.go(0, 3)
    saved = training.saved()
    expected = training.go(3, STEPS)
    assert_same(expected, Training([llama()], config).resume(*saved, 3).go(3, STEPS))
    assert_same(expected, Training([llama()], config).go(0, STEPS))


def test_parameters_saved_with_different_options_are_not_joined():
    saved = Training([llama()], for_model(lr=LR, patterns={"layers.1.*.wq.*": {"weight_decay": 0.7}}))
    saved.go(0, 1)
    with pytest.raises(ValueError, match="saved with different options: weight_decay"):
        Training([llama()]).resume(*saved.saved(), 1)


def test_a_run_resumes_with_other_pipeline_stages():
    whole = Training([llama()])
    whole.go(0, 3)
    saved = whole.saved()
    expected = whole.go(3, STEPS)
    cut = Training(stages()).resume(*saved, 3)
    assert len(cut.optimizers) == 2
    assert_same(expected, cut.go(3, STEPS))


def test_a_pattern_may_match_in_one_stage_and_mistakes_are_named():
    config = for_model(lr=LR, patterns={"role:head": {"lr": 0.001}, "layers.0.*.wq.*": {"lr": 0.002}})
    first, last = config.build(model_parts=stages())
    assert {group["lr"] for group in first.param_groups} == {LR, 0.002}
    assert {group["lr"] for group in last.param_groups} == {LR, 0.001}
    with pytest.raises(ValueError, match=r"match nothing.*layers\.7"):
        for_model(lr=LR, patterns={"layers.7.*": {"lr": 0.1}}).build(model_parts=[llama()])
    (normuon,) = for_model(lr=LR, preset="normuon").build(model_parts=[llama()])
    assert normuon.param_groups[0]["normalize"] == "normuon"
    with pytest.raises(ValueError, match="must be one of MuonSW, AdamWSW, SGDSW"):
        ScaledDecayOptimizers.Config(name="Muon").build(model_parts=[llama()])
    with pytest.raises(ValueError, match="use patterns instead"):
        ScaledDecayOptimizers.Config(param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="MuonSW")]).build(
            model_parts=[llama()]
        )


def test_names_omit_activation_checkpoint_wrappers():
    model = llama()
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(layer)
    wrapped, plain = (Training([m]).optimizers.state_dict() for m in (model, llama()))
    assert wrapped.keys() == plain.keys()


def test_fsdp2_and_its_checkpoints_on_two_processes(tmp_path):
    """Saved by torchtitan's CheckpointManager on two processes and loaded there again; see `two_processes.py`."""
    result = two_processes("torchtitan", tmp_path)
    assert result.pop("off_by") < 1e-4
    assert result == {
        "sharded": True,
        "resumed": True,
        "peaks": [LR],
        "resumed_peaks": [LR],
        "matrices": 12,
        "sampled": [1, 2, 4, 6],
    }
