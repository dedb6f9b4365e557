"""The other groups: every rule, hard cases, the paper's table, dynamics, transfer of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from operator import itemgetter

from evidence_page.records import Evidence, Record, bold, chance, claim_table, final_loss, markdown, mean
from muonsw.decay import DECAY_RULES
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.diagnose.fits import fit_alignment
from muonsw.lab.paper import CONSTANT_OFFSET, CONSTANT_SLOPE, DEFECT, ROWS, SCALED_SLOPE
from muonsw.lab.report.sections import Axis, Chart, Curve, Level, Sheet
from muonsw.lab.studies.arms import CONSTANT, CONTROL_SUFFIX, SCALED
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.training.best_rules import best_strength, candidates, judge_strengths, rules_run
from muonsw.lab.studies.training.regret import RULES
from muonsw.lab.theory import NormHistory, predict_norms
from planned import BEST, GROUPS, RATES, all_rules

LATE = 50 / 376  # the share of a run over which the paper fits the late alignment


def rules_section(evidence: Evidence) -> str:
    """Every rule at its strengths, on the seeds that it has; its best against constant decay's, on the same seeds."""
    found, arms = strengths(evidence), candidates(rules_run(MINI))
    rows = []
    for rule, values in found.items():
        for arm, losses in zip(arms[rule], values, strict=False):
            strength = "" if arm.name == rule else arm.name.removeprefix(f"{rule}, ")
            rows.append([rule, strength, bold(mean(losses), min(map(mean, values))), str(len(losses))])
    gaps = gaps_to_constant(found)
    ranked = ", ".join(f"{rule} {mean(gap):+.3f}" for rule, gap in sorted(gaps.items(), key=lambda one: mean(one[1])))
    judged = {rule: whole(found)[rule] for rule, gap in gaps.items() if len(gap) > 1}
    claims = claim_table(judge_strengths(judged)) if len(judged) > 1 else "One seed: nothing is judged yet."
    single = ", ".join(rule for rule, gap in gaps.items() if len(gap) == 1)
    alone = f" Of one seed, so not judged: {single}." if single and len(judged) > 1 else ""
    told = f"The best of each that has all its strengths, minus constant decay's on the same seeds: {ranked}.{alone}"
    if ends := best_at_an_end(whole(found)):
        told += f" Best at the weakest or strongest that was tried, so perhaps better beyond it: {', '.join(ends)}."
    return f"{markdown(['rule', 'strength', 'loss', 'seeds'], rows, texts=2)}\n\n{told}\n\n{claims}"


def best_at_an_end(found: Mapping[str, list[list[float]]]) -> list[str]:
    """The rules whose best strength has no other on one side of it."""
    return [rule for rule, values in found.items() if len(values) > 1 and best_strength(values) in (0, len(values) - 1)]


def strengths(evidence: Evidence) -> dict[str, list[list[float]]]:
    """By rule, of each strength that was tried, the losses of the first seeds that all of them have."""
    losses = {(one.arm, one.config.seed): evidence.loss(one) for one in all_rules()}
    seeds, found = sorted({seed for _, seed in losses}), {}
    for rule, arms in candidates(rules_run(MINI)).items():
        tried = [arm.name for arm in arms if losses[arm.name, seeds[0]] is not None]
        had = _first_seeds(losses, tried, seeds)
        found[rule] = [[losses[name, seed] for seed in had] for name in tried]
    return found


def _first_seeds(losses: Mapping[tuple[str, int], float | None], names: Sequence[str], seeds: list[int]) -> list[int]:
    """The seeds up to the first that one of these arms lacks."""
    return list(takewhile(lambda seed: all(losses[name, seed] is not None for name in names), seeds))


