"""Taking over the optimizers of a run that is under way: their states, settings and routing, by parameter.

The pair may be torch's Muon and AdamW, Keller Jordan's Muon with or without its auxiliary Adam, dion's Muon, or torch's
AdamW or SGD alone. Each layout is one function here, which says for a parameter what our group and our state would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from muonsw import rates
from muonsw.algorithms import ALGORITHMS
from muonsw.interop.drive import own_weight_decay
from muonsw.interop.load import check_shape
from muonsw.interop.load import translate as translate_torch
from muonsw.interop.unwrap import unwrap_optimizer
from muonsw.options import BOOKKEEPING, algorithm_defaults, differing_options, validate_option
from muonsw.peak import expected_peak, give_where_unrecorded, inherited, scheduler_record
from muonsw.precision import SCALE
from muonsw.slots import EMPTY_SLOTS
from muonsw.state import as_state, in_form, own_shape
from muonsw.work import Group, names_of

State = dict[str, Any]
Holders = dict[Tensor, tuple[Optimizer, Group]]

# What a scheduler has written; a new one that is made with last_epoch= asks for it.
_RECORDS = ("initial_lr", "max_lr", "min_lr", "lr_scale")
# How Muon sees a matrix by default: as it is, at every step.
_PLAIN_VIEW: Group = {"split_sizes": None, "heads": None, "transposed": False, "split_dim": 0, "block_period": None}
_DION_NORMUON = {"normalize": "normuon", "normalize_eps": 1e-8, "normalize_axis": "rows", "normalize_snap": False}
_DION_SCALES = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: "none"}


class AdoptedGroup(NamedTuple):
    """Parameters of one of our groups that others treated alike: their options, our group, and states in its order."""

    options: Group
    group: Group
    states: list[State]


class AdoptedParameter(NamedTuple):
    """A parameter as another optimizer had it: options of its group in our words, and its state."""

    options: Group
    state: State


def take_over(optimizer: Optimizer, others: Sequence[Any], peak_lr: float | None) -> None:
    """Replace an optimizer's groups and state by what others had; nothing is changed when it raises."""
    adopted = _adopted_groups(optimizer, others, peak_lr)
    groups, state = optimizer.param_groups[:], optimizer.state.copy()
    try:
        optimizer.param_groups.clear()
        for part in adopted:
            optimizer.add_param_group(part.group)
            optimizer.state.update(zip(optimizer.param_groups[-1]["params"], part.states, strict=True))
    except BaseException:
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def _adopted_groups(optimizer: Optimizer, others: Sequence[Any], peak_lr: float | None) -> list[AdoptedGroup]:
    """Our groups after the take-over, each with the states of its parameters; nothing is changed yet."""
    holders = _holders(optimizer, [unwrap_optimizer(other) for other in others])
    _refuse_mismatch(optimizer, holders)
    default = optimizer.defaults["peak_lr"]
    from_default = inherited(default, optimizer.param_groups)
    parts = []
    for number in range(len(optimizer.param_groups)):
        for part in _parts(optimizer, number, holders):
            if from_default[number]:
                part.group["peak_lr"] = None  # that number is for all groups: given anew below, by the adopted rates
            parts.append(part)
    groups = [part.group for part in parts]
    number_for_all = default if peak_lr is None else validate_option("peak_lr", peak_lr)
    if isinstance(number_for_all, float):
        give_where_unrecorded(number_for_all, groups)
    _refuse_unknown_peak(groups)
    steps = max((int(state["step"]) for part in parts for state in part.states if "step" in state), default=0)
    for group in groups:
        group["step_count"] = steps
        _assume_peak_reached(group)
    return parts


def _parts(optimizer: Optimizer, number: int, holders: Holders) -> list[AdoptedGroup]:
    """One of our groups, divided where the others treated its parameters differently."""
    own = optimizer.param_groups[number]
    if "initial_lr" in own:
        raise ValueError("a scheduler was already made for this optimizer: adopt first, then make the scheduler")
    parts: list[AdoptedGroup] = []
    for name, param in zip(names_of(own, number), own["params"], strict=True):
        found = _adopted(name, param, *holders[param])
        part = next((part for part in parts if not differing_options(part.options, found.options)), None)
        if part is None:
            part = AdoptedGroup(found.options, _group(own, found.options), [])
            parts.append(part)
        part.group["params"].append((name, param) if "param_names" in own else param)
        part.states.append(_checked(name, param, part.group, found.state))
    return parts


