"""Train from a config file: `python -m muonsw.lab.run CONFIG.json RUN`; `studies/program.py` is what it runs."""

from __future__ import annotations

import importlib
import sys

from muonsw.lab.base.launcher import end
from muonsw.lab.errors import INTERRUPTED


def main() -> int:
    """Load the trainer and run it; an interrupt while it loads ends in one line, too."""
    try:
        return int(importlib.import_module("muonsw.lab.studies.program").main())
    except KeyboardInterrupt:
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    end(main())
