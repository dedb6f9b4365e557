"""Handwritten digits: a ViT or a ResNet of timm on the 1,797 pictures that come with scikit-learn.

    muonsw compare --task examples/tasks/vision.py
    muonsw compare --task examples/tasks/vision.py --task.kind resnet --out out/resnet

Needs `pip install timm scikit-learn`.
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SETTINGS = {"steps": 600, "lr": 0.005, "weight_decay": 1.0, "ns_dtype": "float32"}
VALIDATION = 360  # held-out pictures, a fifth


def model(seed, kind="vit", depth=4):
    """A small ViT on patches of 2 x 2 pixels, or a ResNet whose first layers keep the 8 x 8 pixels."""
    if kind == "vit":
        sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": depth, "num_heads": 4}
        return timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **sizes)
    if kind != "resnet":
        raise ValueError(f"kind={kind!r}: choose vit or resnet")
    net = timm.create_model("resnet10t", in_chans=1, num_classes=10, channels=(16, 32, 64, 64), stem_type="")
    net.conv1.stride, net.maxpool = (1, 1), nn.Identity()
    return net


def batches(split, seed, batch=64):
    """Random pictures with distortion and noise for training; all held-out pictures for validation."""
    pictures, labels = digits()
    if split == "validation":
        return list(zip(pictures[:VALIDATION].split(90), labels[:VALIDATION].split(90), strict=True))
    pictures, labels = pictures[VALIDATION:], labels[VALIDATION:]

    def number(i):
        rows = torch.randint(len(labels), (batch,))
        return augmented(pictures[rows]), labels[rows]

    return number


def digits():
    """Pictures (1797, 1, 8, 8) with mean 0 and variance 1, and their labels, shuffled to mix the writers."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(data.images, dtype=torch.float32)[order, None]
    return (pictures - pictures.mean()) / pictures.std(), torch.tensor(data.target)[order]


def augmented(pictures):
    """Pictures after small random affine maps, with noise; torch is seeded with (seed, i) here."""
    rows = len(pictures)
    maps = torch.eye(2, 3).repeat(rows, 1, 1) + 0.1 * torch.randn(rows, 2, 3)
    grid = functional.affine_grid(maps, pictures.shape, align_corners=False)
    moved = functional.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    return moved + 0.1 * torch.randn_like(moved)


def loss(model, batch):
    """Cross-entropy, with smoothed labels while training."""
    pictures, labels = batch
    return functional.cross_entropy(model(pictures), labels, label_smoothing=0.1 if model.training else 0.0)


def metrics(model, batch):
    """The share of digits recognized."""
    pictures, labels = batch
    return {"accuracy": (model(pictures).argmax(1) == labels).float().mean()}
