"""Every closed form against brute force in float64, and every hypothesis against its violation."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab import theory
from muonsw.lab.theory import HypothesisError, PowerLaw

EPS = torch.finfo(torch.float64).eps
unit = st.floats(0.0, 1.0)
positive = st.floats(0.05, 5.0)
Rule = Callable[[float, float], float]


def constant_decay(eta: float, lam: float) -> float:
    return lam * eta


def scaled_decay(eta_max: float) -> Rule:
    return lambda eta, lam: lam * eta**2 / eta_max


def descend(w: float, etas: list[float], rule: Rule, a: float, c: float, lam: float) -> float:
    for eta in etas:
        w = w - eta * a * (w - c) - rule(eta, lam) * w
    return w


def harmonic(gamma: float, t0: float, steps: int) -> list[float]:
    return [gamma / (t + t0) for t in range(steps)]


# Scalar quadratic


@given(w0=st.floats(-9, 9), a=positive, c=st.floats(-9, 9), lam=positive, shares=st.lists(unit, max_size=40))
def test_frozen_point_is_the_iterate(w0: float, a: float, c: float, lam: float, shares: list[float]) -> None:
    etas = [share / (a + lam) for share in shares]
    predicted = theory.frozen_point(w0, etas, a=a, c=c, lam=lam)
    assert predicted == pytest.approx(descend(w0, etas, constant_decay, a, c, lam), abs=1000 * EPS)


def test_frozen_point_takes_many_starts() -> None:
    starts = torch.linspace(-2, 2, 5, dtype=torch.float64)
    points = theory.frozen_point(starts, [0.5, 0.25], a=1.0, c=1.0, lam=0.2)
    assert points.tolist() == [theory.frozen_point(w, [0.5, 0.25], a=1.0, c=1.0, lam=0.2) for w in starts.tolist()]


@pytest.mark.parametrize("w0", [-5.0, 0.02, 7.0])
def test_only_constant_decay_settles_at_its_fixed_point(w0: float) -> None:
    a, c, lam = 0.8, 1.5, 0.3
    etas = [0.9 * (1 + t) ** -0.6 for t in range(5000)]  # forgets the start by exp(-1.1 * 66)
    wbar = theory.constant_decay_fixed_point(a=a, c=c, lam=lam)
    gap = theory.constant_decay_loss_gap(a=a, c=c, lam=lam)
    constant = descend(w0, etas, constant_decay, a, c, lam)
    scaled = descend(w0, etas, scaled_decay(0.9), a, c, lam)
    assert constant == pytest.approx(wbar, rel=100 * EPS)
    assert a / 2 * (constant - c) ** 2 == pytest.approx(gap, rel=1000 * EPS)
    assert abs(scaled - wbar) > 0.9 * abs(c - wbar)
    assert a / 2 * (scaled - c) ** 2 < 1e-3 * gap


@pytest.mark.parametrize(
    ("a", "c", "lam", "gamma", "t0"),
    [(1.0, 1.0, 0.1, 2.0, 4.0), (2.0, -3.0, 0.5, 1.5, 10.0), (0.5, 2.0, 0.05, 6.0, 3.0)],
)
def test_scaled_error_leads_and_constant_decay_does_not_have_it(
    a: float, c: float, lam: float, gamma: float, t0: float
) -> None:
    def relative(steps: int) -> float:
        w = descend(0.0, harmonic(gamma, t0, steps), scaled_decay(gamma / t0), a, c, lam)
        return abs((c - w) / theory.scaled_decay_error(steps, a=a, c=c, lam=lam, gamma=gamma, t0=t0) - 1)

    # What is left out is one order smaller, so ten times the steps give a tenth of it.
    assert relative(100_000) < 0.01
    assert relative(100_000) < 0.15 * relative(10_000)
    constant = descend(0.0, harmonic(gamma, t0, 10_000), constant_decay, a, c, lam)
    assert abs(c - constant) > 50 * abs(theory.scaled_decay_error(10_000, a=a, c=c, lam=lam, gamma=gamma, t0=t0))


# Muon


def polar(M: torch.Tensor) -> torch.Tensor:
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    return (U * (S.unsqueeze(-2) > 0)) @ Vh


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class MuonStep:
    """What one step of Muon saw; the batch dimension runs over independent chains."""

    W: torch.Tensor
    grad: torch.Tensor
    O: torch.Tensor  # noqa: E741
    error: torch.Tensor


def run_muon(
    W: torch.Tensor,
    A: torch.Tensor,
    etas: list[float],
    rule: Rule,
    lam: float,
    *,
    beta: float = 0.0,
    noise: float = 0.0,
) -> Iterator[MuonStep]:
    """Muon on 1/2 |W - A|^2, with the noise's deviation per entry. The last item holds the final weights."""
    generator = torch.Generator().manual_seed(7)
    M = torch.zeros_like(W)
    for eta in etas:
        grad = W - A
        xi = noise * torch.randn(W.shape, dtype=W.dtype, generator=generator) if noise else 0.0
        M = beta * M + grad + xi
        step = MuonStep(W, grad, polar(M), (1 - beta) * M - grad)
        yield step
        W = (1 - rule(eta, lam)) * W - eta * step.O
    yield MuonStep(W, W - A, torch.zeros_like(W), torch.zeros_like(W))


