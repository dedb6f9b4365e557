"""The model of the routing tests."""

import torch
from torch import nn


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


def by_name(optimizer):
    return {name: g for g in optimizer.param_groups for name in g["param_names"]}


def roles_of(optimizer):
    return {name: g["role"] for g in optimizer.param_groups for name in g["param_names"]}
