"""Small problems that many tests run optimizers on."""

import io
import math
import warnings

import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW, NonFiniteGradientWarning
from muonsw.nonfinite import Flag, all_finite
from muonsw.reference import Decay, ReferenceAdamWSW, ReferenceMuonSW, ReferenceSGDSW, ns5


def lion(params, **options):
    """Lion, which has no class of its own."""
    return MuonSW([{"params": params, "algorithm": "lion"}], **options)


def dion2(params, **options):
    """Dion2, which has no class either."""
    return MuonSW([{"params": params, "algorithm": "dion2"}], **options)


def reference_muon(W, decay):
    return ReferenceMuonSW(W, decay, nesterov=True, heavy_ball=False, orthogonalize=ns5)


WITH_REFERENCE = {
    "muon": (MuonSW, reference_muon),
    "adamw": (AdamWSW, ReferenceAdamWSW),
    "sgd": (SGDSW, ReferenceSGDSW),
}
OPTIMIZERS = {"muon": MuonSW, "adamw": AdamWSW, "sgd": SGDSW, "lion": lion, "dion2": dion2}


# Options that decay rules need, for runs of at most a thousand steps.
RULE_OPTIONS = {"cosine": {"total_steps": 1000}}


def phi_of(rule, lam, lr, peak, step, mean_squares, steps=1000):
    """The reference's decay of one step; `mean_squares` are those of the gradients so far."""
    decay = Decay(rule, lam, peak, steps)
    decay.t = step
    for square in mean_squares:
        decay.v = decay.beta2 * decay.v + (1 - decay.beta2) * square
    return decay.phi(lr)


def mean_square(params):
    """The mean squared gradient over all elements of all parameters."""
    return sum(float(p.grad.double().square().sum()) for p in params) / sum(p.numel() for p in params)


def matrices(*shapes, dtype=torch.float32, seed=0):
    """Random parameters of the given shapes, with standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    return [nn.Parameter((0.1 * values).to(dtype)) for values in drawn]


def set_gradients(params, step, seed=0):
    """Set gradients that depend only on the step, the same for every optimizer."""
    for number, param in enumerate(params):
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + number)
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64, device="cpu")
        param.grad = grad.to(param.dtype)


def run(optimizer, params, steps, *, start=0, schedule=None, scheduler=None):
    """Feed an optimizer `steps` steps of `set_gradients`, with a schedule or a torch scheduler."""
    for step in range(start, start + steps):
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
        set_gradients(params, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def follow(optimizer, params, references, steps, schedule):
    """Feed an optimizer and references the same gradients; the largest relative distance of a weight at the end."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        set_gradients(params, step)
        for param, reference in zip(params, references, strict=True):
            reference.step(param.grad, schedule(step))
        optimizer.step()
    return max(float((p.detach().double() - r.W).norm() / r.W.norm()) for p, r in zip(params, references, strict=True))


def via_file(state):
    """Save and load plain data."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_resumes(build, params, optimizer, *, start, steps=4):
    """An optimizer of `build(params)` that loads this one's state from a file takes the same steps; return it."""
    resumed = clones(params)
    other = build(resumed)
    other.load_state_dict(via_file(optimizer.state_dict()))
    run(optimizer, params, steps, start=start)
    run(other, resumed, steps, start=start)
    assert_same(params, resumed)
    return other


def step_with_nan(optimizer, params, number):
    """A step whose last gradient holds a NaN, which is skipped."""
    set_gradients(params, number)
    params[-1].grad[0, 0] = torch.nan
    with warnings.catch_warnings(action="ignore", category=NonFiniteGradientWarning):
        optimizer.step()


def flag_on_device(work, *_):
    """Replace `muonsw.step.finite_flag`: the host never learns of bad gradients, as on accelerators."""
    return Flag((~all_finite([grad for batch in work for grad in batch.grads])).float())


def tensors_of(optimizer, params):
    """Copies of the weights and of their state."""
    return [t.detach().clone() for p in params for t in (p, *optimizer.state.get(p, {}).values())]


def clones(params):
    """Independent copies of parameters."""
    return [nn.Parameter(p.detach().clone()) for p in params]


def assert_same(left, right):
    """Bit-for-bit equality of two lists of tensors, or of two dictionaries of them."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = left.values(), [right[name] for name in left]
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {number} differs by {(a - b).abs().max()}"


def cosine(peak, total, final=0.1):
    """A cosine from `peak` to `final * peak`, as a function of the step."""
    return lambda t: peak * (final + (1 - final) * (1 + math.cos(math.pi * min(t, total) / total)) / 2)
