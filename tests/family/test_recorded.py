"""Rules take the steps of their authors' code, recorded in `recorded.json`."""

import pytest
import torch
from torch import nn

from muonsw import HeadRows, MuonSW, QKClip
from muonsw.algorithms.kl_shampoo import kl_shampoo, scale
from tests.family.references import gradient, recorded, start

JORDAN = {"scale": "original", "orthogonalizer": "newton_schulz", "ns_dtype": "float64", "decay": "constant"}

# Options of MuonSW that give the recorded rule.
OURS = {
    "normuon": {**JORDAN, "normalize": "normuon"},
    "adamuon": {**JORDAN, "precondition": "sign", "normalize": "adamuon", "scale": "match_rms_adamw"},
    "muon2": {**JORDAN, "precondition": "muon2", "orthogonalizer": "simple_quintic"},
    "soap_muon": {**JORDAN, "precondition": "soap", "orthogonalizer": "simple_quintic"},
    "nanochat": {
        **JORDAN, "precondition": "equalize", "normalize": "normuon", "normalize_axis": "longer",
        "normalize_beta2": 0.9, "normalize_snap": True, "cautious": True, "scale": "none",
        "orthogonalizer": "polar_express_nanochat",
    },
}  # fmt: skip


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_follows(optimizer, params, grads, weights, **close):
    """Check each recorded step: the gradients of all parameters, and the weights after it."""
    for step, after in zip(grads, weights, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = wide(grad)
        optimizer.step()
        torch.testing.assert_close([param.detach() for param in params], list(map(wide, after)), **close)


@pytest.mark.parametrize("name", OURS)
def test_members_follow_their_authors(name):
    """Tolerances cover the authors' epsilons.

    They add 1e-7 to norms of momenta, which are above 1e3 here: a relative change of 1e-10. Muon^2 and AdaMuon
    orthogonalize matrices of norm one or more, where it is 1e-7. nanochat's 1e-6 next to 1e3 and AdaMuon's other
    epsilon of 1e-8 matter less. The iteration magnifies a relative change of its input less than tenfold.
    """
    data = recorded(name)
    theirs, close = data["source"]["options"], 1e-9 if name == "normuon" else 1e-6
    params = [nn.Parameter(wide(weight)) for weight in data["weights"]]
    optimizer = MuonSW(params, lr=theirs["lr"], weight_decay=theirs["weight_decay"], **OURS[name])
    assert_follows(optimizer, params, data["grads"], data["after"], rtol=0, atol=close * theirs["lr"])


def test_lion_follows_its_authors():
    data = recorded("lion")
    first, *weights = data["weights"]
    params = [nn.Parameter(wide(weight)) for weight in first]
    optimizer = MuonSW([{"params": params, "algorithm": "lion"}], decay="constant", **data["options"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert_follows(optimizer, params, data["grads"], weights, rtol=0, atol=1e-15)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_aurora_follows_its_authors(number):
    """The authors' floor of 1e-7 under norms has no effect: rows here are longer, and the polynomial converges."""
    run = recorded("aurora")["runs"][number]
    first, *weights = run["weights"]
    param = nn.Parameter(wide(first))
    options = {"orthogonalizer": "aurora", "scale": "original", "decay": "constant", "ns_dtype": "float64"}
    optimizer = MuonSW([param], lr=0.05, weight_decay=0.025, **options)
    assert_follows(optimizer, [param], [[g] for g in run["grads"]], [[w] for w in weights], rtol=0, atol=1e-11)


@pytest.mark.parametrize("number", [0, 1])
def test_dion2_follows_its_authors(number):
    data = recorded("dion2")
    options, run = data["options"], data["runs"][number]
    first, *weights = run["weights"]
    param = nn.Parameter(wide(first))
    group = {"params": [param], "algorithm": "dion2", "ns_dtype": "float64", "scale": "spectral"}
    group |= {"fraction": options["fraction"], "momentum": options["ef_decay"]}
    optimizer = MuonSW([group], decay="constant", lr=options["lr"], weight_decay=options["weight_decay"])
    assert_follows(optimizer, [param], [[g] for g in run["grads"]], [[w] for w in weights], rtol=0, atol=1e-13)
    momentum = optimizer.state[param]["momentum_buffer"]
    torch.testing.assert_close(momentum, wide(run["momenta"][-1]), rtol=1e-14, atol=0)


RUNS = [(name, run) for name in ("soap", "shampoo", "kl_shampoo", "asgo") for run in recorded(name)["runs"]]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_algorithms_with_factors_follow_their_authors(name, run):
    """Decay is added to the recorded steps: the same fraction at every step, including the first."""
    shape, lr, options, weights = run["shape"], run["lr"], run["options"], run["weights"]
    param, decayed = nn.Parameter(start(shape)), nn.Parameter(start(shape))
    optimizer, other = (
        MuonSW([{"params": [weight], "algorithm": name, **options}], lr=lr, weight_decay=lam, decay="constant")
        for weight, lam in ((param, 0.0), (decayed, 0.7))
    )
    expected = start(shape)
    for step, after in enumerate(wide(weights)):
        before = param.detach().clone()
        param.grad, decayed.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        other.step()
        torch.testing.assert_close(param.detach(), after, rtol=1e-8, atol=1e-10)
        expected = (1 - 0.7 * lr) * expected + (param.detach() - before)
        torch.testing.assert_close(decayed.detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_kl_shampoo_with_roots_in_float16_follows_its_authors(number):
    """The bound: two roots take ten steps of three products, each of which rounds its operands to eleven bits."""
    run = recorded("kl_shampoo")["runs"][number]
    (m, n), expected, weight = run["shape"], torch.tensor(run["float16_weights"]), start(run["shape"]).float()
    group, moved, actual = {**run["options"], "ns_dtype": "float16"}, expected - weight, []
    shapes = {"exp_avg": (m, n), "factors_left": (m, m + 1), "factors_right": (n, n + 1)}
    state = {key: torch.zeros(1, *shape) for key, shape in shapes.items()}
    for step in range(len(expected)):
        G = gradient((m, n), step).float()[None]
        direction, state = kl_shampoo(group | {"update_count": step + 1}, G, state)
        weight = weight - run["lr"] * scale(group, m, n) * direction[0]
        actual.append(weight)
    assert (torch.stack(actual) - expected).norm() < 60 * 2**-11 * moved.norm()


def grouped(qkv):
    """Groups of three queries, a key and a value, of size 2."""
    query = HeadRows(qkv, 6, stride=10, by_group=True)
    return {"query": query, "key": HeadRows(qkv, 2, start=6, stride=10), "key_heads": 2}


def latent(q, kv):
    """Two plain and one rotary row of queries; two rows of keys and three of values."""
    rotary = HeadRows(q, 1, start=2, stride=3)
    return {"query": HeadRows(q, 2, stride=3), "rotary_query": rotary, "key": HeadRows(kv, 2, stride=5)}


@pytest.mark.parametrize("layout", [grouped, latent], ids=lambda layout: layout.__name__)
def test_qk_clip_scales_as_megatrons(layout):
    """Logits and factors are float32, which gives errors of a few times 6e-8."""
    data = recorded("qk_clip")
    case = data[layout.__name__]
    params = [nn.Parameter(wide(values)) for values in case["before"]]
    clip = QKClip(data["threshold"], alpha=data["alpha"])
    clip.add(heads=6, **layout(*params)).observe(torch.tensor(data["logits"]))
    clip.step()
    for param, values in zip(params, case["after"], strict=True):
        torch.testing.assert_close(param.detach(), wide(values), rtol=3e-7, atol=0)
