"""Large numbers as people write them: 197B, 300M."""

from __future__ import annotations

import math
import re

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_amount(text: str) -> int:
    """A number of tokens as people write it.

    Raises:
        ValueError: If it is not a positive number, with what is understood.

    Examples:
        >>> parse_amount("197B"), parse_amount("1.5e9"), parse_amount("300M"), parse_amount("524,288")
        (197000000000, 1500000000, 300000000, 524288)
    """
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)", text.strip().replace(",", "").replace("_", ""), re.I)
    try:
        number = float(match.group(1)) * UNITS[match.group(2).upper()] if match else 0.0
    except ValueError:
        number = 0.0
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 197B, 300M, 1.5e9 or 524288")
    return round(number)


def amount(number: float, digits: int = 3) -> str:
    """A large number with the letter that `parse_amount` understands.

    Examples:
        >>> amount(18_350_080_000), amount(962_560), amount(197_132_288_000, 4), amount(999_960_000), amount(512)
        ('18.4B', '963K', '197.1B', '1B', '512')
    """
    rounded = float(f"{number:.{digits}g}")
    letter, unit = max(UNITS.items(), key=lambda one: one[1] if one[1] <= rounded else 0.0)
    return f"{rounded / unit:g}{letter}"