def frobenius(X: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(X)


def nuclear(X: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(X, ord="nuc")


def spectral(X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(X, ord=2).item()


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_muon_obeys_the_norm_bound_at_every_step(beta: float) -> None:
    lam, A, W = 0.5, 8 * matrix(5, 3), 4 * matrix(5, 3, seed=1)
    etas = [1.9 * (1 + t) ** -0.7 for t in range(300)]
    bounds = theory.muon_norm_bounds(spectral(W), etas, lam=lam)
    norms = [spectral(step.W) for step in run_muon(W, A, etas, constant_decay, lam, beta=beta)]
    assert len(bounds) == len(norms)
    assert all(z <= bound * (1 + 100 * EPS) for z, bound in zip(norms, bounds, strict=True))
    scaled = [spectral(step.W) for step in run_muon(W, A, etas, scaled_decay(1.9), lam, beta=beta)]
    assert scaled[-1] > 2 * bounds[-1]


@given(z0=st.floats(0, 50), lam=positive, scale=positive, shares=st.lists(unit, max_size=30))
def test_an_outward_push_attains_the_norm_bound(z0: float, lam: float, scale: float, shares: list[float]) -> None:
    radius = theory.muon_radius(lam, scale=scale)
    z, etas = max(z0, radius), [share / lam for share in shares]
    for bound, eta in zip(theory.muon_norm_bounds(z, etas, lam=lam, scale=scale), [*etas, 0.0], strict=True):
        assert z == pytest.approx(bound, rel=100 * EPS)
        z = (1 - eta * lam) * z + eta * scale


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_constant_decay_meets_the_loss_floor_from_above_and_scaled_goes_through_it(beta: float) -> None:
    lam, sigmas = 0.1, torch.tensor([20.0, 14.0, 11.0, 4.0], dtype=torch.float64)
    A = polar(matrix(6, 4)) @ torch.diag(sigmas)
    etas = [9.0 / (1 + t) for t in range(2000)]
    floor = theory.muon_loss_floor(sigmas, lam=lam)
    assert floor == pytest.approx((10**2 + 4**2 + 1**2) / 2)
    *_, constant = run_muon(0.02 * matrix(6, 4, seed=1), A, etas, constant_decay, lam, beta=beta)
    *_, scaled = run_muon(0.02 * matrix(6, 4, seed=1), A, etas, scaled_decay(9.0), lam, beta=beta)
    # A start inside the radius stays inside, so the floor holds at every step.
    assert floor * (1 - 1e-9) < frobenius(constant.grad).item() ** 2 / 2 < 1.01 * floor
    assert spectral(constant.grad) >= theory.muon_separation(20.0, lam=lam) * (1 - 1e-9)
    assert frobenius(scaled.grad).item() ** 2 / 2 < 1e-3 * floor


def test_targets_inside_the_radius_have_no_floor() -> None:
    assert theory.muon_loss_floor([9.0, 1.0], lam=0.1) == 0.0
    assert theory.muon_separation(9.0, lam=0.1) == 0.0


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 3, 5)])
def test_clipping_is_the_projection_onto_the_ball(shape: tuple[int, ...]) -> None:
    A, radius = 2 * matrix(*shape), 1.3
    P = theory.clip_projection(A, radius)
    assert torch.linalg.matrix_norm(P, ord=2).max().item() <= radius * (1 + 100 * EPS)
    # Optimal: P attains radius |A - P|_*, the largest product that a W of the ball has with A - P.
    torch.testing.assert_close(((A - P) * P).sum((-2, -1)), radius * nuclear(A - P), rtol=1e-12, atol=1e-12)
    sigmas = torch.linalg.svdvals(A)
    distance = frobenius(A - P) ** 2 / 2
    for floor, sigma in zip(distance.reshape(-1).tolist(), sigmas.reshape(-1, sigmas.shape[-1]), strict=True):
        assert theory.muon_loss_floor(sigma, lam=1 / radius) == pytest.approx(floor, rel=1e-12)


