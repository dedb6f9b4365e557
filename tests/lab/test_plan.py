"""The planner: the paper's numbers, sums against brute force, and what the command says."""

import json
import math
import re

import pytest
import torch

from muonsw.lab.base.errors import UsageError
from muonsw.lab.commands.plan import Plan as PlanCommand
from muonsw.lab.cost.amounts import parse_amount
from muonsw.lab.cost.parts import orthogonalizer_flops
from muonsw.lab.cost.run import plan, plan_recipe
from muonsw.lab.cost.update import Setup, activation_bytes, plan_update
from muonsw.lab.model import Decoder, ModelConfig, moe, preset
from muonsw.lab.paper import RECIPES
from muonsw.lab.studies.arms import decay_factors
from muonsw.lab.theory.schedule import MOST_STEPS, sampled, warmup_cosine
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from muonsw.lab.train.groups import build_optimizer
from muonsw.lab.train.presets import preset_run

# Width, GFLOP a token, peak learning rate of the horizon rule, lambda * peak * T with the printed group learning rate.
ROWS = [
    (256, 0.219, 1.05e-2, 35.0),
    (512, 0.646, 7.1e-3, 38.5),
    (768, 1.195, 5.6e-3, 41.6),
    (1024, 2.009, 4.7e-3, 45.0),
]


@pytest.mark.parametrize(("width", "gflop", "peak", "product"), ROWS)
def test_the_papers_rows(width, gflop, peak, product):
    recipe = RECIPES[f"paper-w{width}"]
    result = plan(preset(f"w{width}"), recipe.steps)
    assert result.parameters == pytest.approx(recipe.total, abs=5e4)
    assert result.active == pytest.approx(recipe.active, abs=5e4)
    assert result.tokens == pytest.approx(recipe.tokens, rel=5e-3)
    assert result.tokens_per_active == pytest.approx(recipe.tokens_per_active, abs=5.0)
    assert result.flops_per_token / 1e9 == pytest.approx(gflop, abs=6e-4)
    assert result.peak_lr == pytest.approx(peak, abs=5e-5)
    printed = plan(preset(f"w{width}"), recipe.steps, peak_lr=recipe.peak_lr)
    groups = {group.name: group for group in printed.groups}
    assert groups["Muon, adam"].phi_peak * recipe.steps == pytest.approx(product, abs=0.15)
    assert groups["Muon, none"].phi_peak * recipe.steps == pytest.approx(product * width / 256, rel=5e-3)
    assert groups["Muon, sqrt"].peak_lr == pytest.approx(recipe.peak_lr / math.sqrt(width / 256))
    assert groups["AdamW"].peak_lr == groups["Muon, adam"].peak_lr


@pytest.mark.parametrize("width", [256, 1024])
def test_the_total_decay_of_a_cosine_to_a_tenth(width):
    recipe = RECIPES[f"paper-w{width}"]
    group = plan_recipe(recipe).groups[0]
    constant, scaled, base = group.totals.values()
    assert constant / (group.phi_peak * recipe.steps) == pytest.approx(0.55, abs=0.0075)
    assert scaled / (group.phi_peak * recipe.steps) == pytest.approx(0.405, abs=0.0075)
    assert scaled / constant == pytest.approx(0.73, abs=0.005)
    assert base == pytest.approx(scaled * 256 / width)
    assert group.phi_peak == pytest.approx(0.1 * group.peak_lr)
    assert group.phi_peak_over_memory == pytest.approx(group.phi_peak / 0.05)


@pytest.mark.parametrize("schedule", [ScheduleConfig(), ScheduleConfig("wsd"), ScheduleConfig("constant")])
def test_sums_of_long_runs_agree_with_every_step_of_them(schedule):
    steps = 3 * MOST_STEPS + 1
    kept = sampled(schedule.multiple(steps), steps)
    assert len(kept) == MOST_STEPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muonsw.lab.theory.schedule.MOST_STEPS", steps)
        exact = sampled(schedule.multiple(steps), steps)
    assert len(exact) == steps
    for power in (1, 2):
        mean = math.fsum(value**power for value in kept) / len(kept)
        assert mean == pytest.approx(math.fsum(value**power for value in exact) / steps, rel=1e-4)


def test_short_runs_take_every_step():
    kept = sampled(ScheduleConfig(warmup_steps=10).multiple(100), 100)
    assert kept == [warmup_cosine(step, total_steps=100, warmup_steps=10) for step in range(100)]


