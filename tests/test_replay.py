"""Steps that are replayed from a CUDA graph: the same weights, whatever moves meanwhile. The rest needs no GPU."""

import copy
import pickle

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW, NonFiniteGradientWarning, Telemetry, machine, replay
from muonsw import optimizer as optimizer_module
from muonsw.replay import PATIENCE, SETTLED, binding
from tests.common.cuda import no_waiting
from tests.common.problems import OPTIMIZERS, cosine, matrices, set_gradients

SHAPES = [(64, 64), (32, 96), (4, 48, 32), (96, 32)]

on_a_gpu = pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device")


def optimizer_on(device, algorithm="muon", dtype=torch.float32, **options):
    params = [nn.Parameter(p.detach().to(device)) for p in matrices(*SHAPES, dtype=dtype)]
    groups = [
        {"params": params[:2], "algorithm": algorithm, "momentum": 0.9},
        {"params": params[2:], "algorithm": algorithm, "momentum": 0.9, "matrix": "stack", "weight_decay": 0.0},
    ]
    return MuonSW(groups, **{"lr": 0.05, "weight_decay": 0.3, **options}), params


def feed(params, step, *, in_place=True):
    """Gradients that depend on the step alone, in the same place as before or wherever they come to lie."""
    twins = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in params]
    set_gradients(twins, step)
    for param, twin in zip(params, twins, strict=True):
        if in_place and param.grad is not None:
            param.grad.copy_(twin.grad)
        else:
            param.grad = twin.grad.to(param.device)


def tensors_of(optimizer, params):
    return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]


def assert_same(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# On any device


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_on_a_cpu_steps_are_taken_as_written_and_that_is_told_once(algorithm):
    plain, params = optimizer_on("cpu", algorithm)
    replaying, twins = optimizer_on("cpu", algorithm, replay=True)
    for step in range(SETTLED + 3):
        feed(params, step)
        feed(twins, step)
        plain.step()
        if step:
            replaying.step()
        else:
            with pytest.warns(UserWarning, match="on cpu, not on one CUDA device"):
                replaying.step()
    assert_same(tensors_of(replaying, twins), tensors_of(plain, params))


def bound(optimizer):
    return binding(optimizer.param_groups, optimizer.state)


def test_a_graph_is_bound_to_what_it_reads_and_writes():
    optimizer, params = optimizer_on("cpu")
    feed(params, 0)
    optimizer.step()
    param, group, state = params[0], optimizer.param_groups[0], optimizer.state[params[0]]
    changes = {
        "parameters": lambda: setattr(param, "data", param.data.clone()),
        "gradients": lambda: setattr(param, "grad", param.grad.clone()),
        "state": lambda: state.update(momentum_buffer=state["momentum_buffer"].clone()),
        "options": lambda: group.update(momentum=0.8),
    }
    before, first = bound(optimizer), [param.data, param.grad, state["momentum_buffer"]]
    for changed, change in changes.items():
        change()
        assert bound(optimizer).difference(before) == changed
        before = bound(optimizer)
    assert all(tensor.numel() for tensor in first)  # alive until here, so that no address was used twice


def test_a_graph_is_not_bound_to_rates_peaks_and_counters():
    optimizer, params = optimizer_on("cpu", decay="log_time")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    feed(params, 0)
    optimizer.step()
    before = bound(optimizer)
    for step in range(3):
        feed(params, step)
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] *= 0.9
    assert bound(optimizer) == before
    optimizer.param_groups[0]["weight_decay"] = 0.0  # a norm rule would not act any more
    assert bound(optimizer).difference(before) == "options"


def test_a_parameter_without_gradient_gets_no_state_by_being_looked_at():
    optimizer, params = optimizer_on("cpu")
    assert bound(optimizer).gradients == ((), (), tuple(range(len(params))))
    assert not optimizer.state


def test_tensors_without_memory_of_their_own_are_bound_to_nothing():
    """Shells, as those of DTensors, have address zero wherever their numbers are; and so have tensors without any."""
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = AdamWSW([param, nn.Parameter(torch.ones(0, 3))], lr=0.1)
    param.grad = torch.ones(2, 3)
    assert bound(optimizer) is None
    del optimizer.param_groups[0]["params"][1]
    assert bound(optimizer) is not None
    param.grad = torch.ones(2, 3).to_sparse()
    assert bound(optimizer) is None


def test_copies_go_on_replaying():
    optimizer = AdamWSW(matrices((4, 4)), lr=0.1, replay=True)
    assert copy.deepcopy(optimizer).replay
    assert pickle.loads(pickle.dumps(optimizer)).replay


def test_many_ranks_and_replays_are_refused_together():
    with pytest.raises(ValueError, match="leave out process_group or replay"):
        MuonSW(matrices((4, 4)), lr=0.1, replay=True, process_group=object())


def test_sparse_gradients_are_refused_by_name():
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = AdamWSW(table.parameters(), lr=0.1, replay=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="is sparse"):
        optimizer.step()