# Robbins-Monro


def test_a_report_sums_and_names_what_does_not_hold() -> None:
    report = theory.check_schedule(torch.tensor([0.5, 0.25, 0.0]), a=3.0, lam=1.0, mu=2.0)
    assert (report.steps, report.sum_eta, report.sum_eta_squared, report.max_eta) == (3, 0.75, 0.3125, 0.5)
    assert report.hypotheses == {
        "eta > 0": False,
        "eta*lambda <= 1": True,
        "eta <= 1/(a + lambda)": False,
        "mu*eta <= 1": True,
    }
    with pytest.raises(HypothesisError, match="eta > 0"):
        report.require()
    theory.check_schedule([0.25, 0.125], a=3.0, lam=1.0).require()


@pytest.mark.parametrize("p", [-0.5, 0.0, 0.3, 0.5, 0.6, 0.9, 1.0, 1.1, 2.0])
def test_power_laws_agree_with_the_condensation_test(p: float) -> None:
    def converges(exponent: float) -> bool:
        """A series of decreasing terms converges as the sum over 2^k eta(2^k) does, which is geometric."""
        return 2.0 ** (1 - exponent) < 1.0

    law = PowerLaw(0.3, p)
    assert law.sum_diverges == (not converges(p))
    assert law.sum_of_squares_converges == converges(2 * p)
    assert law(3) == pytest.approx(0.3 * 4**-p)
    with nullcontext() if 0.5 < p <= 1.0 else pytest.raises(HypothesisError, match="sum eta"):
        law.require_robbins_monro()


# SGD with noise


@given(
    alpha=positive,
    kappa=st.floats(0, 10),
    ratio=st.floats(1.05, 6),
    u1=st.floats(1e-9, 100),
    t1=st.integers(0, 9),
)
def test_the_recursion_stays_under_nu_over_t(alpha: float, kappa: float, ratio: float, u1: float, t1: int) -> None:
    setting = {"u1": u1, "t1": t1, "alpha": alpha, "kappa": kappa, "gamma": ratio / alpha, "t0": ratio + 0.5}
    nu, u = theory.sa_constant(**setting), u1
    for t in range(t1, 200):
        assert u <= nu / (t + setting["t0"]) * (1 + 1e-12)
        eta = setting["gamma"] / (t + setting["t0"])
        u = (1 - alpha * eta) * u + kappa * eta**2
    assert theory.sa_bound(200, **setting) == nu / (200 + setting["t0"])


