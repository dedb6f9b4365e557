"""`muonsw plan`: what a run will cost, printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.lab.console import Table, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import plain
from muonsw.lab.model import preset
from muonsw.lab.paper import PAPER_BATCH_TOKENS
from muonsw.lab.plan import GIB, H200, ON_PAPER, RunPlan, Setup, parse_amount, plan, rows_of
from muonsw.lab.train.presets import preset_run


@dataclass(frozen=True)
class Plan:
    """Say what a run will cost: parameters, FLOPs, memory, hours and traffic.

    Nothing is trained. `muonsw advise` says what weight decay will do.
    """

    preset: str = ""
    """The model: w128, w256, w512, w768, w1024, mini, demo, each also with -dense; or moe-1t, on paper only."""

    tokens: Annotated[str, arg(metavar="AMOUNT")] = ""
    """Tokens to train on, such as 197B, 300M or 1.5e9."""

    steps: Annotated[int | None, arg(metavar="N")] = None
    """Steps, instead of tokens."""

    batch_tokens: Annotated[str, arg(metavar="AMOUNT")] = ""
    """Tokens in a step. Default: the preset's."""

    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of a table."""

    setup: OmitArgPrefixes[FlagCreatePairsOff[Setup]] = field(default_factory=Setup)

    def run(self) -> int:
        result = self.planned()
        if self.json:
            print(json.dumps(plain(asdict(result)), indent=2, allow_nan=False))
            return 0
        console, setup, total = Console(), result.update.setup, result.update.memory.total
        time = f"{result.hours:,.1f} hours" if result.hours >= 0.1 else f"{3600 * result.hours:.3g} seconds"
        room = "of" if total <= H200.capacity else "which is more than"
        gpus = "1 GPU" if setup.gpus == 1 else f"{setup.gpus:,} GPUs ({setup.strategy})"
        say(
            console,
            f"{time} on {gpus}; the fullest holds {total / GIB:.1f} GiB, {room} the "
            f"{H200.capacity / GIB:.0f} GiB of an H200.",
        )
        print_table(console, Table("plan", "", ("", "", ""), rows_of(result)))
        return 0

    def planned(self) -> RunPlan:
        if not self.preset or bool(self.tokens) == (self.steps is not None):
            raise UsageError("give --preset with either --tokens or --steps, such as --preset w1024 --tokens 197B")
        try:
            on_paper = ON_PAPER.get(self.preset)
            batch = PAPER_BATCH_TOKENS if on_paper else preset_run(self.preset, "").tokens_per_step
            batch = parse_amount(self.batch_tokens) if self.batch_tokens else batch
            steps = math.ceil(parse_amount(self.tokens) / batch) if self.steps is None else self.steps
            model = on_paper or preset(self.preset)
            return plan(model, steps, batch_tokens=batch, setup=self.setup)
        except OverflowError as error:
            raise UsageError("a number is too large to compute with: give a smaller one") from error
        except ValueError as error:
            raise UsageError(str(error)) from error
