"""Telemetry computed the slow way: float64, from weights saved before and after a step."""

import copy

import torch

from muonsw.matrices import MatrixView


def rms(x):
    return x.square().mean().sqrt().item()


def cosine(x, y):
    return (torch.sum(x * y) / (x.norm() * y.norm())).item()


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


class Step:
    """One step of an optimizer, with `before`, `after`, `grads` and `momenta` in float64."""

    def __init__(self, optimizer, params, step=None):
        self.params = params
        self.before = [p.detach().double().clone() for p in params]
        self.grads = [p.grad.detach().double().clone() for p in params]
        (step or optimizer.step)()
        self.after = [p.detach().double().clone() for p in params]
        states = [optimizer.state[p] for p in params]
        actual = [s.get("momentum_buffer", s.get("exp_avg")) for s in states]
        self.momenta = [None if m is None else m.detach().double().clone() for m in actual]

    def updates(self, phis):
        """Each change without its decay: u in W' = (1 - phi) W - u."""
        return [(1 - phi) * w - v for w, v, phi in zip(self.before, self.after, phis, strict=True)]

    def expected(self, phis, chosen=None):
        """The values of an aggregate over the parameters with these numbers."""
        chosen = range(len(self.params)) if chosen is None else chosen
        updates = self.updates(phis)
        w, u, g = (flat(ts[i] for i in chosen) for ts in (self.before, updates, self.grads))
        change = flat(self.after[i] - self.before[i] for i in chosen)
        values = {
            "weight_rms": rms(w),
            "update_rms": rms(u),
            "relative_update": rms(u) / rms(w),
            "applied_rms": rms(change),
            "gradient_rms": rms(g),
            "alignment_update": cosine(w, u),
            "alignment_gradient": cosine(w, g),
            "decay": sum(phis[i] * self.before[i].numel() for i in chosen) / len(w),
            "numel": len(w),
        }
        with_momentum = [i for i in chosen if self.momenta[i] is not None]
        if with_momentum:
            m = flat(self.momenta[i] for i in with_momentum)
            values["alignment_momentum"] = cosine(flat(self.before[i] for i in with_momentum), m)
        return values

    def mean_cosine(self, others):
        """The mean over parameters of the mean over the matrices of a stack."""
        means = []
        for w, x in zip(self.before, others, strict=True):
            area = w[0].numel() if w.dim() == 3 else w.numel()
            pairs = zip(w.reshape(-1, area), x.reshape(-1, area), strict=True)
            means.append(torch.tensor([cosine(a, b) for a, b in pairs]).mean().item())
        return sum(means) / len(means)


def directions(optimizer, params):
    """Muon's directions of the coming step, before the shape scale, from a copy of the optimizer at learning rate 1.

    The copy decays nothing and stretches nothing, so its weights move by the directions.
    """
    twin = copy.deepcopy(optimizer)
    for group, copied in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, q in zip(group["params"], copied["params"], strict=True):
            q.grad = p.grad.clone()
            q.data.zero_()
        copied.update(lr=1.0, weight_decay=0.0, scale="none", decay="none")
    twin.step()
    pairs = zip(optimizer.param_groups, twin.param_groups, strict=True)
    moved = {p: -q.detach().double() for a, b in pairs for p, q in zip(a["params"], b["params"], strict=True)}
    return [moved[p] for p in params]


def defects(direction, matrix=None):
    """||O||_F / sqrt(min(m, n)) of each matrix in a direction."""
    _, rows, columns = next(MatrixView(matrix).cells(direction.shape))
    norms = direction.reshape(-1, rows * columns).norm(dim=1)
    return (norms / min(rows, columns) ** 0.5).tolist()


def assert_values(record, expected, rel=2e-5, absolute=3e-6):
    """A record's values agree with those expected, cosines absolutely and sizes relatively.

    Expected updates are differences of float32 weights: an element of 3e-3 is off by 1e-5, a cosine of 200 of them by
    7e-7 on average, of which four times is allowed.
    """
    for name, value in expected.items():
        allowed = absolute if name.startswith("alignment") else rel * abs(value)
        assert abs(record[name] - value) <= allowed, f"{name}: {record[name]} instead of {value}"
