"""What the authors' functions make of two matrices: `python -m tests.family.record.coefficients CLONES` writes it."""

import sys
from itertools import repeat

from tests.family.record.authors import Clone, gaussian, save

NORMUON, DION = ("zichongli5/NorMuon", "d45c9a4"), ("microsoft/dion", "0a059a4")
ASGO, AURORA = ("infinity-stars/ASGO", "d3ef14b"), ("tilde-research/aurora-release", "3d79a5c")
# (name here, repository and commit, file, function, further arguments)
FUNCTIONS = [
    ("newton_schulz", NORMUON, "normuon.py", "zeropower_via_newtonschulz5", ()),
    ("newton_schulz_you", DION, "dion/newton_schulz_triton.py", "zeropower_via_newtonschulz5", ()),
    ("polar_express_5", DION, "dion/polar_express.py", "polar_express", ()),
    ("polar_express", ASGO, "optimizers/utils/matrix_decom.py", "zeropower_via_PolarExpress", (5,)),
    ("simple_quintic", AURORA, "src/polar.py", "polar", ()),
]
# Large enough that an epsilon of 1e-6 beside the norm does not show in float64.
INPUTS = [gaussian(4, 6, seed=0) * 2.0**30, gaussian(6, 4, seed=1) * 2.0**30]


def results(clone, function, arguments, wide):
    constants = ["_POLAR_EXPRESS_COEFFS"] if "_POLAR_EXPRESS_COEFFS" in clone.text else []
    run = clone.load(function, *constants, wide=wide, repeat=repeat)[0]
    return [run(matrix if wide else matrix.float(), *arguments).double() for matrix in INPUTS]


def main(clones):
    record = {"inputs": INPUTS, "sets": {}}
    for name, repository, path, function, arguments in FUNCTIONS:
        clone = Clone(clones, *repository, path)
        source = {**clone.source, "function": function}
        wide, narrow = (results(clone, function, arguments, wide) for wide in (True, False))
        record["sets"][name] = {"source": source, "float64": wide, "own_dtype": narrow}
    save("coefficients", record)


if __name__ == "__main__":
    main(sys.argv[1])
