"""Preconditioners and normalizers, the two slots around the orthogonalizer; and the specs of optimizer state.

    momentum -> precondition -> orthogonalize -> normalize -> shape scale -> decay -> apply

A member of a slot is a pure function of a batch of equal matrices and their state. It only declares its state;
`algorithms/base.py` and `distributed/` handle batches, ranks, skipped steps and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsw.machine import full_float32
from muonsw.orthogonalize import normalize
from muonsw.registry import Registry
from muonsw.work import Group, State

Options = dict[str, Any]


class StateSpec(NamedTuple):
    """One tensor of a parameter's state; its initial value is zero.

    Attributes:
        shape: for one tensor per matrix, its shape for m outputs and n inputs, such as `lambda m, n: (m, 1)`. None for
            a tensor laid out like the parameter.
        squares: never negative, so its 8-bit codes need no sign.
        counter: a scalar that counts the parameter's steps.
    """

    shape: Callable[[int, int], tuple[int, int]] | None = None
    squares: bool = False
    counter: bool = False


ELEMENTWISE = StateSpec()
SQUARES = StateSpec(squares=True)
COUNTER = StateSpec(counter=True)
Specs = Mapping[str, StateSpec]

# The options of a group with empty slots.
EMPTY_SLOTS: Options = {"precondition": None, "normalize": None}


class SlotMember(NamedTuple):
    """A function for a slot.

    Attributes:
        apply: maps options, matrices X (count, m, n) and state to the new X and state; changes nothing in place.
        defaults: its options by name. A group stores them as `<slot>_<name>` if they are set.
        state: the tensors of its state, by key.
        elementwise: computes each element separately, so it may run on shards of any shape.
        uses_gradient: of preconditioners: `state["grad"]` is the descent gradient, in the shape of X; do not return it.
        counts_steps: `options["step"]` is the number of this step, from 1, on the host.
        has_kernel: `muonsw.kernels` implements it too.
    """

    apply: Callable[[Options, Tensor, State], tuple[Tensor, State]]
    defaults: Options
    state: Callable[[Options], Specs] = lambda _: {}
    elementwise: bool = False
    uses_gradient: bool = False
    counts_steps: bool = False
    has_kernel: bool = False


# The member of an empty slot.
NO_MEMBER = SlotMember(lambda _, X, __: (X, {}), {}, has_kernel=True)


class Slot(NamedTuple):
    """A place in the pipeline for one member of a registry, or none."""

    name: str
    members: Registry[SlotMember]

    def member(self, group: Group) -> SlotMember:
        name = group.get(self.name)  # an incomplete group may lack it
        return NO_MEMBER if name is None else self.members[name]

    def options(self, group: Group) -> Options:
        member = self.member(group)
        values = {key: group.get(f"{self.name}_{key}") for key in member.defaults}
        step = {"step": group["update_count"]} if member.counts_steps else {}
        return {key: member.defaults[key] if value is None else value for key, value in values.items()} | step

    def specs(self, group: Group) -> Specs:
        return self.member(group).state(self.options(group))

    def apply(self, group: Group, X: Tensor, state: State) -> tuple[Tensor, State]:
        """Run the group's member on matrices as stored, with the state that it declares."""
        member, options = self.member(group), self.options(group)
        specs = member.state(options)
        inputs = {key: state[key] for key in (*specs, *(("grad",) if member.uses_gradient else ()))}
        return oriented(partial(member.apply, options), specs, X, inputs, transposed=group.get("transposed", False))

    def option_names(self) -> list[str]:
        keys = dict.fromkeys(key for member in self.members.values() for key in member.defaults)
        return [f"{self.name}_{key}" for key in keys]

    def refuse_options_of_others(self, group: Group) -> None:
        for option in self.option_names():
            key = option.removeprefix(f"{self.name}_")
            if group.get(option) is not None and key not in self.member(group).defaults:
                owners = [repr(name) for name, member in self.members.items() if key in member.defaults]
                raise ValueError(
                    f"{option}={group[option]!r} is an option of {self.name}={' and '.join(owners)}, but this group "
                    f"has {self.name}={group[self.name]!r}"
                )


def oriented(
    apply: Callable[[Tensor, State], tuple[Tensor, State]], specs: Specs, X: Tensor, state: State, *, transposed: bool
) -> tuple[Tensor, State]:
    """Call a function of (outputs, inputs) matrices on matrices that may be stored transposed."""
    if not transposed:
        return apply(X, state)

    def flipped(state: State) -> State:
        return {key: t.mT if specs.get(key, ELEMENTWISE).shape is None else t for key, t in state.items()}

    X, new = apply(X.mT, flipped(state))
    return X.mT, flipped(new)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, inner products, and per-matrix state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Members of `precondition`, which act on momentum before it is orthogonalized.

