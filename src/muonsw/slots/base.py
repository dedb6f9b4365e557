"""The two slots around the orthogonalizer, and how a rule declares its state.

    momentum -> precondition -> orthogonalize -> normalize -> shape scale -> decay -> apply

A member of a slot is a pure function on a batch of equal matrices and their state. Gathering the state of many
parameters, the exchange between ranks, skipped steps and checkpoints are not its business: it declares its state, and
`algorithms/whole.py` and `distributed/` do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsw.registry import Registry
from muonsw.work import Group

Options = dict[str, Any]
State = dict[str, Tensor]


class StateSpec(NamedTuple):
    """One tensor of a parameter's state; it begins at zero.

    Attributes:
        shape: of a tensor that each matrix has, its two axes for a matrix of m outputs and n inputs, such as
            `lambda m, n: (m, 1)`. None is a tensor laid out like the parameter.
        squares: it is never negative, so that 8 bits need no sign.
        counter: it is one number, the steps that the parameter has taken.
    """

    shape: Callable[[int, int], tuple[int, int]] | None = None
    squares: bool = False
    counter: bool = False


ELEMENTWISE = StateSpec()
SQUARES = StateSpec(squares=True)
COUNTER = StateSpec(counter=True)
Specs = Mapping[str, StateSpec]

# A group in which no slot has a member.
EMPTY_SLOTS: Options = {"precondition": None, "normalize": None}


def no_state(options: Options) -> Specs:  # noqa: ARG001
    """The state of a member that has none."""
    return {}


class SlotMember(NamedTuple):
    """A function for a slot.

    Attributes:
        apply: options, matrices X (count, m, n) and state to the new X and the new state. It changes nothing in place.
        defaults: its options by name. A group has them as `<slot>_<name>` where they are set.
        state: the tensors of its state, by key.
        elementwise: treats every element on its own, so that it may run on shards in any shape.
        uses_gradient: `state["grad"]` is the gradient, pointing downhill, in the shape of X; it is not returned.
        counts_steps: `options["step"]` is the number of this step, from 1, on the host.
    """

    apply: Callable[[Options, Tensor, State], tuple[Tensor, State]]
    defaults: Options
    state: Callable[[Options], Specs] = no_state
    elementwise: bool = False
    uses_gradient: bool = False
    counts_steps: bool = False


# What stands in an empty slot.
NO_MEMBER = SlotMember(lambda _, X, __: (X, {}), {})


class Slot(NamedTuple):
    """A place in the pipeline that holds one member of a registry, or none."""

    name: str
    members: Registry[SlotMember]

    def member(self, group: Group) -> SlotMember:
        """The member that a group asks for."""
        name = group.get(self.name)  # a group that is being put together may lack it
        return NO_MEMBER if name is None else self.members[name]

    def options(self, group: Group) -> Options:
        """The options of the group's member, by their plain names."""
        member = self.member(group)
        given = {key: group.get(f"{self.name}_{key}") for key in member.defaults}
        step = {"step": group["update_count"]} if member.counts_steps else {}
        return {key: member.defaults[key] if value is None else value for key, value in given.items()} | step

    def specs(self, group: Group) -> Specs:
        """The state of the group's member."""
        return self.member(group).state(self.options(group))

    def apply(self, group: Group, X: Tensor, state: State) -> tuple[Tensor, State]:
        """Run the group's member on matrices as they are stored, with the tensors of the state that are its own."""
        member, options = self.member(group), self.options(group)
        specs = member.state(options)
        own = {key: state[key] for key in (*specs, *(("grad",) if member.uses_gradient else ()))}
        return oriented(partial(member.apply, options), specs, X, own, transposed=group.get("transposed", False))

    def option_names(self) -> list[str]:
        """The names under which groups keep options of members."""
        keys = dict.fromkeys(key for member in self.members.values() for key in member.defaults)
        return [f"{self.name}_{key}" for key in keys]

    def refuse_options_of_others(self, group: Group) -> None:
        """Refuse an option that the group's member does not have."""
        own = {f"{self.name}_{key}" for key in self.member(group).defaults}
        for option in self.option_names():
            if group.get(option) is not None and option not in own:
                key = option.removeprefix(f"{self.name}_")
                owners = [repr(name) for name, other in self.members.items() if key in other.defaults]
                raise ValueError(
                    f"{option}={group[option]!r} is an option of {self.name}={' and '.join(owners)}, but this group "
                    f"has {self.name}={group[self.name]!r}" + (f", which takes {', '.join(sorted(own))}" if own else "")
                )


def oriented(
    apply: Callable[[Tensor, State], tuple[Tensor, State]], specs: Specs, X: Tensor, state: State, *, transposed: bool
) -> tuple[Tensor, State]:
    """Call a function that wants (outputs, inputs) with matrices that may be stored the other way."""
    if not transposed:
        return apply(X, state)

    def flipped(state: State) -> State:
        return {key: t.mT if specs.get(key, ELEMENTWISE).shape is None else t for key, t in state.items()}

    X, new = apply(X.mT, flipped(state))
    return X.mT, flipped(new)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, of inner products, and of state that has a shape of its own."""
    return torch.float64 if dtype == torch.float64 else torch.float32
