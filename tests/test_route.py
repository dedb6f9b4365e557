"""Routing a model: by role, by pattern, strict."""

import sys
import warnings

import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW
from muonsw.routing import classify


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


def by_name(optimizer):
    return {name: g for g in optimizer.param_groups for name in g["param_names"]}


def roles_of(optimizer):
    return {name: g["role"] for g in optimizer.param_groups for name in g["param_names"]}


def test_roles():
    found = {entry.name: entry.role for entry in classify(Model(tied=False))}
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


def test_names_that_mean_two_things_are_reported_apart():
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
    assert (of["blocks.0.qkv.weight"].get("split_sizes"), of["blocks.0.qkv.weight"]["weight_decay"]) == (
        (8, 8, 8),
        0.1,
    )
    assert (of["blocks.1.qkv.weight"].get("split_sizes"), of["blocks.1.qkv.weight"]["weight_decay"]) == (
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


def test_what_nothing_explains_gets_adamw_without_decay_until_the_user_says_how():
    model = nn.Module()
    model.blob, model.body = nn.Parameter(torch.randn(2, 3, 4, 5)), nn.Linear(4, 4, bias=False)
    of = by_name(MuonSW.for_model(model, lr=0.02))
    assert (of["blob"]["role"], of["blob"]["algorithm"], of["blob"]["weight_decay"]) == ("unclear", "adamw", 0.0)
    pattern = {"algorithm": "muon", "matrix": "stack", "weight_decay": 0.1}
    assert by_name(MuonSW.for_model(model, lr=0.02, patterns={"blob": pattern}))["blob"]["matrix"] == "stack"
    with pytest.raises(ValueError, match=r"blob has shape \(2, 3, 4, 5\)"):
        MuonSW.for_model(model, lr=0.02, patterns={"role:unclear": {"algorithm": "muon"}})


def test_a_model_without_parameters_is_an_error():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MuonSW.for_model(nn.Identity(), lr=0.1)


def test_the_table_shows_every_group_and_count():
    optimizer = MuonSW.for_model(Model(), lr=0.02)
    lines = optimizer.routing().splitlines()
    assert len(lines) == 1 + len(optimizer.param_groups) + 1  # a header, and what the state takes
    assert lines[0].split() == ["group", "role", "algorithm", "decay", "lr", "tensors", "parameters", "names"]
    experts = next(line for line in lines if "experts" in line)
    assert "scaled 0.1" in experts
    assert f"{2 * (4 * 32 * 8 + 4 * 8 * 16):,}" in experts


def test_one_scheduler_drives_the_whole_model():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    optimizer = MuonSW.for_model(model, lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, cycle_momentum=False)
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


def test_matrices_come_first():
    """Loggers that show the first group show the matrices' learning rate."""
    for cls in (MuonSW, AdamWSW, SGDSW):
        roles = [
            g["role"] in ("hidden", "experts", "convolution") for g in cls.for_model(Model(), lr=0.02).param_groups
        ]
        assert roles == sorted(roles, reverse=True)
        assert roles[0]


def test_every_parameter_has_a_reason():
    optimizer = MuonSW.for_model(Model(), lr=0.02, patterns={"*.qkv.*": {"lr": 0.01}})
    lines = optimizer.routing(reasons=True).splitlines()
    names = [name for g in optimizer.param_groups for name in g["param_names"]]
    assert len(lines) == 1 + len(names)
    assert lines[0].split() == ["group", "role", "algorithm", "shape", "seen", "as", "name", "reason"]
    for name, line in zip(names, lines[1:], strict=True):
        words = line.split()
        reason = line.split(name, 1)[1].strip()
        assert name in words
        assert len(reason.split()) > 3, line
    assert "pattern '*.qkv.*'" in next(line for line in lines if "blocks.0.qkv.weight" in line)


def test_groups_made_by_hand_have_a_table_too():
    layer = nn.Linear(4, 4, bias=False)
    assert "by hand" in MuonSW(layer.named_parameters(), lr=0.1).routing(reasons=True)
    assert "by hand" in MuonSW(layer.parameters(), lr=0.1).routing(reasons=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adamw": 3e-4}, r"adamw=0\.0003: must be a dict, such as \{\"lr\": 0\.001\}"),
        ({"patterns": {"embed.weight": "sgd"}}, r"patterns\['embed\.weight'\]='sgd': must be a dict"),
        ({"patterns": "embed.weight"}, r"patterns='embed\.weight': must be a dict, such as \{\"role:embedding\": "),
    ],
)
def test_a_number_or_a_name_in_the_place_of_options_is_refused_by_name(given, message):
    with pytest.raises(TypeError, match=message):
        MuonSW.for_model(Model(), lr=0.02, **given)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_patterns_and_names_see_through_wrappers(wrap):
    patterns = {"embed.weight": {"lr": 0.5}, "blocks.*.qkv.weight": {"split_sizes": (8, 8, 8)}}
    plain = MuonSW.for_model(Model(), lr=0.02, patterns=patterns)
    wrapped = MuonSW.for_model(wrap(Model()), lr=0.02, patterns=patterns)
    assert [g["param_names"] for g in wrapped.param_groups] == [g["param_names"] for g in plain.param_groups]
    assert roles_of(wrapped) == roles_of(plain)


