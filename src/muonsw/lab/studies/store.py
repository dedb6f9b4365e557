"""Results as plain JSON beside the figures: claims with verdicts, series, and where they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muonsw.lab.claims.claim import failed_first
from muonsw.lab.processes import environment
from muonsw.lab.storage import plain, write_atomically
from muonsw.lab.studies.experiment import Study
from muonsw.lab.studies.runner import Finished


def report_data(study: Study, results: Mapping[str, Finished], *, seed: int, seconds: float) -> dict[str, Any]:
    """Everything about a reproduced study except its curves."""
    claims = [claim for result in results.values() for claim in result.outcome.claims]
    return {
        "study": study.name,
        "title": study.title,
        "seed": seed,
        "claims_total": len(claims),
        "claims_failed": sum(not claim.holds for claim in claims),
        "experiments": [
            {
                "name": experiment.name,
                "title": experiment.title,
                "hypotheses": plain(experiment.hypotheses),
                "settings": plain(asdict(experiment.settings)),
                "claims": [claim.as_data() for claim in failed_first(results[experiment.name].outcome.claims)],
            }
            for experiment in study.experiments
        ],
        "seconds": {name: round(result.seconds, 2) for name, result in results.items()} | {"total": round(seconds, 2)},
        "environment": environment(),
    }


def write_results(
    study: Study, results: Mapping[str, Finished], folder: Path, *, seed: int, seconds: float
) -> list[Path]:
    """Write `claims.json` and, where there are curves, `series.json`; return their paths."""
    data = report_data(study, results, seed=seed, seconds=seconds)
    paths = [write_atomically(folder / "claims.json", json.dumps(data, indent=2, allow_nan=False) + "\n")]
    series = [asdict(curves) for result in results.values() for curves in result.outcome.series]
    if series:
        text = json.dumps(plain(shorten(series)), allow_nan=False, separators=(",", ":"))
        paths.append(write_atomically(folder / "series.json", text + "\n"))
    return paths


def shorten(value: Any) -> Any:
    """Floats at seven significant digits, which no picture can tell from more."""
    if isinstance(value, Mapping):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
