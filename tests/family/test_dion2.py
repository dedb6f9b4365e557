"""Dion2: equal to its authors' steps and to a reference; only the selected slices move and are forgotten."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.nonfinite import Flag, NonFiniteGradientWarning, all_finite
from muonsw.reference import Decay
from tests.common.problems import assert_same, cosine, matrices, run, set_gradients
from tests.family.references.dion2 import ReferenceDion2

RECORD = json.loads((Path(__file__).parent / "recorded/dion2.json").read_text(encoding="utf-8"))
PEAK = 0.05


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def dion2(params, *, group=None, **options):
    """Dion2, which has no class of its own."""
    return MuonSW([{"params": params, "algorithm": "dion2", "ns_dtype": "float64", **(group or {})}], **options)


@pytest.mark.parametrize("recorded", RECORD["runs"])
def test_equal_to_the_authors_steps(recorded):
    options, (first, *weights) = RECORD["options"], map(wide, recorded["weights"])
    param = nn.Parameter(first.clone())
    group = {"scale": "spectral", "fraction": options["fraction"], "momentum": options["ef_decay"]}
    rates = {"lr": options["lr"], "weight_decay": options["weight_decay"]}
    optimizer = dion2([param], group=group, decay="constant", **rates)
    for grad, weight, momentum in zip(recorded["grads"], weights, recorded["momenta"], strict=True):
        param.grad = wide(grad)
        optimizer.step()
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-13)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], wide(momentum), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("rule", "fraction"), [("constant", 0.25), ("scaled", 0.25), ("scaled", 1.0)])
def test_a_run_is_the_references_run(rule, fraction):
    """Under two rules; the others are held against their formulas with every algorithm in `tests/common`."""
    params = matrices((7, 9), (8, 3), (5, 5), (1, 4), dtype=torch.float64)
    references = [ReferenceDion2(p.detach(), Decay(rule, 0.3, PEAK), fraction, 0.9) for p in params]
    group = {"fraction": fraction, "momentum": 0.9}
    optimizer = dion2(params, group=group, lr=PEAK, weight_decay=0.3, decay=rule)
    schedule = cosine(PEAK, 60)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = schedule(step)
        set_gradients(params, step)
        for param, reference in zip(params, references, strict=True):
            reference.step(param.grad, schedule(step))
        optimizer.step()
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param.detach(), reference.W, rtol=0, atol=1e-10)


def test_only_the_largest_slices_move_and_all_decay():
    param = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = dion2([param], group={"fraction": 0.5}, lr=0.1, weight_decay=0.5, decay="constant")
    param.grad = torch.randn(4, 6, dtype=torch.float64) * wide([[0.1], [3.0], [2.0], [0.2]])
    optimizer.step()
    still, moved = param.detach()[[0, 3]], param.detach()[[1, 2]]
    torch.testing.assert_close(still, torch.full((2, 6), 0.95, dtype=torch.float64), rtol=0, atol=1e-15)
    assert (moved - 0.95).abs().min() > 1e-4
    momentum = optimizer.state[param]["momentum_buffer"]
    assert torch.equal(momentum[[0, 3]], param.grad[[0, 3]])
    torch.testing.assert_close(momentum[[1, 2]], 0.95 * param.grad[[1, 2]], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        ({"matrix": "stack"}, (3, 4, 6)),
        ({"matrix": "flatten"}, (4, 2, 3)),
        ({"heads": 2}, (8, 5)),
        ({"split_sizes": (3, 5), "split_dim": 1}, (4, 8)),
    ],
    ids=str,
)
def test_every_matrix_of_a_parameter_selects_its_own(group, shape):
    """As many parameters, each of one matrix, take the same steps."""
    param = matrices(shape, dtype=torch.float64)[0]

    def parts(tensor):
        if "heads" in group:
            return list(tensor.chunk(2))
        if "split_sizes" in group:
            return list(tensor.split((3, 5), dim=1))
        return list(tensor) if group["matrix"] == "stack" else [tensor.flatten(1)]

    singles = [nn.Parameter(part.clone()) for part in parts(param.detach())]
    together, apart = dion2([param], group=group, lr=0.05), dion2(singles, lr=0.05)
    for step in range(4):
        set_gradients([param], step)
        for single, grad in zip(singles, parts(param.grad), strict=True):
            single.grad = grad.clone()
        together.step()
        apart.step()
    for part, single in zip(parts(param.detach()), singles, strict=True):
        torch.testing.assert_close(part, single.detach(), rtol=0, atol=1e-12)


def test_a_transposed_matrix_takes_the_transposed_steps():
    straight = matrices((4, 7), dtype=torch.float64)[0]
    turned = nn.Parameter(straight.detach().mT.clone())
    one = dion2([straight], group={"scale": "spectral"}, lr=0.05)
    other = dion2([turned], group={"scale": "spectral", "transposed": True}, lr=0.05)
    for step in range(4):
        set_gradients([straight], step)
        turned.grad = straight.grad.mT.clone()
        one.step()
        other.step()
    torch.testing.assert_close(turned.detach().mT, straight.detach(), rtol=0, atol=1e-12)


def test_no_gradient_and_a_zero_gradient_leave_directions_at_zero():
    params = matrices((4, 6), (4, 6))
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.zeros(4, 6)
    dion2(params, lr=0.1, weight_decay=0.0).step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"fraction": 0.0}, r"fraction=0.0: must be in \(0, 1\]"),
        ({"fraction": 1.5}, r"fraction=1.5: must be in \(0, 1\]"),
        ({"fractions": 0.5}, "did you mean 'fraction'"),
        ({"ef_decay": 0.9}, "'ef_decay' is not an option: it is called momentum here"),
        ({"algorithm": "dion"}, "did you mean 'dion2'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(group, message):
    with pytest.raises(ValueError, match=message):
        dion2(matrices((2, 2)), group=group)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"needs matrices, but .* has shape \(3,\)"):
        dion2(matrices((3,)))


def flag_on_device(work, *_):
    return Flag((~all_finite([grad for batch in work for grad in batch.grads])).float())


@pytest.mark.parametrize("known_by", ["host", "device"])
def test_a_step_that_is_skipped_leaves_weights_and_momentum(known_by, monkeypatch):
    if known_by == "device":
        monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    params = matrices((4, 6), (6, 3))
    optimizer = dion2(params, lr=0.05, nonfinite="skip")
    run(optimizer, params, 2)
    before = [t.clone() for p in params for t in (p.detach(), optimizer.state[p]["momentum_buffer"])]
    set_gradients(params, 2)
    params[1].grad[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same([t for p in params for t in (p.detach(), optimizer.state[p]["momentum_buffer"])], before)


@pytest.mark.slow
def test_a_compiled_step_is_the_same():
    torch.compiler.reset()
    params, eager = matrices((6, 8), (8, 5)), matrices((6, 8), (8, 5))
    optimizer, other = (dion2(p, lr=torch.tensor(0.05)) for p in (params, eager))
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        set_gradients(params, number)
        set_gradients(eager, number)
        step()
        other.step()
    for a, b in zip(params, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_pieces_take_the_same_steps():
    whole, cut = matrices((6, 9), (6, 9), (9, 6)), matrices((6, 9), (6, 9), (9, 6))
    run(dion2(whole, lr=0.01), whole, 3)
    run(dion2(cut, lr=0.01, chunk_bytes=256), cut, 3)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
