"""Records arrive where they are sent."""

import json

import torch
from torch import nn

from muonsw import MuonSW, Telemetry
from muonsw.telemetry import JsonlSink, TensorBoardSink, WandbSink
from tests.common.problems import matrices


class Writer:
    """Takes scalars as TensorBoard's SummaryWriter does."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, global_step):
        self.scalars[tag, global_step] = value


class Run:
    """Takes values as a W&B run does."""

    def __init__(self):
        self.metrics, self.logged = {}, []

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, values):
        self.logged.append(values)


def trained(*sinks):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    optimizer = MuonSW.for_model(model, lr=0.02)
    telemetry = Telemetry(optimizer, every=2, sink=sinks)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
    return telemetry


def test_a_jsonl_file_reads_back_as_the_records(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    first, second = trained(JsonlSink(path)), trained(JsonlSink(path))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == first.records + second.records
    assert {line["kind"] for line in lines} == {"telemetry"}


def test_values_that_are_not_finite_are_null(tmp_path):
    params = matrices((4, 4))
    optimizer = MuonSW(params, lr=0.02, nonfinite="propagate")
    path = tmp_path / "metrics.jsonl"
    Telemetry(optimizer, every=1, sink=JsonlSink(path))
    params[0].grad = torch.full((4, 4), float("nan"))
    optimizer.step()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["all"]["update_rms"] is None
    assert record["all"]["alignment_update_mean"] is None
    assert record["all"]["weight_rms"] > 0


def test_scalars_go_to_a_tensorboard_writer():
    writer, every = Writer(), Writer()
    telemetry = trained(TensorBoardSink(writer), TensorBoardSink(every, parameters=True))
    record = telemetry.last
    assert writer.scalars["telemetry/roles/hidden/decay", 4] == record["roles"]["hidden"]["decay"]
    assert writer.scalars["telemetry/layers/1/numel", 2] == 20
    assert writer.scalars["telemetry/skipped", 1] == 0
    assert not any("parameters" in tag for tag, _ in writer.scalars)
    assert every.scalars["telemetry/parameters/0.weight/defect", 4] == record["parameters"]["0.weight"]["defect"]
    assert None not in every.scalars.values()


def test_scalars_go_to_a_wandb_run_under_their_own_step():
    run_object = Run()
    telemetry = trained(WandbSink(run_object))
    assert run_object.metrics["telemetry/*"] == "telemetry/step"
    assert [values["telemetry/step"] for values in run_object.logged] == [1, 2, 4]
    assert run_object.logged[-1]["telemetry/all/weight_rms"] == telemetry.last["all"]["weight_rms"]
