"""Kernels are collected where Triton is installed; without a GPU they run in its interpreter."""

import importlib.util
import os

import torch

KERNELS = ["src/muonsw/kernels/[a-z]*.py", "src/muonsw/lab/model/kernels.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else KERNELS

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