def _holders(optimizer: Optimizer, others: Iterable[Optimizer]) -> Holders:
    """Which of the others has a parameter, and in which group."""
    holders: Holders = {}
    for other in others:
        for group in other.param_groups:
            for param in group["params"]:
                if holders.setdefault(param, (other, group))[0] is not other:
                    raise ValueError(
                        f"{_name_of(optimizer, param)} is in {type(holders[param][0]).__name__} and in "
                        f"{type(other).__name__}; pass the one that trains it, or remove it from the other"
                    )
    return holders


def _name_of(optimizer: Optimizer, param: Tensor) -> str:
    for number, own in enumerate(optimizer.param_groups):
        for name, mine in zip(names_of(own, number), own["params"], strict=True):
            if mine is param:
                return name
    return f"a parameter of shape {tuple(param.shape)}"


def _adopted(name: str, param: Tensor, other: Optimizer, group: Group) -> AdoptedParameter:
    layout = next((read for fits, read in LAYOUTS if fits(group)), None)
    if layout is None:
        raise ValueError(
            f"{name} is in a group of {type(other).__name__} with the keys {', '.join(sorted(group))}, a layout that "
            f"is not known; adopt knows torch's Muon, AdamW and SGD, Keller Jordan's Muon and dion's Muon"
        )
    found = layout(name, param, group, dict(other.state.get(param) or {}))
    records = {key: group[key] for key in _RECORDS if key in group}
    return AdoptedParameter(
        {**found.options, "lr": group["lr"], "weight_decay": own_weight_decay(group), **records}, found.state
    )


def _torchs(name: str, param: Tensor, group: Group, state: State) -> AdoptedParameter:  # noqa: ARG001
    algorithm = "muon" if "adjust_lr_fn" in group else "adamw" if "betas" in group else "sgd"
    translated = translate_torch({key: value for key, value in group.items() if key not in ("params", "param_names")})
    known = {*ALGORITHMS[algorithm].defaults, "maximize"}
    options = {key: value for key, value in translated.items() if key in known}
    if algorithm == "muon":
        options |= {**_PLAIN_VIEW, "matrix": None, "momentum_form": "ema", "orthogonalizer": "newton_schulz"}
    if algorithm == "sgd":
        if float(group["weight_decay"]):
            raise ValueError(
                f"{name} is in a group of SGD with weight_decay={float(group['weight_decay']):g}, which torch adds "
                f"to the gradient; here decay is decoupled. Set it to 0 there, and choose one here afterwards"
            )
        options |= {"momentum_form": "heavy_ball"}
        state = {key: value for key, value in state.items() if value is not None}
    return AdoptedParameter({"algorithm": algorithm, **options}, state)


def _jordans(name: str, param: Tensor, group: Group, state: State) -> AdoptedParameter:
    if not group.get("use_muon", True):
        return AdoptedParameter({"algorithm": "adamw", "betas": tuple(group["betas"]), "eps": group["eps"]}, state)
    options = {"algorithm": "muon", "momentum": group["momentum"], "momentum_form": "ema", "nesterov": True}
    options |= {"scale": "original", "ns_steps": 5, "orthogonalizer": "newton_schulz", **_PLAIN_VIEW}
    options["matrix"] = {2: None, 3: "stack", 4: "flatten"}.get(param.dim())
    if param.dim() == 4:
        rows, columns = param.shape[-2:]  # it scales by the shape of the kernel, not of the matrix
        if rows > columns:
            raise ValueError(
                f"{name} is a convolution with a kernel of {rows} x {columns}, scaled in a way unknown here"
            )
        options["scale"] = "none"
    return AdoptedParameter(options, state)


def _dions(name: str, param: Tensor, group: Group, state: State) -> AdoptedParameter:
    """Of dion: it counts steps in the group and calls its buffers `momentum` and `variance`.

    Its Newton-Schulz coefficients are its own: directions differ from ours as one orthogonalizer from another.
    """
    for key in ("cautious_wd", "num_heads"):
        if group.get(key) not in (None, False, 1):
            raise ValueError(f"{name} is in a group of dion with {key}={group[key]!r}, which cannot be taken over")
    algorithm, betas = group["algorithm"], {"betas": (group["beta1"], group["beta2"])}
    if algorithm in ("muon", "normuon", "dion2"):
        options = {"scale": _DION_SCALES[group["adjust_lr"]], **_PLAIN_VIEW}
        options["matrix"] = None if param.dim() == 2 else "flatten" if group["flatten"] else "stack"
        if algorithm == "dion2":
            options |= {"momentum": group["ef_decay"], "fraction": group["fraction"]}
        else:
            options |= {"momentum": group["mu"], "nesterov": group["nesterov"], "momentum_form": "heavy_ball"}
        if algorithm == "normuon":
            options |= {**_DION_NORMUON, "normalize_beta2": group["muon_beta2"]}
        renamed = _renamed(state, momentum="momentum_buffer", variance_neuron="exp_avg_sq_row")
        return AdoptedParameter({"algorithm": algorithm.removeprefix("nor"), **options}, renamed)
    if algorithm == "lion":
        return AdoptedParameter({"algorithm": "lion", **betas}, _renamed(state, momentum="exp_avg"))
    if algorithm == "adamw":
        options = {**betas, "eps": group["epsilon"]}
        renamed = _renamed(state, momentum="exp_avg", variance="exp_avg_sq")
        return AdoptedParameter(
            {"algorithm": "adamw", **options}, {**renamed, "step": group["step"]} if renamed else {}
        )
    raise ValueError(f"{name} is trained by {group['algorithm']!r}, which this library does not have")


