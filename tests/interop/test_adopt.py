"""Taking over a Muon + AdamW pair in mid-run: the next step is what the pair would have done."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from muonsw import SGDSW, MuonSW, PeakLRWarning
from muonsw.orthogonalize import newton_schulz


class Net(nn.Module):
    """Hidden matrices of two shapes, a head, an embedding, norms, a convolution and experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv = nn.Conv2d(4, 8, 3)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 12, bias=False)


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def go(model, optimizers, start, end, schedulers=()):
    for step in range(start, end):
        set_gradients(model, step)
        for optimizer in (*optimizers, *schedulers):
            optimizer.step()


class PairLayout(Optimizer):
    """Steps written out by hand; subclasses have the group and state keys of other people's optimizers."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.count(group)
            for param in group["params"]:
                self.state[param] = self.state[param] or self.fresh(group, param)
                direction = self.direction(group, param, self.state[param])
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction.view_as(param))

    def count(self, group):
        pass

    @staticmethod
    def adam(m, v, grad, betas, eps, step):
        m.lerp_(grad, 1 - betas[0])
        v.lerp_(grad.square(), 1 - betas[1])
        return m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)


class Jordan(PairLayout):
    """`use_muon` in groups; `momentum_buffer`, or `exp_avg`, `exp_avg_sq` and a plain `step`, in states."""

    def __init__(self, groups):
        super().__init__(groups, {})

    def fresh(self, group, param):
        if group["use_muon"]:
            return {"momentum_buffer": torch.zeros_like(param)}
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param), "step": 0}

    def direction(self, group, param, state):
        if not group["use_muon"]:
            state["step"] += 1
            return self.adam(
                state["exp_avg"], state["exp_avg_sq"], param.grad, group["betas"], group["eps"], state["step"]
            )
        beta = group["momentum"]
        state["momentum_buffer"].lerp_(param.grad, 1 - beta)
        ahead = param.grad.lerp(state["momentum_buffer"], beta)
        stretch = max(1, param.shape[-2] / param.shape[-1]) ** 0.5
        return newton_schulz(ahead.flatten(1), steps=5, dtype=torch.float32) * stretch


class Dion(PairLayout):
    """`mu`, `algorithm` and `step` in groups; `momentum` and `variance` in states; heavy-ball momentum."""

    def __init__(self, groups, **defaults):
        usual = {"lr": 0.01, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "algorithm": "muon"}
        usual |= {"step": 0, "epsilon": 1e-8, "nesterov": False, "flatten": True, "adjust_lr": "spectral_norm"}
        super().__init__(groups, {**usual, **defaults})

    def count(self, group):
        group["step"] += 1

    def fresh(self, group, param):
        variance = {"variance": torch.zeros_like(param)} if group["algorithm"] == "adamw" else {}
        return {"momentum": torch.zeros_like(param), **variance}

    def direction(self, group, param, state):
        if group["algorithm"] == "adamw":
            betas = (group["beta1"], group["beta2"])
            return self.adam(state["momentum"], state["variance"], param.grad, betas, group["epsilon"], group["step"])
        state["momentum"].mul_(group["mu"]).add_(param.grad)
        ahead = state["momentum"] * group["mu"] + param.grad if group["nesterov"] else state["momentum"]
        matrix = ahead.flatten(1)
        stretch = {
            "spectral_norm": math.sqrt(matrix.shape[0] / matrix.shape[1]),
            "rms_norm": 0.2 * math.sqrt(max(matrix.shape)),
            None: 1.0,
        }[group["adjust_lr"]]
        return newton_schulz(matrix, steps=5, dtype=torch.float32) * stretch


def split(model, *, head_by_muon=False):
    """As people write it: matrices by their number of axes. The head may be among them, unlike in `for_model`."""
    chosen = ("up.weight", "down.weight", "conv.weight", *(["head.weight"] if head_by_muon else []))
    named = dict(model.named_parameters())
    return [named[name] for name in chosen], [param for name, param in named.items() if name not in chosen]


def jordan(model, **split_options):
    matrices, rest = split(model, **split_options)
    muon = {"params": matrices[::-1], "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    adam = {"params": rest, "use_muon": False, "lr": 0.003, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    return [Jordan([adam, muon])]


def dion(model, adjust_lr="spectral_norm", nesterov=True, **split_options):
    matrices, rest = split(model, **split_options)
    groups = [{"params": rest, "algorithm": "adamw", "lr": 0.003}, {"params": matrices, "lr": 0.02}]
    return [Dion(groups, adjust_lr=adjust_lr, nesterov=nesterov)]


def torchs_adamw_with_a_hand_written_muon(model, **split_options):
    """A group that holds a rate, a momentum and a decay, and no more, is Jordan's Muon by itself."""
    matrices, rest = split(model, **split_options)

    class Alone(Jordan):
        def direction(self, group, param, state):
            return super().direction({**group, "use_muon": True}, param, state)

        def fresh(self, group, param):
            return super().fresh({**group, "use_muon": True}, param)

    muon = Alone([{"params": matrices, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}])
    return [torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.99), weight_decay=0.05), muon]


