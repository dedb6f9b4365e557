"""The convergence figure; `test_mup.py` draws the other."""

from muonsw.lab.studies import figures
from tests.lab.small_experiments import outcome


def test_the_convergence_figure_has_every_start_the_medians_and_the_bound(tmp_path, monkeypatch):
    outcomes = {name: outcome(name) for name in ("scalar-figure", "matrix-figure")}
    charts = []
    monkeypatch.setattr(figures, "draw", lambda _path, drawn, *_, **__: charts.extend(drawn) or [])
    figures.draw_convergence(outcomes, tmp_path)
    for chart, found in zip(charts, outcomes.values(), strict=True):
        starts = sum(len(series.values) for series in found.series)
        assert len(chart.curves) == starts + 2  # and the median of each rule
        assert [level.y for level in chart.levels] == [found.series[0].level]
