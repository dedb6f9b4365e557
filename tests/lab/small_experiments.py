"""The theory experiments at a size that fits a test: the same claims, fewer steps, chains and cells."""

from dataclasses import replace
from functools import cache

from muonsw.lab.studies.catalogue import THEORY

SIZES = {
    "scalar": {"steps": 2000, "chains": 5, "freeze_steps": 500},
    "scalar-figure": {"steps": 2000, "chains": 5, "points": 40},
    "matrix": {"rows": 6, "columns": 12, "steps": 200, "chains": 2, "betas": (0.0, 0.9)},
    "matrix-figure": {"rows": 6, "columns": 12, "steps": 300, "chains": 3, "points": 40},
    "sgd-nonconvex": {"steps": 2000, "chains": 200},
    "sgd-strongly-convex": {"steps": 2000, "chains": 400},
    "muon-noise": {"steps": 500, "chains": 4, "betas": (0.0, 0.9), "batches": (1, 16), "ranks": (4,)},
    "muon-deterministic": {"rows": 4, "columns": 8, "steps": 300, "chains": 2, "betas": (0.0, 0.9)},
    "fixed-rate": {"rows": 4, "columns": 8, "steps": 300, "chains": 2, "fixed_steps": 50},
}

SMALL = {experiment.name: replace(experiment, **SIZES[experiment.name]) for experiment in THEORY.experiments}


@cache
def outcome(name):
    """What an experiment finds with seed 0, run once for all tests of a process."""
    return SMALL[name].run(0)