PAIRS = {
    "jordan": jordan,
    "dion": dion,
    "dion_rms": lambda m, **o: dion(m, "rms_norm", nesterov=False, **o),
    "dion_none": lambda m, **o: dion(m, None, **o),
    "torch_and_jordan": torchs_adamw_with_a_hand_written_muon,
}


@pytest.mark.parametrize("head_by_muon", [False, True], ids=["as_we_route", "head_by_muon"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_next_steps_are_the_pairs(pair, head_by_muon):
    theirs, ours = Net(), Net()
    old, other = (PAIRS[pair](model, head_by_muon=head_by_muon) for model in (theirs, ours))
    go(theirs, old, 0, 5)
    go(ours, other, 0, 5)
    optimizer = MuonSW.for_model(ours, lr=1.0, decay="constant", ns_dtype="float32")
    optimizer.adopt(*other)
    head = next(group for group in optimizer.param_groups if "head.weight" in group["param_names"])
    assert head["algorithm"] == ("muon" if head_by_muon else "adamw")
    go(theirs, old, 5, 8)
    go(ours, [optimizer], 5, 8)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_a_group_that_becomes_muons_has_the_optimizers_own_options_of_muon():
    """The head was AdamW's until now, so its group held no options of Muon worth keeping."""
    model = Net()
    pair = dion(model, head_by_muon=True)
    go(model, pair, 0, 1)
    chosen = {"ns_dtype": "float32", "ns_steps": 7, "orthogonalizer": "polar_express"}
    optimizer = MuonSW.for_model(model, lr=1.0, decay="constant", **chosen)
    optimizer.adopt(*pair)
    head = next(group for group in optimizer.param_groups if "head.weight" in group["param_names"])
    assert {key: head[key] for key in chosen} == chosen


def torch_pair(model):
    named = dict(model.named_parameters())
    matrices = [named["down.weight"], named["up.weight"]]
    rest = [param for param in named.values() if all(param is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [torch.optim.AdamW(rest, lr=0.003, weight_decay=0.0), muon]


def test_torchs_own_pair_with_its_schedulers():
    """torch iterates in bfloat16, so directions agree to its rounding; AdamW's agree to float32's."""
    theirs, ours = Net(), Net()
    old, other = torch_pair(theirs), torch_pair(ours)
    schedulers = [[CosineAnnealingLR(o, 20) for o in pair] for pair in (old, other)]
    go(theirs, old, 0, 5, schedulers[0])
    go(ours, other, 0, 5, schedulers[1])
    optimizer = MuonSW.for_model(ours, lr=1.0, decay="constant", ns_dtype="bfloat16")
    optimizer.adopt(*other)
    scheduler = CosineAnnealingLR(optimizer, 20, last_epoch=schedulers[1][0].last_epoch - 1)  # it takes one step itself
    before = {name: param.detach().clone() for name, param in ours.named_parameters()}
    go(theirs, old, 5, 8, schedulers[0])
    go(ours, [optimizer], 5, 8, [scheduler])
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        tolerance = 0.03 if name in ("up.weight", "down.weight") else 1e-4
        assert (a - b).norm() <= tolerance * (b - before[name]).norm(), name
    rates = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"muon": old[1].param_groups[0]["lr"], "adamw": old[0].param_groups[0]["lr"]})


def test_the_schedulers_record_gives_the_peak():
    model = Net()
    pair = torch_pair(model)
    go(model, pair, 0, 5, [CosineAnnealingLR(o, 10) for o in pair])
    optimizer = MuonSW.for_model(model, lr=1.0)
    optimizer.adopt(*pair)
    go(model, [optimizer], 5, 6)
    hidden = optimizer.param_groups[0]
    assert hidden["lr"] < hidden["resolved_peak_lr"] == 0.02
    assert optimizer.summary().groups[0].decay == pytest.approx(0.1 * hidden["lr"] ** 2 / 0.02)


def test_without_a_record_it_asks_for_the_peak():
    model = Net()
    pair = jordan(model)
    go(model, pair, 0, 2)
    optimizer = MuonSW.for_model(model, lr=1.0)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="pass peak_lr=<the highest"):
        optimizer.adopt(*pair)
    assert [dict(group) for group in optimizer.param_groups] == before
    optimizer.adopt(*pair, peak_lr=0.05)
    go(model, [optimizer], 2, 3)
    assert optimizer.summary().groups[0].decay == pytest.approx(0.1 * 0.02**2 / 0.05)


def decaying_pair(model):
    """Two rates, both with decay, half-way down their schedule."""
    pair = torch_pair(model)
    pair[0].param_groups[0]["weight_decay"] = 0.1
    schedulers = [CosineAnnealingLR(o, 10) for o in pair]
    go(model, pair, 0, 5, schedulers)
    return pair


def forget_records(optimizer):
    for group in optimizer.param_groups:
        del group["initial_lr"]


@pytest.mark.parametrize("how", ["adopt", "constructor"])
def test_one_peak_for_the_pair_is_that_of_the_higher_rate(how):
    model = Net()
    pair = decaying_pair(model)
    for old in pair:
        forget_records(old)
    optimizer = MuonSW.for_model(model, lr=1.0, **({"peak_lr": 0.02} if how == "constructor" else {}))
    optimizer.adopt(*pair, **({"peak_lr": 0.02} if how == "adopt" else {}))
    expected = {"muon": 0.02, "adamw": 0.003}
    for group in optimizer.param_groups:
        assert group["peak_lr"] == pytest.approx(expected[group["algorithm"]])


def test_a_peak_that_a_scheduler_recorded_is_kept():
    model = Net()
    pair = decaying_pair(model)
    forget_records(pair[0])  # AdamW had no scheduler, and its peak alone is asked for
    optimizer = MuonSW.for_model(model, lr=1.0)
    with pytest.raises(ValueError, match="pass peak_lr=<the highest"):
        optimizer.adopt(*pair)
    optimizer.adopt(*pair, peak_lr=0.003)
    go(model, [optimizer], 5, 6)
    for group in optimizer.summary().groups:
        assert group.peak_lr is None or group.peak_lr == (0.02 if group.algorithm == "muon" else 0.003)


def test_a_peak_that_no_group_takes_is_warned_of():
    model = Net()
    pair = decaying_pair(model)
    optimizer = MuonSW.for_model(model, lr=1.0)
    with pytest.warns(PeakLRWarning, match=r"or from schedulers, 0\.02 the highest, so peak_lr=0\.05"):
        optimizer.adopt(*pair, peak_lr=0.05)
    go(model, [optimizer], 5, 6)
    assert optimizer.summary().groups[0].peak_lr == 0.02
    optimizer.set_peak_lr(0.05)
    assert {round(group["peak_lr"], 6) for group in optimizer.param_groups} == {0.05, 0.0075}


def test_peaks_that_groups_have_of_their_own_survive():
    model = Net()
    pair = decaying_pair(model)
    for old in pair:
        forget_records(old)
    patterns = {"role:hidden": {"peak_lr": 0.03}}
    optimizer = MuonSW.for_model(model, lr=1.0, peak_lr=0.004, patterns=patterns)
    optimizer.adopt(*pair)
    assert {g["peak_lr"] for g in optimizer.param_groups if g["role"] == "hidden"} == {0.03}


def test_an_adopted_state_saves_and_loads():
    model, copied = Net(), Net()
    pair = jordan(model)
    go(model, pair, 0, 3)
    optimizer = MuonSW.for_model(model, lr=1.0, decay="constant")
    optimizer.adopt(*pair)
    copied.load_state_dict(model.state_dict())
    # Two groups of ours were divided by nothing here, so a fresh optimizer has the same ones.
    again = MuonSW.for_model(copied, lr=1.0, decay="constant")
    again.load_state_dict(optimizer.state_dict())
    go(model, [optimizer], 3, 5)
    go(copied, [again], 3, 5)
    for a, b in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (lambda m: [torch.optim.AdamW(list(m.parameters())[:2])], "are in none of those"),
        (lambda m: [torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.ones(2))])], "are not in this optimizer"),
        (lambda m: [torch.optim.AdamW(m.parameters(), amsgrad=True)], "amsgrad"),
        (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)], "adds to the gradient"),
        (lambda m: [torch.optim.Adagrad(m.parameters())], "a layout that is not known"),
        (lambda m: [Dion([{"params": list(m.parameters()), "algorithm": "nordion2"}])], "trained by 'nordion2'"),
        (lambda m: [Dion([{"params": list(m.parameters()), "num_heads": 2}])], "num_heads=2"),
    ],
    ids=["too_few", "too_many", "amsgrad", "coupled", "unknown", "nordion2", "heads"],
)
def test_what_cannot_be_adopted(others, message):
    model = Net()
    optimizer = MuonSW.for_model(model, lr=0.1, decay="constant")
    with pytest.raises(ValueError, match=message):
        optimizer.adopt(*others(model))


