"""Showing a run: what a record has to say, and a bar with loss, speed and the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console

from muonsw.lab.base.progress import View, showing
from muonsw.lab.train.loop import Watch
from muonsw.lab.train.records import Record
from muonsw.lab.train.state import Training
from muonsw.text import counted

NAME = "training"
ORDER = ("update", "loss", "validation", "weight RMS")
EVALUATION = ("kind", "step", "loss")  # what every record of one has; the rest are metrics
# Dense bfloat16 TFLOP/s by a part of the device's name, from the makers' data sheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "4090": 165.0}


def numbers_of(record: Record, steps: int) -> dict[str, str]:
    """What a view shows of a record, as texts by heading; `steps` are the updates of the whole run.

    Examples:
        >>> numbers_of({"kind": "train", "step": 1200, "loss": 3.25}, 5000)
        {'update': '1,200/5,000', 'loss': '3.2500'}
        >>> numbers_of({"kind": "eval", "step": 1200, "loss": 3.5}, 5000)
        {'validation': '3.5000'}
        >>> numbers_of({"kind": "telemetry", "step": 1200, "decayed": {"weight_rms": 0.125}}, 5000)
        {'weight RMS': '0.1250'}
    """
    match record["kind"]:
        case "train":
            return {"update": f"{record['step']:,}/{steps:,}", "loss": f"{record['loss']:.4f}"}
        case "eval":
            return {"validation": f"{record['loss']:.4f}"}
        case "telemetry" if (norm := (record.get("decayed") or {}).get("weight_rms")) is not None:
            return {"weight RMS": f"{norm:.4f}"}
    return {}


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """A watch that draws while its block runs."""
    with showing(console, {NAME: None}) as view:
        display = _Display(view)
        yield Watch(started=display.started, record=display.record, note=view.say)


class _Display:
    def __init__(self, view: View) -> None:
        self.view, self.steps, self.flops, self.unit = view, 0, 0.0, ""

    def started(self, training: Training) -> None:
        config = training.config
        self.steps, self.flops = config.steps, _share_of_peak(training)
        task, self.unit = training.task, training.task.unit
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        self.view.say(
            f"{parameters:,} parameters, {counted(config.steps, 'update')} of {task.per_step:,} {task.unit}, "
            f"{task.data(config.steps)}, on {training.device}"
        )
        order = (*ORDER, f"{self.unit}/s", "MFU")
        self.view.update(NAME, training.step, dict.fromkeys(order, ""), total=config.steps)

    def record(self, record: Record) -> None:
        numbers = numbers_of(record, self.steps)
        if record["kind"] == "eval":
            more = "".join(f", {name} {value:.4g}" for name, value in record.items() if name not in EVALUATION)
            self.view.log(f"update {record['step']:,} of {self.steps:,}: validation {numbers['validation']}{more}")
        if speed := record.get(f"{self.unit}_per_second"):
            numbers[f"{self.unit}/s"] = f"{speed:,.0f}"
            if self.flops:
                numbers["MFU"] = f"{100 * self.flops * speed:.1f}%"
        self.view.update(NAME, record["step"] if record["kind"] == "train" else None, numbers)


def _share_of_peak(training: Training) -> float:
    """What one token a second is of the peak of all ranks' devices; zero where that is not known."""
    if training.device.type != "cuda" or not training.task.flops:
        return 0.0
    name = torch.cuda.get_device_name(training.device)
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    ranks = training.world.size
    return 0.0 if peak is None else training.task.flops / (ranks * peak * 1e12)
