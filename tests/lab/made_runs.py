"""Run folders whose numbers behave as those of real runs do: losses that fall, norms that follow their recursion."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from muonsw.lab.theory.norm import next_norm

PEAK, WIDTH = 0.01, 256
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1> \"'&λ 日本 $x^2$ <b>"


@dataclass(frozen=True)
class Recipe:
    """What one run is to look like."""

    decay: str = "scaled"
    seed: int = 0
    steps: int = 1000
    weight_decay: float = 0.1
    arm: str = ""
    complete: bool = True
    every: int = 10
    parameters: tuple[str, ...] = ("layers.0.attention.qkv", "layers.1.experts.up")
    extra: dict = field(default_factory=dict)


def write_run(folder: Path, recipe: Recipe) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(recipe)), encoding="utf-8")
    environment = {"python": "3.11.9", "torch": "2.13.0", "device": "cpu", "versions": {"numpy": "2.4"}}
    (folder / "environment.json").write_text(
        json.dumps(environment | {"command": ["muonsw", "train", str(recipe.seed)]}), encoding="utf-8"
    )
    records = list(simulate(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if recipe.complete:
        losses = [(record["loss"], record["step"]) for record in records if record["kind"] == "eval"]
        best, step = min(losses)
        result = {"steps": recipe.steps, "final_loss": losses[-1][0], "best_loss": best, "best_step": step}
        result |= {"seconds": 0.04 * recipe.steps, "tokens": 16384 * recipe.steps}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def config(recipe):
    optimizer = {"algorithm": "muon", "lr": PEAK, "weight_decay": recipe.weight_decay, "decay": recipe.decay}
    return {
        "version": 1,
        "model": {"width": WIDTH, "layers": 2, "experts": 8, "mup": {"base_width": 256}},
        "optimizer": optimizer | {"momentum": 0.95},
        "schedule": {"shape": "cosine", "warmup_steps": recipe.steps // 20, "final_fraction": 0.1},
        "steps": recipe.steps,
        "seed": recipe.seed,
        **({"arm": recipe.arm} if recipe.arm else {}),
        **recipe.extra,
    }


def learning_rate(step, steps):
    warmup = steps // 20
    if step <= warmup:
        return PEAK * step / warmup
    return PEAK * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def simulate(recipe):
    random = np.random.default_rng([recipe.seed, len(recipe.decay)])
    # Short runs are relaxation-matched: the decay is raised until the norm has time to settle.
    strength, norm, floor = recipe.weight_decay * 35_000 / recipe.steps, 0.02, 3.30 + 0.004 * random.standard_normal()
    done = recipe.steps if recipe.complete else recipe.steps // 2
    yield {"kind": "eval", "step": 0, "loss": 10.8}
    for step in range(1, done + 1):
        lr = learning_rate(step, recipe.steps)
        phi = min(0.2, strength * lr) * {"scaled": lr / PEAK, "constant": 1.0, "none": 0.0}[recipe.decay]
        size = 0.176 * lr * 2
        align = float(-16.0 * size / (2 * norm) * 0.4 + 0.004 * random.standard_normal())
        align = max(-0.5, align)
        part = step / recipe.steps
        shift = {"scaled": 0.0, "constant": 0.055, "none": 0.09}[recipe.decay] * part**2
        loss = (
            floor
            + 7.5 * (1 + step * 40_000 / recipe.steps / 60) ** -0.62
            + 0.35 * (lr / PEAK) * (1 - 0.4 * part)
            + shift
        )
        yield train_record(step, loss + 0.03 * random.standard_normal(), lr, random)
        if step % recipe.every == 0 or step == 1:
            yield telemetry_record(recipe, step, (norm, size, phi, align, lr), random)
        if step % max(1, recipe.steps // 40) == 0:
            yield {"kind": "eval", "step": step, "loss": float(loss + 0.003 * random.standard_normal())}
        norm = float(next_norm(norm, s=size, phi=phi, a=align))


def train_record(step, loss, lr, random):
    return {
        "kind": "train", "step": step, "loss": loss + 0.026, "cross_entropy": loss, "balance": 0.25, "z": 0.01,
        "grad_norm": float(0.4 + 0.02 * random.standard_normal()), "lr": lr, "tokens": 16384 * step,
        "tokens_per_second": 4e5, "load_entropy": [0.98, 0.97],
    }  # fmt: skip


def telemetry_record(recipe, step, state, random):
    norm, size, phi, align, lr = state

    def values(factor):
        return {
            "weight_rms": norm * factor, "update_rms": size, "relative_update": size / (norm * factor),
            "applied_rms": size, "decay": phi, "lr": lr, "peak_lr": PEAK if recipe.decay == "scaled" else None,
            "alignment_update": align, "alignment_update_mean": align * 0.9, "numel": 1000,
        }  # fmt: skip

    return {
        "kind": "telemetry", "step": step, "all": values(1.1), "decayed": values(1.0),
        "roles": {"hidden": values(1.0), "embedding": values(2.0)},
        "layers": {"0": values(0.95), "1": values(1.05)},
        "parameters": {name: values(0.9 + 0.1 * float(random.random())) for name in recipe.parameters}, "skipped": 0,
    }  # fmt: skip
