"""What weight decay does to the weights of a run: `muonsw diagnose`, and findings while training.

Both apply `RULES` to a `History`: `diagnose` to all records of a run, `Findings` to the records so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from tyro.conf import Positional

from muonsw.lab.advise import IDLE
from muonsw.lab.charts import Axis, Chart, Curve
from muonsw.lab.charts import draw as draw_charts
from muonsw.lab.console import Column, Table, harmless, norm_text, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder
from muonsw.lab.options import unset
from muonsw.lab.runs import SCOPES, Run, load_runs, tabulate, unique_names
from muonsw.lab.theory.norm import NormHistory, smooth_targets, target_norms
from muonsw.telemetry import Record
from muonsw.text import counted

Array = NDArray[np.float64]

LARGEST = 1e100  # values above come from damaged records or diverged float64 weights; their squares overflow
MIN_SAMPLES = 5
MUON_BETA = 0.95  # assumed for weights that Muon moves when no configuration says otherwise
LINEAR = ("constant", "independent")  # rules whose phi is proportional to the learning rate
MEASURED = ("weight_rms", "update_rms", "decay", "alignment_update")  # the inputs of the norm recursion

# The thresholds of the rules. A norm that follows sqrt(lr) has lost 29% when the learning rate is halved. A collapse
# loses at least that in total, and a tenth after the halving.
COLLAPSE, HALVED, LATE_LOSS = 0.29, 0.5, 0.1
RELAXED = 3.0  # exp(-3) = 0.05: the squared norm has forgotten 95% of its start
AVERAGED, GIVEN_BACK = 0.05, 0.1  # share of the records in a loss average; share of the progress lost in divergence
CHANCE = 6.0  # standard errors that noise never reaches
REACHED = 0.95  # sampled steps miss the exact peak of a schedule
DEFECT_RANGE = (0.68, 1.21)  # five Newton-Schulz steps map singular values above 1.5e-3 of the largest into this range
TOO_FAST = 0.4  # phi over 1 - beta; theory assumes that decay is slow compared with momentum
NEARLY_ALWAYS, MANY_SKIPPED = 0.9, 0.01


@dataclass(frozen=True, eq=False)
class History:
    """Telemetry of one scope of a run: `decayed`, `all`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`."""

    run: Run
    scope: str = "decayed"

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        return self.run.scope(self.scope).step

    def column(self, key: str) -> Array:
        """One value per sample, NaN if it is missing or too large to square."""
        values = self.run.scope(self.scope).get(key, np.full(len(self.steps), np.nan))
        return np.where(np.abs(values) < LARGEST, values, np.nan)

    def last(self, key: str) -> float:
        """The last known value, or NaN."""
        known = _known(self.column(key))
        return float(known[-1]) if len(known) else math.nan

    def highest(self, key: str) -> float:
        """The largest known value, or NaN."""
        known = _known(self.column(key))
        return float(known.max()) if len(known) else math.nan

    def left(self, key: str) -> float:
        """The last known value as a share of the largest, or NaN."""
        highest = self.highest(key)
        return self.last(key) / highest if highest > 0 else math.nan

    @property
    def since_peak(self) -> slice:
        """The samples since the peak learning rate, or all while it rises."""
        return slice(0 if self.peak_at == len(self.steps) - 1 else self.peak_at, None)

    def typical(self, values: Array, where: Any = None) -> float:
        """The median of the known values, by default of those since the peak learning rate."""
        known = _known(values[self.since_peak if where is None else where])
        return float(np.median(known)) if len(known) else math.nan

    def setting(self, name: str) -> Any:
        return (self.run.settings.get("optimizer") or {}).get(name)

    @property
    def momentum(self) -> float:
        """Muon's beta for weights trained by Muon, else AdamW's first beta, else 0."""
        if np.isfinite(self.column("defect")).any():
            return float(self.setting("momentum") or MUON_BETA)
        return float((self.setting("betas") or [0.0])[0])

    @cached_property
    def norm(self) -> NormHistory | None:
        """The samples with all inputs of the norm recursion, or None."""
        r, s, phi, a = map(self.column, MEASURED)
        known = np.isfinite([r, s, phi, a]).all(axis=0) & (r > 0) & (s >= 0) & (phi >= 0) & (phi <= 1)
        known &= np.abs(a) < 1.0 + 1e-5  # a float32 cosine may slightly exceed 1
        if not known.any():
            return None
        r, s, phi, a = (column[known].tolist() for column in (r, s, phi, a.clip(-1.0, 1.0)))
        return NormHistory.of(self.steps[known].tolist(), r=r, s=s, phi=phi, a=a)

    @cached_property
    def peak_at(self) -> int:
        """Index of the last sample at the peak learning rate."""
        at_peak = np.flatnonzero(self.column("lr") >= self.highest("lr") * (1.0 - 1e-9))
        return int(at_peak[-1]) if len(at_peak) else 0

    @property
    def still_rising(self) -> bool:
        """Whether the last sample of an unfinished run has the highest learning rate so far."""
        return self.peak_at == len(self.steps) - 1 and not self.run.complete

    @cached_property
    def total_decay(self) -> Array:
        """The sum of phi over all steps up to each sample, with phi interpolated between samples."""
        phi = self.column("decay")
        known = np.isfinite(phi)
        if not known.any():
            return np.full(len(self.steps), np.nan)
        steps, phi = self.steps[known], phi[known]
        # The sum of a straight line over consecutive steps, without the left end.
        between = np.diff(steps) * (phi[1:] + phi[:-1]) / 2.0 + np.diff(phi) / 2.0
        totals = phi[0] + np.concatenate([[0.0], np.cumsum(between)])
        return np.asarray(np.interp(self.steps, steps, totals, left=0.0))


def _known(values: Array) -> Array:
    return values[np.isfinite(values)]


def open_history(run: Run, scope: str = "") -> History:
    """The telemetry of a scope, by default the weights that decay, or all; a `UsageError` if the run has none."""
    if not run.telemetry.records:
        when = "" if run.complete else " yet"
        raise UsageError(f"{run.path} has no telemetry{when}; train with --telemetry-every 20")
    scopes = run.scopes()
    scope = scope or ("decayed" if "decayed" in scopes else "all")
    if scope not in scopes:
        choices = ", ".join(name for name in scopes if not name.startswith("parameter:"))
        raise UsageError(f"{run.path} has no telemetry of {scope!r}; --scope can be {choices}")
    return History(run, scope)


# The rules. Each examines a history and says what is wrong and what to do, or returns None.


def words(history: History) -> str:
    """The weights of a history, as named in a sentence."""
    kind, _, name = history.scope.partition(":")
    if name:
        return f"the weights of {kind} {name}"
    return "all weights" if kind == "all" else "the decayed weights"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def diverging(history: History) -> str | None:
    losses, steps = history.run.train.get("loss"), history.run.train.step
    if losses is None or not len(losses):
        return None
    known = np.isfinite(losses)
    if not known[-1]:
        finite = np.flatnonzero(known)
        since = int(steps[finite[-1] + 1]) if len(finite) else int(steps[0])
        return (
            f"The training loss has been NaN or infinite since step {since:,}. Restart from an earlier checkpoint "
            "with a lower learning rate."
        )
    # The running average is above its minimum by more than a share of the progress and more than noise.
    steps, losses = steps[known], losses[known]
    width = max(int(AVERAGED * len(losses)), 5)
    if len(losses) < 2 * width:
        return None
    averages = np.convolve(losses, np.full(width, 1.0 / width), mode="valid")
    best = int(averages.argmin())
    progress, back = float(averages[0] - averages[best]), float(averages[-1] - averages[best])
    noise = float(np.median(np.abs(np.diff(losses)))) / width**0.5
    if not back > max(GIVEN_BACK * progress, CHANCE * noise, 1e-12):
        return None
    return (
        f"The run is diverging: the training loss rose from {averages[best]:.4f} around step "
        f"{steps[best + width // 2]:,} to {averages[-1]:.4f}. Lower the learning rate, or go back to a checkpoint."
    )


def skipped(history: History) -> str | None:
    steps, counts = history.run.telemetry.known("skipped")
    # The counter restarts at zero when a run resumes.
    number = int(counts[-1] + counts[:-1][np.diff(counts) < 0].sum()) if len(counts) else 0
    if not number or number <= MANY_SKIPPED * steps[-1]:
        return None
    return (
        f"{number:,} of {steps[-1]:,} steps ({percent(number / steps[-1])}) were skipped because a gradient was not "
        "finite. Look for overflow (loss scale, data, attention logits), or lower the learning rate."
    )


def collapsing(history: History) -> str | None:
    r = history.column("weight_rms")
    halved = np.flatnonzero((history.column("lr") <= HALVED * history.highest("lr")) & np.isfinite(r))
    halved = halved[halved > history.peak_at]
    forgotten = np.flatnonzero((2.0 * history.total_decay >= RELAXED) & np.isfinite(r))
    # A fall from the initial norm is not a collapse: the start must be forgotten before the learning rate halves.
    if history.run.rule not in LINEAR or len(halved) < 2 or not len(forgotten) or forgotten[0] > halved[0]:
        return None
    top, end = int(forgotten[r[forgotten].argmax()]), history.last("weight_rms")
    lost = 1.0 - end / float(r[top])
    if lost < COLLAPSE or 1.0 - end / float(r[halved[0]]) < LATE_LOSS:
        return None
    return (
        f"{history.run.rule.capitalize()} decay collapses {words(history)}: since step {history.steps[top]:,} they "
        f"lost {percent(lost)} of their norm ({norm_text(float(r[top]))} to {norm_text(end)}), and the learning rate "
        f'is at {percent(history.left("lr"))} of its peak. Try decay="scaled", or a smaller lambda.'
    )


def decay_idle(history: History) -> str | None:
    total = float(history.total_decay[-1])
    if not 0.0 < total < IDLE or history.still_rising or history.run.in_progress:
        return None
    return (
        f"Decay hardly changes {words(history)} in this run: total decay is {total:.2g}, so the choice of rule does "
        f"not matter. For decay to act, raise lambda about {1.0 / total:.0f} times, or train longer."
    )


def peak_not_reached(history: History) -> str | None:
    used, peak = history.highest("lr"), history.highest("peak_lr")
    # With peak="base" a divided learning rate never reaches the peak, on purpose.
    if not used < REACHED * peak or history.setting("peak") == "base" or history.still_rising:
        return None
    # The group summaries also cover the steps between samples and those before a resume.
    records = history.run.telemetry
    peaks = [key for key in records if key.startswith("groups.") and key.endswith(".peak_lr")]
    highest = [records.get(key.replace(".peak_lr", ".highest_lr"), np.full(1, np.nan))[-1] for key in peaks]
    if peaks and all(top >= REACHED * records[key][-1] for top, key in zip(highest, peaks, strict=True)):
        return None
    return (
        f"The learning rate of {words(history)} never reached the peak that decay divides by ({used:.3g} of "
        f"{peak:.3g}), so decay is {percent(used / peak)} of what lambda says. Set peak_lr to the peak of the schedule."
    )


def large_updates(history: History) -> str | None:
    size, bound = history.typical(history.column("relative_update")), 1.0 - history.momentum
    if not size > bound:
        return None
    return (
        f"Each step changes {words(history)} by {percent(size)}, which replaces them within the {1.0 / bound:.0f} "
        f"steps that momentum {history.momentum:g} remembers. Lower the learning rate, or lower lambda if decay has "
        "made the weights this small."
    )


def fast_decay(history: History) -> str | None:
    peak, forgetting = history.highest("decay"), 1.0 - history.momentum
    if not peak > TOO_FAST * forgetting:
        return None
    return (
        f"Decay of {words(history)} is fast compared with momentum: phi reaches {peak:.2g} a step, "
        f"{percent(peak / forgetting)} of 1 - beta = {forgetting:.2g}. Use a smaller lambda and more steps."
    )


def defect_out_of_range(history: History) -> str | None:
    defect, (low, high) = history.typical(history.column("defect")), DEFECT_RANGE
    if not (defect < low or defect > high):
        return None
    cause = "the iteration overshoots; check ns_dtype and the coefficients"
    if defect < low:
        cause = "the momentum has nearly low rank, so many directions hardly move (dead experts, unused rows)"
    return f"Muon's direction for {words(history)} has size {defect:.2f} (1 is orthogonal): {cause}."


def always_clipped(history: History) -> str | None:
    limit, norms = history.setting("clip"), history.run.train.known("grad_norm")[1]
    clipped = norms > limit if limit and len(norms) else history.run.telemetry.known("clipped")[1]
    share = float(clipped.mean()) if len(clipped) >= MIN_SAMPLES else 0.0
    # Muon's steps keep their size whatever the gradient's.
    if share <= NEARLY_ALWAYS or history.setting("algorithm") == "muon":
        return None
    return (
        f"Gradient clipping acts on {percent(share)} of the steps, so it divides every gradient by its norm instead of "
        "guarding against outliers. Raise the limit to a few times the usual norm."
    )


class Rule(NamedTuple):
    """A check, and when it applies."""

    name: str  # as in docs/guide/telemetry.md
    check: Callable[[History], str | None]
    weights: bool = False  # also checked for every role, from five samples on
    live: bool = False  # also checked while training

    def find(self, history: History) -> Finding | None:
        enough = not self.weights or len(history.steps) >= MIN_SAMPLES
        text = self.check(history) if enough else None
        return Finding(self.name, history.scope, text) if text else None


RULES = (
    Rule("diverging", diverging),
    Rule("skipped", skipped, live=True),
    Rule("collapsing", collapsing, weights=True, live=True),
    Rule("large-updates", large_updates, weights=True, live=True),
    Rule("peak-not-reached", peak_not_reached, weights=True),
    Rule("defect", defect_out_of_range, weights=True),
    Rule("clipping", always_clipped, live=True),
    Rule("fast-decay", fast_decay),
    Rule("decay-idle", decay_idle),
)


class Finding(NamedTuple):
    """The result of a rule."""

    rule: str
    scope: str
    text: str  # what is wrong, and what to do


def examine(history: History, roles: Sequence[History] = (), *, live: bool = False) -> list[Finding]:
    """Apply all rules, or the live ones; a finding about the whole scope is not repeated for its roles."""
    findings: list[Finding] = []
    for rule in RULES:
        if rule.live or not live:
            overall = rule.find(history)
            in_roles = [finding for role in roles if rule.weights and (finding := rule.find(role))]
            findings += [overall] if overall else in_roles
    return findings


# The command.


class Diagnosis(NamedTuple):
    """One run, examined."""

    history: History
    roles: Sequence[History]  # empty unless the history is pooled over roles
    findings: Sequence[Finding]


def diagnose(run: Run, *, scope: str = "") -> Diagnosis:
    """Examine the weights of a scope, by default those that decay; with pooled scopes also every role."""
    history = open_history(run, scope)
    roles = [History(run, name) for name in sorted(run.scopes()) if name.startswith("role:")]
    roles = roles if history.scope in SCOPES else []
    return Diagnosis(history, roles, examine(history, roles))


TABLE_NOTE = (
    "norm: RMS of the weights, and as a share of its maximum; r*: the norm at which it would settle at the present "
    "learning rate; total decay: the sum of the shares of a weight that decay removes in each step."
)


def print_diagnosis(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """Print the findings of each run, then one table of norms."""
    rows = []
    names = unique_names(diagnosis.history.run.name for diagnosis in diagnoses)
    for name, (history, roles, findings) in zip(names, diagnoses, strict=True):
        run = history.run
        reached = f", step {run.steps:,} of {run.planned_steps:,}" if run.in_progress else ""
        count = counted(len(findings), "finding") if findings else "nothing to report"
        heading = f"{name} ({run.rule or 'unknown'} decay, {counted(len(history.steps), 'sample')}{reached}): {count}"
        console.print(Text(harmless(heading), style="bold"))
        for finding in findings:
            line = Text.assemble((finding.rule, "bold red"), f": {harmless(finding.text)}")
            console.print(line, soft_wrap=not console.is_terminal)
        for part in (history, *roles):
            numbers = (
                part.last("weight_rms"),
                part.left("weight_rms"),
                math.nan if part.norm is None else float(target_norms(part.norm)[-1]),
                float(part.total_decay[-1]),
                part.typical(part.column("relative_update")),
            )
            shown = (f"{number:.3g}" if math.isfinite(number) else None for number in numbers)
            rows.append((f"{name} {part.scope}" if len(diagnoses) > 1 else part.scope, *shown))
    titles = ("norm", "of its maximum", "r*", "total decay", "update/weight")
    columns = [Column("weights"), *(Column(title, number=True) for title in titles)]
    print_table(console, Table("norms", "Weight norms", columns, rows, TABLE_NOTE))


NORM = "RMS (dashed: steady state)"
PANELS = {
    NORM: "weight_rms",
    "cos(weight, update)": "alignment_update",
    "cos(weight, gradient)": "alignment_gradient",
    "cos(weight, momentum)": "alignment_momentum",
    "size of Muon's direction": "defect",
}


def draw(histories: Sequence[History], stem: Path) -> list[Path]:
    """Draw loss, norm, alignments and orthogonality as one figure, as PNG and SVG."""
    names = unique_names(f"{history.run.name} ({history.run.rule or 'unknown'})" for history in histories)
    panels: dict[str, list[Curve]] = {}

    def add(title: str, arm: str, x: Any, y: Any, *, dashed: bool = False) -> None:
        if np.isfinite(values := np.asarray(y, dtype=np.float64)).any():
            panels.setdefault(title, []).append(Curve(arm, arm, np.asarray(x).tolist(), values.tolist(), dashed))

    for arm, history in zip(names, histories, strict=True):
        evaluated = history.run.losses
        add("loss", arm, *(evaluated if len(evaluated[0]) else history.run.training_losses))
        for title, key in PANELS.items():
            add(title, arm, history.steps, history.column(key))
        if history.norm is not None:
            add(NORM, arm, history.norm.steps, smooth_targets(history.norm), dashed=True)
    highest = _known(np.array([history.highest("weight_rms") for history in histories])).max(initial=0.0)
    axes = {NORM: Axis(limits=(0.0, 1.4 * highest or 1.0))}  # during warmup the steady state is far larger
    charts = [Chart(title, title, curves, Axis("step"), axes.get(title, Axis())) for title, curves in panels.items()]
    rules = {name: history.run.rule for name, history in zip(names, histories, strict=True)}
    return draw_charts(stem, charts, rules, columns=3) if charts else []


@dataclass(frozen=True)
class Diagnose:
    """Show what decay does to the weights of runs, and what is wrong.

    Prints findings in plain words, and a table of measured and predicted norms.

    Draws one figure.
    """

    runs: Annotated[tuple[Path, ...], Positional, unset(metavar="RUN...")] = ()
    """Run folders, or JSON lines that `muonsw.Telemetry` wrote in your own loop; several are drawn together."""

    out: Annotated[Path | None, unset(metavar="DIR")] = None
    """Folder for the figure. Default: RUN/diagnose for a run, FILE-diagnose for a file, out/diagnose for several."""

    scope: Annotated[str, unset()] = ""
    """Which weights: decayed (the default), all, role:NAME, layer:NUMBER or parameter:NAME."""

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw diagnose RUN...")
        diagnoses = [diagnose(run, scope=self.scope) for run in load_runs(self.runs)]
        folder, first = self.out, self.runs[0]
        if folder is None:
            folder = first.with_name(f"{first.stem}-diagnose") if first.is_file() else first / "diagnose"
            folder = folder if len(diagnoses) == 1 else Path("out/diagnose")
        prepare_folder(folder)
        draw([diagnosis.history for diagnosis in diagnoses], folder / "diagnose")
        console = Console()
        print_diagnosis(console, diagnoses)
        say(console, f"\nwrote diagnose.png and diagnose.svg to {folder}")
        return 0


# Findings while training.

AGAIN = 10  # repeat a finding after ten times as many steps
MOST_SAMPLES = 100


class Findings:
    """A telemetry sink that returns what `diagnose` finds in the records so far.

    A finding is repeated only after ten times as many steps.

    Attributes:
        history: every finding so far, with the step of its record.

    Examples:
        >>> findings = Findings()
        >>> findings({"step": 10, "roles": {}, "skipped": 5})
        ['5 of 10 steps (50%) were skipped because a gradient was not finite. Look for overflow ...']
        >>> findings({"step": 20, "roles": {}, "skipped": 10})
        []
    """

    def __init__(self) -> None:
        self.history: list[tuple[int, str]] = []
        self._reported_at: dict[tuple[str, str], int] = {}
        self._records: list[dict[str, Any]] = []

    def __call__(self, record: Record) -> list[str]:
        """Add a record, and return the findings that are due."""
        kept = ("step", *SCOPES, "roles", "skipped", "clipped")
        self._records.append({"kind": "telemetry", **{key: record[key] for key in kept if key in record}})
        if len(self._records) > MOST_SAMPLES:
            del self._records[1:-1:2]
        run = Run("live", Path(), {}, {}, None, tabulate(self._records))
        history = History(run, "decayed" if "decayed" in record else "all")
        roles = [History(run, f"role:{role}") for role in sorted(record["roles"])]
        step, due = record["step"], []
        for finding in examine(history, roles, live=True):
            topic = finding.rule, finding.scope
            if step >= AGAIN * self._reported_at.get(topic, 0):
                self._reported_at[topic] = step
                due.append(finding.text)
        self.history += [(step, text) for text in due]
        return due