def test_a_constant_pull_breaks_the_recursion_bound() -> None:
    u, setting = 1.0, {"alpha": 1.0, "kappa": 1.0, "gamma": 2.0, "t0": 4.0}
    for eta in harmonic(2.0, 4.0, 400):
        u = (1 - eta) * u + 0.5 * eta  # of first order in eta, as constant decay is
    assert u > 10 * theory.sa_bound(400, u1=1.0, t1=0, **setting)


def mean_squared_distance(
    etas: list[float],
    rule: Rule,
    lam: float,
    h: torch.Tensor,
    x_star: torch.Tensor,
    sigma: float,
) -> list[float]:
    """Exact E|x_t - x*|^2 of SGD on sum h_i (x_i - x*_i)^2 / 2 from 0, sigma^2 spread over coordinates."""
    mean, variance = torch.zeros_like(h), torch.zeros_like(h)
    history = []
    for eta in etas:
        history.append(((mean - x_star) ** 2 + variance).sum().item())
        shrink = 1 - eta * h - rule(eta, lam)
        mean = shrink * mean + eta * h * x_star
        variance = shrink**2 * variance + eta**2 * sigma**2 / len(h)
    return history


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_strongly_convex_rate_bounds_scaled_decay_only(sigma: float) -> None:
    mu, L, gamma, t0, lam, steps = 1.0, 2.0, 2.0, 8.0, 0.4, 4000
    h = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)
    x_star = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)
    etas = harmonic(gamma, t0, steps)
    setting = {"mu": mu, "L": L, "q": lam * t0 / gamma, "rho": 1.0}
    t1 = theory.first_contracting_step(gamma=gamma, t0=t0, **setting)

    def within(rule: Rule) -> list[bool]:
        u = mean_squared_distance(etas, rule, lam, h, x_star, sigma)
        constants = setting | {"u1": u[t1], "t1": t1, "gamma": gamma, "t0": t0, "sigma": sigma, "x_star": 3.0}
        return [u[t] <= theory.strongly_convex_bound(t, **constants) for t in range(t1, steps, 37)]

    assert all(within(scaled_decay(gamma / t0)))
    assert not any(within(constant_decay)[50:])


@given(x=st.floats(-9, 9), x_star=st.floats(-9, 9), sigma=st.floats(0, 3), q=st.floats(0, 4), share=unit)
def test_kappa_bounds_a_single_step(x: float, x_star: float, sigma: float, q: float, share: float) -> None:
    eta = share / 4  # with mu = L = 1 small enough for all these q: K1 eta + K2 eta^3 <= 1
    e = x - x_star
    after = (x - eta * e - q * eta**2 * x - x_star) ** 2 + eta**2 * sigma**2
    kappa = theory.strongly_convex_kappa(eta, mu=1.0, L=1.0, q=q, sigma=sigma, x_star=abs(x_star))
    assert after <= (1 - eta) * e**2 + kappa * eta**2 + 1e-12


def test_the_first_contracting_step_is_the_first() -> None:
    setting = {"mu": 1.0, "L": 2.0, "q": 0.4, "rho": 1.5}
    t1 = theory.first_contracting_step(gamma=2.0, t0=8.0, **setting)
    theory.strongly_convex_kappa(2.0 / (t1 + 8.0), sigma=1.0, x_star=1.0, **setting)
    with pytest.raises(HypothesisError, match="K1"):
        theory.strongly_convex_kappa(2.0 / (t1 + 7.0), sigma=1.0, x_star=1.0, **setting)


@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_stationarity_bound_holds_for_scaled_decay_on_a_quadratic(sigma: float) -> None:
    # For F = |x - x*|^2 / 2 the squared gradient is the squared distance, and L = rho = 1.
    x_star = torch.tensor([3.0, -1.0], dtype=torch.float64)
    etas = [0.25 * (1 + t) ** -0.6 for t in range(3000)]
    u = mean_squared_distance(etas, scaled_decay(0.25), 0.4, torch.ones_like(x_star), x_star, sigma)
    bound = max(math.sqrt(value) for value in u) + x_star.norm().item()
    total = sum(eta * value for eta, value in zip(etas, u, strict=True))
    limit = theory.stationarity_bound(etas, f_gap=5.0, L=1.0, q=1.6, sigma=sigma, bound=bound)
    assert 0.05 * limit < total <= limit


