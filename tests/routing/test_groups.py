"""Param groups for a model: patterns, options, names and tables."""

import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW
from tests.routing.models import Model, by_name, roles_of


@pytest.mark.parametrize("cls", [MuonSW, AdamWSW, SGDSW])
def test_matrices_come_first_and_decay_and_the_rest_gets_adamw_under_muon(cls):
    """Loggers that show the first group show the matrices' learning rate."""
    groups = cls.for_model(Model(), lr=0.02, weight_decay=0.1).param_groups
    hidden = [group["role"] in ("hidden", "experts", "convolution") for group in groups]
    assert hidden[0]
    assert hidden == sorted(hidden, reverse=True)
    for group, is_hidden in zip(groups, hidden, strict=True):
        assert group["algorithm"] == ("adamw" if cls is MuonSW and not is_hidden else cls.algorithm)
        assert group["weight_decay"] == (0.1 if is_hidden else 0.0)
        assert group["lr"] == 0.02


def test_every_parameter_once_and_tied_weights_once():
    model = Model(tied=True)
    optimizer = MuonSW.for_model(model, lr=0.02)
    claimed = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(claimed) == len(set(claimed)) == len(list(model.parameters()))
    assert "lm_head.weight" not in roles_of(optimizer)


def test_patterns_set_any_option_and_the_first_match_wins():
    patterns = {
        "blocks.0.qkv.weight": {"split_sizes": (8, 8, 8)},
        "*.qkv.*": {"weight_decay": 0.9},
        "role:router": {"algorithm": "muon", "weight_decay": 0.1},
        "role:embedding": {"lr": 0.001},
    }
    of = by_name(MuonSW.for_model(Model(), lr=0.02, patterns=patterns))
    first, second = of["blocks.0.qkv.weight"], of["blocks.1.qkv.weight"]
    assert (first.get("split_sizes"), first["weight_decay"]) == ((8, 8, 8), 0.1)
    assert (second.get("split_sizes"), second["weight_decay"]) == (None, 0.9)
    assert (of["blocks.1.moe.router.weight"]["algorithm"], of["embed.weight"]["lr"]) == ("muon", 0.001)


def test_adamw_options_apply_to_parameters_that_a_pattern_moves():
    """They apply to parameters that a pattern moves to AdamW, not to those it moves away."""
    patterns = {"*.qkv.*": {"algorithm": "adamw"}, "role:router": {"algorithm": "muon", "weight_decay": 0.1}}
    of = by_name(MuonSW.for_model(Model(), lr=0.02, adamw={"lr": 3e-4, "betas": (0.8, 0.9)}, patterns=patterns))
    for name in ("blocks.0.qkv.weight", "embed.weight"):
        assert (of[name]["lr"], of[name]["betas"]) == (3e-4, (0.8, 0.9))
    assert of["blocks.0.moe.router.weight"]["lr"] == 0.02
    sgd = by_name(
        SGDSW.for_model(Model(), lr=0.02, adamw={"lr": 3e-4}, patterns={"embed.weight": {"algorithm": "adamw"}})
    )
    assert (sgd["embed.weight"]["lr"], sgd["blocks.0.qkv.weight"]["lr"]) == (3e-4, 0.02)


def test_unclear_parameters_get_adamw_without_decay_unless_a_pattern_decides():
    model = nn.Module()
    model.blob, model.body = nn.Parameter(torch.randn(2, 3, 4, 5)), nn.Linear(4, 4, bias=False)
    of = by_name(MuonSW.for_model(model, lr=0.02))
    assert (of["blob"]["role"], of["blob"]["algorithm"], of["blob"]["weight_decay"]) == ("unclear", "adamw", 0.0)
    pattern = {"algorithm": "muon", "matrix": "stack", "weight_decay": 0.1}
    assert by_name(MuonSW.for_model(model, lr=0.02, patterns={"blob": pattern}))["blob"]["matrix"] == "stack"
    with pytest.raises(ValueError, match=r"blob has shape \(2, 3, 4, 5\)"):
        MuonSW.for_model(model, lr=0.02, patterns={"role:unclear": {"algorithm": "muon"}})


