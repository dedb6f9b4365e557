"""Timings are made of checked steps and losses, of everyone who is installed; the numbers themselves are not tested."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from muonsw import machine
from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.tables import print_table
from muonsw.lab.bench import steps
from muonsw.lab.bench.timing import WARMING_ROUNDS, chosen_device, in_turn, product_rate
from muonsw.lab.bench.training import Amount, TimedTraining
from muonsw.lab.cli import main
from muonsw.lab.commands.bench import steps_table, training_table
from muonsw.lab.train.presets import preset_run

CPU = torch.device("cpu")
TWO = steps.listed([(8, 8), (8, 12)])


def test_the_sets_hold_the_same_numbers_for_everyone():
    for name, matrices in steps.SETS.items():
        ours = sum(torch.Size(shape).numel() for shape, _ in matrices.ours)
        stacks = sum(torch.Size(shape).numel() for shape in matrices.stacks)
        assert ours == stacks == matrices.parameters(), name


def test_our_steps_are_torchs():
    distances = steps.check(CPU, [(16, 16), (16, 24)])
    assert distances.keys() == {"muon", "adamw"}


def test_a_wrong_step_is_not_timed(monkeypatch):
    pair = steps.PAIRS["adamw"]
    worse = pair._replace(ours=lambda p: pair.torchs(p[:1]))
    monkeypatch.setattr(steps, "PAIRS", {"adamw": worse})
    with pytest.raises(steps.WrongStepError, match="our adamw step differs from torch's by 100"):
        steps.check(CPU, [(4, 4), (4, 6)])


def test_everyone_is_timed_and_a_failure_is_named():
    def broken(_matrices, _tensors):
        raise ValueError("it cannot")

    chosen, _ = steps.contenders(["muonsw", "AdamWSW", "hyperball", "schedule_free"])
    rows = steps.measure(TWO, steps.MatrixSource(CPU), rounds=1, chosen={**chosen, "broken": broken})
    assert rows.pop("broken") == {"error": "ValueError: it cannot"}
    for row in rows.values():
        assert 0 < row["ms_min"] <= row["ms"]
    assert rows["muonsw"]["state_bytes_per_parameter"] == pytest.approx(4, rel=0.01)
    assert rows["AdamWSW"]["state_bytes_per_parameter"] == pytest.approx(8, rel=0.1)
    assert rows["schedule_free"]["state_bytes_per_parameter"] == pytest.approx(12, rel=0.1)


def test_a_peer_that_takes_gradients_away_gets_them_back():
    seen = []

    class Taker(torch.optim.SGD):
        def step(self):
            params = self.param_groups[0]["params"]
            seen.append(all(p.grad is not None for p in params))
            for p in params:
                p.grad = None

    steps.measure(TWO, steps.MatrixSource(CPU), rounds=2, chosen={"taker": steps.theirs(lambda p: Taker(p, lr=0.1))})
    assert all(seen[:-1])
    assert len(seen) == 2 + WARMING_ROUNDS + 2


def test_peers_that_are_missing_are_named(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'absent'")

    present = steps.theirs(lambda p: torch.optim.SGD(p, lr=0.1))
    monkeypatch.setattr(steps, "PEERS", {"absent": absent, "present": lambda: present})
    found, missing = steps.contenders()
    assert missing == ["absent"]
    assert set(found) == {*steps.USUAL, "present"}
    assert set(steps.contenders(eager=True)[0]) == {*found, *steps.USUAL_EAGER}
    with pytest.raises(UsageError, match=r"unknown optimizer 'muonws' \(did you mean 'muonsw'\?\); known: muonsw"):
        steps.contenders(["muonws"])


def test_no_name_holds_what_separates_names_in_a_list():
    assert [name for name in (*steps.OURS_AND_TORCHS, *steps.PEERS) if "," in name] == []


def test_the_same_gradients_for_everyone():
    a, b = (steps.MatrixSource(CPU).make(TWO.plain) for _ in range(2))
    assert all(isinstance(p, nn.Parameter) for p in a)
    assert all(torch.equal(x.grad, y.grad) and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_amount_sets_the_sizes_of_a_run():
    run = preset_run("w256", "tokens")
    assert (Amount().of(run).batch, Amount().of(run).accumulation) == (256, 8)
    assert Amount(micro=64).of(run).accumulation == 4
    assert (Amount(batch=4).of(run).batch, Amount(batch=4).of(run).accumulation) == (4, 4)


def test_updates_are_the_trainers():
    timed = TimedTraining("demo", CPU, Amount(batch=2, blocks=1, updates=1))
    before = timed.training.model.embedding.weight.detach().clone()
    row = timed.measure()
    assert timed.training.step == 3
    assert not torch.equal(before, timed.training.model.embedding.weight)
    assert row["tokens_per_second"] == pytest.approx(2 * 128 / (1e-3 * row["ms"]))
    assert row["gib"] is None


def test_a_product_has_a_rate():
    assert product_rate(CPU) > 1e6


def test_the_command_prints_tables_and_json(capsys, monkeypatch):
    monkeypatch.setattr("muonsw.lab.commands.bench.SETS", {"two": TWO})
    monkeypatch.setattr("muonsw.lab.commands.bench.check", lambda device: steps.check(device, [(8, 8)]))
    assert main(["bench", "--device", "cpu", "--sets", "two", "--preset", "none", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "One step on two: 2 matrices" in printed
    assert "torch.optim.Muon" in printed
    arguments = ["bench", "--device", "cpu", "--sets", "two", "--preset", "none", "--rounds", "1"]
    assert main([*arguments, "--only", "muonsw", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["steps"]["two"]) == {"muonsw"}
    assert record["environment"]["versions"]["torch"]


def test_tables_fit_into_80_columns():
    step = {
        "ms": 1234.5678,
        "ms_min": 1200.1,
        "extra_bytes": 8e9,
        "state_bytes_per_parameter": 8.0,
        "first_step_s": 53.2,
    }
    rows = {"torch AdamW fused": step, "broken": {"error": "ValueError: it cannot"}}
    speed = {"preset": "w1024", "tokens_per_second": 1234567.8, "ms": 2298.6, "optimizer_ms": 35.8, "tflops": 458.1}
    training = {**speed, "gib": 53.1, "batch": 256, "compile_s": 39.2}
    console = Console(file=StringIO(), force_terminal=True, width=80, color_system=None)
    for table in (steps_table("w1024", rows), training_table(training, 798.0)):
        print_table(console, table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("57%" in line and "1,234,568" in line for line in lines)
    assert any("broken failed: ValueError: it cannot" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "w257"], "unknown set of matrices 'w257' (did you mean 'w256'?); known: small"),
        (["--preset", "w257"], "unknown preset 'w257'"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--micro-batch", "0"], "--micro-batch must be at least 1"),
        (["--device", "tpu"], "--device is auto, cpu or cuda"),
        (["--only", "unknown"], "unknown optimizer 'unknown'"),
    ],
)
def test_mistakes_are_reported_before_any_work(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(machine.gpus() > 0, reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(UsageError, match="there is no CUDA device here"):
        chosen_device("cuda")


def test_all_take_their_turn_in_every_round_and_another_one_is_first():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = in_turn(ways, rounds=3, warming=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}
