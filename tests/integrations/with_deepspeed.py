"""Run as a separate process: DeepSpeed trains on the CPU, and the result is written as JSON."""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from tests.integrations.launching import deepspeed_on_the_cpu

LR, STEPS, LAMBDA = 0.02, 6, 0.1
SETTINGS = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}  # its default clips by a norm of 1


def model():
    torch.manual_seed(0)
    hidden = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    return nn.Sequential(nn.Embedding(32, 16), *hidden, nn.RMSNorm(16), nn.Linear(16, 32, bias=False))


def batch(step):
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(network, step):
    tokens = batch(step)
    return nn.functional.cross_entropy(network(tokens).flatten(0, 1).float(), tokens.flatten())


def halving(step):
    return 1.0 if step < 2 else 0.5 if step < 4 else 0.25


def engine(stage, client=None, network=None, **config):
    import deepspeed

    network = network or model()
    wrapped, _, _, _ = deepspeed.initialize(
        model=network,
        optimizer=client and client(network),
        model_parameters=None if client else network.parameters(),
        config={**SETTINGS, "zero_optimization": {"stage": stage}, **config},
    )
    return wrapped


def train(wrapped, start, end, before=None):
    for step in range(start, end):
        for group in wrapped.basic_optimizer.param_groups:
            group["lr"] = LR * halving(step)
        if before is not None:
            before(wrapped, step)
        wrapped.backward(loss_of(wrapped, step))
        wrapped.step()
    return [param.detach().float().clone() for param in wrapped.module.parameters()]


def by_hand(optimizer):
    network = model()
    optimizer = optimizer(network)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * halving(step)
        loss_of(network, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in network.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def stage_0(folder):
    """Our optimizer in the engine takes the steps of a plain loop and resumes bit for bit."""
    from muonsw import MuonSW

    def ours(network):
        return MuonSW.for_model(network, lr=LR, weight_decay=LAMBDA)

    wrapped = engine(0, ours)
    train(wrapped, 0, 3)
    wrapped.save_checkpoint(folder, tag="three")
    actual = train(wrapped, 3, STEPS)
    again = engine(0, ours)
    again.load_checkpoint(folder, tag="three")
    resumed = train(again, 3, STEPS)
    peaks = {group["resolved_peak_lr"] for group in again.basic_optimizer.param_groups}
    matrices = wrapped.basic_optimizer.summary().matrices
    plain = equal(actual, by_hand(ours))
    return {"plain": plain, "resumed": equal(actual, resumed), "peaks": list(peaks), "matrices": matrices}


def zero(_):
    """ZeRO flattens parameters: Muon refuses, AdamW works elementwise."""
    from muonsw import AdamWSW, MuonSW

    refused = []
    for stage in (1, 2, 3):
        wrapped = engine(stage, lambda net: MuonSW.for_model(net, lr=LR), zero_allow_untested_optimizer=True)
        before = [param.detach().clone() for param in wrapped.module.parameters()]
        try:
            train(wrapped, 0, 1)
        except ValueError as error:
            refused.append("ZeRO" in str(error) and equal(before, wrapped.module.parameters()))

    def adamw(network):
        return AdamWSW(network.parameters(), lr=LR, weight_decay=LAMBDA)

    allowed = {"zero_allow_untested_optimizer": True}
    expected = by_hand(adamw)
    for stage in (1, 2):  # the same entries in another order, in float32
        torch.testing.assert_close(train(engine(stage, adamw, **allowed), 0, STEPS), expected, rtol=0, atol=1e-6)
    return {"refused": refused}


def own_muon(_):
    """DeepSpeed's own Muon with `scale_weight_decay` equals one whose decay is set by hand before each step."""
    from muonsw import scale_weight_decay

    settings = {"lr": LR, "weight_decay": LAMBDA, "momentum": 0.95, "torch_adam": True}
    equals, decays = [], []
    for stage in (0, 1, 2):
        config = {"optimizer": {"type": "Muon", "params": copy.deepcopy(settings)}}
        driven = engine(stage, **copy.deepcopy(config))
        scale_weight_decay(driven.optimizer, "scaled", peak_lr=LR)
        actual = train(driven, 0, STEPS)
        decays.append([group["weight_decay"] for group in driven.basic_optimizer.param_groups])

        def by_rule(wrapped, step):
            for group in wrapped.basic_optimizer.param_groups:
                group["weight_decay"] = LAMBDA * halving(step)

        equals.append(equal(actual, train(engine(stage, **copy.deepcopy(config)), 0, STEPS, before=by_rule)))
    return {"equal": equals, "decays": decays}


def main(what, folder):
    warnings.simplefilter("ignore")
    deepspeed_on_the_cpu()
    torch.set_num_threads(1)
    result = {"stage_0": stage_0, "zero": zero, "own_muon": own_muon}[what](folder)
    Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