def test_the_tables_show_every_group_and_a_reason_for_every_parameter():
    optimizer = MuonSW.for_model(Model(), lr=0.02, patterns={"*.qkv.*": {"lr": 0.01}})
    lines = optimizer.routing().splitlines()
    assert len(lines) == 1 + len(optimizer.param_groups) + 1  # a header, and the size of the state
    experts = next(line for line in lines if "experts" in line)
    assert "scaled 0.1" in experts
    assert f"{2 * (4 * 32 * 8 + 4 * 8 * 16):,}" in experts
    lines = optimizer.routing(reasons=True).splitlines()
    names = [name for g in optimizer.param_groups for name in g["param_names"]]
    for name, line in zip(names, lines[1:], strict=True):
        assert name in line.split()
        assert len(line.split(name, 1)[1].split()) > 3, line
    assert "pattern '*.qkv.*'" in next(line for line in lines if "blocks.0.qkv.weight" in line)


def test_groups_made_by_hand_have_a_table_too():
    layer = nn.Linear(4, 4, bias=False)
    assert "by hand" in MuonSW(layer.named_parameters(), lr=0.1).routing(reasons=True)
    assert "by hand" in MuonSW(layer.parameters(), lr=0.1).routing(reasons=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_flattened_parameters_are_refused_by_name(use_orig_params, pretended_ranks):
    """FSDP1 turns weights into vectors."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    pretended_ranks(2)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    device = torch.device("cpu")
    model = FullyShardedDataParallel(layers, use_orig_params=use_orig_params, device_id=device)
    with pytest.raises(ValueError, match=r"(_flat_param|0\.weight) has been flattened .*fully_shard"):
        MuonSW.for_model(model, lr=0.02)


def test_muon_without_a_matrix_warns():
    with pytest.warns(UserWarning, match=r"found no matrix to orthogonalize.*roles: bias, embedding, norm"):
        MuonSW.for_model(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), lr=0.02)
    AdamWSW.for_model(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), lr=0.02)


def test_low_rank_factors_move_to_muon_on_request():
    model = nn.Module()
    model.base = nn.Linear(16, 16, bias=False)
    model.lora_A, model.lora_B = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.zeros(16, 4))
    model.base.requires_grad_(False)
    with pytest.warns(UserWarning, match="'role:lora'"):
        optimizer = MuonSW.for_model(model, lr=0.02)
    assert {(g["role"], g["algorithm"], g["weight_decay"]) for g in optimizer.param_groups} == {("lora", "adamw", 0.0)}
    moved = MuonSW.for_model(model, lr=0.02, patterns={"role:lora": {"algorithm": "muon"}})
    assert {(g["algorithm"], g["weight_decay"]) for g in moved.param_groups} == {("muon", 0.0)}


def test_groups_have_readable_unique_names():
    """A role's second group is numbered, and a pattern's name stays."""
    patterns = {"blocks.0.qkv.*": {"name": "first", "lr": 0.1}, "blocks.1.qkv.*": {"lr": 0.2}}
    actual = [group["name"] for group in MuonSW.for_model(Model(), lr=0.02, patterns=patterns).param_groups]
    assert len(set(actual)) == len(actual)
    assert actual[0] == "first"
    assert {"hidden", "hidden-2", "experts", "embedding"} <= set(actual)


@pytest.mark.parametrize("values", [(1.1e-4, 1.4e-4), (1e-4, 1e-4)], ids=["different", "equal"])
def test_tensor_rates_of_two_patterns_stay_two(values):
    """Numbers that print alike may differ, and equal tensors may be filled with different rates later."""
    first, second = map(torch.tensor, values)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    patterns = {"0.*": {"lr": first}, "1.*": {"lr": second}, "2.*": {"lr": first}}
    optimizer = MuonSW.for_model(model, lr=0.1, patterns=patterns)
    rates = {tuple(group["param_names"]): group["lr"] for group in optimizer.param_groups}
    assert rates == {("0.weight", "2.weight"): first, ("1.weight",): second}
    assert rates["1.weight",] is second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": {"*.qvk.*": {"lr": 0.1}}}, r"pattern '\*\.qvk\.\*' matches no parameter"),
        (
            {"patterns": {"*.qkv.*": {}, "blocks.0.qkv.weight": {}}},
            r"'blocks\.0\.qkv\.weight' matches no .* earlier",
        ),
        ({"adamw": {"beta": (0.9, 0.95)}}, r"adamw=\{'beta': \.\.\.\}.*betas"),
        ({"adamw": {"momentum": 0.9}}, "momentum"),
        ({"adamw": {"betas": 0.9}}, "betas"),
        ({"model": nn.Identity()}, "no parameter that requires a gradient"),
    ],
    ids=str,
)
def test_mistakes_are_named(options, message):
    options = {"cls": MuonSW, "model": Model(), **options}
    with pytest.raises(ValueError, match=message):
        options.pop("cls").for_model(options.pop("model"), lr=0.02, **options)
