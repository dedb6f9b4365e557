"""Run folders with known losses and norms, for judges."""

import json
import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from muonsw.lab.runs import Run, load_run
from tests.lab.made_runs import make_run
from tests.lab.train.small_runs import small_run


def written(folder, name, *, rule, seed, loss, **settings):
    """A run folder that obeys the recursion of the norm, with a known final loss."""
    make_run(folder / name, rule=rule, steps=1500, every=5, **settings)
    result = {"steps": 1500, "final_loss": loss, "best_loss": loss, "best_step": 1500}
    (folder / name / "result.json").write_text(json.dumps(result), encoding="utf-8")
    run = load_run(folder / name)
    settings = small_run(seed=seed, steps=1500).as_data()
    optimizer = {**settings["optimizer"], **run.settings["optimizer"]}
    return replace(run, settings={**settings, "optimizer": optimizer}).named(rule)


@cache
def pair():
    """Runs of both rules, made once for all tests; scaled decay ends 0.05 lower."""
    folder, losses, lam = Path(tempfile.mkdtemp()), {0: 3.0, 1: 3.01, 2: 2.99}, {"lam": 0.7, "lr": 0.02}
    return {
        rule: [
            written(folder, f"{rule}-{seed}", rule=rule, seed=seed, loss=loss - 0.05 * (rule == "scaled"), **lam)
            for seed, loss in losses.items()
        ]
        for rule in ("constant", "scaled")
    }


def runs_of(cell, loss, seeds=2):
    """Runs of a grid's cell whose loss is a function of rule and value; seeds differ by a thousandth."""
    comparison = cell.comparison(seeds)
    losses = {cell.arm(rule, value): loss(rule, value) for rule, tried in cell.arms.items() for value in tried}

    def run(arm, seed):
        result = {"final_loss": losses[arm.name] + 1e-3 * seed}
        return Run(arm.name, Path(), comparison.config(arm, seed).as_data(), {}, result, {})

    return {arm.name: [run(arm, seed) for seed in range(seeds)] for arm in comparison.arms}


def verdicts(claims):
    return {claim.id: claim.holds for claim in claims}


def parabola(value, best, curvature=0.05):
    return 3.0 + curvature * math.log(value / best) ** 2
