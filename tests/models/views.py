"""A matrix view in the words of the tables."""

import math

MATRICES = ("hidden", "experts", "convolution")


def seen_as(role, view, shape):
    """The view of a matrix role as words; None where the parameter is not seen as matrices."""
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
    """Whether rows and columns are equally many, so that (in, out) and (out, in) are the same to every scale."""
    if view.get("matrix") == "flatten":
        return shape[0] == math.prod(shape[1:])
    return shape[-2] == shape[-1] and not view.get("split_sizes")