PRECONDITIONERS: Registry[SlotMember] = Registry("precondition")
PRECONDITION = Slot("precondition", PRECONDITIONERS)


def sign(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """The sign of momentum, which AdaMuon orthogonalizes (Si et al., 2025)."""
    return X.sign(), {}


PRECONDITIONERS.register("sign", SlotMember(sign, {}, elementwise=True, has_kernel=True))


def muon2(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """Muon^2: momentum, in any shape, divided by the root of the average squared gradient, as in Adam.

        V <- beta2 V + (1 - beta2) G^2
        M <- M / (sqrt(V) + eps)

    arXiv 2604.09967. No bias correction: orthogonalization cancels a common factor of V. The authors' code is not
    public; the defaults are those of modded-nanogpt's `train_gpt_simple_muonsq.py` (track 3, 2026-05-01).
    """
    squares = state["grad"].to(state["exp_avg_sq"].dtype).square()
    average = torch.lerp(state["exp_avg_sq"], squares, 1 - options["beta2"])
    return X / average.sqrt().add_(options["eps"]), {"exp_avg_sq": average}


MUON2 = SlotMember(
    muon2,
    {"beta2": 0.95, "eps": 1e-10},
    lambda _: {"exp_avg_sq": SQUARES},
    elementwise=True,
    uses_gradient=True,
    has_kernel=True,
)
PRECONDITIONERS.register("muon2", MUON2)


def equalize(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """MuonEq: momentum (count, m, n) as matrices of Frobenius norm one whose rows have equal norms.

    arXiv 2603.28254, in the form of nanochat (`nanochat/optim.py`): the polar factor is better conditioned. Unlike
    nanochat's, it does not depend on the size of the gradient: it skips only rows of exact zeros.
    """
    X = normalize(X)
    norms = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return X / torch.where(norms > 0, norms * X.shape[-2] ** 0.5, 1.0), {}


PRECONDITIONERS.register("equalize", SlotMember(equalize, {}, has_kernel=True))


@full_float32()
def soap(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """SOAP-Muon: momentum whitened in the eigenbases of Shampoo's factors, which then follow the gradient.

        P = Q_l^T U Q_r                                         in the last step's bases
        V <- beta2 V + (1 - beta2) P^2
        U <- Q_l (P / max(sqrt(V), eps)) Q_r^T
        L <- beta2 L + (1 - beta2) G G^T,  R <- beta2 R + (1 - beta2) G^T G,  then Q_l and Q_r as in SOAP

    From the record of modded-nanogpt's track 3 (2026-06-09, `train_gpt_clean_SOTA.py`), without its per-layer blending,
    floors and brakes. The first step is Muon's, because there are no bases yet. The bases change every `frequency`
    steps; sides longer than `max_dim` are not rotated.
    """
    from muonsw.algorithms.factors import rotate, rotate_back  # algorithms import this file
    from muonsw.algorithms.soap import advance_bases, have_begun

    bases, step = (state["basis_left"], state["basis_right"]), options["step"]
    dtype = bases[0].dtype  # `state_dtype` changes only squares and momentum
    X, G, squares = (tensor.to(dtype) for tensor in (X, state["grad"], state[_ROTATED]))
    rotated = rotate(X, *bases)
    squares = squares.lerp(rotated.square(), 1 - options["beta2"])
    whitened = rotate_back(rotated / squares.sqrt().clamp(min=options["eps"]), *bases)
    factors = {key: tensor for key, tensor in state.items() if key not in ("grad", _ROTATED)}
    refresh = (step - 1) % options["frequency"] == 0
    new = advance_bases(G, {"exp_avg_sq": squares, **factors}, options["beta2"], refresh=refresh, first=step == 1)
    X = torch.where(have_begun(max(bases, key=Tensor.numel)), whitened, X)
    return X, {_ROTATED: new.pop("exp_avg_sq"), **new}


_ROTATED = "exp_avg_sq_rotated"


def _soap_state(options: Options) -> Specs:
    from muonsw.algorithms.soap import sides

    return {_ROTATED: SQUARES, **sides(options["max_dim"])}


PRECONDITIONERS.register(
    "soap",
    SlotMember(
        soap,
        {"beta2": 0.9, "eps": 1e-8, "frequency": 1, "max_dim": 10000},
        _soap_state,
        uses_gradient=True,
        counts_steps=True,
    ),
)


# Members of `normalize`, which act on the orthogonalized directions.

NORMALIZERS: Registry[SlotMember] = Registry("normalize")
NORMALIZE = Slot("normalize", NORMALIZERS)

# NorMuon's averages: one per output, or one per slice along the longer axis (rows of tall matrices, columns of wide).
AXES = ("rows", "longer")


def normuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """NorMuon: slices of directions (count, m, n) divided by the root of their average square; the norm stays the same.

        V <- beta2 V + (1 - beta2) mean_j U_ij^2
        U <- U / (sqrt(V) + eps)
        U <- U c / (||U|| + eps)                                c the Frobenius norm before

    Li et al., "NorMuon: Making Muon more efficient and scalable" (2025), `zichongli5/NorMuon`. `snap` first scales U to
    the norm sqrt(min(m, n)), as nanochat does. Norms after the division follow from the mean squares before it, so the
    matrix is read twice and written once. Unlike in the authors' code, statistics are in float32 and a convolution's
    rows are its output channels.
    """
    ((key, before),), eps = state.items(), options["eps"]  # (count, m, 1) or (count, 1, n)
    along = -2 if before.shape[-1] != 1 else -1
    wide = torch.promote_types(U.dtype, before.dtype)
    squares = torch.linalg.vector_norm(U, dim=along, keepdim=True, dtype=wide).square().to(before.dtype)
    norm = target = _norm(squares)
    if options["snap"]:
        target = torch.full_like(norm, min(U.shape[-2:]) ** 0.5)
    gain = target / torch.where(norm > 0, norm, 1.0)
    squares = squares * gain.square()
    average = torch.lerp(before, squares / U.shape[along], 1 - options["beta2"])
    divisor = average.sqrt() + eps
    factor = gain * target / (_norm(squares / divisor.square()) + eps) / divisor
    return _rescaled(U, factor), {key: average}


def _norm(squares: Tensor) -> Tensor:
    return squares.sum(dim=(-2, -1), keepdim=True).sqrt()


def _normuon_state(options: Options) -> Specs:
    if options["axis"] == "rows":
        return {"exp_avg_sq_row": StateSpec(lambda m, _: (m, 1))}
    return {"exp_avg_sq_slice": StateSpec(lambda m, n: (m, 1) if m >= n else (1, n))}


_NORMUON_OPTIONS: Options = {"beta2": 0.95, "eps": 1e-10, "axis": "rows", "snap": False}
NORMALIZERS.register("normuon", SlotMember(normuon, _NORMUON_OPTIONS, _normuon_state, has_kernel=True))


def adamuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """AdaMuon: directions divided by the root of their average square, with the norm of an orthogonal matrix.

        V <- beta2 V + (1 - beta2) U^2
        U <- U / (sqrt(V) + eps)
        U <- U sqrt(min(m, n)) / (||U|| + eps)

    Si et al., "AdaMuon" (2025), `Chongjie-Si/AdaMuon`. The authors also use `precondition="sign"`,
    `scale="match_rms_adamw"`, and the momentum coefficient as beta2.
    """
    ((key, before),), eps = state.items(), options["eps"]
    wide = U.to(before.dtype)
    average = torch.lerp(before, wide.square(), 1 - options["beta2"])
    divided = wide / (average.sqrt() + eps)
    norm = torch.linalg.vector_norm(divided, dim=(-2, -1), keepdim=True)
    return divided * (min(U.shape[-2:]) ** 0.5 / (norm + eps)), {key: average}


NORMALIZERS.register(
    "adamuon",
    SlotMember(adamuon, {"beta2": 0.95, "eps": 1e-8}, lambda _: {"exp_avg_sq_direction": SQUARES}, has_kernel=True),
)


def muon_plus(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """Muon+: the Frobenius norm of directions set to that of an orthogonal matrix, sqrt(min(m, n)); zero stays zero.

    arXiv 2602.21545. Every matrix then moves exactly as far as its shape scale says.
    """
    norm = torch.linalg.vector_norm(U, dim=(-2, -1), keepdim=True, dtype=wide_dtype(U.dtype))
    factor = min(U.shape[-2:]) ** 0.5 / torch.where(norm > 0, norm, 1.0)
    return _rescaled(U, factor), {}


NORMALIZERS.register("muon_plus", SlotMember(muon_plus, {}, has_kernel=True))


def _rescaled(U: Tensor, factor: Tensor) -> Tensor:
    """Directions times factors, computed in the wider dtype; on accelerators stored in the directions' dtype."""
    if U.device.type == "cpu":  # CPUs are slow on mixed dtypes, here and when weights move
        return U.to(factor.dtype) * factor
    return torch.mul(U, factor, out=torch.empty_like(U))
