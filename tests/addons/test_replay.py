"""Steps that are replayed from a CUDA graph: the same weights, whatever moves meanwhile. The rest needs no GPU."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from muonsw import AdamWSW, MuonSW, NonFiniteGradientWarning, Telemetry, kernels, machine
from muonsw.addons import replay
from muonsw.addons.replay import PATIENCE, SETTLED, Replay, binding
from muonsw.kernels import tables
from muonsw.kernels.graphs import GradientReads
from muonsw.orthogonalize import ORTHOGONALIZERS, newton_schulz
from muonsw.step import make_plan
from tests.common.cuda import no_waiting
from tests.common.problems import OPTIMIZERS, assert_same, cosine, flag_on_device, matrices, set_gradients

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


# On any device


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_on_a_cpu_steps_are_taken_eagerly_and_that_is_reported_once(algorithm):
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
    found = binding(optimizer.param_groups, optimizer.state)
    return None if found is None else found[0]


MATMUL = torch.backends.cuda.matmul


def changes(optimizer, param):
    """Changes, each with what of a graph's binding it must be seen in."""
    group, state, momentum = (
        optimizer.param_groups[0],
        optimizer.state[param],
        optimizer.state[param]["momentum_buffer"],
    )
    return [
        ("parameters", lambda: setattr(param, "data", param.data.clone())),
        ("parameters", lambda: setattr(param, "data", param.data.mT)),
        ("gradients", lambda: setattr(param, "grad", param.grad.mT.contiguous().mT)),
        ("state", lambda: state.update(momentum_buffer=momentum.clone())),
        ("state", lambda: momentum.set_(momentum.clone())),  # as an offload does
        ("state", lambda: momentum.set_(momentum.mT)),
        ("options", lambda: group.update(momentum=0.8)),
        ("options", lambda: group.update(weight_decay=0.0)),
        ("options", lambda: setattr(MATMUL, "allow_tf32", True)),
        ("options", lambda: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", False)),
        ("options", lambda: setattr(MATMUL, "allow_fp16_accumulation", True)),
        ("options", lambda: torch.use_deterministic_algorithms(True)),
    ]


@pytest.mark.parametrize("number", range(12))
def test_a_graph_is_bound_to_what_it_reads_and_writes(number):
    optimizer, params = optimizer_on("cpu")
    feed(params, 0)
    optimizer.step()
    before, param = bound(optimizer), params[0]
    alive = [param.data, param.grad, *(value.detach() for value in optimizer.state[param].values())]
    keys = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")
    settings, deterministic = [getattr(MATMUL, key) for key in keys], torch.are_deterministic_algorithms_enabled()
    changed, change = changes(optimizer, param)[number]
    try:
        change()
        assert bound(optimizer).difference(before) == changed
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for key, value in zip(keys, settings, strict=True):
            setattr(MATMUL, key, value)
    assert all(tensor.numel() for tensor in alive)  # alive until here, so that no address was used twice


def test_a_graph_is_bound_to_which_gradients_are_aligned():
    """Its kernels read sixteen bytes at a time of those that were."""
    params = matrices((4, 4), (4, 4))
    optimizer, rooms = AdamWSW(params, lr=0.1), [torch.zeros(24) for _ in params]

    def moved_by(*entries):
        for param, room, begin in zip(params, rooms, entries, strict=True):
            param.grad = room[begin : begin + 16].view(4, 4)
        return bound(optimizer)

    assert moved_by(0, 0) == moved_by(4, 8)
    assert moved_by(0, 1) == moved_by(4, 1)
    assert moved_by(0, 1).difference(moved_by(1, 0)) == "gradients"


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


def test_a_sparse_gradient_is_bound_to_nothing():
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = AdamWSW([param, nn.Parameter(torch.ones(0, 3))], lr=0.1)
    param.grad = torch.ones(2, 3)
    assert bound(optimizer) is not None  # an empty shard has no address, and needs none
    param.grad = torch.ones(2, 3).to_sparse()
    assert bound(optimizer) is None


def test_steps_are_replayed_unasked_where_the_host_would_be_what_takes_long(monkeypatch, waiting):
    monkeypatch.setattr(kernels, "available", lambda _: True)

    def pays(*shapes, **options):
        params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        return Replay().pays(MuonSW(params, **{"lr": 0.1, **options}).param_groups)

    assert pays((1024, 1024), (2**14, 2**14))
    assert not pays((2**15, 2**14))
    assert pays((8, 8), lr=torch.tensor(0.1))
    assert not pays((8, 8), fused=False)
    assert pays((8, 8), norm="hyperball")
    assert not pays((8, 8), heads=2, block_period=5)
    assert not pays((8, 8), orthogonalizer=waiting)  # or whatever else a user has registered
    assert pays((8, 8), orthogonalizer="aurora", precondition="muon2", normalize="adamuon")
    assert not pays((8, 8), precondition="soap")
    optimizer = AdamWSW(matrices((4, 4)), lr=0.1)
    assert optimizer.replay is None
    assert optimizer._replay.ready(optimizer) is None


@pytest.mark.parametrize(("algorithm", "reads_it"), [("muon", False), ("adamw", True)])
def test_a_scheduler_that_cycles_the_first_beta_makes_those_steps_eager_that_read_it(algorithm, reads_it, monkeypatch):
    """OneCycleLR cycles it in all groups, unless it is asked not to."""
    optimizer, params = optimizer_on("cpu", algorithm)
    feed(params, 0)
    optimizer.step()
    monkeypatch.setattr(kernels, "available", lambda _: True)
    assert Replay().pays(optimizer.param_groups)
    OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
    assert Replay().pays(optimizer.param_groups) != reads_it
    before = bound(optimizer)
    for group in optimizer.param_groups:
        group["betas"] = (0.87, *group["betas"][1:])
    assert (bound(optimizer) == before) != reads_it


class Repeated:
    """Stands for a graph where there are none: the program again, on the same tensors."""

    def __init__(self, program, device, pool):
        assert device.type == "cpu"
        assert pool is None or isinstance(pool, Repeated)
        self.replay, self.pool = program, self


class SeesNothing(GradientReads):
    """On CPUs torch operations read the gradients, which stay in place in these tests."""

    def __exit__(self, *error):
        super().__exit__(*error)
        self.seen = False


@pytest.fixture
def graphs_on_cpus(monkeypatch):
    monkeypatch.setattr(replay, "recorded", Repeated)
    monkeypatch.setattr(replay, "GradientReads", SeesNothing)
    monkeypatch.setattr(replay, "supports", lambda _optimizer, _batches: "")


def no_memory(*_arguments):
    raise MemoryError


def run_over(frozen, *, algorithm="adamw", captured=True):
    """Steps in each of which the parameter at one index has no gradient, or none lacks it."""
    optimizer, params = optimizer_on("cpu", algorithm, replay=True)
    buffers = [torch.empty_like(param) for param in params]
    for step, index in enumerate(frozen):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = cosine(0.05, len(frozen))(step)
        for param, grad in zip(params, buffers, strict=True):
            param.grad = grad
        feed(params, step)
        if index is not None:
            params[index].grad = None
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    return optimizer, params


class Nothing:
    """Stands for a graph where it does not matter what it does: like a real one, it holds no tensor."""

    def __init__(self, program, device, pool):
        del program, device, pool
        self.pool = self

    def replay(self):
        pass


@pytest.mark.usefixtures("graphs_on_cpus")
def test_graphs_keep_no_state_alive_that_was_replaced(monkeypatch):
    monkeypatch.setattr(replay, "recorded", Nothing)
    optimizer, params = run_over([None] * (SETTLED + 2))
    assert optimizer._replay._graphs
    gone = [weakref.ref(tensor) for state in optimizer.state.values() for tensor in state.values()]
    for state in optimizer.state.values():
        state.update({key: tensor.clone() for key, tensor in state.items()})
    assert not any(reference() is not None for reference in gone)
    feed(params, 9)
    optimizer.step()
    assert optimizer._replay._chosen is None


@pytest.mark.usefixtures("graphs_on_cpus")
def test_graphs_of_parameters_that_were_replaced_are_dropped(monkeypatch):
    monkeypatch.setattr(replay, "recorded", Nothing)
    optimizer, params = run_over([None] * (SETTLED + 2))
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(param.detach().clone()) for param in group["params"]]
    feed([param for group in optimizer.param_groups for param in group["params"]], 0)
    optimizer.state.clear()
    optimizer.step()
    assert not optimizer._replay._graphs
    gone = [weakref.ref(param) for param in params]
    del params
    assert not any(reference() is not None for reference in gone)


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_graph_is_not_replayed_where_its_count_of_skipped_steps_lies_elsewhere():
    """As in a model that has left the device, was stepped elsewhere and is back in the same places."""
    optimizer, _ = run_over([None] * (SETTLED + 3))
    assert optimizer._replay._chosen is not None
    counters = optimizer._counters
    there, counters._skipped_on_device = counters._skipped_on_device, counters._skipped_on_device.clone()
    optimizer.step()
    assert optimizer._replay._chosen is None
    counters._skipped_on_device = there
    optimizer.step()
    assert optimizer._replay._chosen is not None


