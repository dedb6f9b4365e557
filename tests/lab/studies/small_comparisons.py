"""Comparisons that take a second: a tiny decoder under both rules, and a scale of such runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from muonsw.lab import launch
from muonsw.lab.compare import Arm, Comparison, train_all
from muonsw.lab.model import MuP
from muonsw.lab.studies.scales import Scale, adamw_sweep
from muonsw.lab.studies.study import by_settings
from muonsw.lab.train.config import DataConfig, OptimizerConfig
from tests.lab.train.small_runs import MODEL, small_run, tokens

ARMS = tuple(
    Arm(rule, OptimizerConfig(decay=rule, weight_decay=1.0, ns_dtype="float32")) for rule in ("constant", "scaled")
)
KEY = "comparison"
WILD = Arm("wild", OptimizerConfig(lr=50.0, weight_decay=0.0))
QUIET = Console(quiet=True)


def tiny_run(**settings):
    model = {"width": 16, "layers": 1, "head_dim": 8, "experts": 2, "ff": 16, "sequence": 16}
    return small_run(**({"model": model, "batch": 2} | settings))


def comparison(arms=ARMS, seeds=(0, 1, 2), **settings):
    return Comparison(KEY, tiny_run(**settings), tuple(arms), tuple(seeds))


def train_in(folder):
    one_by_one = partial(launch.run, console=QUIET, workers=1)
    return partial(train_all, place=by_settings(folder, Path(tokens()), "cpu"), launch=one_by_one)


def tiny_scale(**changes):
    """A scale of tiny runs at two widths; muP divides the learning rate of the wider one."""
    narrow = replace(MODEL, width=16, layers=1, head_dim=8, experts=2, ff=16, sequence=16, mup=MuP(base_width=16))
    optimizer = OptimizerConfig(muon_lr="adam", peak="base", weight_decay=1.0, ns_dtype="float32")
    row = replace(tiny_run(), model=narrow, optimizer=optimizer, steps=10, telemetry_every=1, eval_every=5)
    row = replace(row, data=DataConfig("", eval_windows=4))
    settings = {
        "name": "cpu",
        "title": "tiny",
        "rows": {16: row, 32: replace(row, model=replace(narrow, width=32))},
        "headline": 16,
        "sweep": adamw_sweep(row, 10),
        "widths": (16,),
        "rates": (0.005, 0.01, 0.02),
        "horizons": (5, 10),
        "seeds": 2,
        "tflops": 1.0,
    }
    return Scale(**(settings | changes))