# Stochastic Muon


@pytest.mark.parametrize(("beta", "noise"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.3), (0.9, 0.3)])
def test_lemmas_and_the_descent_inequality_hold_on_every_path(beta: float, noise: float) -> None:
    A, W, lam, r = 3 * matrix(4, 3), matrix(8, 4, 3, seed=1), 0.5, 3
    etas = [0.5 * (1 + t) ** -0.6 for t in range(200)]
    *path, end = run_muon(W, A, etas, scaled_decay(0.5), lam, beta=beta, noise=noise)
    for step in path:
        product = (step.grad * step.O).sum((-2, -1))
        assert (product >= theory.alignment_bound(nuclear(step.grad), frobenius(step.error), r=r) - 1e-12).all()
    q, target = lam / 0.5, frobenius(A).item()
    for chain in range(8):
        norms = [nuclear(step.grad[chain]).item() for step in path]
        bound = max(frobenius(step.W[chain]).item() for step in path)
        losses = [frobenius(step.grad[chain]).item() ** 2 / 2 for step in (path[0], end)]
        C_W = theory.shrink_constant(grad_zero=target, L=1.0, bound=bound)
        limit = theory.descent_bound(
            etas,
            [frobenius(step.error[chain]).item() for step in path],
            f_drop=losses[0] - losses[1],
            q=q,
            C_W=C_W,
            L=1.0,
            r=r,
            bound=bound,
        )
        assert sum(eta * norm for eta, norm in zip(etas, norms, strict=True)) <= limit
        for step, norm in zip(path, norms, strict=True):
            gap = frobenius(step.grad[chain]).item() ** 2 / 2
            assert gap <= theory.convex_gap_bound(norm, bound=bound, target=target)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"f_drop": 3.0}, 3.0),
        ({"r": 4, "errors": [2.0, 4.0]}, 2 * 2 * (0.5 * 2 + 0.25 * 4) + 4e-9 * 0.3125),
        ({"q": 2.0, "C_W": 7.0}, 14 * 0.3125),
        ({"L": 5.0, "r": 2}, 10 * 0.3125),
        ({"q": 2.0, "L": 3.0, "bound": 10.0}, 3 * 0.3125 + 3 * 4 * 100 * (0.5**4 + 0.25**4)),
    ],
)
def test_each_term_of_the_descent_bound(setting: dict[str, float], expected: float) -> None:
    zero = {"errors": [0.0, 0.0], "f_drop": 0.0, "q": 0.0, "C_W": 0.0, "L": 1e-9, "r": 1, "bound": 0.0}
    assert theory.descent_bound([0.5, 0.25], **zero | setting) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_tracking_error_stays_under_its_bound_and_reaches_its_limit(beta: float) -> None:
    chains, B, sigma = 400, 4, 1.2
    A, W = matrix(3, 2), torch.zeros(chains, 3, 2, dtype=torch.float64)
    etas = [0.3 * (1 + t) ** -0.9 for t in range(150)]
    *path, _ = run_muon(W, A, etas, scaled_decay(0.3), 0.1, beta=beta, noise=sigma / math.sqrt(B * 6))
    squares = torch.stack([frobenius(step.error) ** 2 for step in path])
    bounds = theory.tracking_error_bounds(
        etas, grad_start=frobenius(A).item(), sigma=sigma, beta=beta, B=B, L=1.0, r=2, q=0.1 / 0.3, bound=10.0
    )
    five_deviations = 5 * squares.std(1) / math.sqrt(chains)
    assert (squares.mean(1) <= torch.tensor(bounds) + five_deviations).all()
    # Late in the run the error is noise alone, and independent noise averages to this over all beta.
    limit = theory.tracking_error_limit(sigma=sigma, beta=beta, B=B)
    floor = (1 - beta) / (1 + beta) * sigma**2 / B
    assert floor <= limit
    assert squares[-20:].mean().item() == pytest.approx(floor, rel=0.2)
    assert theory.noise_floor(sigma=sigma, beta=beta, r=2, B=B) == pytest.approx(2 * math.sqrt(2 * limit))