class Repeated:
    """Stands for a graph where there are none: the program again, on the same tensors."""

    def __init__(self, program, device, pool):
        assert device.type == "cpu"
        assert pool is None or isinstance(pool, Repeated)
        self.replay = program

    def pool(self):
        return self


@pytest.fixture
def graphs_on_cpus(monkeypatch):
    monkeypatch.setattr(replay, "recorded", Repeated)
    monkeypatch.setattr(optimizer_module, "obstacle", lambda _work, _nonfinite: "")


def no_memory(*_arguments):
    raise MemoryError


def places_for(params, count):
    return [[torch.empty_like(param) for param in params] for _ in range(count)]


def run_over(places, order, *, algorithm="adamw", captured=True):
    """Steps whose gradients lie in one of several places, as `order` says."""
    optimizer, params = optimizer_on("cpu", algorithm, replay=True)
    buffers = places_for(params, places)
    for step, place in enumerate(order):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = cosine(0.05, len(order))(step)
        for param, grad in zip(params, buffers[place], strict=True):
            param.grad = grad
        feed(params, step)
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    return optimizer, params


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_each_of_several_places_gets_its_graph(algorithm):
    """The first steps of a place are taken as written, the fourth is captured; the very first lacks its state."""
    order = [0, 1, 2] * 8
    optimizer, params = run_over(3, order, algorithm=algorithm)
    assert len(optimizer._replay._graphs) == optimizer._replay._captures == 3
    assert optimizer._replay._replays == len(order) - 3 * (SETTLED + 1) - 1
    assert_same(tensors_of(optimizer, params), tensors_of(*run_over(3, order, algorithm=algorithm, captured=False)))


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.filterwarnings("ignore:replay=True")
def test_captures_are_rationed():
    """Gradients that leave their place as soon as it was captured do not cost a capture every few steps."""
    order = [place for place in range(60) for _ in range(SETTLED + 2)]
    optimizer, params = run_over(60, order)
    found = optimizer._replay
    assert len(found._graphs) == replay._REMEMBERED
    assert 0 <= found._captures - replay._FIRST_CAPTURES <= len(order) // replay._STEPS_FOR_A_CAPTURE
    assert_same(tensors_of(optimizer, params), tensors_of(*run_over(60, order, captured=False)))


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_loaded_state_is_the_one_that_moves():
    """Twice from one saved state, the second time with graphs of the state that it replaces."""
    optimizer, params = run_over(1, [0] * 8)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]

    def go_on():
        optimizer.load_state_dict(saved)
        for param, value in zip(params, weights, strict=True):
            param.data.copy_(value)
        for step in range(SETTLED + 4):
            feed(params, step)
            optimizer.step()
        assert optimizer._replay._replays
        return tensors_of(optimizer, params)

    assert_same(go_on(), go_on())


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_step_that_ends_in_an_error_leaves_nothing_for_the_next(monkeypatch):
    optimizer, params = run_over(1, [0] * 8)
    other, twins = run_over(1, [0] * 8)
    known = [param.grad for param in params]
    feed(params, 98, in_place=False)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_step_group", no_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    for param, grad in zip(params, known, strict=True):
        param.grad = grad
    for one, theirs in ((optimizer, params), (other, twins)):
        feed(theirs, 99)
        one.step()
        assert one._replay._chosen is not None
    assert_same(tensors_of(optimizer, params), tensors_of(other, twins))


@pytest.mark.usefixtures("graphs_on_cpus")
def test_measured_steps_are_written_and_change_nothing():
    optimizer, params = run_over(1, [0] * 8)
    other, twins = run_over(1, [0] * 8)
    feed(params, 99)
    feed(twins, 99)
    with Telemetry(other, every=1) as telemetry:
        optimizer.step()
        other.step()
        assert telemetry.last is not None
    assert_same(tensors_of(optimizer, params), tensors_of(other, twins))


@pytest.mark.usefixtures("graphs_on_cpus")
def test_what_keeps_steps_from_being_replayed_is_told_once():
    """Gradients that never lie in the same place, and a momentum that a scheduler moves."""
    with pytest.warns(UserWarning, match=r"gradients changed too often.*set_to_none=False") as told:
        run_over(PATIENCE + 20, range(PATIENCE + 20))
    assert len(told) == 1
    optimizer, params = optimizer_on("cpu", replay=True)
    for step in range(PATIENCE):
        feed(params, step)
        optimizer.param_groups[0]["momentum"] = 0.8 + 0.001 * step
        optimizer.step()
    with pytest.warns(UserWarning, match="options changed too often in 50 steps$"):
        optimizer.step()


# On a GPU

RULES = [
    {},
    {"decay": "constant", "cautious": True},
    {"decay": "cosine", "total_steps": 40},
    {"decay": "log_time"},
    {"norm": "hyperball"},
    {"nonfinite": "propagate"},
]


