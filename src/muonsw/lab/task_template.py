"""A task for `muonsw compare --task` and `muonsw train --task`: which of ten patterns does a noisy picture show?

Replace the functions with your own; nothing else is needed. `muonsw task check` says what is wrong with them.
"""

import torch
from torch import nn
from torch.nn import functional

# How to train, unless the command line says otherwise (--steps, --lr, --weight-decay, ...).
SETTINGS = {"steps": 300, "lr": 0.005, "weight_decay": 2.0}

# Your data would be loaded here: ten pictures of 8 x 8 pixels.
PICTURES = torch.randn(10, 8, 8, generator=torch.Generator().manual_seed(0))


def model(seed, width=64, depth=3):
    """An nn.Module with its initial weights. Torch's generators are already seeded, so you may ignore `seed`.

    Further arguments become command-line options: `--task.width 128 --task.depth 4`.
    """
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *hidden, nn.Linear(width, 10))


def batches(split, seed, batch=128, noise=0.8):
    """The batches of "train" or "validation": here a function of their number i, from 0.

    A list of batches or an iterable such as a DataLoader works too. Before each batch the generators of torch, numpy
    and `random` are seeded with (split, seed, i), so every arm sees the same batches and an interrupted run resumes bit
    for bit. For "validation" the seed is always 0.
    """

    def number(i):
        labels = torch.randint(10, (batch,))
        shift = torch.randint(-1, 2, (2,)).tolist()
        return PICTURES[labels].roll(shift, dims=(1, 2)) + noise * torch.randn(batch, 8, 8), labels

    return number


def loss(model, batch):
    """The scalar to minimise: a mean over the rows of the batch, which is already on the model's device."""
    pictures, labels = batch
    return functional.cross_entropy(model(pictures), labels)


def metrics(model, batch):
    """What else to measure on validation batches, as means over their rows. Optional."""
    pictures, labels = batch
    return {"accuracy": (model(pictures).argmax(1) == labels).float().mean()}
