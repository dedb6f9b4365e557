"""One look for everything the lab draws, on paper and on the page: colours, fonts, lines.

Constant decay is blue and scaled decay is vermillion in every figure of the project. The hues are those of Okabe
and Ito, which readers with any common colour blindness can tell apart; in the dark variant both are lighter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

FONT_SIZE = 12.0
SANS = ("DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif")


@dataclass(frozen=True)
class Palette:
    """The colours of one variant of the theme.

    Attributes:
        background: Of page and figure.
        text: Of titles, labels and ticks.
        muted: Of captions and axes.
        grid: Of grid lines.
        constant: Everything that belongs to constant decay.
        scaled: Everything that belongs to scaled decay.
        bound: Analytic bounds, drawn dashed.
        extra: For further arms, in order.
    """

    background: str
    text: str
    muted: str
    grid: str
    constant: str
    scaled: str
    bound: str
    extra: tuple[str, ...]

    def colour(self, rule: str) -> str:
        """The colour of a decay rule.

        Examples:
            >>> LIGHT.colour("constant")
            '#0072B2'
        """
        return {"constant": self.constant, "scaled": self.scaled}[rule]

    def as_data(self) -> dict[str, Any]:
        """The colours by name."""
        return asdict(self)


LIGHT = Palette(
    background="#FFFFFF",
    text="#1B1F24",
    muted="#57606A",
    grid="#E3E6EA",
    constant="#0072B2",
    scaled="#D55E00",
    bound="#1B1F24",
    extra=("#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
)
DARK = Palette(
    background="#14181D",
    text="#E8EBEE",
    muted="#A3ADB8",
    grid="#2C333B",
    constant="#56B4E9",
    scaled="#FF8A3D",
    bound="#E8EBEE",
    extra=("#2FC79B", "#E29BC4", "#F0C24B", "#8CCBF2"),
)
RULES = ("constant", "scaled")
PALETTES: Mapping[str, Palette] = MappingProxyType({"light": LIGHT, "dark": DARK})

# How arms of one rule are told apart: how far the hue is moved towards the text, and the dashes of its line.
SHADES = ((0.0, "solid"), (0.45, "dashdot"), (0.2, "dot"), (0.65, "longdashdot"))
# How arms are told apart where values are marked, so that colour is not all there is.
MARKERS = "os^vD"


@dataclass(frozen=True)
class ArmStyle:
    """How one arm of a comparison is drawn: its colour, its dashes (plotly's words), its markers (matplotlib's)."""

    colour: str
    dash: str
    marker: str


def arm_styles(rules: Sequence[str], palette: Palette = LIGHT) -> list[ArmStyle]:
    """A style for each arm: the rule fixes the hue, further arms of the same rule are shaded and dashed.

    Args:
        rules: The decay rule of each arm; a rule without a colour of its own gets one of the further ones.
        palette: The variant of the theme.

    Examples:
        >>> [style.colour for style in arm_styles(["constant", "scaled", "none"])]
        ['#0072B2', '#D55E00', '#009E73']
        >>> arm_styles(["scaled", "scaled"])[1]
        ArmStyle(colour='#814210', dash='dashdot', marker='s')
    """
    further = (*palette.extra, palette.muted)
    others = list(dict.fromkeys(rule for rule in rules if rule not in RULES))
    seen: dict[str, int] = {}
    styles = []
    for place, rule in enumerate(rules):
        hue = palette.colour(rule) if rule in RULES else further[others.index(rule) % len(further)]
        share, dash = SHADES[seen.get(rule, 0) % len(SHADES)]
        seen[rule] = seen.get(rule, 0) + 1
        styles.append(ArmStyle(_mix(hue, palette.text, share), dash, MARKERS[place % len(MARKERS)]))
    return styles


def _mix(one: str, other: str, share: float) -> str:
    if not share:
        return one
    pairs = [(int(one[k : k + 2], 16), int(other[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round((1.0 - share) * a + share * b):02X}" for a, b in pairs)


# The rules' names in legends.
RULE_NAMES = MappingProxyType({"constant": "constant (λη)", "scaled": "scaled (λη²/ηₘₐₓ)"})


def matplotlib_style(palette: Palette = LIGHT) -> dict[str, Any]:
    """The theme as matplotlib settings, to use with `matplotlib.rc_context`."""
    return {
        "figure.facecolor": palette.background,
        "axes.facecolor": palette.background,
        "savefig.facecolor": palette.background,
        "text.color": palette.text,
        "axes.labelcolor": palette.text,
        "axes.titlecolor": palette.text,
        "axes.edgecolor": palette.muted,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "xtick.labelcolor": palette.text,
        "ytick.labelcolor": palette.text,
        "grid.color": palette.grid,
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


def plotly_layout(palette: Palette = LIGHT) -> dict[str, Any]:
    """The theme as plotly layout settings; `plotly_axis` goes with each axis."""
    return {
        "paper_bgcolor": palette.background,
        "plot_bgcolor": palette.background,
        "font": {"family": ", ".join(SANS), "size": FONT_SIZE + 1, "color": palette.text},
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
        "hoverlabel": {"bgcolor": palette.background, "font": {"color": palette.text}},
        "margin": {"l": 70, "r": 20, "t": 60, "b": 60},
    }


def plotly_axis(palette: Palette = LIGHT) -> dict[str, Any]:
    """How an axis looks."""
    return {
        "gridcolor": palette.grid,
        "linecolor": palette.muted,
        "tickcolor": palette.muted,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
    }
