"""Does the fast path train as the plain one does? The same runs with kernels and without, and the seeds' own spread.

    PYTHONPATH=src python bench/fast_path.py --data DIR --seeds 4 --steps 400

`fast` has our kernels in model and optimizer, and `orthogonalizer="auto"`; `plain` has neither: torch's operations and
the plain iteration in bfloat16. Each path is a process of its own that trains its seeds one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from muonsw.kernels import SWITCH
from muonsw.lab.train.loop import train
from muonsw.lab.train.presets import run_on, with_steps

ORTHOGONALIZERS = {"fast": "auto", "plain": "newton_schulz"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared tokens")
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", choices=ORTHOGONALIZERS, help="train one path here, and print its losses as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps([loss(options, seed) for seed in range(options.seeds)]))
        return
    paths = {name: started(name) for name in ORTHOGONALIZERS}
    losses = {name: json.loads(process.communicate()[0].splitlines()[-1]) for name, process in paths.items()}
    for name, found in losses.items():
        print(f"{name:6} {'  '.join(f'{value:.4f}' for value in found)}   mean {statistics.mean(found):.4f}")
    print(comparison(losses["fast"], losses["plain"]))


def started(name: str) -> subprocess.Popen[str]:
    environment = os.environ | ({} if name == "fast" else {SWITCH: "0"})
    command = [sys.executable, *sys.argv, "--only", name]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def loss(options: argparse.Namespace, seed: int) -> float:
    """The final validation loss of one run."""
    run = with_steps(run_on(options.preset, options.data, seed=seed), options.steps)
    optimizer = replace(run.optimizer, orthogonalizer=ORTHOGONALIZERS[options.only])
    run = replace(run, optimizer=optimizer, eval_every=options.steps, checkpoint_every=options.steps)
    with tempfile.TemporaryDirectory() as folder:
        return float(train(run, Path(folder) / "run")["final_loss"])


def comparison(fast: list[float], plain: list[float]) -> str:
    """The difference of the means beside its standard error, from the spread of the seeds within each path."""
    if len(fast) < 2:
        return "one seed says nothing about noise"
    variance = (statistics.variance(fast) + statistics.variance(plain)) / len(fast)
    gap = statistics.mean(fast) - statistics.mean(plain)
    return f"fast minus plain: {gap:+.4f}, standard error {variance**0.5:.4f}"


if __name__ == "__main__":
    main()
