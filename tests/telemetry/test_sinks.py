"""Sinks receive every record."""

import json
from unittest.mock import Mock

import torch
from torch import nn

from muonsw import MuonSW, Telemetry
from muonsw.telemetry import JsonlSink, MlflowSink, TensorBoardSink, WandbSink
from tests.common.problems import matrices


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
    JsonlSink(path)({"kind": "train", "step": 1, "loss": float("inf")})
    record, loss = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert loss == {"kind": "train", "step": 1, "loss": None}
    assert record["all"]["update_rms"] is None
    assert record["all"]["alignment_update_mean"] is None
    assert record["all"]["weight_rms"] > 0


def test_scalars_go_to_a_tensorboard_writer():
    writer, detailed = Mock(), Mock()
    record = trained(TensorBoardSink(writer), TensorBoardSink(detailed, parameters=True)).last
    scalars, every = (
        {(tag, step): value for (tag, value, step), _ in each.add_scalar.call_args_list} for each in (writer, detailed)
    )
    assert scalars["telemetry/roles/hidden/decay", 4] == record["roles"]["hidden"]["decay"]
    assert scalars["telemetry/layers/1/numel", 2] == 20
    assert scalars["telemetry/skipped", 1] == 0
    assert not any("parameters" in tag for tag, _ in scalars)
    assert every["telemetry/parameters/0.weight/defect", 4] == record["parameters"]["0.weight"]["defect"]
    assert None not in every.values()


def test_scalars_go_to_wandb_under_their_own_step_and_to_mlflow():
    wandb, mlflow = Mock(), Mock()
    record = trained(WandbSink(wandb), MlflowSink(mlflow)).last
    wandb.define_metric.assert_any_call("telemetry/*", step_metric="telemetry/step")
    logged = [values for (values,), _ in wandb.log.call_args_list]
    assert [values["telemetry/step"] for values in logged] == [1, 2, 4]
    assert logged[-1]["telemetry/all/weight_rms"] == record["all"]["weight_rms"]
    (metrics,), options = mlflow.log_metrics.call_args
    assert (options, metrics["telemetry/all/weight_rms"]) == ({"step": 4}, record["all"]["weight_rms"])
