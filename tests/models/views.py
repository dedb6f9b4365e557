"""Matrix views in the vocabulary of the tables."""

import math

MATRICES = ("hidden", "experts", "convolution")


def seen_as(role, view, shape):
    """Describe the view of a parameter; None if its role is not a matrix."""
    if role not in MATRICES:
        return None
    words = [view["matrix"]] if view.get("matrix") else []
    axis = f"@{view['split_dim']}" if view.get("split_dim") else ""
    if view.get("transposed"):
        words.append("transposed")
    if _is_square(view, shape):
        words.append("square")
    if view.get("heads"):
        words.append(f"heads={view['heads']}{axis}")
    if view.get("split_sizes"):
        words.append(f"split={','.join(map(str, view['split_sizes']))}{axis}")
    return " ".join(words)


def _is_square(view, shape):
    """Whether the matrices are square, so (in, out) and (out, in) have the same scale."""
    if view.get("matrix") == "flatten":
        return shape[0] == math.prod(shape[1:])
    return shape[-2] == shape[-1] and not view.get("split_sizes")