def test_a_module_that_is_only_called_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert set(roles_of(MuonSW.for_model(model, lr=0.02))) == {"module.0.weight", "module.1.weight"}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flattened_parameters_are_refused_by_name(use_orig_params):
    """FSDP1 on two ranks, the other of which is pretended: weights become vectors."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
        with pytest.raises(ValueError, match=r"(_flat_param|0\.weight) has been flattened .*fully_shard"):
            MuonSW.for_model(model, lr=0.02)
    finally:
        torch.distributed.destroy_process_group()


class Router(nn.Linear):
    """Known by its class alone."""


class Expert(nn.Sequential):
    """Known by its class alone."""


def test_fully_shard_changes_no_role():
    """It gives each module a class of another name."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    experts = nn.ModuleList(Expert(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))
    model = nn.ModuleDict({"choose": Router(8, 4), "parts": experts, "out": nn.Linear(8, 20)})
    expected = roles_of(MuonSW.for_model(model, lr=0.02))
    assert {"router", "experts", "head"} < set(expected.values())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for module in (model["choose"], *experts, model["out"]):
            fully_shard(module, mesh=mesh)
        assert roles_of(MuonSW.for_model(model, lr=0.02)) == expected
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet; run one batch"):
        MuonSW.for_model(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), lr=0.02)


def test_muon_without_a_matrix_warns():
    with pytest.warns(UserWarning, match=r"found no matrix to orthogonalize.*roles: bias, embedding, norm"):
        MuonSW.for_model(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), lr=0.02)
    AdamWSW.for_model(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), lr=0.02)


def test_adamw_options_must_be_known_and_reach_something():
    with pytest.raises(ValueError, match=r"adamw=\{'beta': \.\.\.\}.*betas"):
        MuonSW.for_model(Model(), lr=0.02, adamw={"beta": (0.9, 0.95)})
    with pytest.raises(ValueError, match="momentum"):
        MuonSW.for_model(Model(), lr=0.02, adamw={"momentum": 0.9})
    with pytest.raises(ValueError, match="betas"):
        MuonSW.for_model(Model(), lr=0.02, adamw={"betas": 0.9})
    with pytest.raises(ValueError, match="applies to nothing"):
        SGDSW.for_model(Model(), lr=0.02, adamw={"lr": 1e-3})
    with pytest.raises(ValueError, match="applies to nothing"):
        MuonSW.for_model(
            nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), lr=0.02, adamw={"lr": 1}
        )


def test_adamw_options_follow_what_a_pattern_moves():
    """They apply to what ends at AdamW, and not to what leaves it."""
    patterns = {"*.qkv.*": {"algorithm": "adamw"}, "role:router": {"algorithm": "muon", "weight_decay": 0.1}}
    of = by_name(MuonSW.for_model(Model(), lr=0.02, adamw={"lr": 3e-4}, patterns=patterns))
    assert of["blocks.0.qkv.weight"]["lr"] == of["embed.weight"]["lr"] == 3e-4
    assert of["blocks.0.moe.router.weight"]["lr"] == 0.02
    sgd = by_name(
        SGDSW.for_model(Model(), lr=0.02, adamw={"lr": 3e-4}, patterns={"embed.weight": {"algorithm": "adamw"}})
    )
    assert (sgd["embed.weight"]["lr"], sgd["blocks.0.qkv.weight"]["lr"]) == (3e-4, 0.02)


def test_a_model_on_the_meta_device_is_routed_as_any_other():
    with torch.device("meta"):
        abstract = MuonSW.for_model(Model(), lr=0.02)
    assert roles_of(abstract) == roles_of(MuonSW.for_model(Model(), lr=0.02))


def test_declared_decay_is_kept():
    """A matrix that the model itself lists without decay is orthogonalized and not decayed."""

    class Declares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def no_weight_decay(self):
            return {"a.weight"}

    of = by_name(MuonSW.for_model(Declares(), lr=0.02, weight_decay=0.1))
    assert [(of[n]["algorithm"], of[n]["weight_decay"]) for n in ("a.weight", "b.weight")] == [
        ("muon", 0),
        ("muon", 0.1),
    ]


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


