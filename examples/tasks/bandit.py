"""Reinforcement learning: a token game, learned from rewards by REINFORCE with a baseline.

    muonsw compare --task examples/tasks/bandit.py

The player sees eight tokens and must name them in reverse; each token in the right place earns a reward. The gradient
comes only from the rewards of sampled moves. The learning rate is flat after its warmup, as is common in
reinforcement learning, so both rules decay by the same amount: expect no difference. With "cosine" in `SETTINGS` they
differ.
"""

import torch
from torch import nn
from torch.nn import functional

SETTINGS = {"steps": 600, "lr": 0.003, "weight_decay": 0.5, "shape": "constant", "ns_dtype": "float32"}
TOKENS, LENGTH = 6, 8


class Player(nn.Module):
    """A transformer that maps tokens to the logits of all moves at once."""

    def __init__(self, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens):
        """Logits (B, LENGTH, TOKENS)."""
        return self.head(self.layers(self.embedding(tokens) + self.position))


def model(seed, width=64, depth=2):
    """The untrained player."""
    return Player(width, depth)


def batches(split, seed, batch=128):
    """Games, and the noise that samples moves, as a function of (seed, i): equal in every arm."""

    def number(i):
        return torch.randint(TOKENS, (batch, LENGTH)), torch.rand(batch, LENGTH, TOKENS)

    return number


def rewards(tokens, moves):
    """1 for each correct move."""
    return (moves == tokens.flip(1)).float()


def loss(model, batch, entropy=0.01):
    """A surrogate with the gradient of minus the expected reward; on validation, minus the reward."""
    tokens, noise = batch
    logits = model(tokens)
    log_p = functional.log_softmax(logits, dim=-1)
    moves = (log_p - (-noise.log()).log()).argmax(-1)  # sampled from the policy, with Gumbel noise
    reward = rewards(tokens, moves)
    if not model.training:
        return -reward.mean()
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    chosen = log_p.gather(-1, moves[..., None])[..., 0]
    spread = -(log_p.exp() * log_p).sum(-1).mean()
    return -(advantage * chosen).mean() - entropy * spread


def metrics(model, batch):
    """The reward of the most likely moves."""
    tokens, _ = batch
    return {"reward": rewards(tokens, model(tokens).argmax(-1)).mean()}
