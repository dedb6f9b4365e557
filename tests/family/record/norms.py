"""Record what norm rules of other projects do to weights: python -m tests.family.record.norms EMERGING MODDED.

EMERGING is a clone of NVIDIA-NeMo/Emerging-Optimizers at fd77292, whose hooks take float32, MODDED one of
KellerJordan/modded-nanogpt at f411b3d, whose rules are lines of training scripts; those lines are run as they are.
"""

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch

RECORDED = Path(__file__).parents[1] / "recorded" / "norms.json"
HOOKS = "emerging_optimizers/weight_update_hooks"
RESULTS = "records/track_3_optimization/results"
FLOOR = f"{RESULTS}/20260501_contra_muon/train_gpt_simple_contra_muon_2.py"
ROWS = f"{RESULTS}/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py"
LR, DECAY, STEPS, SHAPES = 0.1, 0.5, 6, ((4, 6), (5, 3))


def file_of(clone, commit, path):
    return subprocess.run(
        ["git", "-C", clone, "show", f"{commit}:{path}"], capture_output=True, text=True, check=True
    ).stdout


def hook_of(clone, name, kind):
    source = file_of(clone, "fd77292", f"{HOOKS}/{name}.py")
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, None))
    exec(compile(source, name, "exec"), module.__dict__)
    return getattr(module, kind)()


def with_hook(hook, p, update):
    """A step as their OrthogonalizedOptimizer takes it: decoupled decay, then the update between both halves."""
    p.mul_(1 - LR * DECAY)
    known = hook.pre_weight_update_inplace(p, update)
    p.add_(update, alpha=-LR)
    hook.post_weight_update_inplace(p, known)


def lines_of(source, first, last):
    """The lines of a script from one that contains `first` to the next that contains `last`."""
    lines = source.splitlines()
    begin = next(number for number, line in enumerate(lines) if first in line)
    end = next(number for number in range(begin, len(lines)) if last in lines[number])
    return textwrap.dedent("\n".join(lines[begin : end + 1]))


def with_lines(program, names, p, update):
    known = {"torch": torch, "p": p, "update": update, "group": {"lr": LR}, **names}
    exec(program, known)
    return known["update"]


def updates(shape, step):
    """Updates that are short, long, and outward in turn, so that both sides of each rule are met."""
    generator = torch.Generator().manual_seed(17 * step + shape[0])
    size = (0.05, 3.0, 0.5)[step % 3]
    return size * torch.randn(shape, generator=generator)


def run(move):
    found = {}
    for shape in SHAPES:
        p = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
        rows = [p.tolist()]
        for step in range(STEPS):
            move(p, updates(shape, step))
            rows.append(p.tolist())
        found["x".join(map(str, shape))] = rows
    return found


def main(emerging, modded):
    brake = hook_of(emerging, "radial_brake", "RadialBrakeHook")
    relative = hook_of(emerging, "relative_update", "RelativeUpdateHook")
    floor = lines_of(file_of(modded, "f411b3d", FLOOR), "p_fro = p.float()", "p.add_(update")
    rows = lines_of(file_of(modded, "f411b3d", ROWS), "r_row = p.float()", "update = (update.float()")

    def by_row(p, update):
        p.add_(with_lines(rows, {"target_uw": 0.35, "ROWFLOOR_RHO": 1.0}, p, update), alpha=-LR)

    rules = {
        "brake": SimpleNamespace(decay=DECAY, move=lambda p, u: with_hook(brake, p, u)),
        "relative": SimpleNamespace(decay=DECAY, move=lambda p, u: with_hook(relative, p, u)),
        "floor": SimpleNamespace(decay=0.0, move=lambda p, u: with_lines(floor, {"TARGET_UW": 0.35}, p, u)),
        "row_floor": SimpleNamespace(decay=0.0, move=by_row),
    }
    sources = {
        "brake": f"NVIDIA-NeMo/Emerging-Optimizers fd77292 {HOOKS}/radial_brake.py",
        "relative": f"NVIDIA-NeMo/Emerging-Optimizers fd77292 {HOOKS}/relative_update.py",
        "floor": f"KellerJordan/modded-nanogpt f411b3d {FLOOR}",
        "row_floor": f"KellerJordan/modded-nanogpt f411b3d {ROWS}",
    }
    record = {
        name: {"source": sources[name], "lr": LR, "weight_decay": rule.decay, "weights": run(rule.move)}
        for name, rule in rules.items()
    }
    RECORDED.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
