"""Models small enough for a test, and a readable mixture of experts to compare with."""

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
