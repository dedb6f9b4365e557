"""Train from a config file: `python -m muonsw.lab.run CONFIG.json RUN_FOLDER`, also as ranks of torchrun.

It needs no command-line library, so it runs on machines where only torch and the lab's few packages are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from muonsw.lab.console import enduring, harmless, say, showing
from muonsw.lab.errors import FAILED, INTERRUPTED, OK, USAGE, Diverged, Interrupted, UsageError, end, report_error
from muonsw.text import counted

if TYPE_CHECKING:
    from muonsw.lab.train.config import RunConfig
    from muonsw.lab.train.loop import Watch
    from muonsw.lab.train.state import Training

NAME = "training"
# Dense bfloat16 TFLOP/s by a part of the device's name, from the makers' data sheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "4090": 165.0}


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 3 the machine, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2 or "" in given:
        usage = "usage: python -m muonsw.lab.run CONFIG.json RUN_FOLDER"
        report_error(usage)
        print(usage, file=sys.stderr)
        return USAGE
    try:
        from muonsw.lab.train.checkpoint import read_config_file  # here, since Ctrl-C may come while torch loads

        return run(read_config_file(Path(given[0])), Path(given[1]))
    except (UsageError, Interrupted) as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:  # while modules load, or a second Ctrl-C
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(config: RunConfig, folder: Path) -> int:
    """Train on all ranks that were started, with progress on the console of the first; print how it ended."""
    from muonsw.lab.train.loop import train
    from muonsw.lab.train.ranks import joined

    console = Console()
    try:
        with joined(config.parallel.timeout) as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except Diverged as error:
        _report(error)
        return FAILED
    if not world.leads:
        return OK
    best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
    ended = f"validation loss {result['final_loss']:.4f} after {counted(result['steps'], 'step')} ({best})"
    if skipped := result["skipped"]:
        ended += f", {skipped:,} of them skipped because their gradients were not finite"
    say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """Show loss, speed and the time left while the block runs."""
    import torch

    from muonsw.lab.train.loop import Watch
    from muonsw.lab.train.records import numbers_of

    steps, unit, share_of_peak = 0, "", 0.0
    with showing(console, {NAME: None}) as view:

        def started(training: Training) -> None:
            nonlocal steps, unit, share_of_peak
            task, device = training.task, training.device
            steps, unit = training.config.steps, task.unit
            if device.type == "cuda" and task.flops:
                name = torch.cuda.get_device_name(device)
                peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
                # What one token a second is of the peak of all ranks' devices.
                share_of_peak = task.flops / (training.world.size * peak * 1e12) if peak else 0.0
            parameters = sum(parameter.numel() for parameter in training.model.parameters())
            size = f"{counted(steps, 'step')} of {task.per_step:,} {unit}, {task.data(steps)}"
            view.say(f"{parameters:,} parameters, {size}, on {device}")
            order = ("step", "loss", "validation", "weight RMS", f"{unit}/s", "MFU")
            view.update(NAME, training.step, dict.fromkeys(order, ""), total=steps)

        def record(record: dict[str, Any]) -> None:
            numbers = numbers_of(record, steps)
            if record["kind"] == "eval":
                metrics = [name for name in record if name not in ("kind", "step", "loss")]
                more = "".join(f", {name} {record[name]:.4g}" for name in metrics)
                view.log(f"step {record['step']:,} of {steps:,}: validation {numbers['validation']}{more}")
            if speed := record.get(f"{unit}_per_second"):
                numbers[f"{unit}/s"] = f"{speed:,.0f}"
                if share_of_peak:
                    numbers["MFU"] = f"{100 * share_of_peak * speed:.1f}%"
            view.update(NAME, record["step"] if record["kind"] == "train" else None, numbers)

        yield Watch(started=started, record=record, note=view.say)


def _report(error: Exception) -> None:
    """Print how it ended; rank 0 alone reports what all ranks know."""
    from muonsw.lab.train.ranks import known_to_all, speaker

    other = speaker()
    report_error(f"muonsw: {harmless(error)}")
    if other is None or not known_to_all(error):
        print(f"muonsw: {other or ''}{harmless(error)}", file=sys.stderr)


if __name__ == "__main__":
    end(main())
