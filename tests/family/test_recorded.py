"""Rules are their authors': equal to what the authors' code did, recorded by tests/family/record/."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from tests.family.gradients import gradient, start
from tests.family.record import asgo, kl_shampoo, shampoo, soap

RECORDED = Path(__file__).parent / "recorded"
JORDAN = {"scale": "original", "orthogonalizer": "newton_schulz", "ns_dtype": "float64", "decay": "constant"}

# What to ask of MuonSW to get the recorded rule.
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


@pytest.mark.parametrize("name", OURS)
def test_steps_of_members_are_those_that_the_authors_code_took(name):
    """Authors add 1e-7 to the norms of momenta, which are above 1e3 here: a relative change of 1e-10.

    Muon^2 and AdaMuon orthogonalize matrices of norm one or more, where it is 1e-7; so is nanochat's 1e-6 beside 1e3,
    and AdaMuon's own 1e-8. An iteration turns a relative change of its input into one of less than ten times that.
    """
    data = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    theirs, close = data["source"]["options"], 1e-9 if name == "normuon" else 1e-6
    params = [nn.Parameter(torch.tensor(weight, dtype=torch.float64)) for weight in data["weights"]]
    optimizer = MuonSW(params, lr=theirs["lr"], weight_decay=theirs["weight_decay"], **OURS[name])
    for grads, after in zip(data["grads"], data["after"], strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        for param, expected in zip(params, after, strict=True):
            moved = torch.tensor(expected, dtype=torch.float64)
            torch.testing.assert_close(param.detach(), moved, rtol=0, atol=close * theirs["lr"])


def recorded_runs():
    """The options of each recorded run, its shape, and the weights after each step without decay."""
    renamed = {"frequency": "precondition_frequency", "max_precond_dim": "precondition_max_dim"}
    for module in (soap, shampoo, kl_shampoo, asgo):
        data = json.loads(module.RECORDED.read_text(encoding="utf-8"))
        for recorded in data["runs"]:
            options = {renamed.get(key, key): value for key, value in recorded.items()}
            weights = options.pop("weights", None) or options.pop("float64")
            if "beta2" in options:
                options["betas"] = (options.pop("momentum", 0.9), options.pop("beta2"))
            if options.get("betas", (0, 0))[1] == 1:
                options |= {"betas": (options["betas"][0], 0.5), "shampoo_beta": 1.0}
            for kept in ("float16", "float64"):
                options.pop(kept, None)
            lr, name = options.pop("lr", data.get("lr")), module.RECORDED.stem
            yield pytest.param(name, options.pop("shape"), lr, options, weights, id=f"{name}-{len(weights[0])}")


@pytest.mark.parametrize(("name", "shape", "lr", "options", "weights"), list(recorded_runs()))
def test_steps_of_algorithms_are_those_that_the_authors_code_took(name, shape, lr, options, weights):
    """Decay comes on top of their steps without decay: it is the same fraction at each, and in the first as well."""
    param, decayed = nn.Parameter(start(shape)), nn.Parameter(start(shape))
    optimizer, other = (
        MuonSW([{"params": [one], "algorithm": name, **options}], lr=lr, weight_decay=lam, decay="constant")
        for one, lam in ((param, 0.0), (decayed, 0.7))
    )
    expected = start(shape)
    for step, after in enumerate(torch.tensor(weights, dtype=torch.float64)):
        before = param.detach().clone()
        param.grad, decayed.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        other.step()
        torch.testing.assert_close(param.detach(), after, rtol=1e-8, atol=1e-10)
        expected = (1 - 0.7 * lr) * expected + (param.detach() - before)
        torch.testing.assert_close(decayed.detach(), expected, rtol=1e-9, atol=1e-12)


def test_every_recording_has_its_test():
    """Here, or in a file of its own."""
    paths = [path for folder in ("family", "addons") for path in (Path(__file__).parents[1] / folder).glob("test_*.py")]
    own = {path.stem.removeprefix("test_") for path in paths}
    tests = "".join(path.read_text(encoding="utf-8") for path in paths)
    stems = {path.stem for path in RECORDED.glob("*.json")} - own - set(OURS)
    assert [stem for stem in stems if f"recorded/{stem}.json" not in tests] == []
