"""Train from a config file: `python -m muonsw.lab.run CONFIG.json RUN`, the same as `python -m muonsw.lab.train`."""

from __future__ import annotations

import sys

from muonsw.lab.train.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
