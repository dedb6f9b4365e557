"""Graphs whose gradients move between replays. Without a GPU, a recorder replaces CUDA's graphs."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import AdamWSW, MuonSW, machine
from muonsw.addons import replay
from muonsw.addons.replay import SETTLED
from muonsw.kernels import adamw, finite, momentum, move, normalize, stored, symmetric
from muonsw.kernels.graphs import GradientReads
from muonsw.kernels.tables import GraphTables, in_graph, table
from muonsw.nonfinite import Flag
from muonsw.work import StepContext
from tests.common.problems import assert_same, cosine, matrices, set_gradients, tensors_of

SHAPES = [(16, 16), (8, 24), (2, 24, 16), (24, 8)]


class Recorder(TorchDispatchMode):
    """Like a CUDA graph, record a program without running it, then run it on the same memory."""

    def __init__(self, program, device, pool):
        super().__init__()
        del device, pool
        self.calls = []
        with self, pytest.MonkeyPatch.context() as patch:
            for module in (adamw, finite, momentum, move, normalize, stored, symmetric):
                patch.setattr(module, "launch_on", self.launch)
            program()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar" not in str(operation), "a graph waits for nothing"
        if operation._schema.is_mutable:
            result = (kwargs or {}).get("out", args[0])
        else:
            result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return None if operation._schema.is_mutable and not operation._schema.returns else result

    def launch(self, _device, kernel, grid, *arguments, **options):
        self.calls.append((kernel[grid], arguments, options, None))

    def pool(self):
        return self

    def replay(self):
        for call, args, options, before in self.calls:
            after = call(*args, **options)
            if before is not None and not call._schema.is_mutable and not call.is_view:
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


@pytest.fixture
def graphs(monkeypatch, kernels_on):
    kernels_on(True)
    if not machine.gpus():
        monkeypatch.setattr(replay, "recorded", Recorder)
        monkeypatch.setattr(replay, "supports", lambda _optimizer, _batches: "")


def trained(algorithm, device, *, captured, steps=8, dtype=torch.float32, split=None, **options):
    params = [nn.Parameter(p.detach().to(device, dtype)) for p in matrices(*SHAPES)]
    split = {"matrix": "stack", **(split or {"heads": 2})} if algorithm == "muon" else {}
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, **split}]
    settings = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9, "nonfinite": "propagate", "replay": True, **options}
    optimizer = MuonSW([{**group, "algorithm": algorithm} for group in groups], **settings)
    earlier = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine(0.05, steps)(step)
        earlier.append([p.grad for p in params])  # so new gradients get new addresses
        for param in params:
            param.grad = None
        on_cpu = [nn.Parameter(torch.empty(p.shape)) for p in params]
        set_gradients(on_cpu, step)
        for param, source in zip(params, on_cpu, strict=True):
            param.grad = source.grad.to(device, dtype)
        if not captured:
            optimizer._replay._seen.clear()
        optimizer.step()
    assert optimizer._replay._captures == captured
    return optimizer, params


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "options",
    [
        {"cautious": True},
        {"chunk_bytes": 4096},
        {"dtype": torch.bfloat16},
        {"split": {"heads": 2, "split_dim": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_one_graph_serves_gradients_at_any_address(algorithm, options, device):
    optimizer, params = trained(algorithm, device, captured=True, **options)
    assert optimizer._replay._replays == 8 - (SETTLED + 2)
    eager, expected = trained(algorithm, device, captured=False, **options)
    assert_same(tensors_of(optimizer, params), tensors_of(eager, expected))


@pytest.mark.usefixtures("graphs")
def test_gradient_addresses_follow_the_order_of_the_parameters(device):
    """A batch has one dtype, so batches reorder parameters; and one parameter has no gradient."""

    def run(captured):
        dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
        params = [nn.Parameter(p.detach().to(device, t)) for p, t in zip(matrices(*[(8, 8)] * 5), dtypes, strict=True)]
        optimizer, earlier = AdamWSW(params, lr=0.05, nonfinite="propagate", replay=True), []
        generator = torch.Generator().manual_seed(0)
        for _ in range(SETTLED + 5):
            for param in params[1:]:
                param.grad = torch.randn(8, 8, generator=generator).to(param)
                earlier.append(param.grad)
            if not captured:
                optimizer._replay._seen.clear()
            optimizer.step()
        assert bool(optimizer._replay._replays) == captured
        return params

    assert_same(run(True), run(False))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("options", [{}, {"normalize": "normuon"}, {"state_dtype": "bfloat16"}], ids=str)
def test_a_replay_with_bad_gradients_changes_nothing_and_is_reported_as_skipped(options, device, monkeypatch):
    def on_the_device(work, *_):
        bad = torch.zeros((), device=device)
        finite.find_bad([grad for batch in work for grad in batch.grads], bad)
        return Flag(bad)

    monkeypatch.setattr("muonsw.step.finite_flag", on_the_device)
    optimizer, params = trained("muon", device, captured=True, steps=6, nonfinite="skip", **options)
    params[2].grad[1, 2, 3] = torch.nan
    before = tensors_of(optimizer, params)
    optimizer.step()
    assert optimizer._replay._replays == 2
    assert_same(tensors_of(optimizer, params), before)
    assert optimizer.summary().skipped
    params[2].grad.zero_()
    optimizer.step()
    assert not optimizer.summary().skipped


def test_tables_follow_the_gradients_that_their_entries_point_into(device):
    first, second = torch.zeros(2, 6, 4, device=device), torch.zeros(5, device=device)
    weight = torch.zeros(2, 6, 4, device=device)
    tables = GraphTables([first, second], device, 256)
    rows = [[first[0].data_ptr(), first[1, 2].data_ptr(), second.data_ptr()], [weight.data_ptr(), 24, 0]]
    with in_graph(tables):
        actual = table(rows, device).numbers
        another = table([[second[4:].data_ptr()]], device).numbers
    tables.finish()
    for places in ((first.data_ptr(), second.data_ptr()), (2**40, 2**41)):
        tables.move(places)
        tables.compute()
        a, b = places
        assert actual.tolist() == [[a, a + 4 * (24 + 8), b], rows[1]]
        assert another.tolist() == [[b + 16]]


def test_gradients_that_share_memory_are_detected(device):
    both = torch.zeros(8, 6, device=device)
    assert not GraphTables([both[:4], both[4:]], device, 0).overlap
    assert GraphTables([both[:, :3], both[:, 3:]], device, 0).overlap
    assert GraphTables([both, both], device, 0).overlap


def test_operations_that_read_a_gradient_are_detected(device):
    grad, other = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)

    def seen(work):
        with GradientReads([grad]) as watch:
            work()
        return watch.seen

    assert not seen(lambda: (grad.view(-1)[3:].data_ptr(), other + 1))
    assert not seen(lambda: finite.find_bad([grad], torch.zeros((), device=device)))
    assert seen(lambda: grad.to(torch.float64))
    with torch.inference_mode():
        assert seen(lambda: grad.to(torch.float64))
    assert seen(lambda: torch._foreach_add([other, other], [other, grad.mT]))
    assert seen(lambda: normalize.slice_factors({"normalize": "muon_plus"}, grad[None], [], (0, 0), None))
    # the address of a direction is in a table too
    assert not seen(lambda: move.move(move.Weights([other]), [grad], 1.0, False, StepContext(0.1, 0.0, 0)))


@pytest.mark.usefixtures("graphs")
def test_steps_whose_gradients_torch_reads_are_not_replayed(device, monkeypatch):
    """Without kernels, AdamW's directions come from torch operations."""
    monkeypatch.setattr(replay, "has_kernels_throughout", lambda _group: True)
    with pytest.warns(UserWarning, match="torch operations read gradients"):
        optimizer, params = trained("adamw", device, captured=True, fused=False)
    assert not optimizer._replay._graphs
    assert_same(params, trained("adamw", device, captured=False, fused=False)[1])


@pytest.mark.usefixtures("graphs")
def test_steps_are_replayed_by_default(device, monkeypatch):
    always = property(lambda _: True, lambda *_: None)  # on a CPU too
    monkeypatch.setattr(replay.Replay, "_is_on", always, raising=False)
    optimizer, params = trained("muon", device, captured=True, replay=None)
    assert optimizer._replay._replays
    assert_same(params, trained("muon", device, captured=False, replay=None)[1])
