"""Steps that are replayed from a CUDA graph: the same weights, whatever moves meanwhile. Most of it needs no GPU."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from muonsw import AdamWSW, MuonSW, NonFiniteGradientWarning, Telemetry, kernels, machine
from muonsw.addons import replay
from muonsw.addons.replay import SETTLED, Replay, binding
from muonsw.kernels import tables
from muonsw.kernels.graphs import GradientReads
from muonsw.orthogonalize import ORTHOGONALIZERS, newton_schulz
from muonsw.step import make_plan
from tests.common.cuda import no_waiting
from tests.common.problems import assert_same, cosine, flag_on_device, matrices, set_gradients, tensors_of

SHAPES = [(64, 64), (32, 96), (4, 48, 32), (96, 32)]
REPLAYED = ("muon", "adamw")


def optimizer_on(device, algorithm="muon", dtype=torch.float32, **options):
    params = [nn.Parameter(p.detach().to(device)) for p in matrices(*SHAPES, dtype=dtype)]
    groups = [
        {"params": params[:2], "algorithm": algorithm, "momentum": 0.9},
        {"params": params[2:], "algorithm": algorithm, "momentum": 0.9, "matrix": "stack", "weight_decay": 0.0},
    ]
    return MuonSW(groups, **{"lr": 0.05, "weight_decay": 0.3, **options}), params


def feed(params, step, *, in_place=True, absent=None):
    """Gradients that depend on the step alone, at the same addresses as before or at others; one may be absent."""
    twins = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in params]
    set_gradients(twins, step)
    for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
        if in_place and hasattr(param, "buffer"):
            param.buffer.copy_(twin.grad)
        else:
            param.buffer = twin.grad.to(param.device)
        param.grad = None if number == absent else param.buffer


def take_steps(optimizer, params, steps, *, captured=True, absent=()):
    """Follow a schedule; capture once steps settle, or never, by making the optimizer forget what it has seen."""
    for step, missing in zip(steps, absent or [None] * len(steps), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = cosine(0.05, 16)(step)
        feed(params, step, absent=missing)
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    return tensors_of(optimizer, params)


def trained(algorithm, device, *, captured=True, steps=8, absent=(), **options):
    optimizer, params = optimizer_on(device, algorithm, replay=True, **options)
    take_steps(optimizer, params, range(steps), captured=captured, absent=absent)
    assert bool(optimizer._replay._graphs) == captured
    return optimizer, params


# On any device


def test_on_a_cpu_steps_are_eager_with_one_warning():
    plain, params = optimizer_on("cpu")
    replaying, twins = optimizer_on("cpu", replay=True)
    with pytest.warns(UserWarning, match="on cpu, not on one CUDA device"):
        take_steps(replaying, twins, [0])
    take_steps(replaying, twins, range(1, SETTLED + 3))  # warnings are errors
    assert_same(tensors_of(replaying, twins), take_steps(plain, params, range(SETTLED + 3)))


def bound(optimizer):
    bindings = binding(optimizer.param_groups, optimizer.state)
    return None if bindings is None else bindings[0]


def different(one, other):
    return [name for name, a, b in zip(one._fields, one, other, strict=True) if a != b]


MATMUL = torch.backends.cuda.matmul

# Changes of an optimizer, a parameter of its first group and its momentum, by the part of a binding that must differ.
CHANGES = [
    ("parameters", lambda _o, p, _m: setattr(p, "data", p.data.clone())),
    ("parameters", lambda _o, p, _m: setattr(p, "data", p.data.mT)),
    ("gradients", lambda _o, p, _m: setattr(p, "grad", p.grad.mT.contiguous().mT)),
    ("state", lambda o, p, m: o.state[p].update(momentum_buffer=m.clone())),
    ("state", lambda _o, _p, m: m.set_(m.clone())),  # as an offload does
    ("state", lambda _o, _p, m: m.set_(m.mT)),
    ("options", lambda o, _p, _m: o.param_groups[0].update(momentum=0.8)),
    ("options", lambda o, _p, _m: o.param_groups[0].update(weight_decay=0.0)),  # a norm rule would no longer act
    ("options", lambda *_: setattr(MATMUL, "allow_tf32", True)),
    ("options", lambda *_: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", False)),
    ("options", lambda *_: setattr(MATMUL, "allow_fp16_accumulation", True)),
    ("options", lambda *_: torch.use_deterministic_algorithms(True)),
]


@pytest.fixture
def product_settings():
    keys = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")
    settings, deterministic = [getattr(MATMUL, key) for key in keys], torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    for key, value in zip(keys, settings, strict=True):
        setattr(MATMUL, key, value)


@pytest.mark.usefixtures("product_settings")
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_graph_is_bound_to_what_it_reads_and_writes(number):
    optimizer, params = optimizer_on("cpu")
    take_steps(optimizer, params, [0])
    before, param, (part, change) = bound(optimizer), params[0], CHANGES[number]
    momentum = optimizer.state[param]["momentum_buffer"]
    alive = [param.data, param.grad, momentum.detach()]  # so that no address is used twice
    change(optimizer, param, momentum)
    assert different(bound(optimizer), before) == [part]
    assert all(tensor.numel() for tensor in alive)


def test_a_graph_is_bound_to_which_gradients_are_aligned():
    """Its kernels read sixteen bytes of those at a time."""
    params = matrices((4, 4), (4, 4))
    optimizer, rooms = AdamWSW(params, lr=0.1), [torch.zeros(24) for _ in params]

    def moved_by(*entries):
        for param, room, begin in zip(params, rooms, entries, strict=True):
            param.grad = room[begin : begin + 16].view(4, 4)
        return bound(optimizer)

    assert moved_by(0, 0) == moved_by(4, 8)
    assert moved_by(0, 1) == moved_by(4, 1)
    assert different(moved_by(0, 1), moved_by(1, 0)) == ["gradients"]


def test_a_graph_is_not_bound_to_rates_peaks_and_counters():
    optimizer, params = optimizer_on("cpu", decay="log_time")
    CosineAnnealingLR(optimizer, 10)
    take_steps(optimizer, params, [0])
    before = bound(optimizer)
    optimizer.param_groups[0]["weight_decay"] *= 0.9
    take_steps(optimizer, params, range(1, 4))
    assert bound(optimizer) == before


def test_a_sparse_gradient_is_bound_to_nothing():
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = AdamWSW([param, nn.Parameter(torch.ones(0, 3))], lr=0.1)
    param.grad = torch.ones(2, 3)
    assert bound(optimizer) is not None  # an empty shard has no address, and needs none
    param.grad = torch.ones(2, 3).to_sparse()
    assert bound(optimizer) is None


def test_steps_are_replayed_by_default_where_they_are_cpu_bound(monkeypatch, waiting):
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
    assert not pays((8, 8), orthogonalizer=waiting)  # nor whatever else a user has registered
    assert pays((8, 8), orthogonalizer="aurora", precondition="muon2", normalize="adamuon")
    assert not pays((8, 8), precondition="soap")
    optimizer = AdamWSW(matrices((4, 4)), lr=0.1)
    assert optimizer.replay is None
    assert optimizer._replay.ready(optimizer) is None


def on_a_gpu(batches):
    return [batch._replace(device=torch.device("cuda", 0)) for batch in batches]


@pytest.mark.filterwarnings("ignore:the scheduler cycles betas")
@pytest.mark.parametrize(("algorithm", "reads_it"), [("muon", False), ("adamw", True)])
def test_a_scheduler_that_cycles_the_first_beta_makes_steps_that_read_it_eager(algorithm, reads_it, monkeypatch):
    """OneCycleLR cycles it in all groups unless `cycle_momentum=False`."""
    optimizer, params = optimizer_on("cpu", algorithm)
    take_steps(optimizer, params, [0])
    monkeypatch.setattr(kernels, "available", lambda _: True)
    assert Replay().pays(optimizer.param_groups)
    OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
    assert Replay().pays(optimizer.param_groups) != reads_it
    reason = replay.supports(optimizer, on_a_gpu(make_plan(optimizer).batches))
    assert ("cycle_momentum=False" in reason) == reads_it
    before = bound(optimizer)
    for group in optimizer.param_groups:
        group["betas"] = (0.87, *group["betas"][1:])
    assert (bound(optimizer) == before) != reads_it


def test_steps_that_torch_runs_are_refused_before_a_capture():
    optimizer, params = optimizer_on("cpu", orthogonalizer="exact")
    feed(params, 0)
    work = on_a_gpu(make_plan(optimizer).batches)
    assert "torch operations" in replay.supports(optimizer, work)
    for batch in work:
        batch.group["orthogonalizer"] = "auto"
    assert not replay.supports(optimizer, work)


class Repeated:
    """Replaces a graph on a CPU: runs the program again, on the same tensors."""

    def __init__(self, program, device, pool):
        assert device.type == "cpu"
        assert pool is None or isinstance(pool, Repeated)
        self.replay, self.pool = program, self


class Nothing:
    """Replaces a graph where it does not matter what it does; like a real one, it holds no tensor."""

    def __init__(self, *_):
        self.pool = self

    def replay(self):
        pass


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


@pytest.mark.usefixtures("graphs_on_cpus")
def test_graphs_keep_neither_replaced_state_nor_replaced_parameters_alive(monkeypatch):
    monkeypatch.setattr(replay, "recorded", Nothing)
    optimizer, params = trained("adamw", "cpu")
    gone = [weakref.ref(tensor) for state in optimizer.state.values() for tensor in state.values()]
    for state in optimizer.state.values():
        state.update({key: tensor.clone() for key, tensor in state.items()})
    assert not any(reference() is not None for reference in gone)
    take_steps(optimizer, params, [9])
    assert optimizer._replay._chosen is None
    gone = list(map(weakref.ref, params))
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(param.detach().clone()) for param in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.state.clear()
    take_steps(optimizer, params, [10])
    assert not optimizer._replay._graphs
    assert not any(reference() is not None for reference in gone)


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_graph_is_not_replayed_if_its_count_of_skipped_steps_has_moved():
    """As in a model that has left the device, was stepped elsewhere and is back at the same addresses."""
    optimizer, _ = trained("adamw", "cpu")
    assert optimizer._replay._chosen is not None
    counters = optimizer._counters
    there, counters._skipped = counters._skipped, counters._skipped.clone()
    optimizer.step()
    assert optimizer._replay._chosen is None
    counters._skipped = there
    optimizer.step()
    assert optimizer._replay._chosen is not None


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_step_that_cannot_be_captured_is_eager(monkeypatch):
    def fails(*_):
        raise LookupError("not while a graph is captured")

    expected = tensors_of(*trained("adamw", "cpu", captured=False))
    monkeypatch.setattr(replay, "recorded", fails)
    optimizer, params = optimizer_on("cpu", "adamw", replay=True)
    with pytest.warns(UserWarning, match="cannot be captured: not while a graph is captured"):
        assert_same(take_steps(optimizer, params, range(8)), expected)
    assert optimizer._replay._captures == 1


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.parametrize("algorithm", REPLAYED)
def test_each_of_several_sets_of_gradients_gets_its_graph(algorithm):
    """The first steps with a set are eager, the fourth is captured; the very first lacks its state."""
    absent = [None, 0, 1] * 8
    optimizer, params = trained(algorithm, "cpu", steps=24, absent=absent)
    assert len(optimizer._replay._graphs) == optimizer._replay._captures == 3
    assert optimizer._replay._replays == 24 - 3 * (SETTLED + 1) - 1
    eager = trained(algorithm, "cpu", steps=24, absent=absent, captured=False)
    assert_same(tensors_of(optimizer, params), tensors_of(*eager))


@pytest.mark.usefixtures("graphs_on_cpus")
def test_captures_are_rationed():
    """An option that changes right after every capture does not cause a capture every few steps."""
    optimizer, params = optimizer_on("cpu", "adamw", replay=True)
    steps = 60 * (SETTLED + 2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["eps"] = 1e-8 * (1 + step // (SETTLED + 2))
        take_steps(optimizer, params, [step])
    assert len(optimizer._replay._graphs) == replay._REMEMBERED
    assert 0 <= optimizer._replay._captures - replay._FIRST_CAPTURES <= steps // replay._STEPS_FOR_A_CAPTURE


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_loaded_state_is_the_one_that_moves():
    """Load a state and continue, twice; the second time, graphs of the replaced state exist."""
    optimizer, params = trained("adamw", "cpu")
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]

    def go_on():
        optimizer.load_state_dict(saved)
        for param, value in zip(params, weights, strict=True):
            param.data.copy_(value)
        result = take_steps(optimizer, params, range(SETTLED + 4))
        assert optimizer._replay._replays
        return result

    assert_same(go_on(), go_on())


def no_memory(*_arguments):
    raise MemoryError


@pytest.mark.usefixtures("graphs_on_cpus")
def test_a_step_that_ends_in_an_error_leaves_nothing_for_the_next(monkeypatch):
    """Fail in an eager step, then in a replayed one: neither rates nor addresses that were not copied may remain."""
    expected = tensors_of(*trained("adamw", "cpu", steps=9))
    optimizer, params = trained("adamw", "cpu")
    before, graph = tensors_of(optimizer, params), optimizer._replay._graphs[0]
    with monkeypatch.context() as patch:
        patch.setattr("muonsw.step.count_step", no_memory)
        params[0].grad = params[0].grad.mT.contiguous().mT
        with pytest.raises(MemoryError):
            optimizer.step()
    graph.tables._placed = ()  # as if gradients had moved
    params[0].grad = params[0].buffer
    with monkeypatch.context() as patch:
        patch.setattr(tables, "on_host", no_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert optimizer._replay._chosen is graph
    assert not graph.tables._placed
    assert not any(optimizer._replay._scalars)
    assert_same(tensors_of(optimizer, params), before)
    assert_same(take_steps(optimizer, params, [8]), expected)


@pytest.mark.usefixtures("graphs_on_cpus")
@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_telemetry_measures_replayed_and_skipped_steps_and_changes_nothing(monkeypatch):
    monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    expected = tensors_of(*trained("muon", "cpu", steps=9))
    optimizer, params = trained("muon", "cpu")
    replays, before = optimizer._replay._replays, [p.detach().clone() for p in params]
    with Telemetry(optimizer, every=1) as telemetry:
        assert_same(take_steps(optimizer, params, [8]), expected)
        change = torch.cat([(p.detach() - old).flatten() for p, old in zip(params, before, strict=True)])
        assert telemetry.last["all"]["applied_rms"] == pytest.approx(change.square().mean().sqrt().item(), rel=1e-5)
        params[0].grad[0, 0] = torch.nan
        optimizer.step()
        assert (telemetry.last["skipped"], telemetry.last["matrices"]) == (1, 0)
    assert optimizer._replay._replays == replays + 2
    assert (optimizer.summary().skipped, optimizer.summary().matrices) == (True, 0)
    assert_same(tensors_of(optimizer, params), expected)


# On a GPU


@pytest.fixture
def waiting():
    """An orthogonalizer that waits for the device without declaring it."""

    def waits(matrices, *, steps, dtype=None):
        assert float(matrices.sum()) == float(matrices.sum())
        return newton_schulz(matrices, steps=steps, dtype=dtype)

    ORTHOGONALIZERS.register("waits", waits)
    yield "waits"
    del ORTHOGONALIZERS["waits"]


CASES = [
    *((algorithm, {"dtype": dtype}) for algorithm in REPLAYED for dtype in (torch.float32, torch.bfloat16)),
    *((algorithm, options) for algorithm in REPLAYED for options in (
        {"decay": "constant", "cautious": True}, {"decay": "cosine", "total_steps": 40}, {"decay": "log_time"},
        {"norm": "hyperball"}, {"nonfinite": "propagate"},
    )),
    *(("muon", {"dtype": dtype, **slots}) for dtype in (torch.float32, torch.bfloat16) for slots in (
        {"normalize": "normuon"}, {"normalize": "muon_plus", "precondition": "muon2"},
        {"normalize": "adamuon", "precondition": "sign"}, {"precondition": "equalize"}, {"orthogonalizer": "aurora"},
    )),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device")
class TestOnAGPU:
    @pytest.mark.parametrize(("algorithm", "options"), CASES, ids=str)
    def test_replayed_steps_are_the_eager_ones_bit_for_bit(self, algorithm, options):
        replayed, eager = (trained(algorithm, "cuda", captured=c, steps=16, **options) for c in (True, False))
        assert_same(tensors_of(*replayed), tensors_of(*eager))

    @pytest.mark.parametrize("algorithm", REPLAYED)
    def test_replayed_steps_are_those_of_a_plain_optimizer_up_to_rounding(self, algorithm):
        optimizer, params = optimizer_on("cuda", algorithm, replay=False)
        take_steps(optimizer, params, range(16))
        for a, b in zip(trained(algorithm, "cuda", steps=16)[1], params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_a_replay_waits_for_nothing_and_checks_the_learning_rate_at_once(self):
        optimizer, params = trained("muon", "cuda")
        optimizer.param_groups[0]["lr"] = 0.01
        with no_waiting():
            optimizer.step()
        before = tensors_of(optimizer, params)
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.raises(ValueError, match="peak"):
            optimizer.step()
        assert_same(tensors_of(optimizer, params), before)

    @pytest.mark.parametrize("algorithm", REPLAYED)
    def test_a_bad_gradient_changes_nothing_and_is_counted(self, algorithm):
        optimizer, params = trained(algorithm, "cuda")
        before = tensors_of(optimizer, params)
        params[1].grad[3, 3] = float("nan")
        optimizer.step()
        optimizer.step()
        assert_same(tensors_of(optimizer, params), before)
        assert optimizer.skipped_steps == 2
        assert optimizer.summary().skipped
        with pytest.warns(NonFiniteGradientWarning):
            optimizer.state_dict()
        take_steps(optimizer, params, [9])
        assert not torch.equal(params[0], before[0])
        assert not optimizer.summary().skipped

    @pytest.mark.parametrize("algorithm", REPLAYED)
    def test_whatever_moves_in_mid_run_changes_nothing(self, algorithm):
        """Gradients at other addresses, a frozen parameter, other momentum, state that was loaded or moved."""

        def run(captured):
            optimizer, params = trained(algorithm, "cuda", captured=captured)
            held = []
            for step in range(8, 28):
                held.append([p.grad for p in params])
                feed(params, step, in_place=step not in (9, 12), absent=2 if step == 11 else None)
                params[2].requires_grad_(step != 11)
                if step == 14:
                    for group in optimizer.param_groups[:1]:
                        group.update(betas=(0.8, 0.9), momentum=0.8)
                if step == 16:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                if step == 22:  # only the addresses change; the old memory becomes NaN
                    moved = [tensor for state in optimizer.state.values() for tensor in state.values()]
                    left = [tensor.data for tensor in moved]
                    for tensor in moved:
                        tensor.data = tensor.data.clone()
                    torch._foreach_mul_(left, float("nan"))
                if not captured:
                    optimizer._replay._seen.clear()
                optimizer.step()
            return tensors_of(optimizer, params)

        assert_same(run(True), run(False))

    def test_a_training_loop_that_frees_its_gradients_is_replayed(self):
        """Gradients alternate between two places; no graph holds on to their memory."""

        def run(captured):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64), nn.Linear(64, 8)).cuda()
            optimizer = MuonSW.for_model(model, lr=0.02, replay=True)
            scheduler = CosineAnnealingLR(optimizer, 100)
            batch = torch.randn(32, 64, device="cuda")
            for _ in range(45):
                model(batch).square().mean().backward()
                if not captured:
                    optimizer._replay._seen.clear()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert optimizer._replay._replays > 25 or not captured
            return [param.detach() for param in model.parameters()]

        assert_same(run(True), run(False))

    def test_a_capture_that_fails_leaves_the_process_as_it_was(self, waiting, monkeypatch):
        """The step is eager; generator, allocator and later captures work."""
        monkeypatch.setattr(replay, "has_kernels_throughout", lambda _group: True)
        torch.manual_seed(0)
        expected = torch.randn(8, device="cuda")
        torch.manual_seed(0)
        optimizer, params = optimizer_on("cuda", replay=True, orthogonalizer=waiting)
        with pytest.warns(UserWarning, match="cannot be captured"):
            result = take_steps(optimizer, params, range(SETTLED + 3))
        assert optimizer._replay._captures == 1
        assert torch.equal(torch.randn(8, device="cuda"), expected)
        nn.functional.dropout(expected, 0.5)
        torch.cuda.empty_cache()
        trained("muon", "cuda")
        graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            numbers.copy_(torch.rand(8, device="cuda"))
        graph.replay()
        first = numbers.clone()
        graph.replay()
        assert not torch.equal(first, numbers)
        plain, twins = optimizer_on("cuda", replay=True, orthogonalizer=waiting)
        plain._replay._failure = "captures are off"
        with pytest.warns(UserWarning, match="captures are off"):
            assert_same(result, take_steps(plain, twins, range(SETTLED + 3), captured=False))

    @pytest.mark.parametrize("algorithm", REPLAYED)
    def test_a_graph_holds_the_address_tables_that_it_reads(self, algorithm, monkeypatch):
        """Even if enough tables are made to evict them, and other tensors reuse freed memory."""
        monkeypatch.setattr(kernels, "TORCH_BELOW", 0)

        def run(captured):
            optimizer, params = trained(algorithm, "cuda", captured=captured)
            assert captured == bool(optimizer._replay._graphs and optimizer._replay._graphs[0].tables.held)
            for number in range(tables._MOST_CACHED + 10):
                tables.table(((number,), (1,)), torch.device("cuda", 0))
                tables.block_map((number + 1,), 64, torch.device("cuda", 0))
            filled = [torch.full((size,), -1, dtype=torch.int64, device="cuda") for size in [1, 8, 64, 128] * 200]
            result = take_steps(optimizer, params, range(8, 16), captured=captured)
            assert all(bool((tensor == -1).all()) for tensor in filled)
            return result

        assert_same(run(True), run(False))
