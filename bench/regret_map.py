"""Train the runs of the regret map one after another in this process, and write one record for each.

    PYTHONPATH=src python bench/regret_map.py --data DIR --horizons 400 1600 --out records.jsonl

`muonsw reproduce regret` trains the same runs; this needs none of the packages that draw, prints as it goes, and stops
before a given time so that a lent GPU is used to the end. A record that is in the file already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from muonsw.lab.data.shards import read_record
from muonsw.lab.data.tokenizers import padded_vocab
from muonsw.lab.errors import Diverged
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.studies.training.regret import maps
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.loop import Watch, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scale", default="mini", choices=list(SCALES))
    parser.add_argument("--horizons", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seconds", type=float, default=540.0, help="start no run after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    scale = SCALES[options.scale]
    horizons = tuple(options.horizons or scale.map_horizons)
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(r["rule"], r["lambda"], r["steps"], r["seed"]) for r in known}
    start = time.perf_counter()
    for seed in options.seeds:
        for one in maps(replace(scale, map_horizons=horizons)):
            for arm in one.arms:
                config = ready(one.config(arm, seed), options.data)
                chosen = config.optimizer
                key = (chosen.decay, chosen.weight_decay, config.steps, seed)
                if key in done or time.perf_counter() - start > options.seconds:
                    continue
                record = outcome(config)
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{time.perf_counter() - start:6.0f} s  {record}", flush=True)


def ready(config: RunConfig, data: Path) -> RunConfig:
    vocab = padded_vocab(read_record(data).vocab_size)
    return replace(config, model=replace(config.model, vocab=vocab), data=replace(config.data, path=str(data)))


def outcome(config: RunConfig) -> dict[str, float | int | str | None]:
    norms: list[float] = []

    def look(record: dict[str, object]) -> None:
        if record["kind"] == "telemetry":
            norms.append(record["decayed"]["weight_rms"])  # type: ignore[index]

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            loss = train(config, Path(folder) / "run", Watch(record=look))["final_loss"]
        except Diverged:
            loss = None
    tokens = config.steps * config.tokens_per_step
    return {
        "rule": config.optimizer.decay,
        "lambda": config.optimizer.weight_decay,
        "steps": config.steps,
        "seed": config.seed,
        "lr": config.optimizer.lr,
        "final_loss": loss,
        "end_norm": norms[-1] if norms else None,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - began, 2),
    }


if __name__ == "__main__":
    main()