def _renamed(state: State, **names: str) -> State:
    return {names[key]: value for key, value in state.items() if key in names}


Layout = Callable[[str, Tensor, Group, State], AdoptedParameter]
LAYOUTS: tuple[tuple[Callable[[Group], bool], Layout], ...] = (
    (lambda group: "mu" in group and "algorithm" in group, _dions),
    (lambda group: "use_muon" in group, _jordans),
    (lambda group: "adjust_lr_fn" in group or "amsgrad" in group or "dampening" in group, _torchs),
    (lambda group: {"lr", "momentum", "weight_decay"} == group.keys() - {"params", "param_names", *_RECORDS}, _jordans),
)


def _group(own: Group, options: Group) -> Group:
    """Our group with what the other one did: everything that is not said there stays ours, decay rule included.

    A group that changes its algorithm takes no options of algorithms along: those of its new one meant nothing in it
    so far, and `add_param_group` fills in the constructor's.
    """
    left_out = {"params", "param_names"}
    if options["algorithm"] != own["algorithm"]:
        left_out |= {key for entry in ALGORITHMS.values() for key in entry.defaults}
    kept = {key: value for key, value in own.items() if key not in left_out}
    group = {**kept, **BOOKKEEPING, **options, "params": []}
    # A scheduler of the others, and another part of this group, must not fill a tensor of ours.
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


def _checked(name: str, param: Tensor, group: Group, state: State) -> State:
    """The state in our dtypes, copied; every key that the algorithm needs must be there, or none.

    What slots keep may be missing, or be of another shape: it begins anew.
    """
    complete = {**algorithm_defaults(group["algorithm"]), **group}
    keys = ALGORITHMS[group["algorithm"]].state_keys
    if not state:
        return {}
    needed = keys({**complete, **EMPTY_SLOTS})
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"the state of {name} lacks {', '.join(missing)}, which {group['algorithm']} needs")
    for key in [key for key in needed if key != "step"]:
        check_shape(key, state[key], name, complete, param)
    more = [key for key in keys(complete) if key in state and key not in needed]
    fits = [key for key in more if state[key].shape == own_shape(key, complete, param)]
    taken = {key: state[key] for key in state if key.removesuffix(SCALE) in (*needed, *fits)}
    formed = in_form(taken, complete, param)
    return {key: as_state(key, value, complete, param) for key, value in formed.items()}


def _refuse_mismatch(optimizer: Optimizer, theirs: Holders) -> None:
    own = {param for group in optimizer.param_groups for param in group["params"]}
    if own - theirs.keys():
        raise ValueError(
            f"{len(own - theirs.keys())} of {len(own)} parameters of this optimizer are in none of those that it "
            f"should adopt; pass all of them, built on the parameters of the same model"
        )
    if theirs.keys() - own:
        raise ValueError(
            f"{len(theirs.keys() - own)} parameters that were trained so far are not in this optimizer; build it on "
            f"the whole model"
        )


def _refuse_unknown_peak(groups: list[Group]) -> None:
    for group in groups:
        if rates.needs_peak(group) and group["peak_lr"] is None and scheduler_record(group) is None:
            raise ValueError(
                f"no scheduler has left its peak in adopted groups whose rate is now {float(group['lr']):g}; "
                f"pass peak_lr=<the highest learning rate of the run in groups without a record>"
            )


def _assume_peak_reached(group: Group) -> None:
    """A run that is under way may be past its peak, so a rate that only falls from now on is no sign of a wrong one."""
    if isinstance(group["peak_lr"], float) or scheduler_record(group) is not None:
        group["highest_lr"] = expected_peak(group)
