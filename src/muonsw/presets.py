"""The options of each method's authors, by name, for `for_model`.

A preset sets how directions are computed. The caller sets learning rate, weight decay and decay rule, and may override
any option. Sources are in `docs/guide/family.md`.
"""

from __future__ import annotations

from typing import Any

from muonsw.registry import Registry

_JORDAN: dict[str, Any] = {
    "algorithm": "muon",
    "momentum": 0.95,
    "nesterov": True,
    "momentum_form": "ema",
    "orthogonalizer": "newton_schulz",
    "scale": "original",
}
_SIMPLE = {"orthogonalizer": "simple_quintic"}

PRESETS: Registry[dict[str, Any]] = Registry("preset")
PRESETS.register("muon", _JORDAN)
PRESETS.register("normuon", {**_JORDAN, "normalize": "normuon"})
PRESETS.register("adamuon", {**_JORDAN, "precondition": "sign", "normalize": "adamuon", "scale": "match_rms_adamw"})
PRESETS.register("muon2", {**_JORDAN, **_SIMPLE, "precondition": "muon2"})
PRESETS.register("soap_muon", {**_JORDAN, **_SIMPLE, "precondition": "soap"})
PRESETS.register(
    "nanochat",
    {
        **_JORDAN,
        "orthogonalizer": "polar_express_nanochat",
        "precondition": "equalize",
        "normalize": "normuon",
        "normalize_axis": "longer",
        "normalize_beta2": 0.9,
        "normalize_snap": True,
        "cautious": True,
    },
)
PRESETS.register("aurora", {**_JORDAN, "orthogonalizer": "aurora"})
# The defaults of these algorithms are their authors' options.
for _name in ("soap", "shampoo", "kl_shampoo", "asgo", "lion"):
    PRESETS.register(_name, {"algorithm": _name})
PRESETS.register("dion2", {"algorithm": "dion2", "scale": "spectral"})