def cannot_be_captured(*_arguments):
    raise LookupError("not while a graph is captured")


@pytest.mark.usefixtures("graphs_on_cpus")
def test_whatever_keeps_a_step_from_being_captured_it_is_taken_eagerly(monkeypatch):
    expected = tensors_of(*run_over([None] * 8, captured=False))
    monkeypatch.setattr(replay, "recorded", cannot_be_captured)
    with pytest.warns(UserWarning, match="cannot be captured: not while a graph is captured"):
        optimizer, params = run_over([None] * 8)
    assert optimizer._replay._captures == 1
    assert_same(tensors_of(optimizer, params), expected)


def test_what_torch_runs_is_refused_before_a_capture():
    optimizer, params = optimizer_on("cpu", orthogonalizer="exact")
    feed(params, 0)
    work = [batch._replace(device=torch.device("cuda", 0)) for batch in make_plan(optimizer).batches]
    assert "torch operations" in replay.supports(optimizer, work)
    for batch in work:
        batch.group["orthogonalizer"] = "auto"
    assert not replay.supports(optimizer, work)


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_each_of_several_sets_of_gradients_gets_its_graph(algorithm):
    """The first steps with a set are taken as written, the fourth is captured; the very first lacks its state."""
    order = [None, 0, 1] * 8
    optimizer, params = run_over(order, algorithm=algorithm)
    assert len(optimizer._replay._graphs) == optimizer._replay._captures == 3
    assert optimizer._replay._replays == len(order) - 3 * (SETTLED + 1) - 1
    assert_same(tensors_of(optimizer, params), tensors_of(*run_over(order, algorithm=algorithm, captured=False)))


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.filterwarnings("ignore:replay=True")
def test_captures_are_rationed():
    """An option that changes as soon as it was captured does not cost a capture every few steps."""
    optimizer, params = optimizer_on("cpu", "adamw", replay=True)
    for step in range(60 * (SETTLED + 2)):
        feed(params, step)
        for group in optimizer.param_groups:
            group["eps"] = 1e-8 * (1 + step // (SETTLED + 2))
        optimizer.step()
    found = optimizer._replay
    assert len(found._graphs) == replay._REMEMBERED
    assert 0 <= found._captures - replay._FIRST_CAPTURES <= (step + 1) // replay._STEPS_FOR_A_CAPTURE


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_loaded_state_is_the_one_that_moves():
    """Twice from one saved state, the second time with graphs of the state that it replaces."""
    optimizer, params = run_over([None] * 8)
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
    optimizer, params = run_over([None] * 8)
    other, twins = run_over([None] * 8)
    known = [param.grad for param in params]
    feed(params, 98, in_place=False)
    with monkeypatch.context() as patch:
        patch.setattr("muonsw.step.update_batch", no_memory)
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
def test_a_replay_that_ends_in_an_error_leaves_nothing_for_the_next(monkeypatch):
    """Neither its rates, nor the belief that its gradients' addresses have arrived."""
    optimizer, params = run_over([None] * 8)
    before, captured = tensors_of(optimizer, params), optimizer._replay._graphs[0].tables
    captured._placed = ()  # as if gradients had moved
    with monkeypatch.context() as patch:
        patch.setattr(tables, "on_host", no_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert_same(tensors_of(optimizer, params), before)
    assert not any(optimizer._replay._scalars)
    assert not captured._placed


@pytest.mark.usefixtures("graphs_on_cpus")
def test_measured_steps_are_replayed_and_change_nothing():
    optimizer, params = run_over([None] * 8)
    other, twins = run_over([None] * 8)
    feed(params, 99)
    feed(twins, 99)
    replays, before = other._replay._replays, [p.detach().clone() for p in twins]
    with Telemetry(other, every=1) as telemetry:
        optimizer.step()
        other.step()
    assert other._replay._replays == replays + 1
    assert_same(tensors_of(optimizer, params), tensors_of(other, twins))
    change = torch.cat([(p.detach() - old).flatten() for p, old in zip(twins, before, strict=True)])
    assert telemetry.last["all"]["applied_rms"] == pytest.approx(change.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_a_step_that_the_device_skipped_is_none_in_summary_and_telemetry(monkeypatch):
    monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    optimizer, params = run_over([None] * 8, algorithm="muon")
    assert not optimizer.summary().skipped
    before, replays = tensors_of(optimizer, params), optimizer._replay._replays
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer._replay._replays == replays + 1
    assert (optimizer.summary().skipped, optimizer.summary().matrices) == (True, 0)
    with Telemetry(optimizer, every=1) as telemetry:
        optimizer.step()
    assert (telemetry.last["skipped"], telemetry.last["matrices"]) == (1, 0)
    assert_same(tensors_of(optimizer, params), before)
    feed(params, 99)
    optimizer.step()
    assert not optimizer.summary().skipped


@pytest.mark.usefixtures("graphs_on_cpus")
def test_what_keeps_steps_from_being_replayed_is_reported_once():
    optimizer, params = optimizer_on("cpu", replay=True)

    def take_steps(numbers):
        for step in numbers:
            feed(params, step)
            optimizer.param_groups[0]["momentum"] = 0.8 + 0.001 * step
            optimizer.step()

    with pytest.warns(UserWarning, match="options changed too often in 50 steps$"):
        take_steps(range(PATIENCE + 1))
    take_steps(range(PATIENCE + 1, PATIENCE + 10))  # warnings are errors


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


REPLAYED = ("muon", "adamw")
CASES = [(algorithm, dtype, {}) for algorithm in REPLAYED for dtype in (torch.float32, torch.bfloat16)]
CASES += [(algorithm, torch.float32, options) for algorithm in REPLAYED for options in RULES[1:]]


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("algorithm", "dtype", "options"), CASES)
def test_replayed_steps_are_the_written_ones_bit_for_bit(algorithm, dtype, options):
    replayed = tensors_of(*trained(algorithm, captured=True, dtype=dtype, **options))
    assert_same(replayed, tensors_of(*trained(algorithm, captured=False, dtype=dtype, **options)))


SLOTS = [
    {"normalize": "normuon"},
    {"normalize": "muon_plus", "precondition": "muon2"},
    {"normalize": "adamuon", "precondition": "sign"},
    {"precondition": "equalize"},
    {"orthogonalizer": "aurora"},
]


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_slots_are_replayed(slots, dtype):
    optimizer, params = trained("muon", captured=True, dtype=dtype, **slots)
    assert_same(tensors_of(optimizer, params), tensors_of(*trained("muon", captured=False, dtype=dtype, **slots)))


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", REPLAYED)
def test_replayed_steps_are_those_of_a_plain_optimizer_up_to_rounding(algorithm):
    optimizer, params = optimizer_on("cuda", algorithm, replay=False)
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
@pytest.mark.parametrize("algorithm", REPLAYED)
def test_a_bad_gradient_changes_nothing_and_is_counted(algorithm):
    optimizer, params = trained(algorithm, captured=True, steps=SETTLED + 4)
    before = tensors_of(optimizer, params)
    params[1].grad[3, 3] = float("nan")
    optimizer.step()
    optimizer.step()
    assert_same(tensors_of(optimizer, params), before)
    assert optimizer.skipped_steps == 2
    assert optimizer.summary().skipped
    with pytest.warns(NonFiniteGradientWarning):
        optimizer.state_dict()
    feed(params, 99)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert not optimizer.summary().skipped


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", REPLAYED)
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


def steps_with(optimizer, params, *, captured, steps):
    for step in steps:
        feed(params, step)
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    return tensors_of(optimizer, params)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", REPLAYED)
def test_state_that_is_moved_in_place_is_the_state_that_moves(algorithm):
    """Also where nothing but its address says so; what lay there before becomes NaN."""

    def run(captured):
        optimizer, params = trained(algorithm, captured=captured, steps=8)
        left = []
        for state in optimizer.state.values():
            for tensor in state.values():
                left.append(tensor.data)
                tensor.data = tensor.data.clone()
        torch._foreach_mul_(left, float("nan"))
        return steps_with(optimizer, params, captured=captured, steps=range(8, 16))

    assert_same(run(True), run(False))


@pytest.fixture
def waiting():
    """An orthogonalizer that waits for the device, which nothing says beforehand."""

    def waits(matrices, *, steps, dtype=None):
        assert float(matrices.sum()) == float(matrices.sum())
        return newton_schulz(matrices, steps=steps, dtype=dtype)

    ORTHOGONALIZERS.register("waits", waits)
    yield "waits"
    del ORTHOGONALIZERS["waits"]


@on_a_gpu
@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_process_as_it_was(waiting, monkeypatch):
    """The step is taken eagerly; generator, allocator and later captures work."""
    monkeypatch.setattr(replay, "has_kernels_throughout", lambda _group: True)
    torch.manual_seed(0)
    expected = torch.randn(8, device="cuda")
    torch.manual_seed(0)
    optimizer, params = optimizer_on("cuda", replay=True, orthogonalizer=waiting)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = steps_with(optimizer, params, captured=True, steps=range(SETTLED + 3))
    assert optimizer._replay._captures == 1
    assert torch.equal(torch.randn(8, device="cuda"), expected)
    nn.functional.dropout(expected, 0.5)
    torch.cuda.empty_cache()
    trained("muon", captured=True)
    graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        numbers.copy_(torch.rand(8, device="cuda"))
    graph.replay()
    first = numbers.clone()
    graph.replay()
    assert not torch.equal(first, numbers)
    plain, twins = optimizer_on("cuda", replay=True, orthogonalizer=waiting)
    plain._replay._failure = "none is wanted"
    with pytest.warns(UserWarning, match="none is wanted"):
        assert_same(found, steps_with(plain, twins, captured=False, steps=range(SETTLED + 3)))


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", REPLAYED)
def test_a_graph_holds_the_address_tables_that_it_reads(algorithm, monkeypatch):
    """However many others are made meanwhile, and whatever takes the memory of those that are dropped."""
    monkeypatch.setattr(kernels, "TORCH_BELOW", 0)

    def run(captured):
        optimizer, params = trained(algorithm, captured=captured, steps=8)
        assert bool(captured) == bool(optimizer._replay._graphs and optimizer._replay._graphs[0].tables.held)
        for number in range(tables._MOST_CACHED + 10):
            tables.table(((number,), (1,)), torch.device("cuda", 0))
            tables.block_map((number + 1,), 64, torch.device("cuda", 0))
        filled = [torch.full((size,), -1, dtype=torch.int64, device="cuda") for size in [1, 8, 64, 128] * 200]
        found = steps_with(optimizer, params, captured=captured, steps=range(8, 16))
        assert all(bool((tensor == -1).all()) for tensor in filled)
        return found

    assert_same(run(True), run(False))
