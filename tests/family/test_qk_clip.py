"""QK-clip makes of weights what Megatron-LM's code makes of them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import HeadRows, QKClip

RECORD = json.loads((Path(__file__).parent / "recorded/qk_clip.json").read_text(encoding="utf-8"))


def grouped(qkv):
    """Groups of three queries, a key and a value, of size 2."""
    query = HeadRows(qkv, 6, stride=10, by_group=True)
    return {"query": query, "key": HeadRows(qkv, 2, start=6, stride=10), "key_heads": 2}


def latent(q, kv):
    """Two plain and one rotary row of queries; two rows of keys and three of values."""
    rotary = HeadRows(q, 1, start=2, stride=3)
    return {"query": HeadRows(q, 2, stride=3), "rotary_query": rotary, "key": HeadRows(kv, 2, stride=5)}


@pytest.mark.parametrize("layout", [grouped, latent], ids=lambda layout: layout.__name__)
def test_weights_are_those_of_megatron(layout):
    """Logits and factors are float32 here: an error of a few units of 6e-8."""
    known = RECORD[layout.__name__]
    params = [nn.Parameter(torch.tensor(values, dtype=torch.float64)) for values in known["before"]]
    clip = QKClip(RECORD["threshold"], alpha=RECORD["alpha"])
    clip.add(heads=6, **layout(*params)).observe(torch.tensor(RECORD["logits"]))
    clip.step()
    for param, values in zip(params, known["after"], strict=True):
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(param.detach(), expected, rtol=3e-7, atol=0)