def test_the_planned_decay_is_what_the_optimizer_applies():
    config = ModelConfig(width=64, layers=1, head_dim=32, experts=2, ff=64, vocab=64, sequence=8)
    for peak, rule in (("group", "scaled"), ("base", "scaled, base")):
        settings = OptimizerConfig(lr=0.01, weight_decay=0.5, muon_lr="sqrt", peak=peak, ns_dtype="float32")
        result = plan(config, 7, peak_lr=0.01, optimizer=settings, schedule=ScheduleConfig(warmup_steps=2))
        planned = {group.name: group for group in result.groups}["Muon, sqrt"]
        model = Decoder(config)
        optimizer = build_optimizer(model, settings)
        weight = model.layers[0].attention.out.weight
        peaks = [group["lr"] for group in optimizer.param_groups]
        norm = weight.detach().norm()
        for multiple in sampled(ScheduleConfig(warmup_steps=2).multiple(7), 7):
            for group, lr in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = lr * multiple
            for param in model.parameters():
                param.grad = torch.zeros_like(param)  # a zero gradient gives a zero direction, and decay alone
            optimizer.step()
        factor = float(weight.detach().norm() / norm)
        # prod(1 - phi) = exp(-sum phi) up to sum(phi^2)/2, below phi_peak * sum(phi) / 2
        assert math.log(factor) == pytest.approx(-planned.totals[rule], rel=planned.phi_peak)


def test_memory_is_what_tensors_take():
    config = ModelConfig(width=64, layers=2, head_dim=32, experts=4, ff=128, vocab=256, sequence=32)
    model = Decoder(config)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.arange(66).view(2, 33)
    model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    optimizer.step()
    memory = plan_update(config, Setup(micro_batch=2)).memory
    router = sum(param.numel() for name, param in model.named_parameters() if "router" in name)
    state = {"momentum_buffer": 0, "exp_avg": 0, "exp_avg_sq": 0}
    for values in optimizer.state.values():
        for key in state:
            state[key] += values[key].nbytes if key in values else 0
    assert router > 0  # routers are AdamW's
    assert memory.weights == memory.gradients == sum(param.nbytes for param in model.parameters())
    assert memory.muon_state == state["momentum_buffer"]
    assert memory.adamw_state == state["exp_avg"] + state["exp_avg_sq"]
    assert memory.adamw_only_state == 2 * memory.weights


@pytest.mark.parametrize(("width", "ff", "top_k"), [(64, 256, 2), (128, 128, 4), (128, 384, 1)])
def test_activations_are_about_what_autograd_keeps(width, ff, top_k, monkeypatch):
    # the products as a GPU makes them; a CPU keeps less
    monkeypatch.setattr(moe, "expert_by_expert", grouped_experts)
    config = ModelConfig(width=width, layers=3, head_dim=32, experts=4, top_k=top_k, ff=ff, vocab=64, sequence=64)
    kept = {sequences: saved_bytes(Decoder(config), sequences) for sequences in (2, 6)}
    estimate = {sequences: activation_bytes(config, sequences) for sequences in kept}
    logits = 4 * 4 * config.sequence * config.vocab  # freed within the loss
    assert kept[6] - kept[2] == pytest.approx(estimate[6] - estimate[2] - logits, rel=0.1)


def grouped_experts(rows, gate_up, down, ends):
    return moe.grouped_linear(moe.gated(moe.grouped_linear(rows, gate_up, ends)), down, ends)


