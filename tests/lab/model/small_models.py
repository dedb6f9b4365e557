"""Models small enough for a test, and a readable decoder to compare with."""

import math

import torch

from muonsw.lab.model import ModelConfig


def small(**changes):
    settings = {"width": 16, "layers": 2, "head_dim": 8, "ff": 12, "vocab": 37, "sequence": 16, **changes}
    return ModelConfig(**settings)


def tokens(config, batch=2, length=None, seed=0):
    shape = (batch, length or config.sequence)
    return torch.randint(config.vocab, shape, generator=torch.Generator().manual_seed(seed))


def reference_moe(x_BTD, router_ED, gate_up_EFD, down_EDF, top_k, multiplier):
    """Token by token, expert by expert."""
    outputs = []
    for x in x_BTD.flatten(0, 1):
        logits = (router_ED @ x) * multiplier
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e].item())[:top_k]
        weights = torch.softmax(torch.stack([logits[e] for e in chosen]), dim=0)
        y = torch.zeros_like(x)
        for weight, e in zip(weights, chosen, strict=True):
            gate_matrix, up_matrix = gate_up_EFD[e].chunk(2)
            gate = gate_matrix @ x
            y = y + weight * (down_EDF[e] @ (gate * torch.sigmoid(gate) * (up_matrix @ x)))
        outputs.append(y)
    return torch.stack(outputs).view_as(x_BTD)


def reference_logits(model, ids_BT):
    """The logits of a decoder, from its weights and the formulas of muP, RoPE and attention."""
    config, weight = model.config, {name.removesuffix(".weight"): p for name, p in model.state_dict().items()}
    length, head, m, branch = ids_BT.shape[1], config.head_dim, config.width / 256, 1.4 / math.sqrt(config.layers)
    angle = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(0, head, 2) / head).double()
    future = torch.ones(length, length).triu(1).bool()

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight[name]

    x = 10 * weight["embedding"][ids_BT]
    for layer in (f"layers.{number}" for number in range(config.layers)):
        qkv = norm(x, f"{layer}.attention_norm") @ weight[f"{layer}.attention.qkv"].T
        q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        # The pair (i, i + C/2) is a complex number, which the position rotates.
        q, k = (torch.complex(*part.chunk(2, dim=-1)) * torch.exp(1j * angle) for part in (q, k))
        scores = (q @ k.mH).real / head
        mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
        x = x + branch * mixed.transpose(1, 2).flatten(2) @ weight[f"{layer}.attention.out"].T
        moe = (weight[f"{layer}.moe.{name}"] for name in ("router", "gate_up", "down"))
        x = x + branch * reference_moe(norm(x, f"{layer}.moe_norm"), *moe, config.top_k, 1 / m)
    return norm(x, "norm") @ weight["embedding"].T / m
