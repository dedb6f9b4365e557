"""Make the tables and figures of docs/evidence.md and research/tables.md from research/runs.jsonl.

    python research/tables.py    # rewrites the tables of both pages and the figures

A test fails if they differ from the records.
A row of runs.jsonl is a run: its settings, seed, losses, norms, total decay (the sum of phi), and sampled curves.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from muonsw.lab.stats import interval_of
from muonsw.lab.studies.grid import at_edge, by_seed, vertex
from muonsw.lab.studies.grid import best_of_means as best
from muonsw.lab.theory.norm import NormHistory, predict_norms

HERE = Path(__file__).parent
PAGE, MORE = HERE.parent / "docs/evidence.md", HERE / "tables.md"
ASSETS = HERE.parent / "docs/assets"
ROWS = [json.loads(line) for line in (HERE / "runs.jsonl").read_text("utf-8").splitlines()]
RULES = ("constant", "scaled")
# Runs of one setting share these columns; lambda, rule and seed differ.
SETTING = (
    *("text", "algorithm", "preset", "norm", "width", "batch", "steps", "lr", "schedule", "final_fraction"),
    *("decay_fraction", "data.train_windows", "weights", "muon_lr"),
)
ACTIVE = {64: 954_176, 128: 3_284_608}  # active parameters by width: two of eight experts
GOOD = 0.01  # nats; smaller differences are neglected


# Reading


def of(study, **where):
    """The runs of one or more studies whose columns have these values."""
    return select([row for row in ROWS if set(study.split()) & set(row["study"].split())], **where)


def select(rows, **where):
    """The runs whose columns have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in where.items())]


def settings(study, **where):
    """The runs of a study by setting."""
    groups = defaultdict(list)
    for row in of(study, **where):
        groups[tuple(row.get(name) for name in SETTING)].append(row)
    return groups


def by(rows, name="weight_decay", rule=None):
    """Losses per seed by the value of a column, ascending; values with missing seeds are left out."""
    losses = defaultdict(dict)
    for row in rows if rule is None else select(rows, decay=rule):
        losses[row[name]][row["seed"]] = math.inf if "diverged" in row else row["final_loss"]
    seeds = max(map(len, losses.values()), default=0)
    return {
        value: np.array([ends[s] for s in sorted(ends)]) for value, ends in sorted(losses.items()) if len(ends) == seeds
    }


def per_lambda(rows, rule):
    """Total decay of a rule at lambda 1."""
    row = select(rows, decay=rule)[0]
    return row["total_decay"] / row["weight_decay"]


def best_total(rows, rule):
    """Total decay of a rule at its best lambda."""
    return vertex(by(rows, rule=rule)) * per_lambda(rows, rule)


def best_totals(rows, rule):
    """Total decay of a rule at the best lambda of each seed."""
    return [lam * per_lambda(rows, rule) for lam in vertices(by(rows, rule=rule))]


# Statistics


def half(values):
    """Half of the 95% t interval of a mean; NaN with one value."""
    interval = interval_of(values)
    return (interval.high - interval.low) / 2 if interval else math.nan


def shown(values, digits=3, sign=""):
    """A mean with half of its 95% t interval."""
    width = half(values)
    return f"{np.mean(values):{sign}.{digits}f}" + ("" if math.isnan(width) else f" ± {width:.{digits}f}")


def at_best(losses):
    """The losses of the best value, by seed."""
    return losses[best(losses)]


def vertices(losses):
    """The best value of each seed by its parabola."""
    return [vertex(ends) for ends in by_seed(losses)]


def between(losses, value):
    """The loss at a value, interpolated over its logarithm; outside the grid, the loss at the edge."""
    seeds, x = zip(*losses.values(), strict=True), np.log(list(losses))
    return np.array([np.interp(math.log(value), x, ends) for ends in seeds])


def gap(rows, rule="scaled", other="constant"):
    """By seed, one rule at its best lambda minus another at its own."""
    return at_best(by(rows, rule=rule)) - at_best(by(rows, rule=other))


