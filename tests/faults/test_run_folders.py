"""Run folders whose records or results hold what no training can have measured."""

import json
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.runs import load_run
from tests.faults.commands import run_command
from tests.faults.folders import folders


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("key", "value", "predicted"),
    [
        ("alignment_update", 3.0, False),
        ("alignment_update", 1.0000001, True),  # a cosine in float32
        ("update_rms", 1e300, False),
    ],
)
def test_what_no_training_can_have_measured_is_shown_without_a_prediction(key, value, predicted):
    run = folders().copy("whole")
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8").replace(f'"{key}":', f'"{key}":{value},"other":')
    path.write_text(text, encoding="utf-8")
    assert (len(load_run(run).predicted_norms[0]) > 1) == predicted
    assert run_command("report", run, "-o", run / "page.html", "--no-images").code == 0
    assert run_command("diagnose", run).code == 0


def test_a_result_without_numbers_is_refused_by_name():
    run = folders().copy("whole")
    for content in ('{"final_loss": NaN}', '{"final_loss": 1e999}', '{"final_loss": ' + "9" * 400 + "}"):
        (run / "result.json").write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=r"result\.json cannot be read: .*; delete it, and the command"):
            load_run(run)
    (run / "result.json").write_text(
        json.dumps({"steps": 1e300, "final_loss": -1e308, "best_step": 1e300}), encoding="utf-8"
    )
    assert run_command("report", run, "-o", Path(run) / "page.html", "--no-images").code == 0
