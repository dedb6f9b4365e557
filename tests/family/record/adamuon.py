"""Steps of the authors' AdaMuon in float64: `python -m tests.family.record.adamuon CLONES` writes them.

Its buffers are on a GPU, and are made on the CPU here. Its gathering over ranks, of which there is one, is a copy.
"""

import sys
from types import SimpleNamespace

from tests.family.record.authors import Clone
from tests.family.record.common import record

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def gather(out, mine, async_op):
    del async_op
    out.copy_(mine.view_as(out))
    return SimpleNamespace(wait=lambda: None)


def main(clones):
    file = Clone(clones, "Chongjie-Si/AdaMuon", "369f0b3", "gpt2/models/optimizers/adamuon.py")
    file.text = file.text.replace('device="cuda"', 'device="cpu"')
    dist = SimpleNamespace(all_gather_into_tensor=gather)
    adamuon = file.load("AdaMuon", "zeropower_via_newtonschulz5", dist=dist)[0]
    record("adamuon", file.source, lambda params, **options: adamuon(params, rank=0, world_size=1, **options), OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1])
