"""Same results, no waiting and graphs on a CUDA device. Run by `make test-gpu`."""

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW, kernels, machine
from muonsw.kernels import tables
from muonsw.precision import stochastic_round
from muonsw.reference import Decay, ReferenceMuonSW, ns5
from tests.common.cuda import feed, no_waiting, on_gpu
from tests.common.problems import OPTIMIZERS, assert_same, cosine, matrices, set_gradients, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]

SHAPES = [(64, 64), (32, 96), (4, 48, 32), (64, 64), (96, 32)]


def test_muon_follows_the_reference():
    (param,) = on_gpu((48, 32))
    schedule = cosine(0.05, 100)
    reference = ReferenceMuonSW(
        param.detach().cpu(), Decay("scaled", 0.3, 0.05), nesterov=True, heavy_ball=False, orthogonalize=ns5
    )
    optimizer = MuonSW([param], lr=0.05, weight_decay=0.3, ns_dtype="float32")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for step in range(100):
        optimizer.param_groups[0]["lr"] = schedule(step)
        feed([param], step)
        reference.step(param.grad.cpu(), schedule(step))
        optimizer.step()
    assert (param.detach().cpu().double() - reference.W).norm() < 1e-4 * reference.W.norm()


@pytest.mark.parametrize("orthogonalizer", ["newton_schulz", "polar_express", "gram_newton_schulz"])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_a_step_never_waits_for_the_device(algorithm, orthogonalizer):
    params = on_gpu(*SHAPES)
    group = {"params": params, "algorithm": algorithm, "matrix": "stack", "momentum": 0.9}
    optimizer = MuonSW([group], lr=0.05, weight_decay=0.3, orthogonalizer=orthogonalizer)
    feed(params, 0)
    optimizer.step()
    with no_waiting():
        for _ in range(3):
            optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_a_bad_gradient_changes_nothing_and_the_host_never_waits(algorithm, dtype):
    params = on_gpu((64, 64), (64, 64), dtype=dtype)
    group = {"params": params, "algorithm": algorithm, "momentum": 0.9}
    optimizer = MuonSW([group], lr=0.05, weight_decay=0.3)
    feed(params, 0)
    optimizer.step()
    before = tensors_of(optimizer, params)
    params[1].grad[3, 3] = float("nan")
    with no_waiting():
        optimizer.step()
    assert_same(tensors_of(optimizer, params), before)
    assert optimizer.skipped_steps == 1


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capturing_a_step_is_refused():
    params = on_gpu((64, 64))
    optimizer = MuonSW(params, lr=0.05)
    feed(params, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a CUDA graph would freeze the learning rate"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()


def test_rounding_is_the_same_on_every_device():
    x = torch.randn(4096)
    seed = torch.tensor(11, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(stochastic_round(x, dtype, seed), stochastic_round(x.cuda(), dtype, seed.cuda()).cpu())


def test_fp16_training_under_a_grad_scaler_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = MuonSW.for_model(model, lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    x, y = torch.randn(256, 32, device="cuda"), torch.randn(256, 1, device="cuda")
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", torch.float16):
            loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("below", [kernels.TORCH_BELOW, 0])
def test_adamw_matches_torchs_fused_kernel(below, monkeypatch):
    """Bit for bit where it is torch's kernel, to rounding where it is ours."""
    monkeypatch.setattr(kernels, "TORCH_BELOW", below)
    ours, theirs = on_gpu((128, 64), (50,)), on_gpu((128, 64), (50,))
    a = AdamWSW(ours, lr=0.01, weight_decay=0.1, decay="constant", replay=False)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for t in range(20):
        feed(ours, t)
        feed(theirs, t)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if below == 0 else 0, atol=1e-6 if below == 0 else 0)


@pytest.mark.parametrize(("algorithm", "options"), [("adamw", {}), ("sgd", {"momentum": 0.9, "nesterov": True})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_sets_move_as_large_ones_do(algorithm, options, dtype, monkeypatch):
    """Torch's kernels agree with ours, or in float64 with plain operations, given the same gradients."""

    def trained(below):
        monkeypatch.setattr(kernels, "TORCH_BELOW", below)
        every = on_gpu((64, 48), (7,), (0, 3), (2, 5, 8), dtype=dtype)
        params = every[:2] if below else every  # torch's kernels take no empty tensors
        optimizer = OPTIMIZERS[algorithm](params, lr=0.05, weight_decay=0.3, replay=False, **options)
        for t in range(8):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + t)
            feed(params, t)
            if t == 5:
                params[0].grad[3, 3] = float("inf")
            optimizer.step()
        assert optimizer.skipped_steps == 1
        return params[:2]

    for a, b in zip(trained(2**26), trained(0), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_entry_among_many_gradients_is_found_and_no_gradient_changes(bad, dtype):
    params = [nn.Parameter(torch.zeros(17, dtype=dtype, device="cuda")) for _ in range(250)]
    params.append(nn.Parameter(torch.zeros(0, device="cuda")))
    optimizer = AdamWSW(params, lr=0.1)
    for param in params:
        param.grad = torch.randn(param.shape, device="cuda").to(param.dtype)
    for number, place in ((0, 0), (120, 16), (249, 3)):
        params[number].grad[place] = bad
        before = [p.grad.clone() for p in params]
        optimizer.step()
        torch.testing.assert_close([p.grad for p in params], before, rtol=0, atol=0, equal_nan=True)
        assert not any(p.any() for p in params)
        params[number].grad[place] = 1.0
    assert optimizer.skipped_steps == 3
    optimizer.step()
    assert all(p.any() for p in params[:-1])
    assert optimizer.skipped_steps == 3


RULES = [
    {"decay": "fixed", "weight_decay": 0.01},
    {"decay": "cosine", "total_steps": 20},
    {"decay": "log_time"},
    {"norm": "target"},
    {"norm": "hyperball"},
    {"norm": "target", "target_norm": 0.2},
]


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_rules_of_the_run_act_in_replayed_steps(algorithm, options):
    def trained(replay):
        params = on_gpu((64, 64), (32, 96), (4, 32, 48))
        group = {"params": params, "algorithm": algorithm, "momentum": 0.9, "matrix": "stack"}
        optimizer = MuonSW([group], lr=0.05, **{"weight_decay": 0.3, **options}, replay=replay)
        for t in range(8):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + t)
            feed(params, t)
            optimizer.step()
        return params, optimizer

    (replayed, optimizer), (eager, other) = trained(True), trained(False)
    for a, b in zip(replayed, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["step_count"] == other.param_groups[0]["step_count"] == 8


def test_a_rate_on_the_device_is_read_at_each_step():
    params, others = on_gpu((64, 64)), on_gpu((64, 64))
    lr = torch.tensor(0.05, device="cuda")
    held, plain = MuonSW(params, lr=lr), MuonSW(others, lr=0.05)
    for t in range(4):
        lr.fill_(0.05 / (1 + t))
        plain.param_groups[0]["lr"] = float(lr)
        for optimizer, own in ((held, params), (plain, others)):
            feed(own, t)
            optimizer.step()
    torch.testing.assert_close(params[0], others[0], rtol=1e-6, atol=1e-7)  # the peak is float32's 0.05
    lr.fill_(torch.nan)
    with pytest.raises(ValueError, match="must be a finite number"):
        held.step()


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def trained_at_once(algorithm, below, monkeypatch, device="cuda", **options):
    monkeypatch.setattr(kernels, "TORCH_BELOW", below)
    monkeypatch.setattr(kernels, "_USABLE", {})
    params = [nn.Parameter(p.detach().to(device)) for p in matrices((64, 48), (32, 96))]
    group = {"params": params, "algorithm": algorithm, "momentum": 0.9}
    optimizer = MuonSW([group], lr=0.05, weight_decay=0.3, **options)
    for step in range(6):
        set_gradients(twins := [nn.Parameter(p.detach().cpu()) for p in params], step)
        for param, twin in zip(params, twins, strict=True):
            param.grad = twin.grad.to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params]


EAGER_AND_REPLAYED = [(name, {}) for name in OPTIMIZERS] + [(name, {"replay": True}) for name in ("muon", "adamw")]


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("below", [kernels.TORCH_BELOW, 0])
@pytest.mark.parametrize(("algorithm", "options"), EAGER_AND_REPLAYED, ids=str)
def test_steps_under_another_default_dtype_are_the_same(algorithm, below, options, monkeypatch):
    actual = trained_at_once(algorithm, below, monkeypatch, **options)
    torch.set_default_dtype(torch.float32)
    expected = trained_at_once(algorithm, below, monkeypatch, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("algorithm", "options"), EAGER_AND_REPLAYED, ids=str)
def test_a_model_trains_on_another_device_than_the_current_one(algorithm, options, monkeypatch):
    expected = trained_at_once(algorithm, 0, monkeypatch, device="cuda:0", **options)
    actual = trained_at_once(algorithm, 0, monkeypatch, device="cuda:1", **options)
    assert torch.cuda.current_device() == 0
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_two_streams_do_not_read_each_others_tables(algorithm, monkeypatch):
    """The second optimizer steps while the tables of the first, of the same sizes, still wait to be filled."""
    trained_at_once(algorithm, 0, monkeypatch)  # compiles the kernels
    monkeypatch.setattr(tables, "_tables", tables.TensorCache())
    monkeypatch.setattr(tables, "_maps", tables.TensorCache())
    first, second = on_gpu((64, 48), (32, 96)), on_gpu((64, 48), (32, 96))
    optimizers = [
        MuonSW([{"params": params, "algorithm": algorithm, "momentum": 0.9}], lr=0.05, weight_decay=0.3)
        for params in (first, second)
    ]
    for params in (first, second):
        feed(params, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    optimizers[0].step()
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizers[1].step()
    torch.cuda.synchronize()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("places", [("cpu", "cuda"), ("cuda", "cpu")], ids=str)
def test_a_bad_gradient_on_a_busy_gpu_skips_weights_on_the_host(places):
    params = [nn.Parameter(torch.ones(8, 8, device=place)) for place in places]
    optimizer = AdamWSW(params, lr=0.05)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    torch.cuda._sleep(200_000_000)
    params[places.index("cuda")].grad.fill_(torch.nan)
    optimizer.step()
    assert all(map(torch.equal, params, before))


def test_more_matrices_than_a_grid_has_rows_move_like_fewer():
    """A chunk of 70,000 matrices moves them like chunks of at most 65,535, the limit of a grid's second axis."""

    def trained(**options):
        (param,) = on_gpu((70_000, 8, 8))
        optimizer = MuonSW([{"params": [param], "matrix": "stack"}], lr=0.05, **options)
        param.grad = param.detach().sin()
        optimizer.step()
        return param.detach()

    # float16 products may be summed in another order; elements of directions are below 1.2
    bound = 0.05 * 0.2 * 8**0.5 * 1.2 * 2**-8
    assert (trained() - trained(chunk_bytes=4 * 64 * 10_000)).abs().max() < bound