def lines_run_to_classify(model):
    """How many lines of the library run, loops counted by their turns."""
    lines = 0

    def tally(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return tally if "muonsw" in frame.f_code.co_filename else None

    sys.settrace(tally)
    try:
        list(classify(model))
    finally:
        sys.settrace(None)
    return lines


def test_work_grows_with_the_model_and_not_with_its_square():
    """Four times the layers run at most eight times the lines; squared growth would be sixteen."""

    def expert():
        return nn.ModuleDict({"gate": nn.Linear(8, 4), "up": nn.Linear(8, 4), "down": nn.Linear(4, 8)})

    def mixture(layers):
        moes = [
            {"router": nn.Linear(8, 6), "experts": nn.ModuleList(expert() for _ in range(6))} for _ in range(layers)
        ]
        blocks = [nn.ModuleDict({"attention": nn.Linear(8, 8), "moe": nn.ModuleDict(moe)}) for moe in moes]
        return nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(8, 50)})

    assert lines_run_to_classify(mixture(16)) < 8 * lines_run_to_classify(mixture(4))


def test_groups_have_readable_names_that_no_other_group_has():
    """A second group of one role is numbered, what a pattern calls a group stays, and names are always the same."""
    patterns = {"blocks.0.qkv.*": {"name": "first", "lr": 0.1}, "blocks.1.qkv.*": {"lr": 0.2}}

    def names():
        return [group["name"] for group in MuonSW.for_model(Model(), lr=0.02, patterns=patterns).param_groups]

    found = names()
    assert found == names()
    assert len(set(found)) == len(found)
    assert found[0] == "first"
    assert {"hidden", "hidden-2", "experts", "embedding"} <= set(found)


@pytest.mark.parametrize("values", [(1.1e-4, 1.4e-4), (1e-4, 1e-4)], ids=["different", "equal"])
def test_tensor_rates_of_two_patterns_stay_two(values):
    """Numbers that print alike are not equal, and a tensor that is equal today may be filled with another rate."""
    first, second = map(torch.tensor, values)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    patterns = {"0.*": {"lr": first}, "1.*": {"lr": second}, "2.*": {"lr": first}}
    optimizer = MuonSW.for_model(model, lr=0.1, patterns=patterns)
    rates = {tuple(group["param_names"]): group["lr"] for group in optimizer.param_groups}
    assert rates == {("0.weight", "2.weight"): first, ("1.weight",): second}
    assert rates["1.weight",] is second


@pytest.mark.parametrize("model", [nn.ParameterList([torch.ones(3, 2)]), nn.ParameterDict({"w": torch.ones(3, 2)})])
def test_a_model_that_is_a_bare_list_of_parameters_is_routed(model):
    assert [found.name for found in classify(model)] == [name for name, _ in model.named_parameters()]


def attention_of(library, name):
    """A module with a fused projection, of a class that a library seems to define."""
    attention = type("Attention", (nn.Module,), {"__module__": library})()
    setattr(attention, name, nn.Linear(8, 24, bias=False))
    attention.out = nn.Linear(8, 8, bias=False)
    return attention


@pytest.mark.parametrize(
    ("library", "name", "parts"),
    [
        ("timm.layers.attention", "qkv", (8, 8, 8)),
        ("transformers.models.sam.modeling_sam", "qkv", (8, 8, 8)),
        ("my_gpt", "c_attn", (8, 8, 8)),
        ("timm.models.maxxvit", "qkv", None),  # head by head
        ("my_vit", "qkv", None),
        ("transformers.models.falcon", "query_key_value", None),
    ],
)
def test_only_fused_projections_of_a_certain_layout_are_split(library, name, parts):
    model = nn.Module()
    model.blocks = nn.ModuleList(attention_of(library, name) for _ in range(2))
    optimizer = MuonSW.for_model(model, lr=0.02)
    assert by_name(optimizer)[f"blocks.0.{name}.weight"].get("split_sizes") == parts
    assert ("muon, 3 parts" in optimizer.routing()) == (parts is not None)
    line = next(line for line in optimizer.routing(reasons=True).splitlines() if f"0.{name}" in line)
    assert ("3 parts" in line) == (parts is not None)
    whole = MuonSW.for_model(model, lr=0.02, patterns={f"*.{name}.weight": {"split_sizes": None}})
    assert by_name(whole)[f"blocks.0.{name}.weight"].get("split_sizes") is None
