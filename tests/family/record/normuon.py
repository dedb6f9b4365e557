"""Record what the authors' NorMuon does, for tests/family/test_recorded.py.

    git clone https://github.com/zichongli5/NorMuon && git -C NorMuon checkout d45c9a4
    python -m tests.family.record.normuon NorMuon

The authors multiply in bfloat16. Here `Tensor.bfloat16` returns its tensor, so that their code, unchanged, runs in the
float64 of the parameters, and the rules can be compared to rounding.
"""

import sys

from tests.family.record.common import record

SOURCE = {"repository": "zichongli5/NorMuon", "commit": "d45c9a4", "file": "normuon.py"}


def build(authors, params, options):
    return authors.SingleDeviceNorMuon(params, **options)


if __name__ == "__main__":
    record("normuon", SOURCE, sys.argv[1], build, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95})
