"""Long horizons on fresh text: does the difference at the best lambda grow with the length, and the forgiving region?

The longest runs of the regret map with half its batch, and four times longer ones, on the same text: at scale mini
6,400 and 25,600 updates of 8 sequences, which see a text of 123 million tokens less than twice. Five lambdas around the
one that should be best, which is 0.4 of the other at four times the length: totals grow a little with it, and the peak
learning rate falls. The claims were written down before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from muonsw.lab.arms import RULES, Comparison, Key, Results, multiples
from muonsw.lab.claims.claim import Claim, at_least, at_most, below
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.studies.scales import Scale, lean
from muonsw.lab.studies.training.regret import (
    BEYOND,
    EXACT,
    at_horizon,
    best_gaps,
    best_of_means,
    lambda_map,
    map_of,
    octave_ratios,
    optima,
)
from muonsw.lab.studies.training.sweeps import Losses, vertex

LONGER, SMALLER = 4, 0.4
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def long_runs(scale: Scale) -> list[Comparison]:
    """Both horizons under both rules, the shorter first: a machine on loan may be gone before the longer runs end.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [(one.base.steps, one.base.batch, one.arms[-2].name) for one in long_runs(MINI)]
        [(6400, 8, 'constant, lambda 0.2'), (25600, 8, 'constant, lambda 0.08')]
    """
    run = replace(scale.map_run, batch=scale.map_run.batch // 2)
    steps, lambdas = list(scale.maps.items())[-1]
    middle = lambdas[(len(lambdas) - 1) // 2]
    # The smallest of the five was best in the shorter runs under both rules: half of it was added.
    shorter, longer = (FACTORS[0] / 2, *FACTORS), FACTORS
    grids = {steps: multiples(middle, shorter), LONGER * steps: multiples(SMALLER * middle, longer)}
    # Logged often: the first record of a run lets the next process compile.
    runs = {length: replace(lean(at_horizon(run, length)), log_every=20) for length in grids}
    return [lambda_map(Key(steps=length), runs[length], grid, scale.map_seeds) for length, grid in grids.items()]


def judge_long(results: Results, _scale: Scale) -> list[Claim]:
    """What the paper's argument says about length: the gap at the best lambda and the forgiving region grow with it."""
    found = map_of(results)
    *shorter, long = sorted(found["constant"])
    # Where the best lambda is the smallest or largest that was tried, its total is that of the grid.
    per_lambda = {(one.rule, one.steps): one.per_lambda for one in optima(results) if not one.at_an_end}
    pairs = {steps: (found["scaled"][steps], found["constant"][steps]) for steps in found["constant"]}
    claims = at_one_length(*pairs[long], long)
    for short in shorter:
        gaps, octaves = (
            [a - b for a, b in zip(measure(*pairs[long]), measure(*pairs[short]), strict=False)]
            for measure in (best_gaps, octave_ratios)
        )
        grows = f"best of scaled minus best of constant at {long:,} updates, minus the same at {short:,}, in nats"
        wider = f"octaves of the lambdas tried within 0.01, scaled over constant, at {long:,} updates minus {short:,}"
        claims += [
            at_most("gap-grows", grows, BEYOND, over_seeds(gaps), 0.0, EXACT),
            at_least("region-grows", wider, BEYOND, over_seeds(octaves), 0.0, EXACT),
        ]
        for rule in (rule for rule in RULES if {(rule, long), (rule, short)} <= set(per_lambda)):
            more = f"total of {rule} decay's best lambda at {long:,} updates over that at {short:,}, its logarithm"
            totals = (
                [math.log(vertex(one) * per_lambda[rule, steps]) for one in found[rule][steps]]
                for steps in (long, short)
            )
            ratios = over_seeds([a - b for a, b in zip(*totals, strict=False)])
            claims.append(at_least(f"{rule}-total-grows", more, BEYOND, ratios, 0.0, EXACT))
    return claims


def at_one_length(scaled: Sequence[Losses], constant: Sequence[Losses], steps: int) -> list[Claim]:
    """The rules at their best lambdas, how wide their good regions are, and what the largest lambda costs."""
    lower = f"best of scaled minus best of constant over lambda at {steps:,} updates, in nats"
    wider = f"octaves of the lambdas tried within 0.01 nats at {steps:,} updates, scaled over constant"
    milder = f"regret of the largest lambda at {steps:,} updates, scaled over constant"
    ours, theirs = ([one[max(one)] - one[best_of_means(seeds)] for one in seeds] for seeds in (scaled, constant))
    shares = [s / c if c else math.inf for s, c in zip(ours, theirs, strict=True)]
    return [
        below("best-against-best", lower, BEYOND, over_seeds(best_gaps(scaled, constant)), 0.0, EXACT),
        at_least("scaled-is-wider", wider, BEYOND, over_seeds(octave_ratios(scaled, constant)), 1.0, EXACT),
        at_most("too-large-costs-less", milder, BEYOND, over_seeds(shares), 0.6, EXACT),
    ]