def test_lion_and_dion2_are_taken_over():
    model = Net()
    matrices, rest = split(model)
    own = {"algorithm": "dion2", "ef_decay": 0.9, "fraction": 0.5, "flatten": True}
    other = Dion([{"params": matrices, **own}, {"params": rest, "algorithm": "lion", "beta2": 0.99}])
    for param in model.parameters():
        other.state[param]["momentum"] = torch.randn_like(param)
    optimizer = MuonSW.for_model(model, lr=0.1, decay="constant")
    optimizer.adopt(other)
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    for param in matrices:
        assert [groups[param][key] for key in ("algorithm", "momentum", "fraction")] == ["dion2", 0.9, 0.5]
        assert torch.equal(optimizer.state[param]["momentum_buffer"], other.state[param]["momentum"])
    for param in rest:
        assert [groups[param][key] for key in ("algorithm", "betas")] == ["lion", (0.9, 0.99)]
        assert torch.equal(optimizer.state[param]["exp_avg"], other.state[param]["momentum"])
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()


def test_normuon_of_dion_is_taken_over_with_its_averages():
    """Of a convolution it has an average for each row of the kernel, which begins anew here."""
    model = Net()
    matrices, rest = split(model, head_by_muon=True)
    own = {"algorithm": "normuon", "muon_beta2": 0.9}
    other = Dion([{"params": matrices, **own}, {"params": rest, "algorithm": "adamw", "step": 3}])
    for param in matrices:
        other.state[param] = {"momentum": torch.randn_like(param), "variance_neuron": torch.rand_like(param[..., :1])}
    for param in rest:
        other.state[param] = {"momentum": torch.randn_like(param), "variance": torch.rand_like(param)}
    optimizer = MuonSW.for_model(model, lr=0.1, decay="constant")
    optimizer.adopt(other)
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    for param in matrices:
        chosen = [groups[param][key] for key in ("normalize", "normalize_beta2", "normalize_eps")]
        assert chosen == ["normuon", 0.9, 1e-8]
        if param.dim() == 2:
            assert torch.equal(optimizer.state[param]["exp_avg_sq_row"], other.state[param]["variance_neuron"])
        else:
            assert "exp_avg_sq_row" not in optimizer.state[param]
        param.grad = torch.randn_like(param)
    optimizer.step()


