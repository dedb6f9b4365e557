"""One NCCL rank on a CUDA device: the steps of a plain optimizer, without waiting for the device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonsw import MuonSW, machine
from muonsw.distributed.shards import Layouts
from tests.common.cuda import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]

SHAPES = [(64, 64), (32, 96), (64, 64), (1, 48), (96, 32)]


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(Layouts, "fewest", 1)  # the exchange runs, with one rank
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def values(dtype):
    generator = torch.Generator().manual_seed(0)
    return [(0.1 * torch.randn(shape, generator=generator)).to("cuda", dtype) for shape in SHAPES]


def built(kind, mesh, dtype, **options):
    """Build an optimizer of matrices under Muon and one under AdamW."""

    def make(value):
        return nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if kind == "shards" else value)

    params = [make(value.clone()) for value in values(dtype)]
    shared = {"process_group": dist.group.WORLD} if kind == "copies" else {}
    groups = [{"params": params[:-1]}, {"params": params[-1:], "algorithm": "adamw"}]
    return MuonSW(groups, lr=0.05, weight_decay=0.3, **shared, **options), params


def feed(params, step, bad=False):
    for number, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + number)
        grad = torch.randn(param.shape, generator=generator).to("cuda", param.dtype)
        if bad and number == 1:
            grad[0, 0] = torch.inf
        param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)]) if hasattr(param, "device_mesh") else grad


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
@pytest.mark.parametrize("moving", [False, True], ids=["gradients stay", "gradients move"])
@pytest.mark.parametrize("kind", ["shards", "copies"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_steps_on_one_rank_equal_a_plain_optimizer(mesh, kind, dtype, moving):
    """Eager and replayed steps, each with an infinity in one of them."""
    optimizers = [built(chosen, mesh, dtype, ns_dtype=torch.float64) for chosen in ("plain", kind)]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for step in range(12):
        for optimizer, params in optimizers:
            before = [param.grad for param in params]
            feed(params, step, bad=step in (2, 9))
            if step and not moving:
                for param, grad in zip(params, before, strict=True):
                    param.grad = grad.copy_(param.grad)
            optimizer.step()
    assert [optimizer.skipped_steps for optimizer, _ in optimizers] == [2, 2]
    assert optimizers[1][0]._replay._replays or dtype == torch.float64
    close = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for alone, together in zip(optimizers[0][1], optimizers[1][1], strict=True):
        found = together.detach().full_tensor() if kind == "shards" else together.detach()
        assert (found - alone.detach()).abs().max() <= close * alone.detach().abs().max()


@pytest.mark.parametrize("replay", [None, False], ids=["replayed", "eager"])
@pytest.mark.parametrize("kind", ["shards", "copies"])
def test_settled_steps_never_wait_for_the_device(mesh, kind, replay):
    optimizer, params = built(kind, mesh, torch.float32, replay=replay)
    feed(params, 0)
    for _ in range(8):
        optimizer.step()
    with no_waiting():
        for _ in range(3):
            optimizer.step()
    assert bool(optimizer._replay._replays) == (replay is None)
    assert optimizer.skipped_steps == 0
    alive.append(optimizer)


alive = []  # the process group must end even while graphs are alive
