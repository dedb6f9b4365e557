"""Adding measurements up: from the pieces of a matrix to matrices, to parameters, and to roles, layers and all.

Rows hold sums (squares, inner products, values times the number of entries), so that the row of a larger part is the
sum of the rows of its smaller parts. `muonsw.telemetry.record` turns them into means and cosines at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muonsw.telemetry.measurements import Measurements, to_floats
from muonsw.telemetry.over_ranks import sum_over_ranks
from muonsw.telemetry.parameters import ParameterInfo
from muonsw.telemetry.spectrum import Spectra

Rows = dict[str, Tensor]

# Each cosine: its inner product, and the squares it divides by.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}

# What only matrices have: rows hold the sum over matrices, and how many there are under `count_`.
PER_MATRIX = ("defect", "spectral_norm", "condition")

# More matrices than any parameter has, to number those of all parameters at once.
_STRIDE = 2**40


def parameter_columns(
    measured: Measurements, infos: Mapping[Tensor, ParameterInfo], spectra: Spectra
) -> tuple[Rows, list[ParameterInfo]]:
    """One column for each parameter that was measured, in the order of the optimizer, and what is known of each."""
    seen = {piece.param for piece in measured.pieces} | measured.shared.keys()
    params = [param for param in infos if param in seen]
    owners, matrices = _matrix_columns(measured, {param: number for number, param in enumerate(params)})
    anywhere, owners = torch.unique(owners, return_inverse=True)
    params = [params[number] for number in anywhere.tolist()]
    matrices["matrices"] = torch.ones_like(matrices["numel"])
    for name, terms in ALIGNMENTS.items():
        matrices[name], matrices[f"count_{name}"] = _cosine(matrices, terms)
    rows = _summed(matrices, owners, len(params))
    for name in ALIGNMENTS:
        cosines, count = rows.pop(name), rows.pop(f"count_{name}")
        rows[f"{name}_mean"] = torch.where(count > 0, cosines / count, 0.0)
        rows[f"count_{name}_mean"] = (count > 0).double()
    found = [infos[param] for param in params]
    _add_settings(rows, found)
    _add_spectra(rows, params, spectra)
    return rows, found


def pooled(rows: Rows, members: Sequence[list[int]]) -> Rows:
    """One column for each list of columns: their sum."""
    chosen = torch.tensor([column for columns in members for column in columns], dtype=torch.int64, device="cpu")
    target = torch.tensor([i for i, columns in enumerate(members) for _ in columns], dtype=torch.int64, device="cpu")
    return _summed(rows, target, len(members), chosen)


def _summed(rows: Rows, target: Tensor, size: int, chosen: Tensor | None = None) -> Rows:
    """The rows with their columns, or those chosen, added up into `size` new ones."""
    table = torch.stack(list(rows.values()))
    table = table if chosen is None else table[:, chosen]
    return dict(zip(rows, table.new_zeros(len(rows), size).index_add(1, target, table), strict=True))


def _matrix_columns(measured: Measurements, index: dict[Tensor, int]) -> tuple[Tensor, Rows]:
    """One column for each matrix: which parameter it belongs to, and its rows."""
    pieces = measured.pieces
    piece_of = torch.repeat_interleave(
        torch.tensor([piece.matrices for piece in pieces], dtype=torch.int64, device="cpu")
    )

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device="cpu")[piece_of]

    factors = to_floats([piece.lr for piece in pieces] + [0.0 if piece.phi is None else piece.phi for piece in pieces])
    lrs, phis = factors[: len(pieces)], factors[len(pieces) :]
    rows = _additive(measured.to_host(), spread([lr * piece.scale for lr, piece in zip(lrs, pieces, strict=True)]))
    phi = spread(phis)
    both = phi.square() * rows["ww"] + 2 * phi * rows["wu"] + rows["uu"]  # the square of phi W + u
    rows["dd"] = torch.where(spread([piece.change_follows for piece in pieces]) > 0, both.clamp(min=0), rows["dd"])
    rows["numel"] = spread([piece.area for piece in pieces])
    rows["side_numel"] = spread([piece.side for piece in pieces]) * rows["numel"]
    rows["ww_momentum"] = torch.where(spread([piece.has_momentum for piece in pieces]) > 0, rows["ww"], 0.0)
    rows["phi_numel"] = phi * rows["numel"]
    rows["count_decay"] = spread([piece.phi is not None for piece in pieces]) * rows["numel"]

    keys = [index[piece.param] * _STRIDE + piece.first + i for piece in pieces for i in range(piece.matrices)]
    unique, inverse = torch.unique(torch.tensor(keys, dtype=torch.int64, device="cpu"), return_inverse=True)
    matrices = _summed(rows, inverse, len(unique))
    if measured.shared:
        shared = {index[param] * _STRIDE: entry for param, entry in measured.shared.items() if param in index}
        unique, matrices = sum_over_ranks(unique, matrices, shared)

    side = matrices.pop("side_numel") / matrices["numel"]
    matrices["count_defect"] = (side > 0).double()
    matrices["defect"] = torch.where(side > 0, (matrices["oo"] / side).sqrt(), 0.0)
    return unique // _STRIDE, matrices


def _additive(measured: Rows, move: Tensor) -> Rows:
    """Squares and inner products, of which those of a matrix are the sum of those of its pieces.

    w is the weight before the update, u the update, o its direction, g the gradient, m the momentum, d the change.
    """
    return {
        "ww": measured["weight"].square(),
        "decayed": measured["decayed"].square(),
        "oo": measured["direction"].square(),
        "uu": (measured["direction"] * move).square(),
        "gg": measured["gradient"].square(),
        "mm": measured["momentum"].square(),
        "dd": measured["change"].square(),
        "wu": measured["weight_direction"] * move,
        "wg": measured["weight_gradient"],
        "wm": measured["weight_momentum"],
    }


def _cosine(matrices: Rows, terms: tuple[str, str, str]) -> tuple[Tensor, Tensor]:
    """The cosine of each matrix, and 1 where there is one; matrices of norm zero have none."""
    product, left, right = (matrices[term] for term in terms)
    size = left.sqrt() * right.sqrt()
    defined = ~(size == 0)  # a NaN is defined: it must show
    return torch.where(defined, product / size, 0.0), defined.double()


def _add_settings(rows: Rows, infos: list[ParameterInfo]) -> None:
    """Decay, learning rate and peak, each times the number of entries that have one."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    acted_on = torch.where(rows["ww"] == 0, 1.0, rows["decayed"] / rows["ww"])
    rows["decay"] = torch.where(rows["count_decay"] > 0, rows["phi_numel"] * acted_on, 0.0)
    rows["lr"], rows["count_lr"] = column([info.lr for info in infos]) * rows["numel"], rows["numel"]
    rows["peak_lr"] = column([info.peak_lr or 0.0 for info in infos]) * rows["numel"]
    rows["count_peak_lr"] = column([info.peak_lr is not None for info in infos]) * rows["numel"]


def _add_spectra(rows: Rows, params: list[Tensor], spectra: Spectra) -> None:
    for name in ("spectral_norm", "condition"):
        found = [spectra.get(name, {}).get(param) for param in params]
        rows[name] = torch.tensor(
            [0.0 if v is None else float(v.sum()) for v in found], dtype=torch.float64, device="cpu"
        )
        rows[f"count_{name}"] = torch.tensor(
            [0 if v is None else len(v) for v in found], dtype=torch.float64, device="cpu"
        )
