"""Charts as PNG and SVG, and the colours of arms."""

import pytest

from muonsw.lab.charts import FURTHER, HUES, Axis, Chart, Curve, arm_styles, draw


def test_rules_fix_hues_and_arms_of_one_rule_differ():
    rules = ["constant", "scaled", "scaled", "none", "squared", "scaled"]
    styles = list(arm_styles(dict(zip("abcdef", rules, strict=True))).values())
    assert [style.colour for style in styles[:2]] == list(HUES.values())
    assert [style.colour for style in styles[3:5]] == list(FURTHER[:2])
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize("log", [0, 10])
def test_losses_as_large_as_floats_can_be_are_drawn_as_gaps_and_equal_charts_give_equal_files(log, tmp_path):
    heights = [2.0, 9e99, 9e299, 1e308, -1.7e308, float("inf"), float("nan"), 3.0]
    curve = Curve("run", "constant", range(len(heights)), heights)
    chart = Chart("loss", "Loss in $", [curve], x=Axis("step"), y=Axis("loss", log=log))
    first, second = (draw(tmp_path / name, [chart], {"constant": "constant"}) for name in ("first", "second"))
    assert [path.suffix for path in first] == [".png", ".svg"]
    for path, other in zip(first, second, strict=True):
        assert path.read_bytes() == other.read_bytes()
        assert path.stat().st_size > 1000
