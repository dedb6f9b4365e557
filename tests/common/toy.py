"""A new algorithm in one file and one line, as CONTRIBUTING promises: it moves along a decaying sum of gradients."""

import torch

from muonsw.algorithms import Algorithm, Update
from muonsw.algorithms.base import clean, columns
from muonsw.slots import ELEMENTWISE


def update(group, parts, ctx):
    _, grads, sums = columns(parts, ("fading_sum",))
    for grad, total in zip(clean(grads, sums, group["maximize"], ctx.ok), sums, strict=True):
        after = 0.9 * total + grad
        total.copy_(after if ctx.ok is None else torch.where(ctx.ok, after, total))
    return Update(parts, sums)


TOY = Algorithm({}, lambda _: {"fading_sum": ELEMENTWISE}, update)
