"""The theory experiments at a size that fits a test: the same claims, fewer steps, chains and cells."""

from dataclasses import replace

from muonsw.lab.theory.chains import CONSTANT, SCALED, Rules
from muonsw.lab.theory.fixed_rate import FIXED_RATE
from muonsw.lab.theory.matrix import MATRIX, MATRIX_FIGURE
from muonsw.lab.theory.muon_deterministic import DETERMINISTIC
from muonsw.lab.theory.muon_noise import MUON
from muonsw.lab.theory.noise_equilibrium import EQUILIBRIUM
from muonsw.lab.theory.nonconvex import NONCONVEX
from muonsw.lab.theory.scalar import SCALAR, SCALAR_FIGURE
from muonsw.lab.theory.strongly_convex import STRONGLY_CONVEX

SWAPPED = Rules(constant=SCALED, scaled=CONSTANT)


def smaller(experiment, **settings):
    return replace(experiment, settings=replace(experiment.settings, **settings))


SMALL = {
    experiment.name: experiment
    for experiment in (
        smaller(SCALAR, steps=2000, chains=5, freeze_steps=500),
        smaller(SCALAR_FIGURE, steps=2000, chains=5, points=40),
        smaller(MATRIX, rows=6, columns=12, steps=200, chains=2, betas=(0.0, 0.9)),
        smaller(MATRIX_FIGURE, rows=6, columns=12, steps=300, chains=3, bins=30),
        smaller(NONCONVEX, steps=2000, chains=200),
        smaller(STRONGLY_CONVEX, steps=2000, chains=400),
        smaller(MUON, steps=500, chains=4, betas=(0.0, 0.9), batches=(1, 16), ranks=(4,)),
        smaller(DETERMINISTIC, rows=4, columns=8, steps=300, chains=2, betas=(0.0, 0.9)),
        smaller(FIXED_RATE, rows=4, columns=8, steps=300, chains=2, fixed_steps=50),
        smaller(EQUILIBRIUM, steps=900, burn=300, chains=8, lags=120, rows=12, columns=24),
    )
}
