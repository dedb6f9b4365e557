"""A new algorithm in one file and one line, as CONTRIBUTING promises: along a fading sum of gradients."""

import torch

from muonsw.algorithms import Algorithm, Update
from muonsw.algorithms.base import clean, columns, elementwise_parts

KEYS = ("fading_sum",)


def updates(group, items, budget):
    for parts in elementwise_parts(items, KEYS, budget.chunk_bytes):
        _, grads, sums = columns(parts, KEYS)
        for grad, total in zip(clean(grads, sums, group["maximize"], budget.ok), sums, strict=True):
            after = 0.9 * total + grad
            total.copy_(after if budget.ok is None else torch.where(budget.ok, after, total))
        yield Update(parts, sums)


TOY = Algorithm(defaults={}, state_keys=lambda _: KEYS, updates=updates, validate=lambda *_: None)
