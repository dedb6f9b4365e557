"""Sizes inside a decoder: what a few updates do to its activations, on one fixed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from muonsw.lab.model import Decoder
from muonsw.lab.model.grouped import grouped_linear
from muonsw.lab.model.moe import MoE, plan_routes

FOLLOWERS = 4


@dataclass(frozen=True)
class Activations:
    """What one forward pass shows.

    Attributes:
        outputs: By coordinate: the stream after each block, what each branch adds to it, and the logits.
        inputs: By matrix: the rows that it multiplies.
        ends: By layer: where each expert's rows end.
    """

    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    ends: Sequence[Tensor]


def chain_tokens(batch: int, sequence: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Sequences (batch, sequence + 1) in which every token has four possible successors, so there is much to learn.

    Examples:
        >>> chain_tokens(2, 7, 16, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 8])
    """
    successors_VS = torch.randint(vocab, (vocab, FOLLOWERS), generator=generator)
    tokens = [torch.randint(vocab, (batch,), generator=generator)]
    for _ in range(sequence):
        choice = torch.randint(FOLLOWERS, (batch,), generator=generator)
        tokens.append(successors_VS[tokens[-1], choice])
    return torch.stack(tokens, dim=1)


def measure(model: Decoder, optimizer: Optimizer, tokens: Tensor, steps: int) -> dict[str, float]:
    """Train on one batch and return sizes (RMS) by name.

    `initial X` is the size of coordinate X before training, `change X` that of its change over all updates, `update W`
    that of the change which the first update makes to the output of matrix W while its input stays as it was.

    Args:
        model: At initialisation.
        optimizer: Of its parameters.
        tokens: Shape (B, T + 1).
        steps: Updates, all on these tokens.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    start = activations(model, inputs)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    sizes = {f"initial {name}": rms(value) for name, value in start.outputs.items()}
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs, targets).total.backward()
        optimizer.step()
        if step == 0:
            sizes |= update_sizes(start, weights, model)
    end = activations(model, inputs)
    return sizes | {f"change {name}": rms(value - start.outputs[name]) for name, value in end.outputs.items()}


def rms(x: Tensor) -> float:
    """Root mean square of the entries, added up in float64.

    Examples:
        >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
        2.5
    """
    return float(x.double().square().mean().sqrt())


@torch.no_grad()
def activations(model: Decoder, tokens_BT: Tensor) -> Activations:
    """One forward pass, watched."""
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    ends: list[Tensor] = []
    with _watched(model, outputs, inputs):
        logits = model.logits(tokens_BT)
    for number, layer in enumerate(model.layers):
        moe = layer.get_submodule("moe")
        assert isinstance(moe, MoE)
        _expert_inputs(moe, number, inputs, ends)
    return Activations({**outputs, "logits": logits}, inputs, ends)


@torch.no_grad()
def update_sizes(start: Activations, before: Mapping[str, Tensor], model: Decoder) -> dict[str, float]:
    """The size of `(W - W_before) x` for every hidden matrix, with the inputs x of the start."""
    sizes = {}
    after = dict(model.named_parameters())
    for number, ends in enumerate(start.ends):
        path = f"layers.{number}"
        for matrix in ("qkv", "out"):
            name = f"{path}.attention.{matrix}.weight"
            sizes[f"update {matrix}/{number}"] = rms(
                functional.linear(start.inputs[f"{matrix}/{number}"], after[name] - before[name])
            )
        for matrix in ("gate_up", "down"):
            name = f"{path}.moe.{matrix}"
            rows = grouped_linear(start.inputs[f"{matrix}/{number}"], after[name] - before[name], ends)
            sizes[f"update {matrix}/{number}"] = rms(rows)
    return sizes


def _expert_inputs(moe: MoE, number: int, inputs: dict[str, Tensor], ends: list[Tensor]) -> None:
    """The rows that the expert matrices multiply, sorted by expert, from what enters the layer."""
    x_ND = inputs.pop(f"moe/{number}").flatten(0, 1)
    top_k = moe.config.top_k
    routes = plan_routes(moe.router_logits(x_ND).topk(top_k, dim=-1).indices, moe.config.experts)
    rows_RD = x_ND.index_select(0, routes.order // top_k)
    gate, up = grouped_linear(rows_RD, moe.gate_up, routes.ends).chunk(2, dim=-1)
    inputs[f"gate_up/{number}"], inputs[f"down/{number}"] = rows_RD, functional.silu(gate) * up
    ends.append(routes.ends)


@contextmanager
def _watched(model: Decoder, outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Iterator[None]:
    """Keep what passes through the modules of every layer."""
    handles = []
    for number, layer in enumerate(model.layers):
        for name, path in (("stream", ""), ("attention", "attention"), ("experts", "moe")):
            hook = _keep_output(outputs, f"{name}/{number}")
            handles.append(layer.get_submodule(path).register_forward_hook(hook))
        for name, path in (("qkv", "attention.qkv"), ("out", "attention.out"), ("moe", "moe")):
            hook = _keep_input(inputs, f"{name}/{number}")
            handles.append(layer.get_submodule(path).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_output(kept: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept[name] = output if isinstance(output, Tensor) else output.x

    return hook


def _keep_input(kept: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, inputs: Any, _output: Any) -> None:
        kept[name] = inputs[0]

    return hook
