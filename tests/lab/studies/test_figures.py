"""The convergence figure; `test_mup.py` draws the other."""

import torch

from muonsw.lab.studies import figures
from tests.lab.small_experiments import SMALL


def test_the_convergence_figure_has_every_start_the_medians_and_the_bound(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    outcomes = {name: SMALL[name].run(0) for name in ("scalar-figure", "matrix-figure")}
    first, second = ([path.read_bytes() for path in figures.draw_convergence(outcomes, tmp_path)] for _ in range(2))
    assert first == second
    assert {path.name for path in tmp_path.iterdir()} == {"convergence.png", "convergence.svg"}

    charts = []
    monkeypatch.setattr(figures, "draw", lambda _path, drawn, *_, **__: charts.extend(drawn) or [])
    figures.draw_convergence(outcomes, tmp_path)
    for chart, outcome in zip(charts, outcomes.values(), strict=True):
        starts = sum(len(series.values) for series in outcome.series)
        assert len(chart.curves) == starts + 2  # and the median of each rule
        assert [level.y for level in chart.levels] == [outcome.series[0].level]
