"""The kernels of a first step are compiled together, before it is taken."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import MuonSW, kernels, machine, step
from muonsw.kernels import elementwise, finite, momentum, move, normalize, symmetric
from tests.common.problems import matrices, set_gradients

MODULES = (elementwise, finite, momentum, move, normalize, symmetric)
SHAPES = [(32, 32), (32, 64), (64, 32), (2, 32, 64), (24,), (24,)]


def kind(argument):
    """What Triton compiles for in an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return (argument == 1, argument % 16) if isinstance(argument, int) else type(argument)


class Launches:
    """Notes what would be compiled, and launches it only if `real`."""

    def __init__(self, monkeypatch):
        self.found, self.real = set(), True
        for module in MODULES:
            monkeypatch.setattr(module, "launch_on", self.launch)

    def launch(self, device, kernel, grid, *arguments, **options):
        self.found.add((kernel.fn.__name__, *map(kind, arguments), *sorted(options.items(), key=str)))
        if self.real:
            kernels.launch_on(device, kernel, grid, *arguments, **options)

    def taken(self):
        found, self.found = self.found, set()
        return found


def optimizer_with_gradients(device, dtype, **options):
    params = [nn.Parameter(p.detach().to(device, dtype)) for p in matrices(*SHAPES)]
    groups = [{"params": params[:3]}, {"params": params[3:4], "matrix": "stack", "split_sizes": (16, 16)}]
    groups += [{"params": params[4:], "algorithm": "adamw"}]
    optimizer = MuonSW(groups, lr=0.05, weight_decay=0.3, nonfinite="propagate", **options)
    twins = [nn.Parameter(torch.empty(p.shape)) for p in params]
    set_gradients(twins, 0)
    for param, twin in zip(params, twins, strict=True):
        param.grad = twin.grad.to(device, dtype)
    return optimizer, params


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"normalize": "normuon", "precondition": "muon2", "cautious": True}], ids=str)
def test_all_that_a_step_launches_is_found_before_it_and_nothing_changes(
    dtype, options, device, kernels_on, monkeypatch
):
    kernels_on(True)
    launches = Launches(monkeypatch)
    optimizer, params = optimizer_with_gradients(device, dtype, ns_dtype="float16", replay=False, **options)
    before = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
    work = step.collect(optimizer)
    rates = step.final_rates(optimizer, work, None)
    state = copy.deepcopy([item.state for batch in work for item in batch.items])
    launches.real = False
    for batch, known in zip(work, rates, strict=True):
        for one in step.updates_here(optimizer, batch.group, step.stand_ins(batch.group, batch.items), known):
            step.apply_update(batch.group, one, known)
    found = launches.taken()
    after = [p.detach() for p in params], [p.grad for p in params]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))
    for old, new in zip(state, [item.state for batch in work for item in batch.items], strict=True):
        assert all(torch.equal(value, new[key]) for key, value in old.items())
    launches.real = True
    optimizer._has_compiled = True
    optimizer.step()
    assert found == launches.taken()
    assert {"_advance", "_normalize", "_symmetric", "_move", "_adamw"} <= {name for name, *_ in found}


@pytest.mark.skipif(not machine.gpus(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("replay", [None, False])
def test_weights_are_the_same_bits_when_kernels_are_compiled_ahead(replay, device):
    ahead, params = optimizer_with_gradients(device, torch.float32, replay=replay)
    plain, twins = optimizer_with_gradients(device, torch.float32, replay=replay)
    plain._has_compiled = True
    for _ in range(3):
        ahead.step()
        plain.step()
    assert ahead._has_compiled
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


@pytest.mark.skipif(not machine.gpus(), reason="the interpreter compiles nothing")
def test_a_first_step_finds_its_kernels_compiled(device, monkeypatch):
    used = [momentum._advance, momentum._normalize, symmetric._symmetric, move._move]
    for kernel in used:
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in [(512, 512), (1024, 512)] * 8]
    optimizer = MuonSW(params, lr=0.05, replay=False)
    for param in params:
        param.grad = torch.randn_like(param)
    compiled = []

    def count():
        compiled.append(sum(len(caches[0]) for kernel in used for caches in kernel.device_caches.values()))

    monkeypatch.setattr(step, "update", lambda *given, update=step.update: (count(), update(*given)))
    optimizer.step()
    count()
    assert compiled[0] == compiled[-1] >= len(used)


@pytest.mark.skipif(not machine.gpus(), reason="the interpreter compiles nothing")
def test_a_kernel_that_is_compiled_together_with_others_is_not_launched(device):
    from muonsw.kernels.finite import find_bad

    bad = torch.zeros(4, device=device)
    with kernels.compiled_together(device):
        find_bad([torch.full((16,), float("nan"), device=device)], bad[0])
    assert not bad.any()
    find_bad([torch.full((16,), float("nan"), device=device)], bad[0])
    assert bad[0] == 1


def test_the_key_of_tritons_cache_is_computed_before_the_first_step(monkeypatch):
    from triton.runtime.cache import triton_key

    monkeypatch.setattr(kernels, "_loading", [])
    MuonSW(matrices((4, 4)), lr=0.1)
    assert not kernels._loading  # on a CPU there is nothing to compile
    triton_key.cache_clear()
    kernels.load_ahead(torch.device("cuda", 0))
    kernels._loading[0].join()
    assert triton_key.cache_info().currsize == 1
