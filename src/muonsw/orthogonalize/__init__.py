"""Orthogonalizers: functions that replace the singular values of matrices by (nearly) one."""

from muonsw.orthogonalize.coefficients import NS5 as NS5
from muonsw.orthogonalize.coefficients import POLAR_EXPRESS as POLAR_EXPRESS
from muonsw.orthogonalize.coefficients import Coefficients as Coefficients
from muonsw.orthogonalize.coefficients import Schedule as Schedule
from muonsw.orthogonalize.coefficients import newton_schulz_schedule as newton_schulz_schedule
from muonsw.orthogonalize.coefficients import polar_express_schedule as polar_express_schedule
from muonsw.orthogonalize.exact import exact as exact
from muonsw.orthogonalize.gram import gram_newton_schulz as gram_newton_schulz
from muonsw.orthogonalize.newton_schulz import newton_schulz as newton_schulz
from muonsw.orthogonalize.normalize import normalize as normalize
from muonsw.orthogonalize.polar_express import polar_express as polar_express
from muonsw.orthogonalize.polynomial import singular_value_map as singular_value_map
from muonsw.orthogonalize.registry import ORTHOGONALIZERS as ORTHOGONALIZERS
from muonsw.orthogonalize.registry import Orthogonalizer as Orthogonalizer

__all__ = [
    "NS5",
    "ORTHOGONALIZERS",
    "POLAR_EXPRESS",
    "Coefficients",
    "Orthogonalizer",
    "Schedule",
    "exact",
    "gram_newton_schulz",
    "newton_schulz",
    "newton_schulz_schedule",
    "normalize",
    "polar_express",
    "polar_express_schedule",
    "singular_value_map",
]
