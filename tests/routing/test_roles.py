"""Single rules; tests/models has whole models."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from muonsw import MuonSW
from tests.routing.models import by_name, roles_of


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


def attention_of(library, kind, name):
    """A module with a fused projection, of a class that a library seems to define."""
    attention = type(kind, (nn.Module,), {"__module__": library})()
    setattr(attention, name, nn.Linear(8, 24, bias=False))
    attention.out = nn.Linear(8, 8, bias=False)
    return attention


@pytest.mark.parametrize(
    ("library", "kind", "name", "parts"),
    [
        ("timm.layers.attention", "Attention", "qkv", (8, 8, 8)),
        ("transformers.models.sam.modeling_sam", "Attention", "qkv", (8, 8, 8)),
        ("my_gpt", "Attention", "c_attn", (8, 8, 8)),
        ("my_gpt", "BigCodeAttention", "c_attn", None),  # it has the name of GPT-2's, but is ordered head by head
        ("timm.models.maxxvit", "Attention", "qkv", None),  # head by head
        ("my_vit", "Attention", "qkv", None),
        ("transformers.models.falcon", "Attention", "query_key_value", None),
    ],
)
def test_only_fused_projections_of_a_certain_layout_are_split(library, kind, name, parts):
    model = nn.Module()
    model.blocks = nn.ModuleList(attention_of(library, kind, name) for _ in range(2))
    optimizer = MuonSW.for_model(model, lr=0.02)
    assert by_name(optimizer)[f"blocks.0.{name}.weight"].get("split_sizes") == parts
    assert ("muon, 3 parts" in optimizer.routing()) == (parts is not None)
    line = next(line for line in optimizer.routing(reasons=True).splitlines() if f"0.{name}" in line)
    assert ("3 parts" in line) == (parts is not None)
    whole = MuonSW.for_model(model, lr=0.02, patterns={f"*.{name}.weight": {"split_sizes": None}})
    assert by_name(whole)[f"blocks.0.{name}.weight"].get("split_sizes") is None


def of_class(name, **parts):
    module = type(name, (nn.Module,), {})()
    for key, part in parts.items():
        setattr(module, key, part)
    return module


def test_a_class_named_head_is_a_head_of_attention():
    blocks = [of_class("Block", attend=of_class("Head", proj=nn.Linear(8, 4))) for _ in range(2)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "lm_head": nn.Linear(8, 50)})
    roles = roles_of(MuonSW.for_model(model, lr=0.02))
    assert (roles["blocks.0.attend.proj.weight"], roles["lm_head.weight"]) == ("hidden", "head")


def test_a_pruned_head_is_a_head():
    """Pruning and torch's older norms keep the trained tensor under another name."""
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "body": nn.Linear(8, 8), "out": nn.Linear(8, 50)})
    prune.identity(model["out"], "weight")
    assert roles_of(MuonSW.for_model(model, lr=0.02))["out.weight_orig"] == "head"


def test_a_module_that_the_model_declares_as_its_input_is_an_embedding():
    class Declares(nn.Module):
        def __init__(self):
            super().__init__()
            self.vocab = of_class("Vocab", weight=nn.Parameter(torch.ones(50, 8)))
            self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

        def get_input_embeddings(self):
            return self.vocab

    assert roles_of(MuonSW.for_model(Declares(), lr=0.02))["vocab.weight"] == "embedding"
