"""`muonsw bench`: how fast steps and training are on this machine, beside what else is installed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from tyro.conf import FlagCreatePairsOff, arg

from muonsw.lab.base.errors import FAILED, OK, UsageError
from muonsw.lab.base.tables import Column, Table, print_table
from muonsw.lab.base.terminal import say
from muonsw.lab.bench.steps import PACKAGES, SETS, MatrixSource, WrongStepError, check, contenders, measure
from muonsw.lab.bench.timing import chosen_device, environment, product_rate
from muonsw.lab.bench.training import Amount, WrongLossError, measure_training
from muonsw.lab.commands.parsing import require_at_least_one
from muonsw.lab.model import preset
from muonsw.registry import unknown
from muonsw.text import counted

# What takes a minute or two.
USUAL_SETS = {"cpu": ("small", "square512"), "cuda": ("small", "wide", "w256")}
USUAL_PRESET = {"cpu": "demo", "cuda": "mini"}
MIB = 2**20


@dataclass(frozen=True)
class Bench:
    """Time the optimizers' steps and the trainer on this machine, beside torch's own and other packages'.

    Peers that are installed take part by themselves: dion, pytorch-optimizer, heavyball, muon-optimizer. Before
    anything is timed, our steps are checked against torch's and compiled losses against uncompiled ones.
    """

    device: str = "auto"
    """auto, cpu or cuda; auto takes a GPU where there is one."""

    sets: Annotated[tuple[str, ...], arg(metavar="NAME...")] = ()
    """Sets of matrices to step on: small, square512, wide, and w256, w512, w768, w1024 of the paper's models."""

    only: Annotated[tuple[str, ...], arg(metavar="NAME...")] = ()
    """Time these alone: muonsw, "muonsw eager", torch.optim.Muon, AdamWSW, dion, members of the family such as normuon,
    adamuon, muon2, aurora, soap, shampoo, lion. A name that is not known gets the whole list."""

    preset: str = ""
    """Model whose training is timed; demo on a CPU and mini on a GPU unless given, none for no training."""

    rounds: int = 7
    """Steps of each, and blocks of updates, of which the medians are shown."""

    micro_batch: Annotated[int | None, arg(metavar="N")] = None
    """Sequences in a micro-batch; default: the preset's."""

    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of tables."""

    def run(self) -> int:
        """Check, time, print."""
        device, sets, trained = self._choices()
        chosen, missing = contenders(self.only or None, eager=device.type == "cuda")
        console = Console(stderr=self.json)
        try:
            record: dict[str, Any] = {"environment": environment(device, PACKAGES), "check": check(device)}
            record["steps"] = {}
            for name in sets:
                say(console, f"timing steps on {name} ...")
                record["steps"][name] = measure(SETS[name], MatrixSource(device), self.rounds, chosen)
            if trained:
                say(console, f"timing training of {trained} ...")
                record["product_tflops"] = product_rate(device) / 1e12
                record["training"] = measure_training(
                    trained, device, Amount(micro=self.micro_batch, blocks=self.rounds)
                )
        except (WrongStepError, WrongLossError) as error:
            say(console, f"muonsw: {error}")
            return FAILED
        if self.json:
            print(json.dumps({**record, "not_installed": missing}))
        else:
            print_record(console, record, missing)
        return OK

    def _choices(self) -> tuple[torch.device, tuple[str, ...], str]:
        """Device, sets and preset, all of which exist."""
        device = chosen_device(self.device)
        sets = self.sets or USUAL_SETS[device.type]
        trained = "" if self.preset == "none" else self.preset or USUAL_PRESET[device.type]
        for name in sets:
            if name not in SETS:
                raise UsageError(unknown("set of matrices", name, list(SETS)))
        require_at_least_one(self, "rounds", "micro_batch")
        try:
            if trained:
                preset(trained)
        except ValueError as error:
            raise UsageError(f"{error}; `none` times no training") from error
        return device, sets, trained


def print_record(console: Console, record: dict[str, Any], missing: list[str]) -> None:
    """All tables, and what they were measured on."""
    for name, rows in record["steps"].items():
        print_table(console, steps_table(name, rows))
    if "training" in record:
        print_table(console, training_table(record["training"], record["product_tflops"]))
    where = record["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    threads = "one thread" if where["threads"] == 1 else f"{where['threads']} threads"
    say(console, f"\n{where['device']}, {threads}, {versions}, {where['date']}")
    distances = ", ".join(f"{name} {distance:.1e}" for name, distance in record["check"].items())
    say(console, f"Three steps of ours differ from torch's by {distances} of their length.")
    if missing:
        say(console, f"Not installed, so not timed: {', '.join(missing)}.")


def steps_table(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    """The optimizers on one set, in the order in which they are known."""
    columns = (
        "optimizer",
        Column("ms a step", number=True, digits=4, rank=0),
        Column("fastest, ms", number=True, digits=4, rank=2),
        Column("extra MiB", number=True, digits=4, rank=1),
        Column("state, bytes a parameter", number=True, digits=3, rank=3),
        Column("first step, s", number=True, digits=3, rank=1),
    )
    timed = {who: row for who, row in rows.items() if "ms" in row}
    failed = [f"{who} failed: {row['error']}" for who, row in rows.items() if "error" in row]
    body = [
        (
            who,
            row["ms"],
            row["ms_min"],
            None if row["extra_bytes"] is None else row["extra_bytes"] / MIB,
            row["state_bytes_per_parameter"],
            row["first_step_s"],
        )
        for who, row in timed.items()
    ]
    matrices = counted(len(SETS[name].plain), "matrix", "matrices")
    title = f"One step on {name}: {matrices}, {SETS[name].parameters() / 1e6:.1f}M parameters"
    return Table(f"steps-{name}", title, columns, body, note="\n".join(failed))


def training_table(row: dict[str, Any], product_tflops: float) -> Table:
    """Speed of updates, with the share of what one large product reaches."""
    columns = (
        "preset",
        Column("tokens/s", number=True, rank=0),
        Column("ms an update", number=True, digits=4, rank=0),
        Column("optimizer ms", number=True, digits=4, rank=1),
        Column("TFLOP/s", number=True, digits=3, rank=1),
        Column("of a product's rate", number=True, rank=1),
        Column("GiB", number=True, digits=3, rank=2),
        Column("sequences", number=True, rank=2),
        Column("compiled in, s", number=True, digits=3, rank=3),
    )
    share = f"{row['tflops'] / product_tflops:.0%}"
    body = (
        row["preset"],
        round(row["tokens_per_second"]),
        row["ms"],
        row["optimizer_ms"],
        row["tflops"],
        share,
        row["gib"],
        row["batch"],
        row["compile_s"],
    )
    note = f"One large matrix product runs at {product_tflops:.3g} TFLOP/s here."
    return Table("training", "Training, full updates", columns, [body], note=note)
