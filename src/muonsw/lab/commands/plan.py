"""`muonsw plan`: what a run will cost, which learning rates it gets, and what decay will do, before it is started."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.lab.advise import RULES, Advice, Advise
from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import plain
from muonsw.lab.base.tables import Column, Table, print_table
from muonsw.lab.base.terminal import paragraph, say
from muonsw.lab.commands.parsing import changed, given
from muonsw.lab.cost.amounts import amount, parse_amount
from muonsw.lab.cost.run import DECAYS, GroupPlan, RecipePlan, RunPlan, plan, plan_recipe
from muonsw.lab.cost.update import H200, ON_PAPER, Setup, UpdateCost
from muonsw.lab.model import muon_lr_multiplier, preset
from muonsw.lab.paper import find_recipe
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from muonsw.lab.train.presets import trained_like

GIB = 2**30
Row = tuple[str, str, str]
GROUP_HEADINGS = ("matrices under", "peak lr", *(f"total, {name}" for name in DECAYS), "φ peak", "φ/(1-β)")
GROUP_NOTE = (
    "Total decay is the sum of φ, the share of a weight that decay takes in a step. Scaled decay divides by the "
    "group's own peak, or by the undivided base peak (base). φ peak is the same for constant and scaled decay with "
    "the group's peak."
)
LARGE_NOTE = (
    "decay is then fast beside momentum's memory, unlike in a long run; lower --weight-decay or take more steps."
)
# Above this, decay acts nearly as fast as momentum forgets, which never happens in a long run.
LARGE_PHI = 0.01
# Options that may be given beside a recipe, which fixes all others.
WITH_RECIPE = ("--recipe", "--batch-tokens", "--schedule", "--decay-fraction", "--warmup-steps", "--json")


@dataclass(frozen=True)
class Plan:
    """Compute a run without running it: size, cost, learning rates, and what decay will do.

    Give a preset with tokens or steps, or the name of a recipe that the paper prints.
    """

    preset: str = ""
    """The model: w128, w256, w512, w768, w1024, mini, demo, or one of them with -dense appended; or moe-1t, which
    exists on paper alone."""

    tokens: Annotated[str, arg(metavar="AMOUNT")] = ""
    """Tokens to train on, such as 197B, 300M or 1.5e9."""

    steps: Annotated[int | None, arg(metavar="N")] = None
    """Updates, instead of tokens."""

    batch_tokens: Annotated[str, arg(metavar="AMOUNT")] = ""
    """Tokens in an update; the preset's unless given."""

    recipe: str = ""
    """A recipe instead of a preset: glm-4.5, kimi-k2, deepseek-v4-pro, paper-w256 to paper-w1024."""

    lr: float | None = None
    """Base peak learning rate; default: the horizon rule's."""

    weight_decay: float | None = None
    """Lambda of hidden and expert matrices; the preset's unless given."""

    momentum: float = 0.95
    """Muon's beta."""

    schedule: str = "cosine"
    """Learning rate after warmup: cosine, wsd or constant."""

    final_fraction: float = 0.1
    """What is left of the peak at the end."""

    decay_fraction: float = 0.2
    """The share of the run that decays under wsd."""

    warmup_steps: int | None = None
    """Updates of warmup; the paper's rule unless given, none for a recipe that prints none."""

    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of tables."""

    setup: OmitArgPrefixes[FlagCreatePairsOff[Setup]] = field(default_factory=Setup)
    """GPUs, all like the H200 that was measured: what each holds, sends and waits for (docs/scaling.md)."""

    def run(self) -> int:
        """Compute and print."""
        result = self.planned()
        row, advice = self._advice(result) if isinstance(result, RunPlan) else ("", {})
        if self.json:
            found = {"advice_for": row, "advice": {rule: asdict(one) for rule, one in advice.items()}} if row else {}
            print(json.dumps(plain(asdict(result) | found), indent=2, allow_nan=False))
        else:
            print_plan(Console(), result)
            if row:
                for line in advice_lines(row, advice):
                    paragraph(Console(), line)
        return 0

    def _advice(self, result: RunPlan) -> tuple[str, dict[str, Advice]]:
        """Which row of the table the preset trains, and by rule what `muonsw advise` says of it."""
        trained = self._trained()[0]
        own = result.peak_lr * muon_lr_multiplier(result.model, trained.muon_lr)
        settings: dict[str, Any] = {
            "schedule": self.schedule,
            "warmup_steps": result.warmup_steps,
            "final_fraction": self.final_fraction,
            "decay_fraction": self.decay_fraction,
            "base_lr": result.peak_lr if trained.peak == "base" else None,
        }
        rules: tuple[Any, ...] = RULES
        row = f"Muon, {trained.muon_lr}, with peak {trained.peak}"
        try:
            return row, {
                rule: Advise(result.steps, own, trained.weight_decay, decay=rule, **settings).advice() for rule in rules
            }
        except (ValueError, OverflowError) as error:  # a decay that no optimizer would take; the rest is a plan
            return f"{row}; {error}", {}

    def planned(self) -> RunPlan | RecipePlan:
        """What the options describe."""
        try:
            return self._recipe() if self.recipe else self._plan()
        except OverflowError as error:
            raise UsageError("a number is too large to compute with: give a smaller one") from error
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _plan(self) -> RunPlan:
        if not self.preset:
            raise UsageError("say what to plan: --preset w1024 with --tokens 197B or --steps 376000, or --recipe NAME")
        if bool(self.tokens) == (self.steps is not None):
            raise UsageError("give either --tokens or --steps, such as --tokens 197B")
        trained, batch = self._trained()
        steps = math.ceil(parse_amount(self.tokens) / batch) if self.steps is None else self.steps
        model = ON_PAPER[self.preset] if self.preset in ON_PAPER else preset(self.preset)
        return plan(
            model,
            steps,
            batch_tokens=batch,
            peak_lr=self.lr,
            optimizer=trained,
            schedule=self._schedule(self.warmup_steps),
            setup=self.setup,
        )

    def _trained(self) -> tuple[OptimizerConfig, int]:
        """The optimizer of the preset and its tokens an update, with what the options change."""
        optimizer, tokens = trained_like(self.preset)
        optimizer = replace(optimizer, **given(self, "momentum", "weight_decay"))
        return optimizer, parse_amount(self.batch_tokens) if self.batch_tokens else tokens

    def _recipe(self) -> RecipePlan:
        for option in changed(self):
            if option not in WITH_RECIPE:
                raise UsageError(f"{option} does not go with --recipe, which has its own; leave one of them out")
        recipe = find_recipe(self.recipe)
        batch = parse_amount(self.batch_tokens) if self.batch_tokens else None
        warmup = 0 if recipe.steps is None and self.warmup_steps is None else self.warmup_steps
        return plan_recipe(recipe, batch_tokens=batch, schedule=self._schedule(warmup))

    def _schedule(self, warmup_steps: int | None) -> ScheduleConfig:
        return ScheduleConfig(
            shape=self.schedule,
            warmup_steps=warmup_steps,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )


def print_plan(console: Console, result: RunPlan | RecipePlan) -> None:
    """Tables in a terminal, aligned plain text elsewhere."""
    if isinstance(result, RunPlan):
        _print_table(console, ("", "", ""), run_rows(result))
        _print_table(console, ("", "", ""), update_rows(result.update))
    else:
        _print_table(console, ("", "", ""), recipe_rows(result))
    if result.groups is not None:
        _print_table(console, GROUP_HEADINGS, [group_row(group) for group in result.groups])
        paragraph(console, GROUP_NOTE)
        large = [group.name for group in result.groups if group.phi_peak > LARGE_PHI]
        if large:
            paragraph(console, f"φ peak is above {LARGE_PHI:g} ({'; '.join(large)}): {LARGE_NOTE}")
    if isinstance(result, RecipePlan):
        say(console, "\n".join(("Not in the paper:", *(f"  - {item}" for item in result.recipe.unknown))))


def advice_lines(row: str, advice: Mapping[str, Advice]) -> list[str]:
    """What decay does to the row that a preset trains, a line for each rule."""
    lines = [f"- {rule}: total decay {one.total:.3g}. {one.answer}" for rule, one in advice.items()]
    return [f"The preset trains the row {row}.", *lines, "`muonsw advise` says more."]


def run_rows(result: RunPlan) -> list[Row]:
    """What is printed about a run: name, value, and where the value comes from."""
    return [
        ("parameters", f"{result.parameters:,}", "exact"),
        ("active parameters", f"{result.active:,}", "exact; all but the experts a token is not sent to"),
        ("steps", f"{result.steps:,}", f"of {result.batch_tokens:,} tokens, {result.warmup_steps:,} of them warmup"),
        ("tokens", amount(result.tokens, 4), f"{result.tokens_per_active:.0f} for each active parameter"),
        ("peak learning rate", f"{result.peak_lr:.3g}", result.peak_lr_from),
        ("FLOP a token", amount(result.flops_per_token, 4), "forward and backward, causal attention at full length"),
        ("FLOP", f"{result.flops:.3g}", f"Newton-Schulz adds {100 * result.orthogonalizer_share:.1f}%"),
        ("hours", f"{result.hours:,.1f}", f"at {result.update.setup.tflops:g} TFLOP/s sustained by each GPU"),
    ]


def update_rows(update: UpdateCost) -> list[Row]:
    """What is printed about an update on the GPU that holds the most; of links only where there are some."""
    setup, memory = update.setup, update.memory
    room = "of" if memory.total <= H200.capacity else "more than"
    adamw = f"two averages of the rest; {gib(memory.adamw_only_state)} for all"
    optimizer = f"{milliseconds(update.pass_seconds)} of it passes over memory"
    rows = [
        ("GPUs", f"{setup.gpus:,}", f"{setup.strategy}, {setup.shards:,} to a copy of the model"),
        ("weights", gib(memory.weights), "float32"),
        ("gradients", gib(memory.gradients), "float32"),
        ("Muon state", gib(memory.muon_state), "momentum of hidden and expert matrices"),
        ("AdamW state", gib(memory.adamw_state), adamw),
        ("activations", gib(memory.activations), f"estimate: {setup.micro_batch} sequences at once, compiled"),
        ("copies of weights", gib(memory.gathered), "bfloat16, or gathered"),
        ("optimizer's buffers", gib(memory.buffers), "at most"),
        ("memory a GPU", gib(memory.total), f"{room} the {gib(H200.capacity)} there are"),
        ("forward and backward", milliseconds(update.model_seconds), "computing"),
        ("products", milliseconds(update.product_seconds), "orthogonalizing, on the GPU with the most"),
        ("optimizer", milliseconds(update.optimizer_seconds), optimizer),
        ("update", milliseconds(update.seconds), f"{100 * update.optimizer_share:.1f}% of it the optimizer"),
    ]
    return rows if setup.gpus == 1 else rows + link_rows(update)


def link_rows(update: UpdateCost) -> list[Row]:
    """What GPUs send each other in an update; rates of links are assumed, and all overlap is taken for perfect."""
    hidden = "hidden behind products" if update.exchange_seconds <= update.product_seconds else "not hidden"
    links = "hidden behind computing" if update.model_link_seconds <= update.model_seconds else "not hidden"
    return [
        ("optimizer receives", f"{update.optimizer_bytes / 1e6:,.1f} MB", "a GPU, mean"),
        ("exchange", milliseconds(update.exchange_seconds), f"of it; {hidden}; links are assumed"),
        ("model receives", f"{update.model_bytes / 1e6:,.1f} MB", "weights, gradients, tokens"),
        ("model's links", milliseconds(update.model_link_seconds), f"for it; {links}; links are assumed"),
    ]


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{1e3 * seconds:,.1f} ms"


def recipe_rows(result: RecipePlan) -> list[Row]:
    """What is printed about a recipe."""
    recipe = result.recipe
    sums = f"{result.decay_tokens / 1e6:,.4g} / batch in millions of tokens"
    if result.batch_tokens is not None:
        sums = f"{result.decay_tokens / result.batch_tokens:.4g}"
    steps = "unknown" if result.steps is None else f"{result.steps:,}"
    batch = (
        "batch not printed; give --batch-tokens" if result.batch_tokens is None else f"{result.batch_tokens:,} tokens"
    )
    return [
        ("recipe", recipe.title, recipe.reference),
        ("parameters", f"{amount(recipe.total, 4)}, {amount(recipe.active, 4)} active", "as printed"),
        ("tokens", amount(recipe.tokens, 4), f"{recipe.tokens / recipe.active:.0f} for each active parameter"),
        ("steps", steps, batch),
        ("learning rate", f"{recipe.peak_lr:g} to {recipe.final_lr:g}", "as printed"),
        ("weight decay λ", f"{recipe.weight_decay:g}", "as printed"),
        ("λ·Ση", sums, "constant decay in total, at the printed learning rate"),
        ("scaled / constant, total", f"{result.scaled_over_constant:.3f}", "of the decay over the whole run"),
        ("scaled / constant, at the end", f"{result.final_ratio:.3g}", "of the decay in the last step"),
        ("λ for an equal total", f"{result.equal_total_weight_decay:.3g}", "under scaled decay"),
    ]


def group_row(group: GroupPlan) -> tuple[str, ...]:
    """One line of the table of learning rates and decay."""
    short = (group.peak_lr, *group.totals.values())
    return (
        group.name,
        *(f"{number:.3g}" for number in short),
        f"{group.phi_peak:.2e}",
        f"{group.phi_peak_over_memory:.3g}",
    )


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    columns = [Column(title, number=bool(title) and place > 0) for place, title in enumerate(headings)]
    print_table(console, Table("plan", "", columns, rows), hint="--json shows them")
