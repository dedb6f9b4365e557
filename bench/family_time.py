"""Time an update of every member of the family, one after the other on a machine that does nothing else.

    python bench/family_time.py --data out/wiki --out evidence/family-time.json

The updates are those of the study `family`, with forward and backward pass: blocks of as many as a member needs to
refresh what it refreshes now and then. `make evidence` puts the file on the page.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from muonsw.lab.bench.timing import chosen_device, environment, save, synchronize
from muonsw.lab.studies.scales import MINI, SCALES
from muonsw.lab.studies.training.family import family
from muonsw.lab.studies.workshop import BySettings
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.state import Training

BLOCK, WARMING = 20, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared tokens")
    parser.add_argument("--scale", choices=sorted(SCALES), default=MINI.name)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--blocks", type=int, default=4, help=f"blocks of {BLOCK} updates, of which the median is taken"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device, scale = chosen_device(given.device), SCALES[given.scale]
    places = BySettings(Path("out"), given.data, device.type)
    milliseconds: dict[str, float] = {}
    for one in family({}, scale):
        config = places.ready(one.config(one.arms[1], 0))
        milliseconds[one.key.name] = update_ms(config, given.blocks)
        print(f"{one.key.name}: {milliseconds[one.key.name]:.2f} ms", flush=True)
        gc.collect()  # a graph lies in cycles
    run: dict[str, Any] = {"width": config.model.width, "tokens_per_update": config.tokens_per_step}
    save({"environment": environment(device), **run, "ms": milliseconds}, given.out)


def update_ms(config: RunConfig, blocks: int) -> float:
    """The median over blocks of the mean time of an update."""
    training = Training(config)
    batches, times = training.batches(), []
    for number in (WARMING, *repeat(BLOCK, blocks)):
        synchronize(training.device)
        start = time.perf_counter()
        for update in islice(batches, number):
            training.update(update, measured=False)
        synchronize(training.device)
        times.append(1e3 * (time.perf_counter() - start) / number)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