# Steady state


@given(r=positive, s=st.floats(0, 2), phi=unit, a=st.floats(-1, 1))
def test_the_exact_recursion_is_the_norm_of_the_sum(r: float, s: float, phi: float, a: float) -> None:
    expected = math.hypot((1 - phi) * r - s * a, s * math.sqrt(1 - a * a))
    assert theory.next_norm(r, s=s, phi=phi, a=a) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_exact_recursion_follows_real_matrices() -> None:
    W, phi, eta = matrix(6, 4), 0.01, 0.3
    direction = polar(matrix(6, 4, seed=1))
    s = eta * 0.2  # 0.2 sqrt(max(m, n)) makes the RMS of an orthogonal update 0.2
    a = ((W * direction).sum() / W.norm() / direction.norm()).item()
    after = (1 - phi) * W - 0.2 * math.sqrt(6) * eta * direction
    predicted = theory.next_norm(W.norm().item() / math.sqrt(24), s=s, phi=phi, a=a)
    assert predicted == pytest.approx(after.norm().item() / math.sqrt(24), rel=1e-13)


@given(s=st.floats(1e-5, 1e-2), phi=st.floats(1e-8, 1e-2), a=st.floats(-0.7, 0.7))
def test_the_steady_state_is_the_fixed_point_for_either_sign(s: float, phi: float, a: float) -> None:
    r_star = theory.steady_state_norm(s=s, phi=phi, a=a)
    assert theory.next_norm_simplified(r_star, s=s, phi=phi, a=a) == pytest.approx(r_star, rel=1e-12)


def test_a_strong_inward_push_does_not_cancel() -> None:
    s, phi, a = 1e-3, 1e-20, 0.5
    assert theory.steady_state_norm(s=s, phi=phi, a=a) == pytest.approx(s / (2 * a), rel=4 * EPS)
    assert s / (2 * phi) * (-a + math.sqrt(a * a + 2 * phi)) == 0.0  # the textbook root


@pytest.mark.parametrize("a", [-0.02, 0.0, 0.02])
def test_both_relaxation_times_are_those_of_the_recursion(a: float) -> None:
    s, phi = 1e-3, 5e-4
    r_star = theory.steady_state_norm(s=s, phi=phi, a=a)

    def measured(alignment: Callable[[float], float]) -> float:
        """Steps per e-fold of a small displacement."""
        r = first = r_star * (1 + 1e-6)
        for _ in range(100):
            r = theory.next_norm_simplified(r, s=s, phi=phi, a=alignment(r))
        return 100 / math.log((first - r_star) / (r - r_star))

    following = measured(lambda r: a * r_star / r)
    fixed = measured(lambda _: a)
    # A step of a recursion with multiplier 1 - x decays by -log(1 - x) = x + x^2/2.
    assert following == pytest.approx(theory.relaxation_time(phi), rel=phi + 1e-4)
    tau = theory.relaxation_time_fixed_alignment(s=s, phi=phi, a=a)
    assert fixed == pytest.approx(tau, rel=1 / tau + 1e-4)
    assert (tau > following * 1.1, tau < following / 1.1) == (a < 0, a > 0)


def test_limits_of_the_paper() -> None:
    scaled = theory.scaled_decay_norm_limit(lam=0.1, eta_max=4.8e-3, k=20.8)
    constant = theory.constant_decay_norm_limit(lam=0.1, a0=7.4e-3)
    assert (f"{scaled:.3f}", f"{constant:.4f}") == ("0.204", "0.0148")