def test_the_scheduler_is_made_afterwards():
    model = Net()
    optimizer = MuonSW.for_model(model, lr=0.1)
    CosineAnnealingLR(optimizer, 10)
    with pytest.raises(ValueError, match="adopt first"):
        optimizer.adopt(*torch_pair(model))


def test_plain_sgd_goes_on():
    theirs, ours = Net(), Net()
    old, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True) for m in (theirs, ours))
    go(theirs, [old], 0, 3)
    go(ours, [other], 0, 3)
    optimizer = SGDSW.for_model(ours, lr=1.0, weight_decay=0.0)
    optimizer.adopt(other)
    go(theirs, [old], 3, 6)
    go(ours, [optimizer], 3, 6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rates_in_tensors_are_reported_apart_by_their_numbers():
    """They print alike."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    rates = [torch.tensor(1.1e-4), torch.tensor(1.4e-4), torch.tensor(1.1e-4)]
    assert len(set(map(str, rates))) == 1
    groups = [{"params": [layer.weight], "lr": lr} for layer, lr in zip(model, rates, strict=True)]
    pair = torch.optim.AdamW(groups, weight_decay=0.1)
    optimizer = MuonSW.for_model(model, lr=0.1, decay="constant")
    optimizer.adopt(pair)
    found = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name: float(lr) for name, lr in found.items()} == {f"{i}.weight": float(lr) for i, lr in enumerate(rates)}
    assert len(optimizer.param_groups) == 2


def test_what_is_filled_there_afterwards_does_not_reach_us():
    model = Net()
    lr = torch.tensor(0.003)
    pair = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    optimizer = MuonSW.for_model(model, lr=1.0, decay="constant")
    optimizer.adopt(pair)
    rates = [group["lr"] for group in optimizer.param_groups]
    lr.fill_(0.5)
    rates[0].fill_(0.25)
    assert [float(rate) for rate in rates] == pytest.approx([0.25, *[0.003] * (len(rates) - 1)])


def test_a_parameter_that_two_optimizers_hold_is_refused():
    model = Net()
    adamw, muon = torch_pair(model)
    adamw.add_param_group({"params": [model.up.weight]})
    optimizer = MuonSW.for_model(model, lr=1.0, decay="constant")
    for order in ((adamw, muon), (muon, adamw)):
        names = " and in ".join(type(other).__name__ for other in order)
        with pytest.raises(ValueError, match=f"up.weight is in {names}"):
            optimizer.adopt(*order)


@pytest.mark.parametrize("joined", [0, 5, 50, 90])
def test_the_rest_of_the_schedule_decays_as_an_uninterrupted_run(joined):
    """Below its peak and falling, the rate is where the run has brought it: no warning (here an error), right decay."""
    model, total = Net(), 100
    pair = torch_pair(model)
    schedulers = [CosineAnnealingLR(o, total) for o in pair]
    go(model, pair, 0, joined, schedulers)
    optimizer = MuonSW.for_model(model, lr=0.02)
    optimizer.adopt(*pair)
    scheduler = CosineAnnealingLR(optimizer, total, last_epoch=schedulers[0].last_epoch - 1)
    for step in range(joined, total):
        go(model, [optimizer], step, step + 1, [scheduler])
        lr = 0.01 * (1 + math.cos(math.pi * step / total))
        assert optimizer.summary().groups[0].decay == pytest.approx(0.1 * lr**2 / 0.02, rel=1e-6, abs=1e-15), step


def test_rules_that_follow_the_step_count_on():
    model = Net()
    pair = torch_pair(model)
    go(model, pair, 0, 10)
    optimizer = MuonSW.for_model(model, lr=0.02, decay="cosine", total_steps=40)
    optimizer.adopt(*pair)
    go(model, [optimizer], 10, 11)
    assert optimizer.summary().groups[0].decay == pytest.approx(0.1 * 0.02 * (1 + math.cos(math.pi * 10 / 40)) / 2)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, momentum=0.9)])
def test_a_state_of_another_shape_is_refused_with_nothing_changed(make):
    """As after a layer was cut down in mid-run, and its optimizer was not told."""
    param = nn.Parameter(torch.ones(4, 3))
    other, optimizer = make([param]), SGDSW([param], lr=0.1, weight_decay=0.0, momentum=0.5)
    param.grad = torch.ones(4, 3)
    for one in (other, optimizer):
        one.step()
    param.grad, param.data = None, param.data[:2]
    other.param_groups[0]["weight_decay"] = 0.0
    buffer = optimizer.state[param]["momentum_buffer"]
    with pytest.raises(
        ValueError, match=r"of parameter 0 of group 0 has shape \(4, 3\), but the parameter has \(2, 3\)"
    ):
        optimizer.adopt(other)
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert optimizer.state[param]["momentum_buffer"] is buffer
