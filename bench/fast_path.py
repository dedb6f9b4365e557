"""Does training by the fast path end where the plain path ends? The same runs by both, seed by seed, on a GPU.

    PYTHONPATH=src python bench/fast_path.py --data DIR

Fast is what a user gets: our kernels, and the orthogonalizer `auto`. Plain is `MUONSW_KERNELS=0` and `newton_schulz`,
torch operations alone. The kernels with `newton_schulz` stand between them and tell which of the two would be to blame.
Each path is a process of its own, because the switch is read once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.training.regret import at_horizon
from muonsw.lab.train.loop import train
from muonsw.lab.train.presets import with_data

# By name: the switch of the kernels, and the orthogonalizer.
PATHS = {"fast": ("1", "auto"), "kernels alone": ("1", "newton_schulz"), "plain": ("0", "newton_schulz")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder that `muonsw data prepare` filled")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--path", choices=PATHS, help="train by one path and print its losses; all, if not given")
    options = parser.parse_args()
    if options.path:
        print(json.dumps([final_loss(options, seed) for seed in range(options.seeds)]))
        return
    started = {path: start(path) for path in PATHS}
    losses = {path: json.loads(process.communicate()[0]) for path, process in started.items()}
    for path, found in losses.items():
        differences = over_seeds([a - b for a, b in zip(found, losses["plain"], strict=True)])
        ends = differences.interval
        print(f"{path:14} {' '.join(f'{loss:.4f}' for loss in found)}", end="")
        print(f"   minus plain {differences.value:+.4f} [{ends.low:+.4f}, {ends.high:+.4f}]" if ends else "")


def start(path: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "MUONSW_KERNELS": PATHS[path][0]}
    command = [sys.executable, *sys.argv, "--path", path]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def final_loss(options: argparse.Namespace, seed: int) -> float:
    run = at_horizon(MINI.map_run, options.steps)
    optimizer = replace(run.optimizer, weight_decay=0.1, orthogonalizer=PATHS[options.path][1])
    run = with_data(replace(run, optimizer=optimizer, seed=seed, checkpoint_every=run.steps), options.data)
    with tempfile.TemporaryDirectory() as folder:
        return float(train(run, Path(folder) / "run")["final_loss"])


if __name__ == "__main__":
    main()