def trained(algorithm, *, captured, steps=16, begin=0, optimizer=None, params=None, **options):
    """A run whose optimizer captures, or never does because it forgets what it has seen."""
    if optimizer is None:
        optimizer, params = optimizer_on("cuda", algorithm, replay=True, **options)
    schedule = cosine(0.05, 16)
    for step in range(begin, steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        feed(params, step)
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    assert bool(optimizer._replay._graphs) == captured
    return optimizer, params


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_replayed_steps_are_the_written_ones_bit_for_bit(algorithm, dtype, options):
    replayed = tensors_of(*trained(algorithm, captured=True, dtype=dtype, **options))
    assert_same(replayed, tensors_of(*trained(algorithm, captured=False, dtype=dtype, **options)))


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_replayed_steps_are_those_of_a_plain_optimizer_up_to_rounding(algorithm):
    optimizer, params = optimizer_on("cuda", algorithm)
    for step in range(16):
        for group in optimizer.param_groups:
            group["lr"] = cosine(0.05, 16)(step)
        feed(params, step)
        optimizer.step()
    _, replayed = trained(algorithm, captured=True)
    for a, b in zip(replayed, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@on_a_gpu
@pytest.mark.gpu
def test_a_replay_waits_for_nothing_and_checks_the_learning_rate_at_once():
    optimizer, params = trained("muon", captured=True, steps=SETTLED + 4)
    optimizer.param_groups[0]["lr"] = 0.01
    with no_waiting():
        optimizer.step()
    before = tensors_of(optimizer, params)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match="peak"):
        optimizer.step()
    assert_same(tensors_of(optimizer, params), before)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_a_bad_gradient_changes_nothing_and_is_counted(algorithm):
    optimizer, params = trained(algorithm, captured=True, steps=SETTLED + 4)
    before = tensors_of(optimizer, params)
    params[1].grad[3, 3] = float("nan")
    optimizer.step()
    optimizer.step()
    assert_same(tensors_of(optimizer, params), before)
    assert optimizer.skipped_steps == 2
    with pytest.warns(NonFiniteGradientWarning):
        optimizer.check()
    feed(params, 99)
    optimizer.step()
    assert not torch.equal(params[0], before[0])


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_whatever_moves_in_mid_run_changes_nothing(algorithm):
    """Gradients that lie elsewhere, a frozen parameter, other momentum, loaded state, measured steps."""

    def run(captured):
        optimizer, params = trained(algorithm, captured=captured, steps=8)
        everywhere = []
        for step in range(8, 20):
            feed(params, step, in_place=step not in (9, 12))
            everywhere.append([p.grad for p in params])
            params[2].requires_grad_(step != 11)
            if step == 11:
                params[2].grad = None
            if step == 14:
                optimizer.param_groups[0]["betas"] = (0.8, 0.9)
                optimizer.param_groups[0]["momentum"] = 0.8
            if step == 16:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if not captured:
                optimizer._replay._seen.clear()
            if step == 18:
                with Telemetry(optimizer, every=1):
                    optimizer.step()
            else:
                optimizer.step()
        return tensors_of(optimizer, params)

    assert_same(run(True), run(False))


@on_a_gpu
@pytest.mark.gpu
def test_a_training_loop_that_frees_its_gradients_is_replayed():
    """Gradients come to lie in two places in turn; no graph holds on to their memory."""

    def run(captured):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64), nn.Linear(64, 8)).cuda()
        optimizer = MuonSW.for_model(model, lr=0.02, replay=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        batch = torch.randn(32, 64, device="cuda")
        for _ in range(PATIENCE - 5):
            model(batch).square().mean().backward()
            if not captured:
                optimizer._replay._seen.clear()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert optimizer._replay._replays > 25 or not captured
        return [param.detach() for param in model.parameters()]

    assert_same(run(True), run(False))


@on_a_gpu
@pytest.mark.gpu
def test_gradients_that_never_stay_are_told_of_once():
    optimizer, params = optimizer_on("cuda", replay=True)
    kept = []
    for step in range(PATIENCE):
        feed(params, step, in_place=False)
        kept.append([p.grad for p in params])
        optimizer.step()
    feed(params, 0, in_place=False)
    with pytest.warns(UserWarning, match=r"gradients changed too often.*set_to_none=False"):
        optimizer.step()


@on_a_gpu
@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_taken_as_written():
    optimizer, params = optimizer_on("cuda", replay=True, orthogonalizer="exact")
    plain, twins = optimizer_on("cuda", orthogonalizer="exact")
    for step in range(SETTLED + 1):
        feed(params, step)
        optimizer.step()
    feed(params, SETTLED + 1)
    optimizer.step()
    feed(params, SETTLED + 2)
    with pytest.warns(UserWarning, match="cannot be captured"):
        optimizer.step()
    for step in range(SETTLED + 3):
        feed(twins, step)
        plain.step()
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
