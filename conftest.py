"""Kernels are collected where Triton is installed."""

import importlib.util

KERNELS = ["src/muonsw/kernels/[a-z]*.py", "src/muonsw/lab/model/kernels.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else KERNELS
