"""Shared by the callbacks of all frameworks: telemetry in their logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from muonsw.checkpoint import unwrap_optimizer
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.telemetry import Record, Telemetry

# Returns sentences about a record, which are logged as warnings.
Findings = Callable[[Record], Iterable[str]]

# The values logged for each role.
HEADLINES = ("weight_rms", "relative_update", "decay", "alignment_update", "defect")


class TelemetryLog:
    """The base of all callbacks: it measures the current run and returns values to log."""

    def __init__(self, logger: logging.Logger, every: int, findings: Findings | None, options: dict[str, Any]) -> None:
        self.every, self.findings = every, findings
        self.telemetry: Telemetry | None = None
        self._logger, self._options = logger, options
        self._logged: Record | None = None
        self._findings_count = 0

    def _attach(self, optimizer: Any, model: torch.nn.Module, start_step: int, *, is_main: bool) -> None:
        """Attach telemetry to a new or resumed run, and log the routing."""
        self._detach()  # the last run may have failed
        optimizer = unwrap_optimizer(optimizer)
        self.telemetry = Telemetry(optimizer, self.every, model=model, **{"start_step": start_step, **self._options})
        if is_main and isinstance(optimizer, ScaledDecayOptimizer):
            self._logger.info("routing of the parameters:\n%s", optimizer.routing())

    def _sampled(self, *, is_main: bool) -> dict[str, float]:
        """Return the values of the last sample, once."""
        record = self.telemetry.last if self.telemetry else None
        if record is None or record is self._logged:
            return {}
        self._logged = record
        if not is_main:
            return {}
        for finding in self.findings(record) if self.findings else ():
            self._logger.warning(finding)
            self._findings_count += 1
        values = {
            f"telemetry/{role}/{key}": measured[key]
            for role, measured in record["roles"].items()
            for key in HEADLINES
            if measured.get(key) is not None
        }
        return {**values, "telemetry/skipped": record["skipped"], "telemetry/findings": self._findings_count}

    def _detach(self) -> None:
        if self.telemetry is not None:
            self.telemetry.detach()
