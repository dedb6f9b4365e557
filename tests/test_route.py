"""Routing a model: by role, by pattern, strict."""

import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW
from muonsw.route import classify


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up = nn.Parameter(torch.randn(4, 32, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 16))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.gate_proj = nn.Linear(8, 8)
        self.moe = Experts()
        self.temperature = nn.Parameter(torch.ones(()))


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.conv = nn.Conv1d(8, 8, 3)
        self.final = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


EXPECTED = {
    "embed.weight": "embedding",
    "pos_embed": "embedding",
    "blocks.0.norm.weight": "norm",
    "blocks.0.qkv.weight": "hidden",
    "blocks.0.gate_proj.weight": "hidden",
    "blocks.0.gate_proj.bias": "bias",
    "blocks.0.moe.router.weight": "router",
    "blocks.0.moe.gate_up": "experts",
    "blocks.0.moe.down": "experts",
    "blocks.0.temperature": "vector",
    "conv.weight": "convolution",
    "conv.bias": "bias",
    "final.weight": "norm",
    "final.bias": "bias",
    "lm_head.weight": "head",
}


def roles_of(optimizer):
    return {name: g["role"] for g in optimizer.param_groups for name in g["param_names"]}


def test_roles():
    found = {name: role for name, _, role, _ in classify(Model(tied=False))}
    assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_hidden_matrices_get_muon_with_decay_and_the_rest_adamw_without():
    optimizer = MuonSW.for_model(Model(), lr=0.02, weight_decay=0.1)
    for group in optimizer.param_groups:
        hidden = group["role"] in ("hidden", "experts", "convolution")
        assert group["algorithm"] == ("muon" if hidden else "adamw")
        assert group["weight_decay"] == (0.1 if hidden else 0.0)
        assert group["lr"] == 0.02


def test_every_parameter_once_and_tied_weights_once():
    model = Model(tied=True)
    optimizer = MuonSW.for_model(model, lr=0.02)
    claimed = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(claimed) == len(set(claimed)) == len(list(model.parameters()))
    assert "lm_head.weight" not in roles_of(optimizer)


def test_a_head_is_found_by_its_size_when_its_name_says_nothing():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    assert roles_of(MuonSW.for_model(model, lr=0.1))["2.weight"] == "head"


@pytest.mark.parametrize("positions", [64, 16])
def test_a_width_that_happens_to_be_the_vocabulary_makes_no_heads(positions):
    model = nn.Module()
    model.tokens, model.positions = nn.Embedding(64, 64), nn.Embedding(positions, 64)
    model.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    assert {roles_of(MuonSW.for_model(model, lr=0.1))[f"blocks.{i}.weight"] for i in range(3)} == {"hidden"}


def test_names_that_mean_two_things_are_told_apart():
    layer = nn.Module()
    layer.gate, layer.up, layer.output = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
    layer.moe = nn.Module()
    layer.moe.gate = nn.Linear(8, 4)
    model = nn.Module()
    model.layers, model.output = nn.ModuleList([layer]), nn.Linear(8, 50)
    roles = roles_of(MuonSW.for_model(model, lr=0.1))
    assert roles["layers.0.gate.weight"] == roles["layers.0.output.weight"] == "hidden"
    assert (roles["layers.0.moe.gate.weight"], roles["output.weight"]) == ("router", "head")


def test_frozen_parameters_are_left_out():
    model = Model()
    model.conv.requires_grad_(False)
    assert "conv.weight" not in roles_of(MuonSW.for_model(model, lr=0.02))


def test_patterns_set_any_option_and_the_first_match_wins():
    optimizer = MuonSW.for_model(
        Model(),
        lr=0.02,
        patterns={
            "blocks.0.qkv.weight": {"split_sizes": (8, 8, 8)},
            "*.qkv.*": {"weight_decay": 0.9},
            "role:router": {"algorithm": "muon", "weight_decay": 0.1},
            "role:embedding": {"lr": 0.001},
        },
    )
    of = {name: g for g in optimizer.param_groups for name in g["param_names"]}
    assert (of["blocks.0.qkv.weight"]["split_sizes"], of["blocks.0.qkv.weight"]["weight_decay"]) == (
        (8, 8, 8),
        0.1,
    )
    assert (of["blocks.1.qkv.weight"]["split_sizes"], of["blocks.1.qkv.weight"]["weight_decay"]) == (
        None,
        0.9,
    )
    assert (of["blocks.1.moe.router.weight"]["algorithm"], of["embed.weight"]["lr"]) == ("muon", 0.001)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"pattern '\*\.qvk\.\*' matches no parameter"):
        MuonSW.for_model(Model(), lr=0.02, patterns={"*.qvk.*": {"lr": 0.1}})
    with pytest.raises(ValueError, match=r"pattern 'blocks\.0\.qkv\.weight' matches no parameter that an earlier"):
        MuonSW.for_model(Model(), lr=0.02, patterns={"*.qkv.*": {}, "blocks.0.qkv.weight": {}})


def test_separate_adamw_options():
    optimizer = MuonSW.for_model(Model(), lr=0.02, adamw={"lr": 3e-4, "betas": (0.8, 0.9), "weight_decay": 0.01})
    for group in optimizer.param_groups:
        if group["algorithm"] == "adamw":
            assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.9), 0.01)


@pytest.mark.parametrize("cls", [AdamWSW, SGDSW])
def test_other_optimizers_route_too(cls):
    optimizer = cls.for_model(Model(), lr=0.02, weight_decay=0.1)
    assert {g["algorithm"] for g in optimizer.param_groups} == {cls.algorithm}
    assert {g["role"]: g["weight_decay"] for g in optimizer.param_groups}["norm"] == 0.0
    assert {g["role"]: g["weight_decay"] for g in optimizer.param_groups}["hidden"] == 0.1


def test_what_cannot_be_a_matrix_is_an_error_by_name_until_the_user_says_how():
    model = nn.Module()
    model.blob = nn.Parameter(torch.randn(2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"blob has shape \(2, 3, 4, 5\)"):
        MuonSW.for_model(model, lr=0.02)
    optimizer = MuonSW.for_model(model, lr=0.02, patterns={"blob": {"matrix": "stack"}})
    assert optimizer.param_groups[0]["matrix"] == "stack"


def test_a_model_without_parameters_is_an_error():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MuonSW.for_model(nn.Identity(), lr=0.1)


def test_the_table_shows_every_group_and_count():
    optimizer = MuonSW.for_model(Model(), lr=0.02)
    lines = optimizer.routing().splitlines()
    assert len(lines) == 1 + len(optimizer.param_groups)
    assert lines[0].split() == ["group", "role", "algorithm", "decay", "lr", "tensors", "parameters", "names"]
    experts = next(line for line in lines if "experts" in line)
    assert "scaled 0.1" in experts
    assert f"{2 * (4 * 32 * 8 + 4 * 8 * 16):,}" in experts


def test_one_scheduler_drives_the_whole_model():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    optimizer = MuonSW.for_model(model, lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    loss_of = lambda: nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10))  # noqa: E731
    first = loss_of().item()
    for _ in range(19):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert loss_of().item() < 0.5 * first
    assert {g["resolved_peak_lr"] for g in optimizer.param_groups} == {0.1}
