"""The history of the norm beside its theory: against vectors that really move, closed forms and brute force."""

import math

import pytest
import torch

from muonsw.lab import theory
from muonsw.lab.theory import HypothesisError, NormHistory, tracking

BETA = 0.9


def columns(rows):
    return {key: [row[key] for row in rows] for key in ("r", "s", "phi", "a")}


def history_of(rows, every=1):
    chosen = rows[::every]
    return NormHistory.of([row["step"] for row in chosen], **columns(chosen))


def cosine(t, steps):
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * t / steps))


def rms(x):
    return float(x.square().mean().sqrt())


def walk(coefficients, *, start=0.1, entries=2000):
    """Move a real vector by updates of given RMS and alignment; every step is recorded."""
    weight = start * torch.randn(entries, dtype=torch.float64)
    rows = []
    for step, (s, phi, a) in enumerate(coefficients, start=1):
        along = weight / weight.norm()
        across = torch.randn(entries, dtype=torch.float64)
        across -= across @ along * along
        update = s * entries**0.5 * (a * along + (1.0 - a**2) ** 0.5 * across / across.norm())
        rows.append({"step": step, "r": rms(weight), "s": s, "phi": phi, "a": a})
        weight = (1.0 - phi) * weight - update
    return rows


def recursion(coefficients, start):
    """The norm itself, in float64, without any of the functions under test."""
    r, rows = start, []
    for step, (s, phi, a) in enumerate(coefficients, start=1):
        rows.append({"step": step, "r": r, "s": s, "phi": phi, "a": a})
        r = math.sqrt((1 - phi) ** 2 * r**2 - 2 * (1 - phi) * s * a * r + s**2)
    return rows


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_vectors_with_a_prescribed_alignment_obey_the_recursion(sign):
    steps = 800
    coefficients = [
        (0.01 * cosine(t, steps), 0.02 * cosine(t, steps) ** 2, sign * 0.2 * math.cos(t / 50)) for t in range(steps)
    ]
    history = history_of(walk(coefficients))
    predicted = theory.predict_norms(history)
    # Rounding alone: each step adds a few units in the last place.
    assert predicted.tolist() == pytest.approx(history.r.tolist(), rel=steps * 1e-14)


@pytest.mark.parametrize("a", [-0.3, -0.02, 0.0, 0.02, 0.3])
def test_a_walk_with_fixed_coefficients_settles_at_the_target(a):
    phi = 0.01
    history = history_of(walk([(0.02, phi, a)] * 1500))
    target = float(theory.target_norms(history)[-1])
    # Dropping phi against 1 changes phi by phi^2/2 and a by a phi in the fixed point; r* is at most linear in 1/phi
    # and in a, so r* is off by at most 1.5 phi.
    assert float(history.r[-1]) == pytest.approx(target, rel=1.5 * phi)
    tracking = theory.track(history)
    assert tracking.broke_at is None
    assert (tracking.ratio[tracking.ratio.isfinite()] < 1e-6).all()


def test_a_walk_with_momentum_has_the_memory_of_its_average():
    entries, phi, eta = 4000, 0.005, 0.01
    weight, momentum = 0.1 * torch.randn(entries), torch.zeros(entries)
    rows = []
    for step in range(1, 1501):
        momentum = BETA * momentum + (1.0 - BETA) * torch.randn(entries)
        update = eta * momentum / momentum.square().mean().sqrt()
        a = float(torch.dot(weight, update) / (weight.norm() * update.norm()))
        rows.append({"step": step, "r": rms(weight), "s": rms(update), "phi": phi, "a": a})
        weight = (1.0 - phi) * weight - update
    history = history_of(rows)
    assert theory.predict_norms(history).tolist() == pytest.approx(history.r.tolist(), rel=1e-4)
    memory = 1.0 - 2.0 * history.a[500:] * history.r[500:] / history.s[500:]
    # Decay of phi per step shortens a memory of (1 + beta)/(1 - beta) by phi/(1 - beta) of it, here 5%.
    expected = (1.0 + BETA) / (1.0 - BETA)
    assert float(memory.mean()) == pytest.approx(expected, rel=0.1)
    settled = theory.steady_state_norm_with_memory(s=eta, phi=phi, memory=expected)
    assert float(history.r[500:].mean()) == pytest.approx(settled, rel=0.06)


def test_memory_and_alignment_are_two_ways_to_say_the_same():
    s, phi, memory = 0.01, 0.002, 39.0
    r = theory.steady_state_norm_with_memory(s=s, phi=phi, memory=memory)
    a = -(memory - 1.0) * s / (2.0 * r)
    assert theory.steady_state_norm(s=s, phi=phi, a=a) == pytest.approx(r, rel=1e-12)


