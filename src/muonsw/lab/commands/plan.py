"""`muonsw plan`: what a run will cost, which learning rates it gets, and what decay will do, before it is started."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.lab.advice import Advice, advise
from muonsw.lab.cost import (
    H200,
    ON_PAPER,
    GroupPlan,
    RankLayout,
    RankPlan,
    RecipePlan,
    RunPlan,
    Scenario,
    amount,
    parse_amount,
    plan,
    plan_ranks,
    plan_recipe,
)
from muonsw.lab.errors import UsageError
from muonsw.lab.model import muon_lr_multiplier, preset
from muonsw.lab.paper import PAPER_BATCH_TOKENS, find_recipe
from muonsw.lab.storage import plain
from muonsw.lab.tables import Column, Table, print_table
from muonsw.lab.terminal import say
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from muonsw.lab.train.presets import trained_like

GIB = 2**30
Row = tuple[str, str, str]
GROUP_HEADINGS = (
    "matrices under", "peak lr", "λ·Ση", "N constant", "N scaled", "N scaled, base",
    "φ peak", "φ/(1-β)", "φ peak, base",
)  # fmt: skip
LARGE_NOTE = (
    "decay is then fast beside momentum's memory, unlike in a long run; lower --weight-decay or take more steps."
)
GROUP_NOTE = (
    "N = 2·Σφ counts relaxation times. Scaled decay divides by the group's own peak, or by the undivided base peak "
    "(base).\nφ peak is the same for constant and scaled decay with the group's peak."
)


# Above this, decay acts nearly as fast as momentum forgets, which never happens in a long run.
LARGE_PHI = 0.01
OPTION_NAMES = {"peak_lr": "lr", "shape": "schedule"}  # where option and field are called differently
# Options that may be given beside a recipe, which fixes all others.
WITH_RECIPE = ("recipe", "batch_tokens", "shape", "decay_fraction", "warmup_steps", "json", "ranks")


@dataclass(frozen=True)
class RankOptions:
    """Several GPUs."""

    gpus: Annotated[int | None, arg(metavar="N")] = None
    """How many, all like the H200 that the model's rates were measured on."""

    strategy: Literal["ddp", "fsdp", "ep"] = "ddp"
    """ddp: a copy on each; fsdp: everything divided; ep: experts stay on their GPUs and tokens travel, the rest is
    divided."""

    experts: Literal["stack", "rows"] = "stack"
    """Under fsdp: experts divided along their stack, or each by its rows."""

    replicas: Annotated[int, arg(metavar="N")] = 1
    """Copies: under fsdp of the whole model (HSDP), under ep of all but the experts."""

    momentum_on_owner: FlagCreatePairsOff[bool] = False
    """Under ddp: each momentum on one GPU alone."""

    recompute: FlagCreatePairsOff[bool] = False
    """Keep the inputs of layers alone, and compute the rest again: a third more FLOPs."""

    gathered_bytes: Literal[2, 4] = 4
    """Bytes of a weight that is gathered; the trainer gathers float32."""

    period: Annotated[int, arg(metavar="N")] = 1
    """On paper: orthogonalize matrices that are cut as wholes in every Nth update alone, and by rows in the others."""

    gpus_per_node: Annotated[int, arg(metavar="N")] = H200.node
    """GPUs of one machine."""

    inside: Annotated[float, arg(metavar="GB/S")] = H200.inside / 1e9
    """What a GPU receives from others of its machine. Assumed, not measured."""

    outside: Annotated[float, arg(metavar="GB/S")] = H200.outside / 1e9
    """What a GPU receives from other machines. Assumed, not measured."""

    def scenario(self, batch_tokens: int, micro_batch: int, tflops: float) -> Scenario | None:
        """What is asked about several GPUs; None where nothing is."""
        if self.gpus is None:
            given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
            if given:
                raise UsageError(f"--{given[0].replace('_', '-')} needs --gpus N")
            return None
        if not (self.inside > 0 and self.outside > 0 and self.gpus_per_node >= 1):
            raise UsageError("--inside, --outside and --gpus-per-node must be above zero")
        links = replace(H200, node=self.gpus_per_node, inside=self.inside * 1e9, outside=self.outside * 1e9)
        return Scenario(
            RankLayout(self.gpus, self.strategy, self.experts, self.replicas),
            batch_tokens,
            micro_batch,
            tflops,
            links,
            gathered=self.gathered_bytes,
            momentum_on_owner=self.momentum_on_owner,
            recompute=self.recompute,
            period=self.period,
        )


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
    """Tokens in an update; 524288 unless given."""

    recipe: str = ""
    """A recipe instead of a preset: glm-4.5, kimi-k2, deepseek-v4-pro, paper-w256 to paper-w1024."""

    tflops: float = 400.0
    """Rate of all hardware together, or of each GPU with --gpus, in 1e12 FLOP a second: what is sustained, not what a
    data sheet says."""

    peak_lr: Annotated[float | None, arg(name="lr")] = None
    """Base peak learning rate; default: the horizon rule's."""

    weight_decay: float = 0.1
    """Lambda of hidden and expert matrices."""

    momentum: float = 0.95
    """Muon's beta."""

    shape: Annotated[str, arg(name="schedule")] = "cosine"
    """Learning rate after warmup: cosine, wsd or constant."""

    final_fraction: float = 0.1
    """What is left of the peak at the end."""

    decay_fraction: float = 0.2
    """The share of the run that decays under wsd."""

    warmup_steps: int | None = None
    """Updates of warmup; the paper's rule unless given, none for a recipe that prints none."""

    micro_batch: int = 8
    """Sequences whose activations are held at once."""

    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of tables."""

    ranks: OmitArgPrefixes[RankOptions] = field(default_factory=RankOptions)
    """Several GPUs: what each holds, sends and waits for, by the cost model of docs/scaling.md."""

    def run(self) -> int:
        """Compute and print."""
        result = self.planned()
        row, advice = self._advice(result) if isinstance(result, RunPlan) else ("", {})
        if self.json:
            found = {"advice_for": row, "advice": {rule: one.as_data() for rule, one in advice.items()}} if row else {}
            print(json.dumps(plain(asdict(result) | found), indent=2, allow_nan=False))
        else:
            print_plan(Console(), result)
            if row:
                say(Console(), advice_text(row, advice))
        return 0

    def _advice(self, result: RunPlan) -> tuple[str, dict[str, Advice]]:
        """Which row of the table the preset trains, and by rule what `muonsw advise` says of it."""
        trained = trained_like(self.preset)
        own = result.peak_lr * muon_lr_multiplier(result.model, trained.muon_lr)
        settings: dict[str, Any] = {
            "schedule": self.shape,
            "warmup_steps": result.warmup_steps,
            "final_fraction": self.final_fraction,
            "decay_fraction": self.decay_fraction,
            "momentum": self.momentum,
            "base_peak_lr": result.peak_lr if trained.peak == "base" else None,
        }
        rules = dict.fromkeys((trained.decay, "constant"))
        row = f"Muon, {trained.muon_lr}, with peak {trained.peak}"
        try:
            return row, {
                rule: advise(result.steps, own, self.weight_decay, rules=(rule,), **settings) for rule in rules
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
        batch = parse_amount(self.batch_tokens) if self.batch_tokens else PAPER_BATCH_TOKENS
        steps = math.ceil(parse_amount(self.tokens) / batch) if self.steps is None else self.steps
        model = ON_PAPER[self.preset] if self.preset in ON_PAPER else preset(self.preset)
        scenario = self.ranks.scenario(batch, self.micro_batch, self.tflops)
        whole = plan(
            model,
            steps,
            batch_tokens=batch,
            peak_lr=self.peak_lr,
            optimizer=OptimizerConfig(weight_decay=self.weight_decay, momentum=self.momentum),
            schedule=self._schedule(self.warmup_steps),
            micro_batch=self.micro_batch,
            tflops=self.tflops * (scenario.layout.gpus if scenario else 1),
        )
        if scenario is None:
            return whole
        ranks = plan_ranks(model, scenario)
        return replace(whole, ranks=ranks, rank_hours=steps * ranks.step_seconds / 3600.0)

    def _recipe(self) -> RecipePlan:
        if self.ranks != RankOptions():
            raise UsageError("--gpus does not go with --recipe, which says too little about its model; give a preset")
        for one in fields(self):
            if one.name not in WITH_RECIPE and getattr(self, one.name) != one.default:
                option = f"--{OPTION_NAMES.get(one.name, one.name.replace('_', '-'))}"
                raise UsageError(f"{option} does not go with --recipe, which has its own; leave one of them out")
        recipe = find_recipe(self.recipe)
        batch = parse_amount(self.batch_tokens) if self.batch_tokens else None
        warmup = 0 if recipe.steps is None and self.warmup_steps is None else self.warmup_steps
        return plan_recipe(recipe, batch_tokens=batch, schedule=self._schedule(warmup))

    def _schedule(self, warmup_steps: int | None) -> ScheduleConfig:
        return ScheduleConfig(
            shape=self.shape,
            warmup_steps=warmup_steps,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )


def print_plan(console: Console, result: RunPlan | RecipePlan) -> None:
    """Tables in a terminal, aligned plain text elsewhere."""
    rows = plan_rows(result) if isinstance(result, RunPlan) else recipe_rows(result)
    _print_table(console, ("", "", ""), rows)
    if isinstance(result, RunPlan) and result.ranks is not None:
        _print_table(console, ("", "", ""), rank_rows(result, result.ranks))
    if result.groups is not None:
        _print_table(console, GROUP_HEADINGS, [group_row(group) for group in result.groups])
        say(console, GROUP_NOTE)
        large = [group.name for group in result.groups if group.decays[0].phi_peak > LARGE_PHI]
        if large:
            say(console, f"φ peak is above {LARGE_PHI:g} ({'; '.join(large)}): {LARGE_NOTE}")
    if isinstance(result, RecipePlan):
        say(console, "\n".join(("Not in the paper:", *(f"  - {item}" for item in result.recipe.unknown))))


def advice_text(row: str, advice: Mapping[str, Advice]) -> str:
    """What decay does to the row that a preset trains, a line for each rule."""
    lines = [f"  {rule}: total decay {one.rules[0].total:.3g}. {one.sentences[0]}" for rule, one in advice.items()]
    return "\n".join((f"The preset trains the row {row}.", *lines, "`muonsw advise` says more."))


def plan_rows(result: RunPlan) -> list[Row]:
    """What is printed about a run: name, value, and where the value comes from."""
    memory = result.memory
    return [
        ("parameters", f"{result.parameters:,}", "exact"),
        ("active parameters", f"{result.active:,}", "exact; all but the experts a token is not sent to"),
        ("steps", f"{result.steps:,}", f"of {result.batch_tokens:,} tokens, {result.warmup_steps:,} of them warmup"),
        ("tokens", amount(result.tokens, 4), f"{result.tokens_per_active:.0f} for each active parameter"),
        ("peak learning rate", f"{result.peak_lr:.3g}", result.peak_lr_from),
        ("FLOP a token", amount(result.flops_per_token, 4), "forward and backward, causal attention at full length"),
        ("FLOP", f"{result.flops:.3g}", f"Newton-Schulz adds {100 * result.orthogonalizer_share:.1f}%"),
        ("hours", f"{result.hours:,.1f}", f"at {result.tflops:g} TFLOP/s sustained"),
        ("weights", gib(memory.weights), "float32"),
        ("gradients", gib(memory.gradients), "float32"),
        ("Muon state", gib(memory.muon_state), "momentum of hidden and expert matrices"),
        ("AdamW state", gib(memory.adamw_state), f"two averages of the rest; {gib(memory.adamw_only_state)} for all"),
        (
            "activations",
            gib(memory.activations),
            f"estimate: bfloat16 autocast, {result.micro_batch} sequences at once",
        ),
        ("memory", gib(memory.total), "sum with Muon; the estimate leaves out temporaries and fragmentation"),
    ]


def rank_rows(result: RunPlan, ranks: RankPlan) -> list[Row]:
    """What is printed about an update on several GPUs."""
    layout, memory = ranks.layout, ranks.memory
    state = memory.weights + memory.gradients + memory.muon_state + memory.adamw_state
    room = (
        f"of {gib(H200.capacity)}" if memory.total <= H200.capacity else f"more than the {gib(H200.capacity)} there are"
    )
    hidden = "hidden behind its products" if ranks.exchange_seconds <= ranks.product_seconds else "not hidden"
    links = "hidden behind computing" if ranks.model_link_seconds <= ranks.model_seconds else "not hidden"
    return [
        ("GPUs", f"{layout.gpus:,}", f"{layout.strategy}, {layout.shards:,} to a copy of the model"),
        ("memory a GPU", gib(memory.total), room),
        ("weights, gradients, state", gib(state), "on the GPU that holds the most"),
        ("activations", gib(memory.activations), "estimate"),
        ("gathered and buffers", gib(memory.gathered + memory.buffers), "at most"),
        ("optimizer sends", f"{ranks.optimizer_bytes / 1e6:,.1f} MB", "received by a GPU in an update, mean"),
        ("model sends", f"{ranks.model_bytes / 1e6:,.1f} MB", "weights, gradients, tokens"),
        (
            "forward and backward",
            milliseconds(ranks.model_seconds),
            f"links {milliseconds(ranks.model_link_seconds)}, {links}",
        ),
        ("products", milliseconds(ranks.product_seconds), "orthogonalizing, on the GPU with the most"),
        ("exchange", milliseconds(ranks.exchange_seconds), hidden),
        (
            "passes over memory",
            milliseconds(ranks.pass_seconds),
            f"and {milliseconds(ranks.overhead_seconds)} overhead",
        ),
        ("optimizer", milliseconds(ranks.optimizer_seconds), f"longest: {ranks.longest}"),
        ("update", milliseconds(ranks.step_seconds), f"{100 * ranks.optimizer_share:.1f}% of it the optimizer"),
        ("hours in all", f"{result.rank_hours:,.1f}", "links are assumed and all overlap is taken for perfect"),
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
    constant, scaled, base = group.decays
    short = (group.peak_lr, constant.total, constant.relaxation, scaled.relaxation, base.relaxation)
    phis = (f"{scaled.phi_peak:.2e}", f"{scaled.phi_peak_over_memory:.3g}", f"{base.phi_peak:.2e}")
    return (group.name, *(f"{number:.3g}" for number in short), *phis)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    columns = [Column(title, number=bool(title) and place > 0) for place, title in enumerate(headings)]
    print_table(console, Table("plan", "", columns, rows), hint="--json shows them")
