"""Accelerate: wrapped optimizers and schedulers work everywhere, and a saved state resumes."""

import math

import pytest
import torch

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR

from muonsw import MuonSW, clip_optimizer_grads_
from tests.common.problems import assert_same
from tests.integrations.models import MODELS, Tokens

LR, STEPS = 0.02, 6


class Run:
    """A prepared model, optimizer and scheduler, and the loop of Accelerate's examples."""

    def __init__(self, accelerator, *, scheduler=lambda o: CosineAnnealingLR(o, STEPS), lr=LR):
        set_seed(0)
        self.accelerator = accelerator
        model = MODELS["llama"]()
        self.plain = MuonSW.for_model(model, lr=lr, weight_decay=0.1)
        batches = torch.utils.data.DataLoader(Tokens(), batch_size=4)
        self.model, self.optimizer, self.batches, self.scheduler = accelerator.prepare(
            model, self.plain, batches, scheduler(self.plain)
        )

    def go(self, start, end, clip=None):
        for batch in list(self.batches)[start:end]:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if clip is not None and self.accelerator.sync_gradients:
                    clip(self)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def by_hand(batches=None, clip=math.inf, processes=1):
    """The same steps in a plain loop; Accelerate steps a scheduler once for each process."""
    set_seed(0)
    model = MODELS["llama"]()
    optimizer = MuonSW.for_model(model, lr=LR, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    for batch in batches or list(torch.utils.data.DataLoader(Tokens(), batch_size=4))[:STEPS]:
        model(**batch).loss.backward()
        clip_optimizer_grads_(optimizer, clip)
        optimizer.step()
        for _ in range(processes):
            scheduler.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_prepared_steps_are_those_of_a_plain_loop(accelerator):
    run = Run(accelerator)
    prepared = run.go(0, STEPS)
    assert_same(by_hand(), prepared)
    assert {group["resolved_peak_lr"] for group in run.plain.param_groups} == {LR}


def test_a_saved_state_resumes_bit_for_bit(accelerator, tmp_path):
    whole = Run(accelerator)
    whole.go(0, 3)
    accelerator.save_state(str(tmp_path))
    expected = whole.go(3, STEPS)
    other = Accelerator(cpu=True)
    resumed = Run(other)
    other.load_state(str(tmp_path))
    assert {group["resolved_peak_lr"] for group in resumed.plain.param_groups} == {LR}
    assert_same(resumed.go(3, STEPS), expected)


def test_set_peak_lr_reads_a_wrapped_scheduler(accelerator):
    """CyclicLR does not record its peak in the groups, only in the scheduler object."""
    cyclic = Run(
        accelerator,
        scheduler=lambda o: CyclicLR(o, base_lr=0.005, max_lr=0.03, step_size_up=2, cycle_momentum=False),
    )
    cyclic.plain.set_peak_lr(cyclic.scheduler)
    cyclic.go(0, STEPS)
    assert {group["resolved_peak_lr"] for group in cyclic.plain.param_groups} == {0.03}


def test_a_compiled_model_trains_and_resumes_like_the_plain_one(tmp_path):
    """`prepare` compiles after the optimizer was built; the backend traces and generates no code."""
    compiled = Accelerator(cpu=True, dynamo_backend="aot_eager")
    run = Run(compiled)
    assert isinstance(run.model, torch._dynamo.OptimizedModule)
    run.go(0, 3)
    compiled.save_state(str(tmp_path))
    actual = run.go(3, STEPS)
    for name, value in by_hand().items():
        torch.testing.assert_close(actual[f"_orig_mod.{name}"], value, rtol=1e-3, atol=1e-5)
    other = Accelerator(cpu=True, dynamo_backend="aot_eager")
    resumed = Run(other)
    other.load_state(str(tmp_path))
    assert_same(resumed.go(3, STEPS), actual)


def test_our_clipping_and_accelerates_both_work(accelerator):
    run, seen = Run(accelerator), []

    def ours(run):
        seen.append(clip_optimizer_grads_(run.optimizer, 1e-3))
        left = [p.grad.norm() for g in run.plain.param_groups if g["algorithm"] == "adamw" for p in g["params"]]
        assert torch.stack(left).norm() == pytest.approx(1e-3, rel=1e-4)

    run.go(0, 2, clip=ours)
    run.go(2, 4, clip=lambda run: run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0))
    assert len(seen) == 2


def test_accumulated_steps_are_those_of_the_larger_batch():
    tokens = torch.stack([Tokens()[place]["input_ids"] for place in range(8)])
    whole = Run(Accelerator(cpu=True))
    whole.accelerator.backward(whole.model(input_ids=tokens, labels=tokens).loss)
    whole.optimizer.step()
    halves = Run(Accelerator(cpu=True, gradient_accumulation_steps=2))
    for part in tokens.chunk(2):
        with halves.accelerator.accumulate(halves.model):
            halves.accelerator.backward(halves.model(input_ids=part, labels=part).loss)
            halves.optimizer.step()
            halves.optimizer.zero_grad()
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_under_bf16_autocast_state_stays_float32():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    run = Run(accelerator)
    run.go(0, 3)
    assert {value.dtype for state in run.plain.state.values() for value in state.values()} == {torch.float32}
    assert run.plain.skipped_steps == 0
