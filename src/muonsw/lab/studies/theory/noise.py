"""The equilibrium on pure noise: norm, alignment and rotation against closed forms, for SGD with momentum and for Muon.

Gradients are independent of each other and of the weights. SGD's updates are then correlated as `beta^k`, which is what
the closed forms assume. Muon's are not: the polar factor forgets faster than the momentum that it comes from, so its
norm lies a little below; with the correlation of its own updates the same sum gives it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import decay_factor
from muonsw.lab import theory
from muonsw.lab.claims.claim import Claim, Evidence, Source, at_most, within_share
from muonsw.lab.claims.statistics import mean_of
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    BOTH,
    TRUE_RULES,
    Rules,
    chain,
    gaussian,
    gradient,
    march,
    muon,
    sgd,
)
from muonsw.lab.theory.hypotheses import require_decay

NOISE = Source("beyond the paper: the noise-dominated equilibrium", "gradients are independent noise, a = 1 - phi")
SAMPLED = Tolerance(
    0.02, "some twenty relaxation times: over ten seeds the largest deviation was 0.005, intervals add theirs"
)
# The peak over the learning rate of all steps, so that the rules decay differently at one lambda.
PEAKS = 2.0
# Simulations before this study, of 32 x 64 at beta 0.95, gave 0.948 to 0.955 for norms and 0.94 to 0.95 for cosines.
BELOW = 0.95
FORGETS = Tolerance(0.03, "how far the polar factor forgets faster depends a little on phi and the shape")


@dataclass(frozen=True)
class NoiseSettings:
    """Chains of matrices at a fixed learning rate, half of the peak, under both rules."""

    rows: int = 32
    columns: int = 64
    chains: int = 4
    beta: float = 0.95
    eta: float = 0.1
    lam: float = 0.2
    steps: int = 2500
    burn: int = 500
    lags: int = 200
    rules: Rules = TRUE_RULES


@dataclass(frozen=True)
class Equilibrium:
    """What was seen of a stack of chains after it had settled, by chain."""

    phi: float
    norm: Tensor  # `|W|_F` over what an update of RMS 1 is long
    alignment: Tensor  # the cosine of weight and update
    rotation: Tensor  # the part of an update across the weight, over the norm of the weight
    correlation: Tensor  # the cosine of updates k steps apart, k from 0


def run_noise(s: NoiseSettings, context: Context) -> Evidence:
    """Both algorithms under both rules, on noise."""
    require_decay(s.lam)
    for rule in BOTH:  # closed forms check their hypotheses, before anything is run
        theory.noise_norm(s=1.0, phi=_phi(rule, s), beta=s.beta)
    claims: list[Claim] = []
    for number, name in enumerate(("sgd", "muon")):
        found = settle(name, s, context, part=(number / 2, (number + 1) / 2))
        expected, slack = (1.0, SAMPLED) if name == "sgd" else (BELOW, FORGETS)
        for rule, one in found.items():
            claims += closed_form_claims(f"{name}-{rule}", f"{name}, {rule} decay", one, s.beta, expected, slack)
        if name == "muon":
            claims += [forgetting_claim(s, found.values()), *(own_claim(rule, one) for rule, one in found.items())]
    return Evidence(claims)


def settle(name: str, s: NoiseSettings, context: Context, *, part: tuple[float, float]) -> Mapping[str, Equilibrium]:
    """Run both rules on noise of their own, and measure after the burn-in."""
    make, peak = {"sgd": sgd, "muon": muon}[name], PEAKS * s.eta
    shape = (s.chains, s.rows, s.columns)
    weights = {rule: chain(gaussian(shape, context.generator, std=s.eta)) for rule in BOTH}
    groups = [{"params": [weights[rule]], "decay": s.rules[rule], "momentum": s.beta} for rule in BOTH]
    optimizer = make(groups, peak=peak, lam=s.lam)
    seen = {rule: _Sums([], []) for rule in BOTH}
    for t in march(optimizer, [s.eta] * s.steps, context.progress, part=part):
        before = {rule: weight.detach().clone() for rule, weight in weights.items()}
        for weight in weights.values():
            gradient(weight).copy_(gaussian(shape, context.generator))
        optimizer.step()
        for rule, weight in weights.items():
            if t >= s.burn:
                seen[rule].add(before[rule], (1.0 - _phi(s.rules[rule], s)) * before[rule] - weight.detach())
    return {rule: _equilibrium(_phi(rule, s), sums, s.lags) for rule, sums in seen.items()}


class _Sums(NamedTuple):
    """By step: squares of weights and updates and their inner product, by chain; and all updates."""

    products: list[Tensor]
    updates: list[Tensor]

    def add(self, W: Tensor, U: Tensor) -> None:
        self.products.append(torch.stack([(W * W).sum((-2, -1)), (U * U).sum((-2, -1)), (W * U).sum((-2, -1))]))
        self.updates.append(U.flatten().float())


def _phi(rule: str, s: NoiseSettings) -> float:
    return float(decay_factor(rule, s.lam, s.eta, PEAKS * s.eta))


def _equilibrium(phi: float, sums: _Sums, lags: int) -> Equilibrium:
    """Mean squares and a mean inner product: what the closed forms are about."""
    weights, updates, inner = torch.stack(sums.products).mean(0)
    norm, size = weights.sqrt(), updates.sqrt()
    alignment = inner / (norm * size)
    rotation = size * (1.0 - alignment.square()).sqrt() / norm
    return Equilibrium(phi, norm / size, alignment, rotation, correlations(torch.stack(sums.updates), lags))


def correlations(U: Tensor, lags: int) -> Tensor:
    """The mean cosine of vectors k steps apart for k up to `lags`, given (steps, entries)."""
    means = torch.stack([(U[: len(U) - k] * U[k:]).sum(1).mean() for k in range(lags + 1)])
    return (means / means[0]).double()


def closed_form_claims(
    id: str, where: str, one: Equilibrium, beta: float, expected: float, slack: Tolerance
) -> list[Claim]:
    """Norm, alignment and rotation over their closed forms; a smaller norm is turned further."""
    norm = mean_of(one.norm / theory.noise_norm(s=1.0, phi=one.phi, beta=beta))
    cosine = mean_of(one.alignment / theory.noise_alignment(phi=one.phi, beta=beta))
    turned = mean_of(one.rotation / theory.noise_rotation(phi=one.phi, beta=beta))
    more = 1.0 if expected == 1.0 else 2.0 - expected + 0.01
    return [
        within_share(f"{id}-norm", f"{where}: norm over its closed form", NOISE, norm, expected, slack),
        within_share(f"{id}-alignment", f"{where}: cosine over its closed form", NOISE, cosine, expected, slack),
        within_share(f"{id}-rotation", f"{where}: rotation over its closed form", NOISE, turned, more, slack),
    ]


def forgetting_claim(s: NoiseSettings, found: Iterable[Equilibrium]) -> Claim:
    """Why: the cosine of successive updates is below beta."""
    largest = max(float(one.correlation[1]) for one in found)
    statement = "Muon's successive updates have a smaller cosine than its momenta (largest of all runs)"
    below = Tolerance(0.0, "the cosine of successive momenta is beta")
    return at_most("muon-forgets", statement, NOISE, largest, s.beta, below)


def own_claim(rule: str, one: Equilibrium) -> Claim:
    """With the correlation of its own updates the sum over steps gives the norm."""
    a = 1.0 - one.phi
    powers = a ** torch.arange(1, len(one.correlation), dtype=torch.float64)
    predicted = math.sqrt((1.0 + 2.0 * float((powers * one.correlation[1:]).sum())) / (1.0 - a**2))
    statement = f"muon, {rule} decay: norm over that of its updates' own correlation"
    return within_share(f"muon-{rule}-own", statement, NOISE, mean_of(one.norm / predicted), 1.0, SAMPLED)


EQUILIBRIUM = Experiment(
    name="noise-equilibrium",
    title="the equilibrium on pure noise: norm, alignment and rotation against closed forms; Muon lies 5% below",
    hypotheses=("lambda > 0", "0 <= beta < 1", "gradients independent of the weights"),
    settings=NoiseSettings(),
    function=run_noise,
    cost=12.0,
)