@pytest.mark.parametrize("every", [1, 25, 100])
def test_prediction_from_sparse_samples_follows_a_smooth_run(every):
    steps = 4001
    coefficients = [(2e-3 * cosine(t, steps), 5e-3 * cosine(t, steps), -0.1 * cosine(t, steps)) for t in range(steps)]
    history = history_of(recursion(coefficients, start=0.05), every)
    predicted = theory.predict_norms(history)
    # A line between samples misses a curve by k^2 f''/8; relative to the curve at its lowest, 0.1 of the peak, that
    # is (pi k/T)^2 * 0.45/(8 * 0.1), and the norm is at most linear in each of three coefficients.
    bound = 3 * (math.pi * every / steps) ** 2 * 0.45 / 0.8 + 1e-12
    assert predicted.tolist() == pytest.approx(history.r.tolist(), rel=bound)
    if every > 1:
        assert len(history) == (steps - 1) // every + 1


def test_the_recursion_is_replayed_in_blocks_that_change_nothing(monkeypatch):
    """Samples inside blocks, at their borders, and a gap of several."""
    samples = {"r": [1.0, 0.9, 0.9, 0.8, 0.7], "s": [0.1, 0.2, 0.1, 0.3, 0.1], "phi": [0.1] * 5, "a": [-0.1] * 5}
    history = NormHistory.of([1, 2, 4, 5, 21], **samples)
    whole = theory.predict_norms(history)
    monkeypatch.setattr(tracking, "BLOCK", 3)
    assert theory.predict_norms(history).equal(whole)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2])
def test_ratio_and_lag_of_an_exponential_target_are_exact(ratio):
    phi = 0.01
    rate = 2.0 * phi * ratio  # of ln r*, so that tau * rate = ratio
    history = history_of(recursion([(0.01 * math.exp(-rate * t), phi, 0.0) for t in range(2000)], start=0.07), 5)
    tracking = theory.track(history)
    assert tracking.ratio.tolist() == pytest.approx([ratio] * len(history), rel=1e-9)
    # x = r^2/r*^2 obeys x exp(-2 rate) = (1 - phi)^2 x + 2 phi, whose fixed point is the lag.
    lag = 0.5 * math.log(2.0 * phi / (math.exp(-2.0 * rate) - (1.0 - phi) ** 2))
    assert float(tracking.lag[-1]) == pytest.approx(lag, abs=1e-9)
    assert lag == pytest.approx(ratio, abs=2.0 * ratio**2 + phi)


def test_tracking_breaks_where_the_target_begins_to_run_away():
    phi, turn = 0.01, 1000
    sizes = [0.01 * math.exp(-0.03 * max(t - turn, 0)) for t in range(1400)]
    tracking = theory.track(history_of(recursion([(s, phi, 0.0) for s in sizes], start=0.07), 5))
    # The ratio is 1.5 from the turn on; its window of 140 steps sees that up to half its length too early.
    steps = torch.arange(1, 1401, 5)
    assert tracking.ratio[steps < turn - 70].max() < 1e-6
    assert tracking.ratio[steps > turn + 70].tolist() == pytest.approx([1.5] * 66, rel=1e-9)
    # The target gains 0.03 a step on a norm that closes 0.02 of the lag: 0.2 is reached within 10 steps.
    assert tracking.broke_at is not None
    assert turn - 70 <= tracking.broke_at <= turn + 20


def test_a_target_that_stops_ends_the_ratio_but_not_the_lag():
    """As at the end of a cosine: the target stands still, and decay is too slow to reach it."""
    sizes = [0.01 * math.exp(-0.002 * min(max(t - 500, 0), 300)) for t in range(1300)]
    decays = [1e-2 if t < 500 else 5e-5 for t in range(1300)]
    tracking = theory.track(
        history_of(
            recursion([(s * (phi / 1e-2) ** 0.5, phi, 0.0) for s, phi in zip(sizes, decays, strict=True)], 0.0707), 2
        )
    )
    assert float(tracking.ratio[-1]) < 1e-6
    assert tracking.broke_at is not None
    assert 500 <= tracking.broke_at <= 800


def test_a_step_without_decay_or_update_has_no_target():
    history = NormHistory.of([1, 2, 3], r=[0.1] * 3, s=[0.0, 0.01, 0.01], phi=[0.01, 0.0, 0.01], a=[0.0] * 3)
    assert torch.isnan(theory.target_norms(history)).tolist() == [True, True, False]
    assert len(theory.track(history).predicted) == 3


def test_one_sample_is_a_history_too():
    tracking = theory.track(NormHistory.of([7], r=[0.1], s=[0.01], phi=[0.01], a=[0.0]))
    assert tracking.predicted.tolist() == [0.1]
    assert tracking.broke_at is None
    assert math.isnan(float(tracking.ratio[0]))


GOOD = {"r": [0.1, 0.1], "s": [0.01, 0.01], "phi": [0.01, 0.01], "a": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("steps", "change", "hypothesis"),
    [
        ([2, 2], {}, "steps increase"),
        ([1, 2, 3], {}, "equally many samples of each"),
        ([1, 2], {"a": [0.0, math.nan]}, "a is finite"),
        ([], {"r": [], "s": [], "phi": [], "a": []}, "at least one sample"),
    ],
)
def test_a_history_that_is_none_is_refused(steps, change, hypothesis):
    NormHistory.of([1, 2], **GOOD)
    with pytest.raises(HypothesisError) as error:
        NormHistory.of(steps, **GOOD | change)
    assert error.value.hypothesis == hypothesis
