"""Members of slots and MuonBP take the steps of their references in float64.

Other algorithms are compared with what their authors' code did (`test_recorded.py`).
"""

import pytest
import torch

from muonsw import MuonSW
from muonsw.reference import Decay, ReferenceMuonSW
from tests.common.problems import cosine, follow, matrices
from tests.family.members import MEMBERS
from tests.family.references import in_blocks

PEAK, STEPS = 0.05, 25
# For SOAP nearly square: rounding chooses the eigenvectors in the null space of a factor.
SHAPES = [(6, 6), (4, 10), (10, 4), (6, 6), (1, 5), (5, 1), (1, 1)]
NEARLY_SQUARE = [(6, 6), (4, 5), (5, 4), (6, 6), (1, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "close"),
    [
        (torch.float64, "auto", 1e-9),
        (torch.float32, "auto", 2e-4),
        (torch.float64, "float32", 1e-3),
        (torch.float32, "float64", 2e-4),
    ],
)
def test_members_follow_their_references(name, dtype, state_dtype, close):
    if "soap" in name and (dtype, state_dtype) != (torch.float64, "auto"):
        pytest.skip("rounding decides which of two near eigenvalues comes first")
    params = matrices(*(NEARLY_SQUARE if "soap" in name else SHAPES), dtype=dtype)
    options, reference = MEMBERS[name]
    references = [reference(param.detach(), Decay("scaled", 0.3, PEAK)) for param in params]
    precise = {"orthogonalizer": "newton_schulz", "ns_dtype": dtype, "state_dtype": state_dtype}
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.3, **precise, **options)
    assert follow(optimizer, params, references, STEPS, cosine(PEAK, STEPS)) < close


SCALES = {"match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5, "spectral": lambda m, n: (m / n) ** 0.5}


@pytest.mark.parametrize("period", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("blocks", "sizes", "axis"),
    [
        ({"heads": 2}, (4, 4), 0),
        ({"heads": 3, "split_dim": 1}, (2, 2, 2), 1),
        ({"split_sizes": (5, 3)}, (5, 3), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", SCALES)
def test_muonbp_follows_its_reference(period, blocks, sizes, axis, scale):
    """Heavy ball without Nesterov, as in the paper."""
    params = matrices((8, 6), (8, 6), dtype=torch.float64)
    references = [
        ReferenceMuonSW(
            param.detach(), Decay("scaled", 0.3, PEAK),
            orthogonalize=in_blocks(sizes, period, axis, SCALES[scale]), stretch=lambda *_: 1.0,
        )
        for param in params
    ]  # fmt: skip
    paper = {"momentum_form": "heavy_ball", "nesterov": False, "weight_decay": 0.3, "ns_dtype": "float64"}
    optimizer = MuonSW(params, lr=PEAK, block_period=period, scale=scale, **paper, **blocks)
    assert follow(optimizer, params, references, 30, cosine(PEAK, 30)) < 1e-9