@pytest.mark.parametrize("eta", [4.8e-3, 4.8e-4, 4.8e-8])
def test_scaled_limit_holds_at_every_rate_and_constant_one_only_at_zero(eta: float) -> None:
    lam, eta_max, k, a0 = 0.1, 4.8e-3, 20.8, 7.4e-3
    scaled = theory.steady_state_norm(s=0.2 * eta, phi=lam * eta**2 / eta_max, a=-k * eta)
    assert scaled == pytest.approx(theory.scaled_decay_norm_limit(lam=lam, eta_max=eta_max, k=k), rel=1e-12)
    constant = theory.steady_state_norm(s=0.2 * eta, phi=lam * eta, a=-a0 - 40.5 * eta)
    limit = theory.constant_decay_norm_limit(lam=lam, a0=a0)
    assert constant > limit
    # To first order sqrt(a^2 + 2 lambda eta) adds lambda eta / a, and the slope of the fit 40.5 eta.
    excess = (40.5 * eta + lam * eta / (2 * a0)) / a0
    assert eta > 1e-6 or constant == pytest.approx(limit * (1 + excess), rel=1e-7)


def test_relaxation_number_of_cosine_runs() -> None:
    etas = [0.1 + 0.9 * (1 + math.cos(math.pi * (t + 0.5) / 1000)) / 2 for t in range(1000)]
    assert theory.relaxation_number(0.01 * eta for eta in etas) == pytest.approx(1.10 * 10, rel=1e-9)
    assert theory.relaxation_number(0.01 * eta**2 for eta in etas) == pytest.approx(0.8075 * 10, rel=1e-9)


def test_steady_state_functions_are_elementwise_on_tensors() -> None:
    s, phi = torch.tensor([1e-3, 2e-3]).double(), torch.tensor([1e-4, 5e-4]).double()
    a = torch.tensor([-0.01, 0.02]).double()
    for function in (theory.steady_state_norm, theory.relaxation_time_fixed_alignment):
        expected = [function(s=x, phi=y, a=z) for x, y, z in zip(s.tolist(), phi.tolist(), a.tolist(), strict=True)]
        assert function(s=s, phi=phi, a=a).tolist() == pytest.approx(expected, rel=4 * EPS)
    with pytest.raises(HypothesisError, match="phi > 0"):
        theory.steady_state_norm(s=s, phi=torch.tensor([1e-4, 0.0]), a=a)


# Hypotheses

