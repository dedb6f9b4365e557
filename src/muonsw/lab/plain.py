"""Values as data that every JSON reader accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


def plain(value: Any) -> Any:
    """Numbers, strings, lists and dictionaries: no infinities, no NaN, no arrays, strings for enumerations.

    Examples:
        >>> import numpy as np
        >>> plain({"a": (1.0, float("nan")), "b": np.array([2, 3])})
        {'a': [1.0, None], 'b': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays, tensors, and the scalars of numpy
        return plain(value.tolist())
    return str(value) if isinstance(value, StrEnum) else value
