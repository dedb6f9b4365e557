"""`muonsw advise`: whether decay matters in a run, what norms will do under each rule, and which lambda to try."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, arg

from muonsw.decay import DECAY_RULES
from muonsw.lab.advice import Advice, advise
from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import plain
from muonsw.lab.base.terminal import say

RULES_HELP = f"Decay rules to compare; the verdict is about the first. Known rules: {', '.join(DECAY_RULES)}."


@dataclass(frozen=True)
class Advise:
    """Say before a run whether decay matters in it, what norms will do, and which lambda to try.

    Nothing is trained: sums over the schedule, a recursion for the norm, and what our own runs found.
    """

    steps: Annotated[int, arg(metavar="N")]
    """Updates of the run."""

    lr: float = 0.02
    """Peak learning rate of the matrices that decay."""

    weight_decay: float = 0.1
    """Lambda."""

    schedule: str = "cosine"
    """Learning rate after warmup: cosine, wsd or constant."""

    final_fraction: float = 0.1
    """What is left of the peak at the end."""

    decay_fraction: float = 0.2
    """The share of the run in which the learning rate falls under wsd."""

    warmup_steps: int | None = None
    """Updates of warmup; default: the paper's rule."""

    algorithm: str = "muon"
    """muon or adamw."""

    momentum: float | None = None
    """Beta of Muon, or the first of AdamW; default 0.95 and 0.9."""

    initial_rms: float = 0.02
    """Root mean square of the weights' entries at the start."""

    width: int | None = None
    """Width of the model, for lambdas that follow it where that was measured."""

    batch_tokens: int | None = None
    """Tokens in an update, likewise."""

    rules: Annotated[tuple[str, ...], arg(metavar="RULE...", help=RULES_HELP)] = ("constant", "scaled")

    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of text."""

    def run(self) -> int:
        """Compute and print."""
        try:
            advice = self._advice()
        except (ValueError, OverflowError) as error:
            raise UsageError(str(error)) from error
        if self.json:
            print(json.dumps(plain(advice.as_data()), indent=2, allow_nan=False))
        else:
            say(Console(), advice)
        return 0

    def _advice(self) -> Advice:
        settings = {name: value for name, value in vars(self).items() if name not in ("lr", "json")}
        return advise(peak_lr=self.lr, **settings)
