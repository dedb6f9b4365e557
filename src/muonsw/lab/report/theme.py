"""One look for everything the lab draws, on paper and on the page: colours, fonts, lines.

Constant decay is blue and scaled decay is vermillion in every figure of the project. The hues are those of Okabe
and Ito, which readers with any common colour blindness can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

FONT_SIZE = 12.0
SANS = ("DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif")


class Palette(NamedTuple):
    """The colours of the theme."""

    background: str
    text: str
    muted: str  # captions and axes
    grid: str
    constant: str  # everything that belongs to constant decay
    scaled: str
    bound: str  # analytic bounds, drawn dashed
    extra: tuple[str, ...]  # for further arms, in order


LIGHT = Palette(
    background="#FFFFFF", text="#1B1F24", muted="#57606A", grid="#E3E6EA",
    constant="#0072B2", scaled="#D55E00", bound="#1B1F24", extra=("#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
)  # fmt: skip
RULES = ("constant", "scaled")
# The rules' names in legends.
RULE_NAMES = MappingProxyType({"constant": "constant (λη)", "scaled": "scaled (λη²/ηₘₐₓ)"})
# How arms of one rule are told apart: how far the hue is moved towards the text, and the dashes of its line.
SHADES = ((0.0, "solid"), (0.45, "dashdot"), (0.2, "dot"), (0.65, "longdashdot"))
# How arms are told apart where values are marked, so that colour is not all there is.
MARKERS = "os^vD"


class ArmStyle(NamedTuple):
    """How one arm of a comparison is drawn: its colour, its dashes (plotly's words), its markers (matplotlib's)."""

    colour: str
    dash: str
    marker: str


def arm_styles(rules: Sequence[str]) -> list[ArmStyle]:
    """A style for each arm: the rule fixes the hue, further arms of the same rule are shaded and dashed.

    A rule without a colour of its own gets one of the further ones.

    Examples:
        >>> [style.colour for style in arm_styles(["constant", "scaled", "none"])]
        ['#0072B2', '#D55E00', '#009E73']
        >>> arm_styles(["scaled", "scaled"])[1]
        ArmStyle(colour='#814210', dash='dashdot', marker='s')
    """
    further = (*LIGHT.extra, LIGHT.muted)
    others = list(dict.fromkeys(rule for rule in rules if rule not in RULES))
    styles = []
    for place, rule in enumerate(rules):
        hue = getattr(LIGHT, rule) if rule in RULES else further[others.index(rule) % len(further)]
        share, dash = SHADES[rules[:place].count(rule) % len(SHADES)]
        styles.append(ArmStyle(_mix(hue, LIGHT.text, share), dash, MARKERS[place % len(MARKERS)]))
    return styles


def _mix(one: str, other: str, share: float) -> str:
    pairs = [(int(one[k : k + 2], 16), int(other[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round((1.0 - share) * a + share * b):02X}" for a, b in pairs)


def matplotlib_style() -> dict[str, Any]:
    """The light theme as matplotlib settings, to use with `matplotlib.rc_context`."""
    coloured = (
        (LIGHT.background, "figure.facecolor axes.facecolor savefig.facecolor"),
        (LIGHT.text, "text.color axes.labelcolor axes.titlecolor xtick.labelcolor ytick.labelcolor"),
        (LIGHT.muted, "axes.edgecolor xtick.color ytick.color"),
        (LIGHT.grid, "grid.color"),
    )
    return {
        **{key: colour for colour, keys in coloured for key in keys.split()},
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": FONT_SIZE + 1,
        "font.family": "sans-serif",
        "font.sans-serif": list(SANS[:-1]),
        "font.size": FONT_SIZE,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "svg.hashsalt": "muonsw",
    }