SCALAR = {"a": 1.0, "c": 1.0, "lam": 0.1}
HARMONIC = SCALAR | {"gamma": 2.0, "t0": 4.0}
RECURSION = {"u1": 1.0, "t1": 0.0, "alpha": 1.0, "kappa": 1.0, "gamma": 2.0, "t0": 4.0}
CONVEX = {"mu": 1.0, "L": 2.0, "q": 0.1, "sigma": 1.0, "rho": 1.0, "x_star": 1.0}
RATE = CONVEX | {"u1": 1.0, "t1": 20.0, "gamma": 2.0, "t0": 8.0}
FLOOR = {"sigma": 1.0, "beta": 0.9, "r": 4, "B": 8}
STEP = {"s": 0.1, "phi": 0.01, "a": 0.0}


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "change", "hypothesis"),
    [
        (theory.constant_decay_fixed_point, (), SCALAR, {"lam": 0.0}, "lambda > 0"),
        (theory.constant_decay_fixed_point, (), SCALAR, {"lam": math.nan}, "lambda > 0"),
        (theory.constant_decay_loss_gap, (), SCALAR, {"a": -1.0}, "a > 0"),
        (theory.frozen_point, (0.0, [0.5, 0.95]), SCALAR, {}, "eta <= 1/(a + lambda)"),
        (theory.frozen_point, (0.0, [-0.5]), SCALAR, {}, "eta >= 0"),
        (theory.scaled_decay_error, (10,), HARMONIC, {"gamma": 1.0}, "a*gamma > 1"),
        (theory.scaled_decay_error, (10,), HARMONIC, {"t0": 0.0}, "t0 > 0"),
        (theory.muon_radius, (-0.1,), {}, {}, "lambda > 0"),
        (theory.muon_norm_bounds, (1.0, [0.5, 11.0]), {"lam": 0.1}, {}, "eta*lambda <= 1"),
        (theory.muon_loss_floor, ([-1.0],), {"lam": 0.1}, {}, "sigma_max >= 0"),
        (theory.clip_projection, (torch.eye(2), -1.0), {}, {}, "radius >= 0"),
        (theory.check_schedule, ([],), {}, {}, "the schedule has a step"),
        (theory.check_schedule, ([0.1],), {"lam": 0.1}, {"lam": -1.0}, "lambda > 0"),
        (PowerLaw, (0.0, 1.0), {}, {}, "eta0 > 0"),
        (theory.sa_bound, (5,), RECURSION, {"gamma": 1.0}, "alpha*gamma > 1"),
        (theory.sa_bound, (5,), RECURSION, {"t0": 1.0}, "alpha*eta <= 1"),
        (theory.sa_bound, (5,), RECURSION, {"t1": 6.0}, "t >= t1"),
        (theory.sa_constant, (), RECURSION, {"kappa": -1.0}, "kappa >= 0"),
        (theory.strongly_convex_kappa, (0.1,), CONVEX, {"sigma": -1.0}, "sigma >= 0"),
        (theory.strongly_convex_kappa, (0.1,), CONVEX, {"mu": 3.0}, "0 < mu <= L"),
        (theory.strongly_convex_kappa, (0.1,), CONVEX, {"rho": 0.5}, "rho >= 1"),
        (theory.strongly_convex_kappa, (1.5,), CONVEX, {}, "mu*eta <= 1"),
        (theory.strongly_convex_kappa, (0.5,), CONVEX, {}, "K1*eta + K2*eta^3 <= mu"),
        (theory.strongly_convex_bound, (99,), RATE, {"gamma": 1.0}, "mu*gamma > 1"),
        (theory.noise_floor, (), FLOOR, {"sigma": -1.0}, "sigma >= 0"),
        (theory.noise_floor, (), FLOOR, {"beta": 1.0}, "0 <= beta < 1"),
        (theory.noise_floor, (), FLOOR, {"B": 0}, "B > 0"),
        (theory.noise_floor, (), FLOOR, {"r": 0}, "r >= 1"),
        (theory.alignment_bound, (1.0, -1.0), {"r": 2}, {}, "|E|_F >= 0"),
        (theory.next_norm, (1.0,), STEP, {"phi": 1.5}, "0 <= phi <= 1"),
        (theory.next_norm, (1.0,), STEP, {"a": 1.5}, "-1 <= a <= 1"),
        (theory.next_norm_simplified, (0.1,), STEP, {"a": 1.0}, "(1 - 2*phi)*r^2 - 2*s*a*r + s^2 >= 0"),
        (theory.steady_state_norm, (), STEP, {"phi": 0.0}, "phi > 0"),
        (
            theory.scaled_decay_norm_limit,
            (),
            {"lam": 0.1, "eta_max": 0.01, "k": 1.0},
            {"lam": 0.0},
            "lambda > 0",
        ),
        (theory.constant_decay_norm_limit, (), {"lam": 0.1, "a0": 0.0}, {"a0": -1.0}, "a0 >= 0"),
    ],
)
def test_a_violated_hypothesis_is_named(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    settings: dict[str, float],
    change: dict[str, float],
    hypothesis: str,
) -> None:
    if change:
        function(*arguments, **settings)
    with pytest.raises(HypothesisError) as error:
        function(*arguments, **settings | change)
    assert error.value.hypothesis == hypothesis
    assert hypothesis in str(error.value)


def test_stationarity_needs_small_steps() -> None:
    setting = {"f_gap": 1.0, "L": 1.0, "q": 0.1, "sigma": 0.0, "bound": 1.0}
    with pytest.raises(HypothesisError, match=r"eta <= 1/\(4\*L\*rho\)"):
        theory.stationarity_bound([0.3], **setting)


def test_curvature_without_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="a needs lam"):
        theory.check_schedule([0.1], a=1.0)
