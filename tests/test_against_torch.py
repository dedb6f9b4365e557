"""With constant decay every optimizer equals torch's to rounding."""

import copy
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw import SGDSW, AdamWSW, MuonSW
from tests.common.problems import clones, cosine, matrices, run

SHAPES = [(8, 8), (4, 12), (12, 4), (8, 8), (1, 6)]
SCHEDULE = cosine(0.05, 60)


@pytest.fixture
def pair():
    params = matrices(*SHAPES)
    return params, clones(params)


def assert_near(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


class WithoutBfloat16(TorchDispatchMode):
    """Casts to bfloat16 become casts to float32, however they are written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.bfloat16:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "torch_scale"),
    [("match_rms_adamw", "match_rms_adamw"), ("original", "original"), ("spectral", "spectral_unclamped")],
)
def test_muon_equals_torchs(pair, nesterov, scale, torch_scale):
    """Without torch's bfloat16 the two agree to float32 rounding, close enough to reveal a missing decay."""
    if torch_scale == "spectral_unclamped" and torch.__version__ < (2, 14):
        pytest.skip("torch has it since 2.14")
    ours, theirs = pair
    optimizer = MuonSW(ours, lr=0.05, decay="constant", nesterov=nesterov, scale=scale, ns_dtype="float32")
    run(optimizer, ours, 60, schedule=SCHEDULE)
    with WithoutBfloat16():
        muon = torch.optim.Muon(theirs, lr=0.05, nesterov=nesterov, adjust_lr_fn=torch_scale)
        run(muon, theirs, 60, schedule=SCHEDULE)
    assert_near(ours, theirs, 1e-5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torchs_with_decay_applied_apart(pair, momentum, nesterov):
    ours, theirs = pair
    optimizer = SGDSW(ours, lr=0.05, weight_decay=0.1, decay="constant", momentum=momentum, nesterov=nesterov)
    run(optimizer, ours, 60, schedule=SCHEDULE)
    sgd = torch.optim.SGD(theirs, lr=0.05, momentum=momentum, nesterov=nesterov)

    def decay(optimizer, args, kwargs):  # noqa: ARG001
        with torch.no_grad():
            for p in theirs:
                p.mul_(1 - 0.1 * optimizer.param_groups[0]["lr"])

    sgd.register_step_pre_hook(decay)
    run(sgd, theirs, 60, schedule=SCHEDULE)
    assert_near(ours, theirs, 1e-6)


ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("torchs", "ours", "tolerance"),
    [
        (partial(torch.optim.AdamW, fused=False, **ADAMW), partial(AdamWSW, decay="constant", **ADAMW), 1e-6),
        (partial(torch.optim.AdamW, fused=True, **ADAMW), partial(AdamWSW, decay="constant", **ADAMW), 1e-6),
        # its momenta are sums, so the load replaces our momentum_form
        (partial(torch.optim.SGD, momentum=0.9), partial(SGDSW, weight_decay=0.0, momentum_form="ema"), 1e-6),
        # the load also replaces our scale
        (
            partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
            partial(MuonSW, decay="constant", ns_dtype="bfloat16", scale="none"),
            1e-2,
        ),
    ],
    ids=["adamw", "fused adamw", "sgd", "muon"],
)
def test_training_continues_from_a_state_of_torch(pair, torchs, ours, tolerance):
    _, theirs = pair
    saved = torchs(theirs, lr=0.05)
    run(saved, theirs, 30, schedule=SCHEDULE)
    params = clones(theirs)
    optimizer = ours(params, lr=0.05)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    run(saved, theirs, 30, start=30, schedule=SCHEDULE)
    run(optimizer, params, 30, start=30, schedule=SCHEDULE)
    assert_near(params, theirs, tolerance)
