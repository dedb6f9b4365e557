"""Every kernel compiles for a Hopper GPU without one: Triton's interpreter accepts code its compiler refuses.

The test runs this file as a program, because kernels that were defined for the interpreter cannot be compiled.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from muonsw import MuonSW, kernels, step
from muonsw.kernels import adamw, finite, momentum, move, normalize, stored, symmetric
from muonsw.lab.model import kernels as model
from muonsw.nonfinite import Flag
from muonsw.precision import Noise

MODULES = (adamw, finite, momentum, move, normalize, stored, symmetric, model)
SLOTS = (
    {},
    {"normalize": "normuon", "precondition": "muon2", "cautious": True},
    {"normalize": "adamuon", "precondition": "sign", "maximize": True},
    {"normalize": "normuon", "normalize_axis": "longer"},
    {"normalize": "muon_plus", "precondition": "equalize"},
)
ELEMENTS = (
    {"algorithm": "adamw"},
    {"algorithm": "adamw", "state_dtype": "int8", "cautious": True},
    {"algorithm": "adamw", "state_dtype": "bfloat16", "maximize": True},
)


def test_every_kernel_compiles_without_a_gpu(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.test_for_hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]


class NoGPU:
    """The driver methods that Triton calls before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def steps(dtype, on_device):
    """Take a step with every option that has kernels; `on_device` passes rates as replay does. Nothing is computed."""
    make_plan = step.make_plan

    def with_scalars(*args):
        plan = make_plan(*args)
        contexts = [c._replace(eta=torch.tensor(c.eta), phi=torch.tensor(c.phi)) for c in plan.contexts]
        return plan._replace(contexts=contexts)

    step.make_plan = with_scalars if on_device else make_plan
    for options in (*SLOTS, *ELEMENTS):
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((512, 512), (512, 1024), (96, 64))]
        for param in params:
            param.grad = torch.randn_like(param)
        MuonSW([{"params": params, **options}], lr=0.01, ns_dtype="float16", replay=False).step()
    step.make_plan = make_plan


def others():
    """Launch what no step of a single process launches on a CPU, and the kernels of the lab's model."""
    x, scale, noise = torch.randn(64, 256), torch.ones(64, 1), Noise(torch.zeros(()), 5, 0)
    finite.find_bad([x], torch.zeros(()))
    group = {"momentum_form": "ema", "momentum": 0.9, "nesterov": True, "maximize": False, "precondition": None}
    momentum.advance_momenta(group, [x], [x], [], [x], None)
    for dtype, levels in ((torch.int8, 127), (torch.uint8, 255)):
        codes = torch.zeros(64, 256, dtype=dtype)
        stored.decode(codes, scale, levels)
        for rounding, ok in ((None, None), (noise, torch.ones((), dtype=torch.bool))):
            stored.encode(x, codes, scale, levels, rounding, ok)
    stored.round_bfloat16(x, x.bfloat16(), noise, None)
    for dtype in (torch.float32, torch.bfloat16):
        logits, fused = x.to(dtype), torch.randn(64, 128).to(dtype)
        model.softmax_losses_(logits, torch.zeros(64, dtype=torch.int64), torch.empty(64), 1.0, 1.0)
        for weights in (torch.rand(32, 2), None):
            model.add_rows(fused, torch.arange(64).view(32, 2), weights)


def main():
    driver.set_active(NoGPU())
    launched = set()

    def compile_only(_device, kernel, grid, *arguments, **options):
        kernel.warmup(*arguments, grid=grid, **options)
        launched.add(kernel)

    for module in MODULES:
        module.launch_on = compile_only
    kernels.available, kernels.TORCH_BELOW = lambda _: True, 0
    step.finite_flag = lambda *_: Flag(torch.zeros(()))
    for dtype, on_device in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, False)):
        steps(dtype, on_device)
    others()
    every = {value for module in MODULES for value in vars(module).values() if isinstance(value, JITFunction)}
    helpers = {kernel for kernel in every if any(f"{kernel.fn.__name__}(" in other.src for other in every - {kernel})}
    missing = sorted(kernel.fn.__name__ for kernel in every - helpers - launched)
    assert not missing, f"add a launch of {missing}"


if __name__ == "__main__":
    main()
