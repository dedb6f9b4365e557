"""Times a report over many runs: `python bench/report_load.py [--runs 200] [--records 10000]`.

Prints seconds for reading every metrics file, for the page and for the pictures beside it, and the size of the page;
seconds of processor time tell a slow machine from a busy one. The folders are synthetic, in a temporary folder, and as
long as real ones: of a hundred records 88 are of training, ten of telemetry over eight scopes, two of evaluation.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

from muonsw.lab.report.report import write_report
from muonsw.lab.runs import load_runs

SCOPE = {"weight_rms": 0.123456789, "update_rms": 0.00123456789, "relative_update": 0.0123456789, "decay": 1.23456e-4}
SCOPE |= {"applied_rms": 0.00123456789, "lr": 0.00123456789, "peak_lr": 0.0123456789, "alignment_update": -0.0212345678}
SCOPE |= {"alignment_update_mean": -0.0198765432, "alignment_gradient": 0.00123456789, "numel": 1234567}


def records(count: int, seed: int):
    for step in range(1, count + 1):
        loss = 3.3 + 7.0 * (1.0 + step / 20) ** -0.6 + 0.05 * math.sin(17.3 * step + seed)
        if step % 10 == 0:
            scope = {**SCOPE, "weight_rms": 0.2 + 0.001 * math.sin(0.01 * step + seed)}
            layers = {str(layer): scope for layer in range(4)}
            yield {"kind": "telemetry", "step": step, "all": scope, "decayed": scope, "layers": layers}
        elif step % 50 == 1:
            yield {"kind": "eval", "step": step, "loss": loss}
        else:
            part = {"kind": "train", "step": step, "loss": loss, "cross_entropy": loss - 0.026, "balance": 0.2501234567}
            rest = {"z": 0.0123456789, "grad_norm": 0.412345678, "lr": 0.01 * math.exp(-step / count)}
            yield {**part, **rest, "tokens": 16384 * step, "tokens_per_second": 412345.678901}


def write_runs(folder: Path, runs: int, count: int) -> list[Path]:
    paths = []
    for number in range(runs):
        path = folder / f"run-{number:04}"
        path.mkdir()
        rule = "scaled" if number % 2 else "constant"
        config = {
            "optimizer": {"decay": rule, "weight_decay": 0.1 * (1 + number // 2 % 4)},
            "seed": number,
            "steps": count,
        }
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (path / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records(count, number)), encoding="utf-8"
        )
        (path / "result.json").write_text(
            json.dumps({"steps": count, "final_loss": 3.3, "best_loss": 3.3, "best_step": count}), encoding="utf-8"
        )
        paths.append(path)
    return paths


def timed(what: str, work):
    """Do the work and print how long it took."""
    computed, start = time.process_time(), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    print(f"{what}: {seconds:.2f} s, {time.process_time() - computed:.2f} s of processor time")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--records", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_runs(folder, options.runs, options.records)
        size = sum((path / "metrics.jsonl").stat().st_size for path in paths)
        print(f"{options.runs} runs of {options.records} records, {size / 1e6:.0f} MB of metrics")
        runs = timed("load", lambda: load_runs(paths))
        page = timed("page", lambda: write_report(folder / "report.html", "bench", runs, images=False)[0])
        timed("page with pictures", lambda: write_report(folder / "report.html", "bench", runs))
        print(f"the page has {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
