"""Single rules; tests/models has whole models."""

import pytest
from torch import nn

from muonsw import MuonSW
from tests.routing.models import by_name


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
