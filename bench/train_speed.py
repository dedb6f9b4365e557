"""Tokens a second of the trainer's own updates on a GPU: micro-batches, clipping, Muon-SW and schedule included.

    PYTHONPATH=src python bench/train_speed.py --presets w256 w1024

Before timing, the compiled losses are checked against the uncompiled ones. The time is a median over blocks of
updates, each ended by one synchronisation; inside a block any wait for the device is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import ByteTokenizer
from muonsw.lab.model import count
from muonsw.lab.train.graph import WARM_CALLS
from muonsw.lab.train.presets import preset_run
from muonsw.lab.train.records import Journal
from muonsw.lab.train.state import Training, with_fingerprint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["w256", "w1024"])
    parser.add_argument("--batch", type=int, default=256, help="sequences in an update (the paper's: 256)")
    parser.add_argument("--micro", type=int, default=32, help="sequences in a micro-batch")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--graphs", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="also write where the time of an update goes, kernel by kernel")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    rows = [measure(name, options) for name in options.presets]
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.batch} sequences an update")
    print(f"{'preset':8} {'ktok/s':>8} {'ms/update':>10} {'optimizer ms':>13} {'TFLOP/s':>8} {'GiB':>6}")
    for row in rows:
        print(
            f"{row['preset']:8} {row['ktok_s']:8.1f} {row['ms']:10.1f} {row['optimizer_ms']:13.1f} "
            f"{row['tflops']:8.1f} {row['gib']:6.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(name: str, options: argparse.Namespace) -> dict[str, float | str]:
    torch._dynamo.reset()
    training = prepared(name, options)
    config, vocab = training.config, training.config.model.vocab
    shape = (options.micro, config.model.sequence + 1)
    rows = [torch.randint(vocab, shape, device="cuda") for _ in range(config.accumulation)]
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
    check(training, batches[0])
    journal = Journal(training, [])

    def update() -> None:
        lr = training.base_lr()
        losses, norm = training.update(batches, measured=False)
        journal.note_update(lr, losses, norm)

    for _ in range(2 if training.replayed_update is None else WARM_CALLS + 2):
        update()
    journal.catch_up()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.blocks):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(options.updates):
            update()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / options.updates)
        journal.catch_up()
    seconds = statistics.median(times)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        (options.profile / f"{name}.txt").write_text(kernel_table(update))
    rate = config.tokens_per_step / seconds
    return {
        "preset": name,
        "batch": options.batch,
        "micro": options.micro,
        "ktok_s": rate / 1e3,
        "ms": 1e3 * seconds,
        "optimizer_ms": optimizer_time(training, batches),
        "tflops": count(config.model).flops_per_token * rate / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def kernel_table(update: Callable[[], None]) -> str:
    """Every kernel of one update: milliseconds, share, launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        update()
        torch.cuda.synchronize()
    found = {event.key: event for event in profiler.key_averages()}
    times = {key: event.self_device_time_total / 1e3 for key, event in found.items() if event.self_device_time_total}
    whole = sum(times.values())
    lines = [f"{whole:9.2f} ms on the device"]
    for key, ms in sorted(times.items(), key=lambda item: -item[1]):
        lines.append(f"{ms:9.3f} {ms / whole:6.1%} {found[key].count:6d}  {key}")
    return "\n".join(lines) + "\n"


def prepared(name: str, options: argparse.Namespace) -> Training:
    """A run of the preset; the tokens on disk are not read, only the vocabulary of the model matters."""
    folder = Path(tempfile.mkdtemp())
    prepare(islice(MarkovSource(seed=0, mean_length=20_000), 80), ByteTokenizer(), folder, validation_fraction=0.2)
    config = preset_run(name, str(folder))
    sizes = {"batch": options.batch, "accumulation": options.batch // options.micro}
    return Training(
        with_fingerprint(
            replace(config, data=replace(config.data, eval_windows=1), device="cuda", graphs=options.graphs, **sizes)
        )
    )


def check(training: Training, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compile, and compare with what was compiled."""
    with torch.no_grad(), training.autocast():
        plain = training.model(*batch)
    start = time.perf_counter()
    with training.autocast():
        compiled = training.forward(*batch)
    compiled.total.backward()
    training.optimizer.zero_grad(set_to_none=True)
    torch.testing.assert_close(compiled.cross_entropy, plain.cross_entropy, rtol=2e-3, atol=0)
    print(f"compiled in {time.perf_counter() - start:.0f} s; loss {float(plain.total):.3f}", flush=True)


def optimizer_time(training: Training, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    training.forward_backward(batches[:1])
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
