"""Kernels are collected where Triton is installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/muonsw/kernels/[a-z]*.py"]
