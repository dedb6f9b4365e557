"""Charts as PNG and SVG."""

import pytest

from muonsw.lab.report.charts import Axis, Chart, Curve, LegendEntry, Sheet
from muonsw.lab.report.figures import write_sheet


@pytest.mark.parametrize("log", [0, 10])
def test_losses_as_large_as_floats_can_be_are_drawn_as_gaps(log, tmp_path):
    heights = [2.0, 9e99, 9e299, 1e308, -1.7e308, float("inf"), float("nan"), 3.0]
    curve = Curve("run", "constant", range(len(heights)), heights)
    chart = Chart("loss", "Loss in $", [curve], x=Axis("step"), y=Axis("loss", log=log))
    for path in write_sheet(Sheet("loss", "", [chart]), [LegendEntry("constant", "constant")], tmp_path):
        assert path.stat().st_size > 1000
