"""The examples run, with fewer steps, and do what they say."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


def test_the_plain_loop_learns(capsys):
    losses = example("plain_loop")["main"](steps=60)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert "embedding" in capsys.readouterr().out


def test_decay_of_another_optimizer_follows_the_square_of_its_learning_rate():
    module = example("other_optimizer")
    decays = module["main"](steps=20)
    assert decays[0] == (module["PEAK"], pytest.approx(module["LAMBDA"] * module["PEAK"]))
    for lr, decay in decays:
        assert decay == pytest.approx(module["LAMBDA"] * lr**2 / module["PEAK"], rel=1e-9)


def test_telemetry_is_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    runs = example("telemetry_plot")["main"](steps=40, folder=tmp_path)
    lines = [
        json.loads(line) for line in (tmp_path / "telemetry-scaled.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 10, 20, 30, 40] == [record["step"] for record in runs["scaled"]]
    ends = {rule: records[-1]["decayed"]["weight_rms"] for rule, records in runs.items()}
    assert ends["scaled"] > ends["constant"]
    assert (tmp_path / "weight-norm.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore")  # transformers and accelerate warn about themselves
def test_the_trainer_of_hugging_face_trains_with_our_optimizer():
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers accelerate")
    losses, optimizer = example("hugging_face_trainer")["main"](steps=20)
    assert losses[-1] < losses[0]
    assert {group["resolved_peak_lr"] for group in optimizer.param_groups} == {0.02}


def test_every_example_is_tested_and_listed():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = Path(__file__).read_text(encoding="utf-8")
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    for name in names:
        assert f'example("{name}")' in tested, name
        assert f"examples/{name}.py" in readme, name
