r"""Preference tuning (DPO): a pre-trained decoder learns to prefer a text's real continuations to corrupted ones.

    muonsw train --out out/pre
    muonsw compare --task examples/tasks/preferences.py --task.start out/pre --task.text new.txt
    muonsw compare --task examples/tasks/preferences.py --task.start out/pre --task.text new.txt --task.rank 4 \
        --lr 0.01

With `--task.rank` Muon trains only low-rank factors of the attention, with decay (see `patterns`); without it the full
model is trained.
"""

import copy
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from muonsw.lab.train.export import load_model

SETTINGS = {"steps": 200, "lr": 0.001, "weight_decay": 1.0, "ns_dtype": "float32"}
BETA = 0.1  # how strongly DPO keeps the model near its start
PROMPT = 16  # tokens that both continuations share


class LowRank(nn.Module):
    """A weight plus the product of two small factors; the second starts at zero."""

    def __init__(self, weight, rank):
        super().__init__()
        rows, columns = weight.shape
        self.lora_A = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.lora_B = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight):
        return weight + self.lora_B @ self.lora_A


class Policy(nn.Module):
    """A decoder to tune, and a frozen copy of it."""

    def __init__(self, decoder, rank):
        super().__init__()
        self.reference = copy.deepcopy(decoder).requires_grad_(False)
        self.decoder = decoder.requires_grad_(not rank)
        for layer in decoder.layers if rank else ():
            parametrize.register_parametrization(
                layer.attention.qkv, "weight", LowRank(layer.attention.qkv.weight, rank)
            )

    def forward(self, tokens):
        """The log-likelihood of the continuations minus that of the reference, in nats."""
        with torch.no_grad():
            before = log_likelihood(self.reference, tokens)
        return log_likelihood(self.decoder, tokens) - before


def log_likelihood(decoder, tokens):
    """Log-likelihood of everything after the prompt, for each row."""
    log_p = decoder.logits(tokens[:, :-1]).float().log_softmax(-1)
    return log_p.gather(-1, tokens[:, 1:, None])[:, PROMPT - 1 :, 0].sum(1)


def model(seed, start="", rank=0):
    """The decoder of a run of `muonsw train`, with its reference; `{seed}` in `start` is replaced by the seed."""
    return Policy(load_model(Path(start.replace("{seed}", str(seed))))[0], rank)


def patterns(model, weight_decay, rank=0):
    """Train low-rank factors with Muon and decay; the default is AdamW without decay."""
    return {"role:lora": {"algorithm": "muon", "weight_decay": weight_decay}} if rank else {}


@cache
def encoded(start, text):
    """The text as tokens of the pre-trained model, and the size of its vocabulary."""
    if not (start and text):
        raise ValueError("give --task.start RUN, a run of `muonsw train`, and --task.text FILE")
    _, tokenizer = load_model(Path(start.replace("{seed}", "0")))
    return torch.as_tensor(tokenizer.encode(Path(text).read_text(encoding="utf-8"))).long(), tokenizer.vocab_size


def batches(split, seed, start="", text="", batch=8, length=48, corrupted=0.15):
    """Pairs of a window and a copy with some tokens after the prompt replaced; the last tenth is held out."""
    tokens, vocab = encoded(start, text)
    cut = 9 * len(tokens) // 10
    tokens = tokens[:cut] if split == "train" else tokens[cut:]

    def number(i):
        starts = torch.randint(len(tokens) - length, (batch, 1))
        chosen = tokens[starts + torch.arange(length)]
        spoiled = (torch.rand(batch, length) < corrupted) & (torch.arange(length) >= PROMPT)
        return chosen, torch.where(spoiled, torch.randint(vocab, (batch, length)), chosen)

    return number


def margins(model, batch):
    """For each pair, how much the preference for the real continuation has grown."""
    chosen, rejected = batch
    both = model(torch.cat([chosen, rejected]))
    return BETA * (both[: len(chosen)] - both[len(chosen) :])


def loss(model, batch):
    """Minus the log-likelihood of the preferences."""
    return -functional.logsigmoid(margins(model, batch)).mean()


def metrics(model, batch):
    """The share of pairs whose real continuation gained more than the corrupted one."""
    return {"preferred": (margins(model, batch) > 0).float().mean()}
