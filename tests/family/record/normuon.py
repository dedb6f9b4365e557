"""Steps of the authors' NorMuon in float64: `python -m tests.family.record.normuon CLONES` writes them."""

import sys

from tests.family.record.authors import Clone
from tests.family.record.common import record

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95}


def main(clones):
    file = Clone(clones, "zichongli5/NorMuon", "d45c9a4", "normuon.py")
    names = ("SingleDeviceNorMuon", "normuon_update", "zeropower_via_newtonschulz5")
    record("normuon", file.source, file.load(*names)[0], OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1])
