"""One look: rules keep their colours, and lines stand out."""

from muonsw.lab.report.theme import LIGHT, arm_styles


def test_rules_fix_hues_and_arms_of_one_rule_differ():
    styles = arm_styles(["constant", "scaled", "scaled", "none", "squared", "scaled"])
    assert [style.colour for style in styles[:2]] == [LIGHT.constant, LIGHT.scaled] == ["#0072B2", "#D55E00"]
    assert len(set(styles)) == len(styles)
    assert all(contrast(style.colour, LIGHT.background) >= 2.5 for style in styles)


def test_lines_stand_out_from_the_background():
    for colour in (LIGHT.constant, LIGHT.scaled, LIGHT.text, LIGHT.muted, *LIGHT.extra):
        assert contrast(colour, LIGHT.background) >= (3.0 if colour not in LIGHT.extra else 1.9), colour


def contrast(one, other):
    """The contrast ratio that web accessibility guidelines define."""

    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
