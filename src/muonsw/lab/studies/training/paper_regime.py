"""Three questions where the paper is: hundreds of tokens per parameter, AdamW at its best lambda, and which peak.

1. `tokens-per-parameter`: the narrowest model at 300 tokens per parameter, five lambdas whose total decay spans our
   advice (1.3) and the paper's runs (20), beside the shorter runs of `long`. Where is the best total?
2. `adamw-lambda`: six lambdas under both rules at the best of three learning rates.
3. `which-peak`: the main table's larger widths, scaled decay by the group's own peak and by the undivided peak, each
   beside constant decay of the same total.

The claims were written before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from muonsw.lab.advise import published_total
from muonsw.lab.base.tables import Table
from muonsw.lab.claims.claim import Claim, Source, above, at_most, below, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.paper import Tolerance
from muonsw.lab.plan import parts_of
from muonsw.lab.report.sections import Axis, Chart, Curve
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import (
    CONSTANT,
    CONTROL,
    GROUP,
    RULES,
    SCALED,
    Arm,
    Comparison,
    Key,
    Results,
    Runs,
    control_arm,
    decay_arms,
    decay_factors,
)
from muonsw.lab.studies.outcome import against_constant, last_loss, paired, steps_to_match, swept_loss
from muonsw.lab.studies.scales import Scale, at_width, lean
from muonsw.lab.studies.training.long import at_one_length, long_runs
from muonsw.lab.studies.training.regret import (
    BEYOND,
    EXACT,
    at_horizon,
    best_of_means,
    first_run,
    lambda_map,
    losses_of,
    map_tables,
    optimum,
)
from muonsw.lab.studies.training.sweeps import mean_losses, power, vertex
from muonsw.lab.train.config import RunConfig

# By scale, the number of steps: 300 tokens for each of 0.95 million active parameters at scale mini.
STEPS = {"mini": 34_800}
TOTALS, ADVISED = (0.6, 1.3, 4.0, 10.0, 20.0), 1.3
POWER_LINES = Source("Power Lines (arXiv 2505.13738), AdamW", "lambda * peak rate * steps = TPP^0.527 / 1.084")
POWER = 0.527
COARSE = Tolerance(0.15, "the lambdas are a factor of 2.5 apart, and tokens per parameter differ by a factor of 19")
PAPER_SAVED = Source("the paper's main table", "the same lambda and total decay")
SAVED = Tolerance(0.035, "the paper's rows save 22% to 29%")

ADAMW_SEARCH, ADAMW = "search", "adamw"
ADAMW_RATES, ADAMW_TOTALS = (5e-3, 1e-2, 2e-2), (0.35, 0.7, 1.4, 2.8, 5.6, 11.2)
SEARCH_SHORTER = 4

GROUP_CONTROL = "constant, group peak's total"
CONTROLS = {SCALED: CONTROL, GROUP: GROUP_CONTROL}


def with_totals(run: RunConfig, totals: Sequence[float]) -> list[float]:
    """The lambdas with which constant decay has these totals."""
    unit = math.fsum(decay_factors(run, replace(run.optimizer, decay=CONSTANT, weight_decay=1.0)))
    return [float(f"{total / unit:.2g}") for total in totals]


def tokens_per_parameter(run: RunConfig) -> float:
    """Training tokens over active parameters: a token visits `top_k` of the experts."""
    parts, model = parts_of(run.decoder), run.decoder
    active = parts.hidden.parameters + parts.rest.parameters + parts.experts.parameters * model.top_k / model.experts
    return run.steps * run.tokens_per_step / active


def longest(scale: Scale) -> list[Comparison]:
    """The runs of `long`, and the narrowest model at 300 tokens per parameter.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> run = longest(MINI)[-1].base
        >>> run.model.width, run.steps, round(tokens_per_parameter(run), -1), with_totals(run, TOTALS)
        (64, 34800, 300.0, [0.003, 0.0065, 0.02, 0.05, 0.1])
    """
    shorter = long_runs(scale)
    steps = STEPS.get(scale.name, shorter[0].base.steps // 2)
    run = at_width(replace(scale.map_run, batch=scale.map_run.batch // 2), scale.drift_widths[0])
    # Evaluated often enough to see at which step one rule reaches the other's loss.
    run = replace(lean(at_horizon(run, steps)), eval_every=max(1, steps // 40), log_every=20)
    return [*shorter, lambda_map(Key(steps=steps), run, with_totals(run, TOTALS), scale.map_seeds)]


def judge_longest(results: Results, scale: Scale) -> list[Claim]:
    """Where the best total is, what advice costs, and what the paper's own metric says at the paper's total."""
    if (arms := results.get(longest(scale)[-1].key)) is None:
        return []
    steps, claims = first_run(arms).config.steps, []
    for rule in RULES:
        totals = _best_totals(list(results.values()), rule)
        if len(totals) > 1:
            powers = [power(best, list(totals)) for best in zip(*totals.values(), strict=False)]
            follows = f"{rule} decay: power of tokens per parameter that the best total follows"
            claims.append(within(f"{rule}-power", follows, POWER_LINES, over_seeds(powers), POWER, COARSE))
        losses = losses_of(arms, rule)
        best, lambdas = best_of_means(losses), sorted(losses[0])
        advised = lambdas[TOTALS.index(ADVISED)]
        cost = over_seeds([one[advised] - one[best] for one in losses])
        words = f"{rule} decay: loss of lambda {advised:g} at {steps:,} steps above that of the best, in nats"
        claims.append(at_most(f"{rule}-advice", words, BEYOND, cost, 0.01, EXACT))
    saved = over_seeds(_saved(arms))
    sooner = f"share of steps that scaled decay saves at the largest lambda and {steps:,} steps"
    return [
        *claims,
        *at_one_length(losses_of(arms, SCALED), losses_of(arms, CONSTANT), steps),
        above("saves-steps", sooner, BEYOND, saved, 0.0, EXACT),
        within("saves-as-printed", sooner, PAPER_SAVED, saved, 0.255, SAVED),
    ]


def longest_tables(results: Results, scale: Scale) -> list[Table]:
    """The runs at 300 tokens per parameter; those of `long` have tables of their own."""
    own = longest(scale)[-1].key
    return map_tables({own: results[own]}, scale) if own in results else []


def _best_totals(cells: Sequence[Runs], rule: str) -> dict[float, list[float]]:
    """By tokens per parameter, the total of every seed's best lambda, where the best of means is inside its grid."""
    found = {}
    for arms in cells:
        one = optimum(arms, rule)
        if not one.at_an_end:
            tokens = tokens_per_parameter(first_run(arms).config)
            found[tokens] = [vertex(losses) * one.per_lambda for losses in losses_of(arms, rule)]
    return found


