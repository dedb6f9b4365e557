"""This machine's hardware, and the dtypes that suit it. No other module queries it, so tests can patch the answers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from muonsw.precision import AUTO, DTYPES


@cache
def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32: with AVX512-BF16 or AMX that oneDNN may use.

    Without them bfloat16 products are emulated, about 25 times slower than float32.
    """
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    if allowed not in ("ALL", "DEFAULT") and "BF16" not in allowed and "AMX" not in allowed and "FP16" not in allowed:
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def gpus() -> int:
    return torch.cuda.device_count()


def gpu_fast_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 without emulation."""
    with torch.cuda.device(device):  # torch answers for the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def gpu_capability(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, 90 for 9.0; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def product_dtype(setting: str, param_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the orthogonalizer's products: the fastest that needs no emulation on this hardware."""
    if setting != AUTO:
        return DTYPES[setting]
    if param_dtype == torch.float64:
        return torch.float64
    if device.type == "cpu":
        return torch.bfloat16 if fast_bfloat16() else torch.float32
    return torch.float32 if device.type == "mps" else _fastest(device)


@cache
def _fastest(device: torch.device) -> torch.dtype:
    if device.type != "cuda" or gpu_fast_bfloat16(device):
        return torch.bfloat16
    # V100 and T4 multiply float16 on tensor cores and emulate bfloat16; older GPUs have no tensor cores. The
    # orthogonalizers normalize first, so float16 does not overflow and is at least as precise as bfloat16.
    return torch.float16 if gpu_capability(device) >= 70 else torch.float32


def product_settings() -> tuple[Any, ...]:
    """The settings of torch that select matmul kernels on GPUs; a graph freezes them."""
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return matmul.fp32_precision, *reduced, matmul.allow_fp16_accumulation, torch.are_deterministic_algorithms_enabled()


_MATMUL_BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 in float32, whatever `torch.set_float32_matmul_precision` says.

    After a gradient spike the small eigenvalues of a factor are below the rounding error of TF32.
    """
    before = [backend.fp32_precision for backend in _MATMUL_BACKENDS]
    try:
        for backend in _MATMUL_BACKENDS:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(_MATMUL_BACKENDS, before, strict=True):
            backend.fp32_precision = precision


def has_ranks() -> bool:
    """Whether a process group exists; some builds of torch have no distributed package."""
    return dist.is_available() and dist.is_initialized()
