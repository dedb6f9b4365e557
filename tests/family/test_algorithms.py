"""What every algorithm with factors promises beside `test_every_rule.py`: of its state, refreshes and options."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.addons.replay import supports
from muonsw.step import make_plan
from tests.common.problems import matrices, run, set_gradients
from tests.family.algorithms import OPTIONS

every_algorithm = pytest.mark.parametrize("name", OPTIONS)


def build(name, params, weight_decay=0.1, **options):
    return MuonSW([{"params": params, **OPTIONS[name], **options}], lr=0.05, weight_decay=weight_decay)


@every_algorithm
def test_a_first_gradient_may_come_late(name):
    params = matrices((4, 4), (4, 4), dtype=torch.float64)
    optimizer, before = build(name, params, weight_decay=0.0), params[1].detach().clone()
    for step in range(12):
        set_gradients(params, step)
        params[1].grad = params[1].grad if step > 4 else None
        optimizer.step()
    moved = (params[1].detach() - before).square().mean().sqrt()
    assert 0 < moved < 0.05 * 7 * 2


@every_algorithm
def test_averages_may_be_kept_in_bfloat16_and_factors_stay_in_float32(name):
    params = matrices((4, 4), (6, 6))
    optimizer = build(name, params, state_dtype="bfloat16")
    run(optimizer, params, 4)
    for state in optimizer.state.values():
        dtypes = {key: value.dtype for key, value in state.items()}
        assert dtypes.pop("exp_avg") == torch.bfloat16
        dtypes.pop("exp_avg_sq", None)
        assert set(dtypes.values()) == {torch.float32}
    assert all(param.isfinite().all() for param in params)


@every_algorithm
def test_only_a_rule_that_counts_no_steps_may_be_captured(name):
    params = matrices((4, 6))
    optimizer = build(name, params)
    set_gradients(params, 0)
    batch = make_plan(optimizer).batches[0]._replace(device=torch.device("cuda"))
    assert ("every few steps" in supports(optimizer, [batch])) == (name != "asgo")


@every_algorithm
def test_parameters_that_were_flattened_are_shown_and_refused(name):
    """As DeepSpeed's ZeRO does."""
    params = matrices((4, 6))
    optimizer = build(name, params)
    params[0].data = params[0].data.flatten()
    assert "24" in optimizer.routing()
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="something has flattened the parameters"):
        optimizer.step()


def test_a_side_that_is_too_long_has_no_factor_and_two_are_refused():
    param = nn.Parameter(torch.randn(3, 12))
    optimizer = MuonSW([{"params": [param], "algorithm": "soap", "precondition_max_dim": 8}], lr=0.01)
    param.grad = torch.randn_like(param)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    assert shapes["basis_left"] == (3, 3)
    assert shapes["basis_right"] == shapes["factor_right"] == (1, 1)
    with pytest.raises(ValueError, match=r"precondition_max_dim=2 leaves both sides of .* a matrix of 3 x 12"):
        MuonSW([{"params": [param], "algorithm": "soap", "precondition_max_dim": 2}], lr=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "soap", "precondition_frequncy": 3}, "did you mean 'precondition_frequency'"),
        ({"algorithm": "soap", "precondition_frequency": 0}, "a whole number of at least 1"),
        ({"algorithm": "soap", "eps": 0.0}, "eps=0: SOAP begins with averages of zero"),
        ({"algorithm": "kl_shampoo", "eps": 0.0}, "eps=0: KL-Shampoo takes roots"),
        ({"algorithm": "soap", "shampoo_beta": 1.5}, r"shampoo_beta=1.5: must be in \[0, 1\]"),
        ({"algorithm": "shampoo", "grafting": "adm"}, "must be one of None, 'adam', 'sgd'"),
        ({"algorithm": "shampoo", "block_size": 2.5}, "a whole number of at least 1"),
        ({"algorithm": "kl_shampoo", "ns_dtype": "bfloat16"}, "ns_dtype='bfloat16' is too coarse"),
    ],
    ids=str,
)
def test_errors_name_the_option_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        MuonSW([{"params": matrices((4, 6)), **options}], lr=0.01)
