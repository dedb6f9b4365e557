"""Steps of the Muon^2 of modded-nanogpt's track 3 in float64; its authors' code is not public.

`python -m tests.family.record.muon2 CLONES` writes them.
"""

import sys

import torch.distributed as dist

from tests.family.record.authors import Clone
from tests.family.record.common import record, single_process

FILE = "records/track_3_optimization/results/20260501_muonsq/train_gpt_simple_muonsq.py"
OPTIONS = {"lr": 0.1, "weight_decay": 0.0125}


def main(clones):
    single_process()
    file = Clone(clones, "KellerJordan/modded-nanogpt", "f411b3d", FILE)
    names = ("MuonSq", "muon_sq_update", "zeropower_via_newtonschulz5")
    record("muon2", file.source, file.load(*names, dist=dist)[0], OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1])
