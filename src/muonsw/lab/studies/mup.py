"""The coordinate check of muP: how activations, their changes and updates scale with the width.

Every experiment trains decoders of several widths for a few steps on one batch and fits each size as a power of the
width. Under the right parametrization the power of every change is zero. The lab's rules for Muon's learning rate are
half a power apart, so a fit within a quarter of its prediction fits no other rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from muonsw.lab.model import MUON_LR_POWERS, Decoder, ModelConfig, MuP
from muonsw.lab.model.layers import MoE, grouped_linear, plan_routes
from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Series, Source, at_least, log_log_slope, mean_of, within
from muonsw.lab.theory.chains import Experiment
from muonsw.lab.train.config import OptimizerConfig
from muonsw.lab.train.state import build_optimizer

FOLLOWERS = 4
# The watched modules of each layer, by path.
WATCHED = {"qkv": "attention.qkv", "out": "attention.out", "attention": "attention", "experts": "moe", "stream": ""}


@dataclass(frozen=True)
class CoordinateCheck(Experiment):
    """A parametrization with an optimizer, at several widths and for several seeds."""

    algorithm: str = "adamw"  # "adamw" for all parameters, or "muon" for hidden matrices with AdamW for the rest
    muon_lr: str = "none"  # how Muon's learning rate follows the width
    mup: bool = True  # whether muP scales the model; otherwise the base constants apply at every width
    widths: tuple[int, ...] = (32, 64, 128, 256)  # ascending
    seeds: int = 5  # repetitions, each with its own tokens and initial weights
    steps: int = 6
    lr: float = 0.005  # base learning rate, constant
    layers: int = 2
    head_dim: int = 16
    experts: int = 4  # in each layer; each token is sent to two
    ff: int = 2  # inner width of an expert, as a multiple of the width
    vocab: int = 64
    sequence: int = 32  # tokens in a sequence
    batch: int = 8  # sequences

    def judge(self, generator: torch.Generator) -> Evidence:
        """Measure all widths and judge; the series are all sizes over the widths, one curve per seed."""
        sizes = measure_widths(self, generator)
        curves = [Series(name, self.name, list(self.widths), values.tolist()) for name, values in sizes.items()]
        claims = [power_claim(self, sizes, name, power) for name, power in predicted_powers(self).items()]
        if not self.mup:
            claims += [drift_claim(self, sizes, f"change {name}") for name in COORDINATES]
        return Evidence(claims, curves)

    def model(self, width: int) -> ModelConfig:
        return ModelConfig(
            width=width,
            layers=self.layers,
            head_dim=self.head_dim,
            experts=self.experts,
            ff=self.ff * width,
            vocab=self.vocab,
            sequence=self.sequence,
            mup=MuP(enabled=self.mup),
        )

    def optimizer(self) -> OptimizerConfig:
        """No decay: it would change every weight by a share that does not depend on the width."""
        return OptimizerConfig(
            algorithm=self.algorithm, lr=self.lr, weight_decay=0.0, muon_lr=self.muon_lr, ns_dtype="float32"
        )


class Matrix(NamedTuple):
    """A weight matrix in one forward pass."""

    path: str  # of its parameter
    rows: Tensor  # its input
    apply: Callable[[Tensor, Tensor], Tensor]  # its output for rows and a weight


def chain_tokens(batch: int, sequence: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Sequences (batch, sequence + 1) in which every token has only four successors, so there is much to learn."""
    successors_VS = torch.randint(vocab, (vocab, FOLLOWERS), generator=generator)
    tokens = [torch.randint(vocab, (batch,), generator=generator)]
    for _ in range(sequence):
        choice = torch.randint(FOLLOWERS, (batch,), generator=generator)
        tokens.append(successors_VS[tokens[-1], choice])
    return torch.stack(tokens, dim=1)