def saved_bytes(model, sequences):
    """Bytes of the different tensors that a forward pass in bfloat16 autocast saves for its backward pass."""
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    tokens = torch.randint(64, (sequences, 65), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        losses = model(tokens[:, :-1], tokens[:, 1:])
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert losses.total.isfinite()
    return sum(storages.values())


def test_orthogonalizer_counts_every_expert_and_split_projection():
    config = ModelConfig(width=64, layers=2, head_dim=32, experts=3, top_k=1, ff=128)
    square, wide = 6 * 64**3, 4 * 64**2 * 128 + 2 * 64**3
    assert orthogonalizer_flops(config) == 5 * 2 * (4 * square + 3 * 3 * wide)


def test_cost_of_a_run():
    result = plan(preset("w256"), 1000, setup=Setup(tflops=10.0))
    assert result.update.model_seconds == pytest.approx(result.flops_per_token * 524_288 / 1e13)
    assert result.hours == pytest.approx(1000 * result.update.seconds / 3600)
    assert 0 < result.orthogonalizer_share < 0.05
    assert (result.peak_lr, result.warmup_steps) == (0.02, 100)
    assert "capped" in result.peak_lr_from


def test_the_horizon_counts_batches_of_the_papers_size():
    small, large = plan(preset("w256"), 80_000, batch_tokens=262_144), plan(preset("w256"), 40_000)
    assert small.peak_lr == large.peak_lr == pytest.approx(0.01)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_consistent_with_themselves(name):
    recipe = RECIPES[name]
    assert recipe.tokens / recipe.active == pytest.approx(recipe.tokens_per_active, rel=0.02)
    assert recipe.final_fraction == pytest.approx(0.1)
    assert (recipe.batch_tokens is None) == (recipe.steps is None)
    assert recipe.unknown


def test_a_recipe_without_a_batch_has_ratios_but_no_sums():
    result = plan_recipe(RECIPES["deepseek-v4-pro"])
    assert result.steps is result.groups is None
    assert result.final_ratio == pytest.approx(0.1)
    assert result.scaled_over_constant == pytest.approx(0.734, abs=1e-3)
    assert result.equal_total_weight_decay == pytest.approx(0.1 / result.scaled_over_constant)
    known = plan_recipe(RECIPES["deepseek-v4-pro"], batch_tokens=50_000_000)
    assert known.steps == 640_000
    assert known.groups[0].totals["constant"] == pytest.approx(result.decay_tokens / 50e6, rel=1e-4)
    with pytest.raises(ValueError, match="leave --batch-tokens out"):
        plan_recipe(RECIPES["paper-w256"], batch_tokens=1)


@pytest.mark.parametrize("text", ["", "B", "-3B", "1.2.3", "0", "1e999", "12 Q", "nan"])
def test_amounts_that_are_none(text):
    with pytest.raises(ValueError, match="197B"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say what to plan"),
        ({"preset": "w256"}, "either --tokens or --steps"),
        ({"preset": "w256", "tokens": "1B", "steps": 5}, "either --tokens or --steps"),
        ({"preset": "w257", "steps": 5}, "unknown preset"),
        ({"preset": "w256", "steps": 0}, "steps=0 must be positive"),
        ({"preset": "w256", "steps": 9, "setup": Setup(tflops=0.0)}, "tflops=0.0 must be positive"),
        ({"preset": "w256", "steps": 9, "lr": -1.0}, "peak_lr=-1.0 must be positive"),
        ({"preset": "w256", "steps": 9, "warmup_steps": 9}, "warmup_steps=9"),
        ({"recipe": "kimi-k3"}, "unknown recipe 'kimi-k3'; choose from glm-4.5"),
        ({"recipe": "kimi-k2", "weight_decay": 0.2}, "--weight-decay does not go with --recipe"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        PlanCommand(**settings).run()


def test_the_command_prints_what_was_planned(capsys):
    assert PlanCommand(preset="w256", tokens="18.4B", json=True).run() == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] == 35_096
    assert list(data["groups"][0]["totals"]) == ["constant", "scaled", "scaled, base"]
    assert PlanCommand(preset="w256", tokens="18.4B").run() == 0
    printed = capsys.readouterr().out
    for text in ("72,677,632", "30,210,304", "35,096", "estimate", "Muon, sqrt", "total, scaled, base"):
        assert text in printed
    assert "\x1b" not in printed
    assert "above 0.01" not in printed


def test_sentences_are_broken_between_words_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert PlanCommand(preset="demo", steps=420).run() == 0
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 60
    assert "by the undivided base peak (base)" in " ".join(printed.split())


@pytest.mark.parametrize("name", ["demo", "mini", "w256"])
def test_a_preset_is_planned_as_it_is_trained(name, capsys):
    run = preset_run(name, "tokens")
    assert PlanCommand(preset=name, steps=run.steps, lr=run.optimizer.lr, json=True).run() == 0
    data = json.loads(capsys.readouterr().out)
    assert data["batch_tokens"] == run.tokens_per_step
    assert data["advice"]["scaled"]["total"] == pytest.approx(math.fsum(decay_factors(run, run.optimizer)), rel=1e-3)


def test_the_command_judges_the_row_that_the_preset_trains(capsys):
    """The paper's divide Muon's rate by the width and decay by the undivided peak; `mini` does neither."""
    for model, place, name in (("w1024", 0, "Muon, adam, with peak base"), ("mini", 2, "Muon, none, with peak group")):
        assert PlanCommand(preset=model, tokens="197B", json=True).run() == 0
        data = json.loads(capsys.readouterr().out)
        planned = data["groups"][place]["totals"]
        expected = planned["scaled, base" if name.endswith("base") else "scaled"]
        assert data["advice_for"] == name
        totals = {rule: advice["total"] for rule, advice in data["advice"].items()}
        assert totals == {
            "scaled": pytest.approx(expected, rel=1e-3),
            "constant": pytest.approx(planned["constant"], 1e-3),
        }
    assert PlanCommand(preset="w1024", tokens="197B").run() == 0
    printed = capsys.readouterr().out
    assert "The preset trains the row Muon, adam, with peak base." in printed
    assert "scaled: total decay 4.49." in printed
    assert "constant: total decay 24.5." in printed


def test_the_command_warns_of_decay_that_outruns_momentum(capsys):
    assert PlanCommand(preset="demo", steps=600, batch_tokens="2048", weight_decay=1.0).run() == 0
    assert "above 0.01 (Muon, adam; Muon, sqrt; Muon, none; AdamW)" in capsys.readouterr().out


def test_the_command_says_what_a_recipe_leaves_open(capsys):
    assert PlanCommand(recipe="glm-4.5").run() == 0
    printed = capsys.readouterr().out
    assert "Not in the paper" in printed
    assert "--batch-tokens" in printed
    assert PlanCommand(recipe="glm-4.5", batch_tokens="16M", schedule="wsd", json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1_375_000
