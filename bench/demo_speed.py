"""Tokens a second of the demo preset on a CPU, against the same model written the plain way.

    OMP_NUM_THREADS=1 PYTHONPATH=src python bench/demo_speed.py

The plain way: a Python loop over experts made of `nn.Linear`, `torch.optim.Muon` for the matrices and
`torch.optim.AdamW` for the rest. Both models are checked to give the same loss and the same gradients before they are
timed in turn; shares of model and optimizer are medians of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from muonsw.lab.bench.timing import chosen_device, environment, in_turn, save
from muonsw.lab.model import Decoder, ModelConfig, preset
from muonsw.lab.model.moe import FeedForwardOutput, MoE, balance_loss, z_loss
from muonsw.lab.train.groups import build_optimizer
from muonsw.lab.train.presets import preset_run


class LoopedExperts(nn.Module):
    """The mixture with one module for each projection of each expert, visited in turn."""

    def __init__(self, config: ModelConfig, like: MoE) -> None:
        super().__init__()
        self.config, self.router, self.router_multiplier = config, like.router, like.router_multiplier
        width, ff = config.width, config.ff_width
        make = lambda inputs, outputs: nn.ModuleList(  # noqa: E731
            nn.Linear(inputs, outputs, bias=False) for _ in range(config.experts)
        )
        self.gate, self.up, self.down = make(width, ff), make(width, ff), make(ff, width)
        with torch.no_grad():
            for expert in range(config.experts):
                gate, up = like.gate_up[expert].chunk(2)
                self.gate[expert].weight.copy_(gate)
                self.up[expert].weight.copy_(up)
                self.down[expert].weight.copy_(like.down[expert])

    def forward(self, x_BTD: Tensor) -> FeedForwardOutput:
        """Each expert on the tokens that chose it."""
        x = x_BTD.flatten(0, 1)
        logits = functional.linear(x, self.router.weight) * self.router_multiplier
        kept, chosen = logits.topk(self.config.top_k, dim=-1)
        weights = kept.softmax(dim=-1)
        out = torch.zeros_like(x)
        for expert in range(self.config.experts):
            token, choice = torch.where(chosen == expert)
            rows = x[token]
            hidden = functional.silu(self.gate[expert](rows)) * self.up[expert](rows)
            out.index_add_(0, token, self.down[expert](hidden) * weights[token, choice, None])
        load = torch.zeros(self.config.experts)
        return FeedForwardOutput(out.view_as(x_BTD), balance_loss(logits, chosen), z_loss(logits), load)


def plain_twin(model: Decoder) -> tuple[Decoder, list[torch.optim.Optimizer]]:
    """The same weights in the plain model, and torch's optimizers for it."""
    twin = Decoder(model.config, seed=None)
    twin.load_state_dict(model.state_dict())
    for layer in twin.layers:
        layer.moe = LoopedExperts(model.config, layer.moe)
    settings = preset_run("demo", "").optimizer
    matrices = [p for name, p in twin.named_parameters() if p.dim() == 2 and not _is_other(name)]
    others = [p for name, p in twin.named_parameters() if p.dim() != 2 or _is_other(name)]
    muon = torch.optim.Muon(
        matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return twin, [muon, torch.optim.AdamW(others, lr=settings.lr, weight_decay=0.0, betas=settings.betas)]


def _is_other(name: str) -> bool:
    return "embedding" in name or "router" in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=preset_run("demo", "").batch)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = preset("demo")
    ours = Decoder(config)
    twin, torch_optimizers = plain_twin(ours)
    mine = build_optimizer(ours, preset_run("demo", "").optimizer)
    tokens = torch.randint(config.vocab, (options.batch, config.sequence + 1))
    sides = {"muonsw": (ours, [mine]), "loop over nn.Linear + torch.optim": (twin, torch_optimizers)}
    check(ours, twin, tokens)
    times = in_turn({name: partial(update, *side, tokens) for name, side in sides.items()}, options.rounds)
    rows = []
    for name, pairs in times.items():
        forward, step = (statistics.median(values) for values in zip(*pairs, strict=True))
        rate = options.batch * config.sequence / (forward + step)
        rows.append({"side": name, "tokens_s": rate, "model_ms": 1e3 * forward, "optimizer_ms": 1e3 * step})
    where = environment(chosen_device("cpu"))
    print(f"{where['device']}, torch {torch.__version__}, {where['threads']} threads")
    print(f"{'':36} {'tokens/s':>9} {'model ms':>9} {'optimizer ms':>13}")
    for row in rows:
        print(f"{row['side']:36} {row['tokens_s']:9,.0f} {row['model_ms']:9.1f} {row['optimizer_ms']:13.1f}")
    print(f"ratio {rows[0]['tokens_s'] / rows[1]['tokens_s']:.2f}")
    save(rows, options.json)


def check(ours: Decoder, twin: Decoder, tokens: Tensor) -> None:
    losses = []
    for model in (ours, twin):
        loss = model(tokens[:, :-1], tokens[:, 1:]).total
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    stacked = ours.layers[0].moe.down.grad
    looped = torch.stack([expert.weight.grad for expert in twin.layers[0].moe.down])
    torch.testing.assert_close(stacked, looped, rtol=1e-3, atol=1e-6)
    for model in (ours, twin):
        model.zero_grad(set_to_none=True)


def update(model: Decoder, optimizers: list[torch.optim.Optimizer], tokens: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    middle = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    main()