def _saved(arms: Runs) -> list[float]:
    """By seed, the share of steps after which scaled decay at the largest lambda has constant decay's best loss."""

    def largest(rule: str) -> Sequence[Run]:
        own = [runs for runs in arms.values() if runs[0].config.optimizer.decay == rule]
        return max(own, key=lambda runs: runs[0].config.optimizer.weight_decay)

    matches = (steps_to_match(*pair) for pair in zip(largest(CONSTANT), largest(SCALED), strict=True))
    return [math.nan if match is None else 1.0 - match for match in matches]


def adamw_search(scale: Scale) -> list[Comparison]:
    """Three learning rates of AdamW, on a seed of their own in shorter runs."""
    steps = list(scale.maps)[-1]
    arms = []
    for rate in ADAMW_RATES:
        run = _adamw(scale, rate, max(1, steps // SEARCH_SHORTER))
        arms.append(Arm(f"lr {rate:g}", replace(run.optimizer, weight_decay=with_totals(run, (1.4,))[0])))
    return [Comparison(Key(ADAMW_SEARCH), run, tuple(arms), (scale.map_seeds,), paired=False)]


def adamw_lambdas(found: Results, scale: Scale) -> list[Comparison]:
    """Six lambdas under both rules at the best rate; before the search, at the middle one."""
    rates = found.get(Key(ADAMW_SEARCH))
    losses = {runs[0].config.optimizer.lr: swept_loss(runs[0]) for runs in rates.values()} if rates else {}
    rate = min(losses, key=losses.__getitem__) if losses else ADAMW_RATES[1]
    run = _adamw(scale, rate, list(scale.maps)[-1])
    return [lambda_map(Key(ADAMW), run, with_totals(run, ADAMW_TOTALS), scale.map_seeds)]


def _adamw(scale: Scale, rate: float, steps: int) -> RunConfig:
    run = lean(at_horizon(replace(scale.map_run, batch=scale.map_run.batch // 2), steps))
    optimizer = replace(run.optimizer, algorithm="adamw", lr=rate, decay=CONSTANT)
    return replace(run, optimizer=optimizer, eval_every=max(1, steps // 40), log_every=20)


def judge_adamw(results: Results, _scale: Scale) -> list[Claim]:
    """The rules at their best and at the largest lambda, and whether the best total is the published one."""
    if (arms := results.get(Key(ADAMW))) is None:
        return []
    run, claims = first_run(arms).config, []
    mean_multiple = optimum(arms, CONSTANT).per_lambda / (run.steps * run.optimizer.lr)
    published = published_total(tokens_per_parameter(run), mean_multiple)
    octave = Tolerance(1.0, "the lambdas are a factor of two apart")
    for rule in RULES:
        one = optimum(arms, rule)
        octaves = [math.log2(vertex(losses) * one.per_lambda / published) for losses in losses_of(arms, rule)]
        words = f"{rule} decay: log2 of the best total over the published one, {published:.1f} summed over the schedule"
        claims.append(within(f"{rule}-published", words, POWER_LINES, over_seeds(octaves), 0.0, octave))
    return [*claims, *at_one_length(losses_of(arms, SCALED), losses_of(arms, CONSTANT), run.steps)]


def adamw_tables(results: Results, scale: Scale) -> list[Table]:
    """The lambdas; the search has one row of rates."""
    return map_tables({key: arms for key, arms in results.items() if key.name == ADAMW}, scale)


def adamw_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Final loss over lambda: the mean thick, and each seed thin, because seeds differ as much as the rules do."""
    if (arms := results.get(Key(ADAMW))) is None:
        return []
    curves = []
    for rule in RULES:
        losses = losses_of(arms, rule)
        seeds = {f"{rule}, seed {place}": one for place, one in enumerate(losses)}
        curves += [Curve(name, rule, list(one), list(one.values())) for name, one in seeds.items()]
        means = mean_losses(losses)
        curves.append(Curve(rule, rule, list(means), list(means.values()), middle=True))
    lambdas, title = sorted(means), f"AdamW, {first_run(arms).config.steps:,} updates"
    x, y = Axis("lambda", log=2, ticks=lambdas), Axis("validation loss", "nats per token")
    return [Chart("adamw-lambda", title, curves, x=x, y=y, note="Mean over seeds, and single seeds.", points=True)]


def peaks(scale: Scale) -> list[Comparison]:
    """Above the base width: constant decay, both peaks of scaled decay, and constant decay of each total."""
    found = []
    for width, run in scale.rows.items():
        if run.decoder.relative_width == 1.0:
            continue
        arms = decay_arms(run)
        group = next(arm for arm in arms if arm.name == GROUP)
        control = replace(control_arm(run, group), name=GROUP_CONTROL)
        found.append(Comparison(Key(width=width), run, (*arms, control), tuple(range(scale.seeds))))
    return found


def judge_peaks(results: Results, _scale: Scale) -> list[Claim]:
    """Each peak ends below constant decay and below its own control, and the gain grows with the width."""
    gains: dict[str, dict[tuple[Key, str], list[float]]] = {arm: {} for arm in CONTROLS}
    claims = []
    for key, arms in results.items():
        for arm, control in CONTROLS.items():
            for base in (CONSTANT, control):
                gains[arm][key, base] = gap = paired(arms[arm], arms[base], last_loss)
                words = f"{key}: {arm} minus {base}, in nats"
                claims.append(below(f"{key.slug}-{arm}-{base}", words, BEYOND, over_seeds(gap), 0.0, EXACT))
    if len(results) < 2:
        return claims
    narrow, *_, wide = sorted(results, key=lambda key: key.width or 0)
    for arm, own in gains.items():
        for base in (CONSTANT, CONTROLS[arm]):
            more = [a - b for a, b in zip(own[wide, base], own[narrow, base], strict=False)]
            words = f"{arm} minus {base} at {wide}, minus the same at {narrow}, in nats"
            claims.append(below(f"{arm}-{base}-grows", words, BEYOND, over_seeds(more), 0.0, EXACT))
    return claims


def peak_tables(results: Results, _scale: Scale) -> list[Table]:
    """Every arm beside constant decay."""
    return [against_constant(results)]