def whole(found: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """The rules all of whose strengths were tried: the best of some is not a rule's best."""
    arms = candidates(rules_run(MINI))
    return {rule: values for rule, values in found.items() if len(values) == len(arms[rule])}


def gaps_to_constant(found: Mapping[str, list[list[float]]]) -> dict[str, list[float]]:
    """By rule, its best strength minus constant decay's best, seed by seed; nothing before constant decay is whole."""
    tried = whole(found)
    if "constant" not in tried:
        return {}
    gaps = {}
    for rule, values in tried.items():
        constant = [losses[: len(values[0])] for losses in tried["constant"]]
        pairs = zip(values[best_strength(values)], constant[best_strength(constant)], strict=False)
        gaps[rule] = [ours - theirs for ours, theirs in pairs]
    return gaps


def other_rules(evidence: Evidence) -> dict[str, dict[int, list[dict[float, float]]]]:
    """By decay rule that the regret map does not have, by horizon and seed: the loss of each lambda."""
    run, found = rules_run(MINI), {}
    for rule, values in whole(strengths(evidence)).items():
        arms = candidates(run)[rule]
        if rule not in RULES and len(arms) > 1 and rule in DECAY_RULES and not DECAY_RULES[rule].uses_gradient:
            lambdas = [arm.optimizer.weight_decay for arm in arms]
            found[rule] = {run.steps: [dict(zip(lambdas, seed, strict=True)) for seed in zip(*values, strict=True)]}
    return found


def hard_section(evidence: Evidence) -> str:
    """Of each case the mean over seeds under both rules, and the differences of the pairs."""
    cases = hard_records(evidence)
    rows = []
    for (case, lam), gaps in hard_gaps(evidence).items():
        found = cases[case, lam]
        means = [mean([final_loss(record) for record in found[rule].values()]) for rule in RULES]
        without = [final_loss(record) for record in cases.get((case, 0.0), {}).get("none", {}).values()]
        gap = over_seeds(gaps)
        interval = "-" if gap.interval is None else f"{gap.interval.low:+.3f} to {gap.interval.high:+.3f}"
        first = next(iter(found["constant"].values()))
        epochs, rate = first["epochs"], first["lr"]
        cells = [f"{value:.3f}" for value in means] + [f"{mean(without):.3f}" if without else "-"]
        rows.append(
            [case, f"{lam:g}", f"{rate:g}", f"{epochs:.1f}", *cells, f"{gap.value:+.3f}", interval, str(len(gaps))]
        )
    headings = ["case", "lambda", "peak rate", "epochs", "constant", "scaled", "no decay", "scaled minus constant"]
    return markdown([*headings, "95% t interval", "seeds"], rows, texts=1)


def hard_records(evidence: Evidence) -> dict[tuple[str, float], dict[str, dict[int, Record]]]:
    """By case and lambda, by rule, by seed."""
    cases: dict[tuple[str, float], dict[str, dict[int, Record]]] = {}
    for one in GROUPS["hard"].runs():
        record = evidence.of(one)
        if record is not None:
            rules = cases.setdefault((one.arm.split(":")[0], record["lambda"]), {})
            rules.setdefault(record["rule"], {})[record["seed"]] = record
    return cases


def hard_gaps(evidence: Evidence) -> dict[tuple[str, float], list[float]]:
    """By case and lambda, scaled minus constant of every seed that has both."""
    gaps = {}
    for case, rules in hard_records(evidence).items():
        seeds = rules.get("constant", {}).keys() & rules.get("scaled", {}).keys()
        if seeds:
            gaps[case] = [
                final_loss(rules["scaled"][seed]) - final_loss(rules["constant"][seed]) for seed in sorted(seeds)
            ]
    return gaps


def table_section(evidence: Evidence) -> str:
    rows = []
    for name in ("table-128", "table-256", "table-512", "adamw"):
        for arm, records in arms_of(evidence, name).items():
            loss, norm = (mean([read(one) for one in records]) for read in (final_loss, itemgetter("end_norm")))
            first = records[0]
            run = f"{first['lambda']:.3g}", f"{first['lr']:g}", f"{first['epochs']:.1f}"
            rows.append([str(first["width"]), arm, *run, f"{loss:.3f}", f"{norm:.3f}", str(len(records))])
    printed = "; ".join(
        f"width {width}: {row.constant_norm:g} and {row.scaled_norm:g}"
        for width, row in ROWS.items()
        if row.constant_norm is not None
    )
    note = f"The paper's end norms under constant and scaled decay: {printed}."
    told = " ".join(filter(None, (gains(evidence, width) for width in MINI.rows)))
    headings = ["width", "arm", "lambda", "base rate", "epochs", "loss", "end norm (RMS)", "seeds"]
    table = markdown(headings, rows, texts=2)
    return "\n\n".join(filter(None, (table, pairs_table(evidence), told, note)))


def pairs_table(evidence: Evidence) -> str:
    """Scaled decay against constant decay seed by seed: at every lambda, and each at its best."""
    rows = []
    for group in ("table-128", "table-256", "table-512", "adamw"):
        found = arms_of(evidence, group)
        best = _best_arm(found, SCALED), _best_arm(found, CONSTANT)
        for ours, theirs in dict.fromkeys([*of_one_lambda(found), *([best] if all(best) else [])]):
            gaps = [final_loss(a) - final_loss(b) for a, b in of_one_seed(found[ours], found[theirs])]
            if gaps:
                gap, width = over_seeds(gaps), found[ours][0]["width"]
                note = ", the best of each" if (ours, theirs) == best else ""
                rows.append([str(width), ours, theirs + note, f"{gap.value:+.3f}", chance(gap), str(len(gaps))])
    return (
        markdown(["width", "arm", "compared with", "difference, nats", "95% t interval", "seeds"], rows, texts=3)
        if rows
        else ""
    )


def of_one_lambda(found: Mapping[str, Sequence[Record]]) -> list[tuple[str, str]]:
    """Arms and the constant decay of the same lambda."""
    pairs = [(arm, arm.replace(SCALED, CONSTANT).replace("adamc", CONSTANT).split(", group")[0]) for arm in found]
    return [(ours, theirs) for ours, theirs in pairs if ours != theirs and theirs in found]


def _best_arm(found: Mapping[str, Sequence[Record]], rule: str) -> str | None:
    """The arm with the lowest mean loss under a rule, over the seeds that all its lambdas have."""
    tried = {arm: records for arm, records in found.items() if arm == rule or arm.startswith(f"{rule}, lambda")}
    shared = set.intersection(*({one["seed"] for one in records} for records in tried.values())) if tried else set()
    losses = {
        arm: [final_loss(one) for one in records if one["seed"] in shared] for arm, records in tried.items() if shared
    }
    return min(losses, key=lambda arm: mean(losses[arm]), default=None)


def of_one_seed(some: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Pairs of records that share their seed."""
    by_seed = {record["seed"]: record for record in others}
    return [(record, by_seed[record["seed"]]) for record in some if record["seed"] in by_seed]


def arms_of(evidence: Evidence, group: str) -> dict[str, list[Record]]:
    """By arm, the records of a group in the order of its runs."""
    found: dict[str, list[Record]] = {}
    for one in GROUPS[group].runs():
        record = evidence.of(one)
        if record is not None:
            found.setdefault(one.arm, []).append(record)
    return found


def gains(evidence: Evidence, width: int) -> str:
    """What scaled decay gains at the matched lambda, how much of it less decay alone would, and how much sooner."""
    found = arms_of(evidence, f"table-{width}")
    arms = [found.get(name, []) for name in (CONSTANT, SCALED, f"{CONSTANT}, {CONTROL_SUFFIX}")]
    rows = list(zip(*arms, strict=False))  # of the seeds that all three have; runs are made seed by seed
    if not rows:
        return ""
    constant, scaled, same = (mean([final_loss(record) for record in arm]) for arm in zip(*rows, strict=True))
    where, gain = f"Width {width}, the matched lambda: scaled decay ends", constant - scaled
    if gain <= 0:
        return f"{where} {-gain:.3f} above constant decay."
    share = (constant - same) / gain
    told = f"{where} {gain:.3f} below constant decay, of which constant decay of the same total gets {share:.0%}"
    reached = [_first_below(ours["losses"], final_loss(theirs)) for theirs, ours, _ in rows]
    known = [step for step in reached if step is not None]
    return f"{told}; it is there after {mean(known) / arms[0][0]['steps']:.0%} of the updates." if known else f"{told}."


def _first_below(losses: Sequence[Sequence[float]], level: float) -> float | None:
    """The update at which a curve of evaluations first comes down to a level, by lines; None if it never does."""
    for (x0, y0), (x1, y1) in pairwise(losses):
        if y1 <= level < y0:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None


def sampled(evidence: Evidence) -> dict[str, dict[str, Sequence[float]]]:
    """By arm, what its telemetry sampled, column by column, and the norm that the recursion gives."""
    found = {}
    for one in GROUPS["dynamics"].runs():
        record = evidence.of(one)
        if record is None or "samples" not in record:
            continue
        columns = dict(zip(record["sampled"], zip(*record["samples"], strict=True), strict=True))
        history = NormHistory.of(
            columns["step"], r=columns["weight_rms"], s=columns["update_rms"], phi=columns["decay"],
            a=columns["alignment_update"],
        )  # fmt: skip
        found[one.arm] = {**columns, "predicted": predict_norms(history).tolist()}
    return found


def dynamics_section(evidence: Evidence) -> str:
    rows = []
    for arm, columns in sampled(evidence).items():
        norms = columns["weight_rms"]
        rows.append(
            [arm, f"{max(norms):.3f}", f"{norms[-1]:.3f}", f"{columns['predicted'][-1]:.3f}"]
            + [f"{mean(columns[key]):+.4f}" for key in ("alignment_gradient", "alignment_momentum")]
            + [late_fit(columns, arm), f"{mean(columns['defect']):.3f}"]
        )
    headings = ["rule", "highest norm", "end norm", "by the recursion", "cos(W, gradient)", "cos(W, momentum)"]
    headings += ["late alignment", "orthogonality"]
    note = (
        "The recursion starts from the first observed norm alone. Late alignment is a line over the last "
        f"{LATE:.0%} of the run; the paper, at width 1024, has a = -{SCALED_SLOPE:g} eta under scaled and "
        f"a = -{CONSTANT_OFFSET:g} - {CONSTANT_SLOPE:g} eta under constant decay, and an orthogonality of {DEFECT:g}."
    )
    picture = (
        "![Weight RMS over the updates: under constant decay it rises and then falls to a third, under scaled decay it "
        "settles; the recursion lies on both. Beside it the alignment of weights and updates.](assets/dynamics.png)"
    )
    return f"{picture}\n\n{markdown(headings, rows, texts=1)}\n\n{note}"


def dynamics_sheet(evidence: Evidence) -> Sheet:
    norms, alignments = [], []
    for arm, columns in sampled(evidence).items():
        steps = columns["step"]
        norms += [
            Curve(arm, arm, steps, columns["weight_rms"]),
            Curve(f"{arm}, recursion", arm, steps, columns["predicted"], line="dashed", neutral=True),
        ]
        alignments.append(Curve(arm, arm, steps, columns["alignment_update"]))
    key = [("solid", "observed"), ("dashed", "by the recursion")]
    return Sheet(
        "dynamics",
        "",
        [
            Chart("norms", "Weight RMS", norms, y=Axis("RMS of the entries"), key=key),
            Chart("alignment", "cos(weights, update)", alignments, y=Axis("alignment"), levels=[Level(0.0)]),
        ],
    )


def late_fit(columns: Mapping[str, Sequence[float]], rule: str) -> str:
    import numpy as np

    steps, rates, alignment = (np.array(columns[key], dtype=float) for key in ("step", "lr", "alignment_update"))
    late = steps > steps[-1] * (1 - LATE)
    fit = fit_alignment(rates[late], alignment[late], offset=rule == "constant")
    return f"-{fit.a0:.2g} - {fit.k:.3g} eta" if rule == "constant" else f"-{fit.k:.3g} eta"


def transfer_section(evidence: Evidence) -> str:
    columns: dict[str, dict[float, float]] = {}
    epochs = evidence.epochs()
    for name in ("widths", "horizons"):
        for one in GROUPS[name].runs():
            loss, config = evidence.loss(one), one.config
            if loss is not None:
                where = f"{config.optimizer.algorithm}, width {config.model.width}, {config.steps:,} updates"
                columns.setdefault(f"{where}, {epochs[config.steps]:.1f} epochs", {})[config.optimizer.lr] = loss
    rows = [
        [where, *(bold(losses[rate], min(losses.values())) if rate in losses else "-" for rate in RATES)]
        for where, losses in columns.items()
    ]
    note = f"One seed. Muon with scaled, AdamW with constant decay, lambda {BEST:g}; muP divides both alike."
    return f"{markdown(['run', *(f'lr {rate:g}' for rate in RATES)], rows, texts=1)}\n\n{note}"
