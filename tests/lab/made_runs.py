"""Run folders without training: norms that obey the recursion, under a known schedule, rule and memory.

`watch` is the exception: it takes steps and records what telemetry measures.
"""

import json
import math
from functools import cache
from pathlib import Path

from muonsw import Telemetry
from muonsw.decay import decay_factor
from muonsw.lab.diagnose import History
from muonsw.lab.runs import load_run
from muonsw.lab.theory.norm import next_norm
from muonsw.lab.theory.schedule import warmup_cosine

MEMORY = 39.0


@cache
def simulate(
    *, rule="scaled", lam=0.1, lr=0.02, steps=4000, warmup=100, final=0.1, start=0.05, update=0.176,
):  # fmt: skip
    """Step, norm, update, decay, learning rate and alignment of every update, in float64."""
    r, rows = start, []
    for step in range(1, steps + 1):
        eta = lr * warmup_cosine(step - 1, total_steps=steps, warmup_steps=warmup, final_fraction=final)
        s, phi = update * eta, decay_factor(rule, lam, eta, lr)
        # Momentum takes some steps to build up.
        remembered = (MEMORY - 1.0) * (1.0 - 0.95 ** (step - 1))
        a = max(-0.5, -remembered * s / (2.0 * r))
        rows.append({"step": step, "r": r, "s": s, "phi": phi, "lr": eta, "a": a})
        r = next_norm(r, s=s, phi=phi, a=a)
    return rows


def scope_record(row, peak):
    r, s, phi, a = row["r"], row["s"], row["phi"], row["a"]
    applied = math.sqrt(phi**2 * r**2 + 2.0 * phi * r * s * a + s**2)
    return {
        "weight_rms": r, "update_rms": s, "relative_update": s / r, "applied_rms": applied, "decay": phi,
        "lr": row["lr"], "peak_lr": peak, "alignment_update": a, "alignment_update_mean": 0.9 * a,
        "alignment_gradient": 0.02 * a, "alignment_momentum": 1.2 * a, "defect": 0.88, "numel": 1000,
    }  # fmt: skip


def make_run(
    folder: Path, *, every=20, until=None, losses=None, skipped=0, change=None, optimizer=None,
    peak=None, telemetry=True, grad_norm=0.5, clipped=None, seed=0, arm="", **settings,
):  # fmt: skip
    """Write a run folder and return it.

    Args:
        until: Last step written, of a run in progress; all steps of a complete run by default.
        change: Called with role (None for the pool) and record; returns the record to write.
        losses: Training losses, one for each step, of which every tenth is written; a falling curve unless given.
        grad_norm: Norm of the gradients before clipping, in the trainer's records; None leaves it out.
        clipped: Share of clipped steps, in telemetry's; None leaves it out.
        peak: `peak_lr` in telemetry; by default the schedule's peak under scaled decay, else None.
        settings: For `simulate`.
    """
    rows = simulate(**settings)
    lr, rule, steps = settings.get("lr", 0.02), settings.get("rule", "scaled"), len(rows)
    peak = (lr if rule == "scaled" else None) if peak is None else peak
    change = change or (lambda _role, record: record)
    muon = {"algorithm": "muon", "lr": lr, "weight_decay": settings.get("lam", 0.1), "decay": rule, "momentum": 0.95}
    config = {"version": 1, "steps": steps, "seed": seed, "optimizer": muon | (optimizer or {})}
    config |= {"arm": arm} if arm else {}
    losses = losses or [3.0 + 7.0 * math.exp(-6.0 * n / steps) + 0.01 * seed for n in range(steps)]
    lines = [{"kind": "eval", "step": 0, "loss": 10.0}]
    for row, loss in zip(rows[:until], losses, strict=until is None):
        step = row["step"]
        if telemetry and (step - 1) % every == 0:
            pooled = change(None, scope_record(row, peak))
            by_role = {role: change(role, scope_record(row, peak)) for role in ("experts", "hidden")}
            lines.append(
                {"kind": "telemetry", "step": step, "all": pooled, "decayed": pooled, "roles": by_role,
                 "layers": {"0": pooled, "1": pooled}, "parameters": {"layers.1.experts.up": pooled},
                 "skipped": skipped}
                | ({} if clipped is None else {"clipped": clipped})
            )  # fmt: skip
        if (step - 1) % 10 == 0:
            record = {"cross_entropy": loss, "lr": row["lr"], "tokens": 100 * step}
            norm = {} if grad_norm is None else {"grad_norm": grad_norm}
            total = loss and loss + 0.01  # with what balances experts
            lines.append({"kind": "train", "step": step, "loss": total, **record, **norm})
        if step % max(steps // 20, 1) == 0:
            lines.append({"kind": "eval", "step": step, "loss": loss})
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config, "environment.json": {"torch": "2.13.0", "versions": {"numpy": "2.4"}}}
    if until is None:
        ends = {"final_loss": losses[-1], "best_loss": min(filter(None, losses))}
        files["result.json"] = {"steps": steps, "seconds": 0.04 * steps, **ends}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def telemetry_lines(folder: Path) -> str:
    """The telemetry of a run folder, as `muonsw.Telemetry` writes it to a file of its own."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if '"telemetry"' in line)


def watch(optimizer, loss, sink, *, steps, schedule=None, **options):
    """Take steps down a loss while telemetry writes to a sink, by default at every step."""
    with Telemetry(optimizer, sink=sink, **{"every": 1} | options):
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()


def make_history(folder: Path, scope="decayed", **settings) -> History:
    return History(load_run(make_run(folder, **settings)), scope)
