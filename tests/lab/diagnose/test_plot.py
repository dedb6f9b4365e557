"""One call turns a file of telemetry into a picture."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW, Telemetry
from muonsw.lab.diagnose.plot import PANELS, plot
from muonsw.telemetry import JsonlSink

pytest.importorskip("matplotlib")


@pytest.fixture
def file(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    optimizer = MuonSW.for_model(model, lr=0.02)
    with JsonlSink(tmp_path / "telemetry.jsonl") as sink, Telemetry(optimizer, every=2, sink=sink):
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tmp_path / "telemetry.jsonl"


def curves(figure, panel):
    return {line.get_label(): line for line in figure.axes[list(PANELS).index(panel)].get_lines()}


def test_every_role_is_drawn_over_the_updates(file):
    figure = plot(file, file.with_suffix(".png"))
    assert set(curves(figure, "weight_rms")) == {"hidden", "norm", "bias"}
    hidden = curves(figure, "decay")["hidden"]
    assert list(hidden.get_xdata()) == [1, 2, 4, 6]
    assert list(hidden.get_ydata()) == pytest.approx([0.1 * 0.02] * 4)
    assert file.with_suffix(".png").stat().st_size > 10_000


def test_a_run_that_was_killed_while_writing_is_drawn(file):
    text = file.read_text(encoding="utf-8")
    file.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n' + text[: len(text) - 20], encoding="utf-8")
    figure = plot(file, roles=["hidden"])
    assert list(curves(figure, "weight_rms")) == ["hidden"]
    assert list(curves(figure, "weight_rms")["hidden"].get_xdata()) == [1, 2, 4]


def test_what_cannot_be_drawn(file, tmp_path):
    with pytest.raises(ValueError, match="role 'router' is in none of the records; there are: bias, hidden, norm"):
        plot(file, roles=["router"])
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no telemetry in it"):
        plot(tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text("{\n{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        plot(tmp_path / "broken.jsonl")
