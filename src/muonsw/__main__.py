"""`python -m muonsw` runs the command `muonsw`, which is part of the lab."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("muonsw.lab.cli", run_name="__main__")
