"""Shared by the benchmarks: clocks, turns, memory, and the machine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from muonsw import machine

Result = TypeVar("Result")
WARMING_ROUNDS = 2


def chosen_device(name: str) -> torch.device:
    if name == "cuda" and not machine.gpus():
        raise SystemExit("torch finds no CUDA device: use --device cpu")
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Time one call on the wall clock."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def in_turn(
    ways: Mapping[str, Callable[[], Result]], rounds: int, warming: int = WARMING_ROUNDS
) -> dict[str, list[Result]]:
    """Collect the results of each function, round by round after some warm-up rounds.

    A round calls each once, and every round starts with a different one, so other load affects all equally.
    """
    results: dict[str, list[Result]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(warming + rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            result = ways[name]()
            if number >= warming:
                results[name].append(result)
    return results


def save(record: Any, path: Path | None) -> None:
    """Write a record as JSON if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def environment(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Describe the machine, threads, versions and the date."""
    versions = {}
    for package in ("torch", "triton", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def peak_extra_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a call above the memory before it; None if it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return int(torch.cuda.max_memory_allocated(device) - before)
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except (OSError, AttributeError):
        return None
    before = _resident_bytes("VmRSS")
    work()
    return max(0, _resident_bytes("VmHWM") - before)


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)