def paired(rows, baseline, column="final_loss"):
    """By seed, a column of some runs minus that of the baseline."""
    first, second = ({row["seed"]: row[column] for row in side} for side in (rows, baseline))
    return np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def steps_saved(constant, scaled):
    """By seed, the percentage of steps that scaled decay saves to reach constant decay's best loss."""
    saved = []
    for baseline, run in zip(*(sorted(rows, key=lambda row: row["seed"]) for rows in (constant, scaled)), strict=True):
        place = int(np.argmin(baseline["eval.loss"]))
        level, step = baseline["eval.loss"][place], baseline["eval.step"][place]
        for (x0, y0), (x1, y1) in pairwise(zip(run["eval.step"], run["eval.loss"], strict=True)):
            if y1 <= level:
                saved.append(100 - 100 * (x0 + (y0 - level) / (y0 - y1) * (x1 - x0)) / step)
                break
    return saved if len(saved) == len(constant) else []


def geometric(values, digits=1):
    """A geometric mean with its 95% t interval."""
    mean, width = np.mean(np.log(values)), half(np.log(values))
    middle, low, high = (f"{math.exp(mean + more):.{digits}f}" for more in (0.0, -width, width))
    return f"{middle} ({low} to {high})"


def slopes(grown, values):
    """By seed, the power of `grown` that the values follow."""
    return [np.polyfit(np.log(grown), np.log(seed), 1)[0] for seed in zip(*values, strict=True)]


def percent(values):
    return f"{np.mean(values):.0f}% ± {half(values):.0f}" if len(values) else None


# Words