def measure_widths(setting: CoordinateCheck, generator: torch.Generator) -> dict[str, Tensor]:
    """Measure sizes by name, each (seeds, widths)."""
    rows: list[dict[str, float]] = []
    shape = (setting.seeds, len(setting.widths))
    for _ in range(setting.seeds):
        tokens = chain_tokens(setting.batch, setting.sequence, setting.vocab, generator)
        seed = int(torch.randint(2**31, (), generator=generator))
        for width in setting.widths:
            model = Decoder(setting.model(width), seed)
            rows.append(measure(model, build_optimizer(model, setting.optimizer()), tokens, setting.steps))
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64).view(shape) for name in rows[0]}


def measure(model: Decoder, optimizer: Optimizer, tokens: Tensor, steps: int) -> dict[str, float]:
    """Train a model for some steps on one batch of tokens (B, T + 1), and return sizes (RMS) by name.

    `initial X` is the size of coordinate X before training, and `change X` the size of its change over all steps.
    `update W` is how much the first step changes the output of matrix W for the same input.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    start, matrices = activations(model, inputs)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    sizes = {f"initial {name}": rms(value) for name, value in start.items()}
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs, targets).total.backward()
        optimizer.step()
        if step == 0:
            for name, (path, rows, apply) in matrices.items():
                sizes[f"update {name}"] = rms(apply(rows, model.get_parameter(path).detach() - before[path]))
    end, _ = activations(model, inputs)
    return sizes | {f"change {name}": rms(value - start[name]) for name, value in end.items()}


def rms(x: Tensor) -> float:
    """Root mean square of the elements, summed in float64."""
    return float(x.double().square().mean().sqrt())


@torch.no_grad()
def activations(model: Decoder, tokens_BT: Tensor) -> tuple[dict[str, Tensor], dict[str, Matrix]]:
    """Outputs by coordinate (the stream after each block, its branches, the logits), and the weight matrices."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}  # by module and layer: its input and output

    def watch(name: str, _module: nn.Module, inputs: Any, output: Any) -> None:
        seen[name] = inputs[0], output if isinstance(output, Tensor) else output.x

    with ExitStack() as hooks:
        for number, layer in enumerate(model.layers):
            for name, path in WATCHED.items():
                hook = partial(watch, f"{name}/{number}")
                hooks.enter_context(layer.get_submodule(path).register_forward_hook(hook))
        logits = model.logits(tokens_BT)
    outputs = {name: output for name, (_, output) in seen.items() if name.partition("/")[0] in COORDINATES}
    matrices = {}
    for number, layer in enumerate(model.layers):
        for name in ("qkv", "out"):
            path = f"layers.{number}.attention.{name}.weight"
            matrices[f"{name}/{number}"] = Matrix(path, seen[f"{name}/{number}"][0], functional.linear)
        # The two stacks of expert matrices take rows sorted by expert.
        moe = layer.get_submodule("moe")
        assert isinstance(moe, MoE)
        x_ND, top_k = seen[f"experts/{number}"][0].flatten(0, 1), moe.config.top_k
        routes = plan_routes(moe.router_logits(x_ND).topk(top_k, dim=-1).indices, moe.config.experts)
        by_expert = partial(grouped_linear, ends_E=routes.ends)
        rows_RD = x_ND.index_select(0, routes.order // top_k)
        gate, up = by_expert(rows_RD, moe.gate_up).chunk(2, dim=-1)
        for name, rows in (("gate_up", rows_RD), ("down", functional.silu(gate) * up)):
            matrices[f"{name}/{number}"] = Matrix(f"layers.{number}.moe.{name}", rows, by_expert)
    return {**outputs, "logits": logits}, matrices


TOLERANCE = Tolerance(0.25, "the rules that are compared are half a power of the width apart; this is half of that")
REFERENCE = "appendix on muP for MoE, table of scaling rules"

COORDINATES = ("stream", "attention", "experts", "logits")
MATRICES = ("qkv", "out", "gate_up", "down")
KINDS = {
    "initial": "initial size",
    "change": "change over the run",
    "update": "change of the output by the first update",
}
WORDS = {
    "stream": "residual stream",
    "attention": "attention output",
    "experts": "experts' output",
    "logits": "logits",
    "qkv": "queries, keys, values",
    "out": "attention projection",
    "gate_up": "experts, gate and up",
    "down": "experts, down",
}

Sizes = Mapping[str, Tensor]


def predicted_powers(setting: CoordinateCheck) -> dict[str, float]:
    """The powers of the width that sizes follow; under the right parametrization all are zero."""
    if not setting.mup:
        # A matrix with entries of constant size multiplies sizes by sqrt(width): two in attention, three in an expert.
        return {"initial attention": 1.0, "initial experts": 1.5}
    updates = [f"update {name}" for name in MATRICES]
    # Spectral norm 0.2*sqrt(width) on inputs of width-independent RMS, times the learning rate.
    power = MUON_LR_POWERS[setting.muon_lr] + 0.5 if setting.algorithm == "muon" else 0.0
    if power != 0.0:
        return dict.fromkeys(updates, power)
    initial, change = ([f"{kind} {name}" for name in COORDINATES] for kind in ("initial", "change"))
    return dict.fromkeys([*initial[:-1], *change, *updates], 0.0)


def power_claim(setting: CoordinateCheck, sizes: Sizes, name: str, power: float) -> Claim:
    """The size follows this power of the width, even in the layer that deviates most."""
    slopes = max(slopes_of(setting, sizes, name), key=lambda slope: abs(float(slope.mean()) - power))
    behaviour = "does not depend on the width" if power == 0.0 else f"goes as width^{power:g}"
    statement = f"{describe(name)} {behaviour}"
    return within(name.replace(" ", "-"), statement, source(setting), mean_of(slopes), power, TOLERANCE)


def drift_claim(setting: CoordinateCheck, sizes: Sizes, name: str) -> Claim:
    """In every layer, the size grows with the width by more than the tolerance for no growth."""
    slopes = min(slopes_of(setting, sizes, name), key=lambda slope: float(slope.mean()))
    statement, more = f"{describe(name)} grows with the width", Tolerance(0.0, "more than would still pass for flat")
    return at_least(name.replace(" ", "-"), statement, source(setting), mean_of(slopes), TOLERANCE.size, more)


def slopes_of(setting: CoordinateCheck, sizes: Sizes, name: str) -> list[Tensor]:
    """The fitted powers of the width, one tensor (seeds) for each layer that has this size."""
    widths = torch.tensor(setting.widths, dtype=torch.float64)
    return [log_log_slope(widths, values) for key, values in sizes.items() if key.partition("/")[0] == name]


def describe(name: str) -> str:
    kind, _, what = name.partition(" ")
    return f"{WORDS[what]}: {KINDS[kind]}"


def source(setting: CoordinateCheck) -> Source:
    if not setting.mup:
        words = f"{setting.algorithm} in the standard parametrization, learning rate {setting.lr:g} at every width"
        return Source(REFERENCE, words)
    power = MUON_LR_POWERS[setting.muon_lr] if setting.algorithm == "muon" else -1.0
    rate = f"learning rate {setting.lr:g} * (width/256)^{power:g}"
    return Source(REFERENCE, f"{setting.algorithm} under muP, {rate} for hidden matrices")


# AdamW is noisier than Muon, so it gets more seeds.
EXPERIMENTS = (
    CoordinateCheck("adamw", "AdamW, muP", seeds=8),
    CoordinateCheck("muon-sqrt", "Muon, muP, lr / √width", "muon", "sqrt", seeds=4),
    CoordinateCheck("muon-adam", "Muon, muP, lr / width (paper)", "muon", "adam", seeds=3),
    CoordinateCheck("muon-none", "Muon, muP, one lr", "muon", "none", seeds=3),
    CoordinateCheck("standard", "AdamW, standard", mup=False),
)
