"""The paper's claims at test size, the same checks with the rules swapped, and settings that break a hypothesis."""

from dataclasses import replace

import pytest

from muonsw.lab.theory.chains import Chains
from muonsw.lab.theory.hypotheses import HypothesisError
from tests.lab.small_experiments import SMALL, outcome

# What does not depend on which rule is which: facts about recursions, and inequalities that hold for any bounded path.
INDIFFERENT = {
    "scalar": set(),
    "scalar-figure": set(),
    "matrix": set(),
    "matrix-figure": set(),
    "sgd-nonconvex": {"descent-inequality"},
    "sgd-strongly-convex": {"recursion-bound"},
    "muon-noise": {"alignment", "descent-inequality", "tracking-bound"},
    "muon-deterministic": set(),
    "fixed-rate": {"fixed-rate-sgd", "fixed-rate-muon"},
}


@pytest.mark.parametrize("name", SMALL)
def test_claims_hold(name):
    claims = outcome(name).claims
    assert [(c.id, c.predicted, c.measured, c.tolerance) for c in claims if not c.holds] == []
    assert len({claim.id for claim in claims}) == len(claims)


@pytest.fixture
def swapped_rules(monkeypatch):
    """Make every chain run the opposite rule of the one its experiment asks for."""
    build, other = Chains.__init__, {"constant": "scaled", "scaled": "constant"}

    def swap(self, kind, stacks, **settings):
        swapped = {key: {**stack, "decay": other.get(stack["decay"], "none")} for key, stack in stacks.items()}
        build(self, kind, swapped, **settings)

    monkeypatch.setattr(Chains, "__init__", swap)


@pytest.mark.usefixtures("swapped_rules")
@pytest.mark.parametrize("name", SMALL)
def test_claims_fail_when_the_rules_are_swapped(name):
    swapped = SMALL[name].run(0)
    assert {claim.id for claim in swapped.claims if claim.holds} <= INDIFFERENT[name]
    assert any(claim.fails for claim in swapped.claims)


@pytest.mark.parametrize(
    ("name", "settings", "hypothesis"),
    [
        *((name, {"lam": 0.0}, "lambda") for name in SMALL),
        ("scalar", {"gamma": 8.0}, r"eta <= 1/\(a \+ lambda\)"),
        ("matrix", {"eta0": 11.0}, r"eta\*lambda <= 1"),
        ("sgd-nonconvex", {"p": 0.5}, r"sum eta\^2 < infinity"),
        ("sgd-strongly-convex", {"gamma": 0.9}, r"mu\*gamma > 1"),
        ("fixed-rate", {"lam": 1.5}, "lambda < 1"),
    ],
)
def test_a_violated_hypothesis_is_named(name, settings, hypothesis):
    with pytest.raises(HypothesisError, match=hypothesis):
        replace(SMALL[name], **settings).run(0)


@pytest.mark.parametrize("name", ["scalar-figure", "matrix-figure"])
def test_a_seed_fixes_every_bit_and_another_changes_it(name):
    again, other = SMALL[name].run(0), SMALL[name].run(1)
    assert again == outcome(name)
    assert other != outcome(name)