def table(lines):
    """Markdown of heads and rows: the first column is text, the others numbers; of two columns both are text."""
    heads, *rows = lines
    lines = [heads, ["---", *["---:" if len(heads) > 2 else "---"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def near(rows, name, value):
    """The runs whose column is within half a percent of a value."""
    return [row for row in rows if math.isclose(row[name], value, rel_tol=5e-3)]


def schedule(row):
    if row["schedule"] == "cosine":
        return f"cosine to {row['final_fraction']:g}"
    return f"{'linear' if row['decay_fraction'] > 0.5 else 'WSD'} to {row['final_fraction']:g}"


def describe(row):
    """A setting in words."""
    optimizer = "AdamW, " if row["algorithm"] == "adamw" else ""
    words = f"{optimizer}width {row['width']}, {row['steps']:,} steps of {row['batch']}, rate {row['lr']:.3g}"
    return words + ("" if row["schedule"] == "cosine" and row["final_fraction"] == 0.1 else f", {schedule(row)}")


# The answers


def one_lambda():
    """Settings at one large lambda: label, constant, scaled, and constant decay of scaled decay's total."""
    cases, grid = [], of("main-table which-peak")
    for width, lam in ((128, 1.09), (256, 2.19), (512, 4.38)):
        arms = {rule: select(grid, width=width, decay=rule) for rule in RULES}
        for peak, words in (("base", "undivided peak"), ("group", "group's own peak")):
            scaled = near(select(arms["scaled"], peak=peak), "weight_decay", lam)
            if scaled:
                constant = near(arms["constant"], "weight_decay", lam)
                control = near(arms["constant"], "total_decay", scaled[0]["total_decay"])
                label = f"width {width}, {words}" if width > 128 else f"width {width}"
                cases.append((label, constant, scaled, control))
    for study, steps, lam in (("long", 25_600, 0.08), ("tokens-per-parameter", 34_800, 0.1)):
        arms = [of(study, steps=steps, weight_decay=lam, decay=rule) for rule in RULES]
        cases.append((f"width {arms[0][0]['width']}, {steps:,} steps, lambda {lam:g}", *arms, []))
    return cases


def one_lambda_table():
    heads = ["at one large lambda", "total decay, constant and scaled", "scaled minus constant, nats"]
    yield [*heads, "against constant decay of the same total", "fewer steps to constant decay's best loss"]
    for words, constant, scaled, control in one_lambda():
        totals = f"{constant[0]['total_decay']:.3g} and {scaled[0]['total_decay']:.3g}"
        left = shown(paired(scaled, control), 3, "+") if control else None
        saved = percent(steps_saved(constant, scaled))
        yield [words, totals, shown(paired(scaled, constant), 3, "+"), left, saved]


TUNED = {
    "lengths, 23M tokens": "regret",
    "lengths, 123M tokens": "long tokens-per-parameter",
    "width, batch, size": "lambda-scaling",
    "schedules": "schedules",
}


def tuned():
    """By kind, the settings of Muon with several lambdas, as lists of rows."""
    return {kind: sorted(settings(study).values(), key=lambda rows: rows[0]["steps"]) for kind, study in TUNED.items()}


def every_setting():
    return [rows for cells in tuned().values() for rows in cells]


def lengths():
    """The settings at several lengths, on little and on much text."""
    return [*tuned()["lengths, 23M tokens"], *tuned()["lengths, 123M tokens"]]


def pooled(cells):
    """The mean gap at the best lambdas of each setting."""
    return [float(np.mean(gap(rows))) for rows in cells]


def tuned_table():
    yield ["settings of Muon", "number", "gaps, nats", "mean gap, ± over settings", "intervals that exclude zero"]
    for kind, cells in {**tuned(), "all": every_setting()}.items():
        gaps = pooled(cells)
        beyond = sum(abs(np.mean(gap(rows))) > half(gap(rows)) for rows in cells)
        yield [kind, len(gaps), f"{min(gaps):+.3f} to {max(gaps):+.3f}", shown(gaps, 4, "+"), beyond]


def length_table():
    heads = ["run", "epochs", "best lambda, constant", "its total", "cost of the largest"]
    yield [*heads, "best lambda, scaled", "its total", "cost of the largest", "the largest"]
    for rows in lengths():
        row = rows[0]
        cells = []
        for rule in RULES:
            losses = by(rows, rule=rule)
            costs = losses[max(losses)] - at_best(losses)
            cells += [f"{vertex(losses):.2g}", f"{best_total(rows, rule):.2f}", shown(costs)]
        start = f"{row['steps']:,} steps, width {row['width']}, {row['text'].removeprefix('enwiki-')} tokens"
        yield [start, f"{row['epochs']:.1f}", *cells, f"{max(by(rows)):g}"]


def prices(cells):
    """By rule and choice of lambda, the cost in each setting: nats above the better rule at its best, by seed."""
    costs = defaultdict(list)
    for rows in cells:
        losses = {rule: by(rows, rule=rule) for rule in RULES}
        lowest = min((at_best(tried) for tried in losses.values()), key=np.mean)
        for rule, tried in losses.items():
            for choice, lam in (("0.1", 0.1), ("0.01", 0.01), ("total decay 1", 1 / per_lambda(rows, rule))):
                reached = min(max(lam, min(tried)), max(tried))
                if abs(math.log2(lam / reached)) <= 1:  # at most an octave outside the grid
                    costs[rule, choice].append((between(tried, reached) - lowest, reached != lam, rows[0]))
    return costs


def price_table():
    yield ["lambda for every run", "settings", "median cost, nats", "highest cost"]
    cells = [*(rows for rows in lengths() if rows[0]["width"] == 128), *tuned()["width, batch, size"]]
    for (rule, choice), known in sorted(prices(cells).items(), key=lambda entry: entry[0][::-1]):
        costs, beyond, row = max(known, key=lambda entry: np.mean(entry[0]))
        median = float(np.median([np.mean(costs) for costs, *_ in known]))
        where = f"width {row['width']}, {row['steps']:,} steps"
        highest = f"{'≥ ' if beyond else ''}{shown(costs)} ({where})"
        words = choice if choice.startswith("total") else f"lambda {choice}"
        yield [f"{words}, {rule}", len(known), f"{median:.3f}", highest]


AXES = {
    "width, the same steps": ("width", {"lr": 0.01, "steps": 1600}, "0 (constant total)"),
    "batch, the same tokens": ("batch", {"width": 128, "lr": 0.02}, "1 (Power Lines)"),
    "width, the same tokens per weight": ("width", {"batch": 8, "lr": 0.02}, "-2 (constant total, nanochat)"),
}


def grown(column, where, rule):
    """The losses by the value of a column, without settings whose best lambda is at an edge."""
    cells = {rows[0][column]: by(rows, rule=rule) for rows in settings("lambda-scaling", **where).values()}
    return {value: losses for value, losses in sorted(cells.items()) if not at_edge(losses)}


def totals_by_tokens(rule):
    """The best total of each seed by tokens per parameter, on fresh text."""
    cells = tuned()["lengths, 123M tokens"]
    tokens = {rows[0]["steps"] * rows[0]["batch"] * 1024 / ACTIVE[rows[0]["width"]]: rows for rows in cells}
    return {key: best_totals(rows, rule) for key, rows in tokens.items()}


def scaling_table():
    yield ["power of", "published", "constant", "scaled"]
    for words, (column, where, published) in AXES.items():
        powers = []
        for rule in RULES:
            tried = grown(column, where, rule)
            powers.append(shown(slopes(list(tried), [vertices(losses) for losses in tried.values()]), 2))
        yield [f"best lambda over {words}", published, *powers]
    powers = [shown(slopes(list(tried), tried.values()), 2) for tried in map(totals_by_tokens, RULES)]
    yield ["best total over tokens per parameter, 16 to 300", "0.53 (Power Lines)", *powers]


def rules():
    """Every rule at its strengths, from their settings: by rule, losses by strength."""
    runs = defaultdict(list)
    for row in of("best-rules"):
        name = "adamc" if row.get("optimizer.unnormalized") else row["decay"]
        if row["norm"] != "free":
            name = row["norm"] + ("_target" if row["norm"] == "hyperball" and "optimizer.target_norm" in row else "")
        runs[name].append(row)
    return {name: by(rows, "lr" if name.startswith("hyperball") else "weight_decay") for name, rows in runs.items()}


def rules_table():
    yield ["rule", "best strength", "loss, two seeds", "minus constant decay"]
    tried = rules()
    constant = at_best(tried["constant"])
    for name, losses in tried.items():
        word = "rate" if name.startswith("hyperball") else "lambda"
        strength = None if name == "none" else f"{word} {best(losses):g}{'*' * at_edge(losses)}"
        difference = None if name == "constant" else shown(at_best(losses) - constant, 3, "+")
        yield [f"`{name}`", strength, f"{np.mean(at_best(losses)):.3f}", difference]


def members():
    """By member and rule, losses by lambda at the best rate after the search; and the size of its state."""
    rates = defaultdict(list)
    for row in of("family", steps=400):
        rates[row.get("preset", "muon"), row["decay"], row["lr"]].append(row)
    entries = defaultdict(dict)
    for (name, rule, _), rows in rates.items():
        losses = by(rows)
        if rule not in entries[name] or np.mean(at_best(losses)) < np.mean(at_best(entries[name][rule])):
            entries[name] |= {rule: losses, "state": rows[0]["state_bytes"]}
    return entries


def family_table():
    yield ["member", "scaled minus constant", "minus Muon, constant", "minus Muon, scaled", "state, MiB"]
    entries = members()
    muon = {rule: at_best(entries["muon"][rule]) for rule in RULES}
    for name, entry in entries.items():
        ends = {rule: at_best(entry[rule]) for rule in RULES}
        minus_muon = [None if name == "muon" else shown(ends[rule] - muon[rule], 3, "+") for rule in RULES]
        mark = "*" * any(at_edge(entry[rule]) for rule in RULES)
        state = f"{entry['state'] / 2**20:.0f}"
        yield [name + mark, shown(ends["scaled"] - ends["constant"], 3, "+"), *minus_muon, state]


def schedule_table():
    yield ["schedule", "best total, constant", "best total, scaled", "scaled minus constant"]
    for rows in settings("schedules").values():
        totals = [f"{best_total(rows, rule):.2f}{'*' * at_edge(by(rows, rule=rule))}" for rule in RULES]
        yield [schedule(rows[0]), *totals, shown(gap(rows), 4, "+")]


def median(row, scope, column, where):
    """The median of a sampled column over part of a run."""
    values = np.array(row[f"{scope}.{column}"], dtype=float)[where]
    return float(np.median(values[np.isfinite(values)]))


def recursion(row):
    """Steps, and the norms that the recursion gives from the first one and the measured updates."""
    names = ("step", "weight_rms", "update_rms", "decay", "alignment_update")
    step, r, s, phi, a = (np.array(row[f"decayed.{name}"], dtype=float) for name in names)
    return step, r, predict_norms(NormHistory.of(step, r=r, s=s, phi=phi, a=a)).numpy()


def growth(row):
    """The logarithm of the gradient in the last tenth of a run over that in the middle."""
    step = np.array(row["normalized.step"]) / row["steps"]
    ends = ((step > 0.9) & (step <= 1.0), (step > 0.4) & (step <= 0.6))
    end, middle = (median(row, "normalized", "gradient_rms", where) for where in ends)
    return math.log(end / middle)


def gradient_runs():
    arms = {}
    for algorithm in ("adamw", "muon"):
        for lr in sorted({row["lr"] for row in of("gradient-growth", algorithm=algorithm)}):
            rows = of("gradient-growth", algorithm=algorithm, lr=lr)
            name = "AdamW" if algorithm == "adamw" else "Muon"
            arms[f"{name}, rate {lr:g}"] = {rule: select(rows, decay=rule) for rule in RULES}
    return arms


def gradient_table():
    yield ["gradient, end over middle", "constant", "scaled", "their ratio"]
    for name, arms in gradient_runs().items():
        logs = {rule: np.array([growth(row) for row in rows]) for rule, rows in arms.items()}
        factors = [f"{math.exp(np.mean(logs[rule])):.2f}" for rule in RULES]
        ratio = logs["constant"] - logs["scaled"]
        yield [name, *factors, geometric(np.exp(ratio), 2)]


def rates():
    """By rule and width, losses by learning rate."""
    runs = defaultdict(dict)
    for row in of("rate-drift"):
        runs["hyperball" if row["norm"] == "hyperball" else row["decay"]].setdefault(row["width"], []).append(row)
    return {name: {width: by(widths[width], "lr") for width in sorted(widths)} for name, widths in runs.items()}


def rate_table():
    tried = rates()
    widths = [f"width {width}" for width in tried["constant"]]
    yield ["best rate", *widths, "power of the width", "loss at the widest"]
    for name, by_width in tried.items():
        seeds = zip(*(vertices(losses) for losses in by_width.values()), strict=True)
        moves = [math.log(max(seed) / min(seed)) / math.log(max(by_width) / min(by_width)) for seed in seeds]
        best_rates = [f"{vertex(losses):.3g}" for losses in by_width.values()]
        yield [name, *best_rates, shown(moves, 2), f"{np.mean(at_best(by_width[max(by_width)])):.3f}"]


def tasks():
    """By task (with options) and lambda: both rules, and constant decay of scaled decay's total."""
    named = defaultdict(list)
    for row in of("tasks"):
        pairs = (option.partition("=") for option in row.get("options", []))
        options = [f"{name}={Path(value).name}" for name, _, value in pairs if value != "out/tasks/new.txt"]
        named[" ".join([Path(row["task"]).name, *options])].append(row)
    cases = {}
    for name, rows in named.items():
        controls = select(rows, arm="constant, same total")
        for lam in sorted({row["weight_decay"] for row in select(rows, arm="scaled")}):
            arms = [select(rows, arm=rule, weight_decay=lam) for rule in RULES]
            cases[name, lam] = (*arms, near(controls, "total_decay", arms[1][0]["total_decay"]))
    return cases


def signed(values, name=""):
    """A mean with its interval, bold if it excludes zero."""
    mean, width = float(np.mean(values)), half(values)
    text = f"{name} {mean:+.3f} ± {width:.3f}".strip()
    return f"**{text}**" if abs(mean) > width else text


def task_table():
    yield ["task", "lambda", "total decay", "loss", "scaled minus constant", "against the same total", "metric"]
    for (name, lam), (constant, scaled, control) in tasks().items():
        row = constant[0]
        metric = next((column for column in row if column.startswith("final.")), None)
        moved = signed(paired(scaled, constant, metric), metric.removeprefix("final.")) if metric else None
        numbers = [f"{lam:g}", f"{row['total_decay']:.2g}", f"{np.mean(by(constant)[lam]):.3f}"]
        gaps = [signed(paired(scaled, other)) for other in (constant, control)]
        yield [f"`{name}`", *numbers, *gaps, moved]


def answer_table():
    saved = {words: percent(steps_saved(constant, scaled)) for words, constant, scaled, _ in one_lambda()}
    long = of("long", steps=25_600)
    ends = {rule: by(long, rule=rule) for rule in RULES}
    costs = [shown(losses[0.08] - losses[0.01]) for losses in ends.values()]
    fewer = {"data.train_windows": 1600, "weight_decay": 0.1}
    little = shown(paired(*(of("hard-cases", decay=rule, **fewer) for rule in ("scaled", "constant"))))
    every = pooled(every_setting())
    yield ["your situation", "what our runs say"]
    yield from {
        "you keep lambda near 0.1 in a long run": "scaled decay needs fewer steps to the same loss: "
        f"{saved[LONG]} in a run of 25,600 steps, {saved[LONGEST]} in one of 34,800 (the paper: 22% to 29%)",
        "you tune lambda": f"no difference that matters: {shown(every, 4)} nats over {len(every)} settings",
        "lambda is too large": f"0.08 in 25,600 steps costs constant decay {costs[0]}, scaled decay {costs[1]} nats",
        "little text, 16 epochs": f"at the lambda of fresh text scaled decay ends {little} nats higher",
        "flat learning rate": "the two rules are the same, bit for bit",
    }.items()


BASE_256, GROUP_256 = "width 256, undivided peak", "width 256, group's own peak"
BASE_512, GROUP_512 = "width 512, undivided peak", "width 512, group's own peak"
LONG, LONGEST = "width 128, 25,600 steps, lambda 0.08", "width 64, 34,800 steps, lambda 0.1"
TABLES = {
    "answer": answer_table,
    "one-lambda": one_lambda_table,
    "tuned": tuned_table,
    "prices": price_table,
    "lengths": length_table,
    "scaling": scaling_table,
    "rules": rules_table,
    "family": family_table,
    "schedules": schedule_table,
    "gradients": gradient_table,
    "rates": rate_table,
    "tasks": task_table,
}


def settled(row):
    """The relative update at the peak, per unit of rate and corrected for momentum, over AdamC's sqrt(2 lambda/eta)."""
    beta = 0.9 if row["algorithm"] == "adamw" else 0.95
    names = ("step", "lr", "update_rms", "weight_rms", "decay")
    step, lr, update, weight, phi = (np.array(row[f"normalized.{name}"], dtype=float) for name in names)
    at_peak = (lr >= 0.9 * np.nanmax(lr)) & (step > row["steps"] / 10)
    return float(np.nanmedian((math.sqrt((1 + beta) / (1 - beta)) * update / weight / np.sqrt(2 * phi))[at_peak]))


def facts():
    """The numbers in the prose of the page and the README, by name."""
    every, by_length = every_setting(), lengths()
    best_lambdas = {(rows[0]["steps"], rule): vertex(by(rows, rule=rule)) for rows in by_length for rule in RULES}
    longest = {rule: by(by_length[-1], rule=rule) for rule in RULES}
    map_gap = gap(by_length[2])
    ends = {rule: by(by_length[4], rule=rule) for rule in RULES}
    # What a lambda above both best ones costs scaled decay, over what it costs constant decay.
    shares, totals = [], {rule: [] for rule in RULES}
    for rows in every:
        scaled, constant = by(rows, rule="scaled"), by(rows, rule="constant")
        for lam in (lam for lam in scaled if lam in constant and lam > max(best(scaled), best(constant))):
            costs = [np.mean(losses[lam] - at_best(losses)) for losses in (scaled, constant)]
            shares += [costs[0] / costs[1]] if costs[1] > 0.02 else []
        for rule, losses in (("scaled", scaled), ("constant", constant)):
            totals[rule] += [] if at_edge(losses) else [best_total(rows, rule)]
    arms = {words: rows for words, *rows in one_lambda()}
    less = [1 - np.mean(paired(scaled, control)) / np.mean(paired(scaled, constant))
            for constant, scaled, control in (arms[words] for words in ("width 128", BASE_256, BASE_512))]  # fmt: skip
    # The group's own peak minus the undivided one, and minus constant decay of the undivided one's total.
    forms = ((arms[BASE_256], arms[GROUP_256]), (arms[BASE_512], arms[GROUP_512]))
    peaks = [" and ".join(shown(paired(group[1], base[arm])) for base, group in forms) for arm in (1, 2)]
    tenth = near(of("main-table", width=256, decay="constant"), "weight_decay", 0.219)
    (adamw,) = settings("adamw-lambda", steps=6_400).values()
    pairs = defaultdict(dict)
    for row in (row for row in of("adamw gradient-growth", algorithm="adamw") if "optimizer.unnormalized" not in row):
        pairs[row["width"], row["lr"], row["weight_decay"], row["seed"]][row["decay"]] = row["final_loss"]
    gains = [pair["constant"] - pair["scaled"] for pair in pairs.values()]
    more = [vertex(by(of("repeated-text"), rule=rule)) / best_lambdas[1_600, rule] for rule in RULES]
    growths = [[math.exp(np.mean([growth(row) for row in rows])) for rows in arms.values()]
               for arms in gradient_runs().values()]  # fmt: skip
    growths = [constant / scaled for constant, scaled in growths]
    ratios = [np.mean([settled(row) for row in rows]) for arms in gradient_runs().values() for rows in arms.values()]
    held = {name: rates()[name][512] for name in ("hyperball", "constant")}
    fine = {rule: tasks()[f"finetune.py start={rule}-seed{{seed}}", 1.0][1] for rule in RULES}
    hard = {name: [of("hard-cases", decay=rule, **{name: value}) for rule in ("scaled", "constant")]
            for name, value in (("schedule", "wsd"), ("weights", "bfloat16"))}  # fmt: skip
    return {
        "tuned": f"{shown(pooled(every), 4)} nats",
        "tuned at 6,400 steps": f"{np.mean(map_gap):+.3f} (interval {np.mean(map_gap) - half(map_gap):+.3f} to "
        f"{np.mean(map_gap) + half(map_gap):+.3f}",
        "tuned at 25,600 steps": shown(gap(by_length[4]), 3, "+"),
        "constant, well chosen": shown(ends["scaled"][0.08] - ends["constant"][0.01]),
        "share": f"{np.median(shares):.2f} in the median ({min(shares):.2f} to {max(shares):.2f}",
        "less decay": "{:.0%} of the gain at width 128 and {:.0%} and {:.0%} at".format(*less),
        "peaks": peaks[0],
        "peaks, same total": peaks[1],
        "a tenth of lambda": shown(paired(arms[BASE_256][1], tenth)),
        "AdamW, tuned": f"scaled minus constant decay is {shown(gap(adamw))}",
        "AdamW, totals": " and ".join(f"{geometric(best_totals(adamw, rule))} under {rule}" for rule in RULES),
        "best lambda": f"factor of {best_lambdas[400, 'constant'] / best_lambdas[25_600, 'constant']:.0f} ",
        "best totals": " and ".join(
            f"{min(values):.2f} to {max(values):.2f} under {rule}" for rule, values in totals.items()
        ),
        "lambda 0.1 at 300 tokens, scaled": shown(longest["scaled"][0.1] - longest["scaled"][0.02]),
        "lambda 0.1 at 300 tokens, constant": shown(longest["constant"][0.1] - longest["constant"][0.0065]),
        "constant at 0.0065": shown(longest["scaled"][0.1] - longest["constant"][0.0065]),
        "AdamW": f"{sum(gain > 0 for gain in gains)} of {len(gains)} pairs",
        "AdamW, gains": f"by {min(gains):.2f} to {max(gains):.2f} nats",
        "repeated, tuned": shown(gap(of("repeated-text")), 3, "+"),
        "falling, then rising": f"ends {shown(gap(of('repeated-text'), 'piecewise'))} higher",
        "repeated": f"about {more[0]:.0f} times the lambda of fresh text, scaled decay about {more[1]:.0f} times",
        "growth": f"{min(growths):.2f} to {max(growths):.2f} times more under constant than under scaled decay",
        "best total over tokens": f"power {shown(slopes(*zip(*totals_by_tokens('scaled').items(), strict=True)), 2)}",
        "gradients": f"{min(ratios):.2f} to {max(ratios):.2f} times",
        "hyperball": shown(at_best(held["hyperball"]) - at_best(held["constant"])),
        **{name: shown(paired(*arms), 3, "+") for name, arms in hard.items()},
        "new text": shown(paired(fine["scaled"], fine["constant"]), 3, "+"),
        "old text": shown(paired(fine["scaled"], fine["constant"], "final.old"), 3, "+"),
        "runs": f"{sum('task' not in row for row in ROWS):,} runs",
        "task runs": f"{sum('task' in row for row in ROWS)} runs",
    }


# Files


def page(text):
    """A page with its tables updated."""
    for name in re.findall(r"<!-- table: (\S+) -->", text):
        block, new = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S), table(TABLES[name]())
        text = block.sub(lambda match, new=new: f"{match[1]}\n{new}\n\n{match[2]}", text)
    return text


def main():
    for path in (PAGE, MORE):
        path.write_text(page(path.read_text("utf-8")), encoding="utf-8")
    from figures import draw

    draw(ASSETS)
    prose = " ".join(PAGE.read_text("utf-8").split())
    missing = [f"{name}: {text}" for name, text in facts().items() if text not in prose]
    if missing:
        raise SystemExit("\n  ".join(["missing numbers on the page:", *missing]))


if __name__ == "__main__":
    main()
