"""The cost model of `muonsw plan`, compared with what ranks hold and send."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from muonsw import MuonSW
from muonsw.distributed.shards import local
from muonsw.lab.model import Decoder, ModelConfig
from muonsw.lab.plan import Setup, plan_step
from tests.distributed.problems import give_plain, give_sharded, group_of, mesh_of, take_step
from tests.distributed.test_exchange import Counter

# Every number of ranks below divides these sizes, so each rank has an equal share.
MODEL = ModelConfig(width=48, layers=2, head_dim=16, experts=12, ff=24, vocab=96, sequence=8)
FEW_EXPERTS = ModelConfig(width=48, layers=2, head_dim=16, experts=2, ff=24, vocab=96, sequence=8)


def shard_model(model, layout):
    """Make every parameter a DTensor with the planned layout; return a process group of the ranks."""
    if layout.strategy == "ddp":
        return group_of(layout.gpus)
    stack = math.gcd(layout.gpus, model.config.experts) if layout.strategy == "ep" else 1
    mesh = mesh_of(layout.gpus // stack, stack)
    if mesh is None:
        return None
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            stacked = param.dim() == 3
            placements = [Shard(0), Shard(0)]
            if stacked and layout.strategy == "ep":
                placements = [Shard(1), Shard(0)]
            elif stacked and layout.experts == "rows":
                placements = [Shard(1), Shard(1)]
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return mesh.get_group(0)


class CounterOfAll(Counter):
    """Counts over several process groups: experts and other matrices may use different ones."""

    calls = 0

    def _all_to_all(self, *args, **kwargs):
        self.me = dist.get_rank(kwargs["group"])
        self.calls += 1
        return super()._all_to_all(*args, **kwargs)


def measured(config, layout):
    """Return what a rank holds after a step and receives in the second one, in the planner's terms."""
    model = Decoder(config, seed=0)
    group = shard_model(model, layout)
    if group is None:
        return None
    shared = {"process_group": group} if layout.strategy == "ddp" else {}
    optimizer = MuonSW.for_model(model, lr=0.05, ns_dtype=torch.bfloat16, **shared)
    give = give_plain if layout.strategy == "ddp" else give_sharded
    take_step(optimizer, 0, give)
    with CounterOfAll(group) as counter:
        take_step(optimizer, 1, give)
    params = list(model.parameters())
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return {
        "weights": sum(local(param).nbytes for param in params),
        "gradients": sum(local(param.grad).nbytes for param in params),
        "muon_state": sum(local(value).nbytes for key, value in states if key == "momentum_buffer"),
        "adamw_state": sum(local(value).nbytes for key, value in states if key.startswith("exp_avg")),
        "received": counter.received,
        "collectives": counter.calls,
    }


def value_id(value):
    kind = (value.strategy, value.gpus, value.experts) if isinstance(value, Setup) else (value.experts, "experts")
    return "-".join(map(str, kind))


CASES = [
    (MODEL, Setup(2, "ddp")),
    (MODEL, Setup(4, "ddp")),
    (MODEL, Setup(2, "fsdp")),
    (MODEL, Setup(3, "fsdp")),
    (MODEL, Setup(4, "fsdp")),
    (MODEL, Setup(2, "fsdp", "rows")),
    (MODEL, Setup(4, "fsdp", "rows")),
    (MODEL, Setup(4, "ep")),
    (FEW_EXPERTS, Setup(4, "ep")),
]


@pytest.mark.parametrize(("config", "layout"), CASES, ids=value_id)
def test_memory_and_traffic_match_the_plan(pool, config, layout):
    """State to the byte, on average over ranks; the exchange to 5%, the bound of `test_exchange`."""
    answers = [answer for answer in pool.run(measured, config, layout) if answer]
    assert len(answers) == layout.gpus
    planned = plan_step(config, layout)
    for name in ("weights", "gradients", "muon_state", "adamw_state"):
        assert mean_of(answers, name) == pytest.approx(getattr(planned.memory, name), rel=1e-9), name
    assert mean_of(answers, "received") == pytest.approx(planned.optimizer_bytes, rel=0.05)
    assert max(answer["collectives"] for answer in answers) < planned.optimizer_collectives


def mean_of(answers, name):
    return sum(answer[name] for answer in answers) / len(answers)


def test_the_plan_is_for_the_rank_with_most_experts(pool):
    layout = Setup(4, "fsdp")
    uneven = ModelConfig(width=48, layers=2, head_dim=16, experts=5, ff=24, vocab=96, sequence=8)
    answers, planned = pool.run(measured, uneven, layout), plan_step(uneven, layout).memory.muon_state
    assert max(answer["muon_state"] for answer in answers) == planned > 1.2 * mean_of(answers, "muon_state")
