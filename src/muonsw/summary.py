"""What the last step did: how many parameters each algorithm moved, and with how much decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonsw import peak
from muonsw.addons.norm_rules import FREE, acts
from muonsw.algorithms import ALGORITHMS
from muonsw.decay import needs_peak, phi_of
from muonsw.state import state_bytes
from muonsw.text import counted, sized, text_table
from muonsw.work import Group

# The number of the group, the parameters and the learning rate of each batch.
LastStep = list[tuple[int, list[Tensor], float]]


@dataclass(frozen=True)
class GroupSummary:
    """One param group in the last step."""

    group: int  # its number
    role: str | None
    algorithm: str
    parameters: int  # scalars moved; excludes parameters without a gradient
    matrices: int  # matrices orthogonalized
    lr: float  # of the step
    rule: str  # the decay rule
    norm: str  # the norm rule, "free" if none acts
    decay: float  # phi, the fraction of each weight that decay removed
    peak_lr: float | None  # the divisor of the decay; None if the rule needs none or it is not known yet
    highest_lr: float | None  # so far


@dataclass(frozen=True)
class Summary:
    """What the last step did; `print` shows it as a table."""

    groups: tuple[GroupSummary, ...]
    skipped: bool  # whether that step changed nothing because a gradient was not finite
    skipped_steps: int  # so far
    state: dict[str, int]  # bytes of optimizer state on this rank by key, even before it is allocated

    @property
    def matrices(self) -> int:
        """Matrices orthogonalized."""
        return sum(group.matrices for group in self.groups)

    @property
    def parameters(self) -> dict[str, int]:
        """Scalars moved by each algorithm."""
        moved: dict[str, int] = {}
        for group in self.groups:
            moved[group.algorithm] = moved.get(group.algorithm, 0) + group.parameters
        return moved

    def __str__(self) -> str:
        moved = ", ".join(f"{counted(count, 'parameter')} by {name}" for name, count in self.parameters.items())
        first = f"{counted(self.matrices, 'matrix', 'matrices')} orthogonalized; moved {moved}"
        if self.skipped:
            first = "the last step was skipped: a gradient was not finite"
        rows = [("group", "role", "algorithm", "parameters", "matrices", "lr", "rule", "decay", "peak")]
        for g in self.groups:
            rule = g.rule if g.norm == FREE else g.norm if g.rule == "none" else f"{g.rule}, {g.norm}"
            peak_lr = "-" if g.peak_lr is None else f"{g.peak_lr:.4g}"
            sizes = (f"{g.parameters:,}", str(g.matrices), f"{g.lr:.4g}")
            rows.append((str(g.group), g.role or "-", g.algorithm, *sizes, rule, f"{g.decay:.4g}", peak_lr))
        return f"{first}\n{text_table(rows)}\n{state_line(self.state)}"


def state_line(state: dict[str, int]) -> str:
    """Bytes of state by key as a line, largest first.

    Examples:
        >>> state_line({"step": 8, "momentum_buffer": 2**20})
        'state: 1.0 MiB (momentum_buffer 1.0 MiB, step 8 bytes)'
    """
    by_size = sorted(state.items(), key=lambda entry: -entry[1])
    parts = ", ".join(f"{key} {sized(count)}" for key, count in by_size)
    return f"state: {sized(sum(state.values()))}" + (f" ({parts})" if parts else "")


def summarize(groups: Sequence[Group], last: LastStep, skipped: bool, skipped_steps: int) -> Summary:
    summaries = []
    for number, group in enumerate(groups):
        batches = [(params, lr) for place, params, lr in last if place == number]
        moved = [] if skipped else [param for params, _ in batches for param in params]
        lr = float(batches[0][1] if batches else group["lr"])
        view = ALGORITHMS[group["algorithm"]].view(group)
        summaries.append(
            GroupSummary(
                group=number,
                role=group["role"],
                algorithm=group["algorithm"],
                parameters=sum(param.numel() for param in moved),
                matrices=sum(view.count(param.shape) for param in moved) if view else 0,
                lr=lr,
                rule=group["decay"] if group["weight_decay"] else "none",
                norm=group["norm"] if acts(group) else FREE,
                decay=phi_of(group, lr, max(1, group["step_count"])) if moved else 0.0,
                peak_lr=peak.eta_max(group) if needs_peak(group) else None,
                highest_lr=group["highest_lr"],
            )
        )
    return Summary(tuple(summaries), skipped, skipped_steps, state_bytes(groups))
