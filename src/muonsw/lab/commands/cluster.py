"""The options of commands that train on a cluster, and what they ask it for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import arg

from muonsw import machine
from muonsw.lab.commands.parsing import changed, require_at_least_one
from muonsw.lab.errors import UsageError
from muonsw.lab.studies.cluster import Cluster
from muonsw.lab.studies.workshop import ByArm, BySettings, Workshop, gpus_for, on_cpu
from muonsw.lab.train.state import resolve_device

# Options of sbatch that this command or submitit sets.
OURS = ("array", "error", "job-name", "ntasks", "open-mode", "output", "requeue", "signal", "time", "wckey")


@dataclass(frozen=True)
class ClusterOptions:
    """Where runs are trained, and what each of them asks a cluster for."""

    cluster: Literal["slurm", "local"] | None = None
    """Train every run as a job of its own: slurm submits them, local starts them here, as a rehearsal. Folder and
    tokens must lie on a disk that all machines share. Unless given, runs are trained in processes of this machine."""
    partition: str = ""
    """Slurm partition."""
    time: Annotated[str, arg(metavar="TIME")] = ""
    """The longest that a job may take, as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS. A run that needs longer
    saves before that, is queued again and continues."""
    gpus_per_run: Annotated[int | None, arg(metavar="N")] = None
    """GPUs for a run, of one machine, each with a rank of its own; 1 unless given, or 0 with --device cpu."""
    cpus_per_run: Annotated[int | None, arg(metavar="N")] = None
    """CPU cores for a run; as many as Slurm gives unless given."""
    memory: str = ""
    """Memory for a run, such as 32G; as much as Slurm gives unless given."""
    account: str = ""
    """Slurm account."""
    qos: str = ""
    """Slurm quality of service."""
    slurm: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")] = ()
    """Anything else that sbatch knows: constraint=h100, reservation=lab, exclusive."""
    setup: Annotated[tuple[str, ...], arg(metavar="LINE")] = ()
    """Shell lines before a job begins, such as "module load cuda"."""
    on_stop: Literal["leave", "cancel"] = "leave"
    """What happens to Slurm jobs when this command is stopped: leave lets them run, and the same command collects
    them later; cancel ends them after they have saved. Local jobs are always ended."""

    def check(self, device: str) -> None:
        """Refuse what cannot be submitted, before anything is prepared.

        Raises:
            UsageError: With the option and what it takes.
        """
        if self.cluster is None:
            for option in changed(self):
                raise UsageError(f"{option} needs --cluster slurm")
            return
        if self.cluster == "slurm" and not self.time:
            raise UsageError("--cluster slurm needs --time, such as --time 4:00:00: the longest that a job may take")
        if self.gpus_per_run is not None and self.gpus_per_run < 0:
            raise UsageError(f"--gpus-per-run must not be below 0, got {self.gpus_per_run}")
        if (self.gpus_per_run or 0) > 1 and ":" in device:
            raise UsageError(f"--device {device} is one GPU: leave out --gpus-per-run {self.gpus_per_run}")
        if device == "cpu" and self.gpus_per_run:
            raise UsageError("--gpus-per-run does not go with --device cpu: leave one of them out")
        if self.gpus_per_run == 0 and device.startswith("cuda"):
            raise UsageError(f"--device {device} needs a GPU: leave out --gpus-per-run 0")
        require_at_least_one(self, "cpus_per_run")
        self.minutes()
        self.extra()

    def cluster_for(self, device: str, at_once: int | None) -> Cluster | None:
        """The cluster that runs on the device of this name are trained on; None is this machine."""
        if self.cluster is None:
            return None
        gpus = self.gpus(device)
        if self.cluster == "local":
            asked: dict[str, Any] = {"timeout_min": self.minutes(), "gpus_per_node": gpus, "setup": list(self.setup)}
            return Cluster("local", asked, at_once, max(1, gpus), poll=0.5)
        extra = self.extra()
        asked = {
            "time": self.minutes(),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "mem": self.memory,
            "cpus_per_task": self.cpus_per_run,
            "gpus_per_node": 0 if "gres" in extra else gpus,
            "setup": list(self.setup),
        }
        given = {name: value for name, value in asked.items() if value}
        # Some clusters put no job into the queue again unless it asks for that.
        parameters = {**given, "additional_parameters": {"requeue": True, **extra}}
        return Cluster("slurm", parameters, at_once, max(1, gpus), self.on_stop == "cancel")

    def workshop(
        self,
        console: Console,
        places: ByArm | BySettings,
        device: str,
        workers: int | None,
        runs: int,
        retry_diverged: bool,
    ) -> Workshop:
        """Where so many runs are made: as jobs of the cluster, all at a time, or in processes of this machine."""
        if (cluster := self.cluster_for(device, workers)) is not None:
            return Workshop(console, workers or runs, places, retry_diverged, cluster=cluster)
        return Workshop(console, workers or runs_at_once(device), places, retry_diverged, gpus_for(device))

    def gpus(self, device: str) -> int:
        """GPUs for a run on the device of this name; a cluster has some even where this machine has none."""
        if self.gpus_per_run is not None:
            return self.gpus_per_run
        return int(not on_cpu(device)) if self.cluster == "local" else int(device != "cpu")

    def device_type(self, device: str) -> str:
        """The type of the device of this name where runs are trained, which need not be this machine."""
        if self.cluster is None:
            return resolve_device(device).type
        return "cuda" if self.gpus(device) else "cpu"

    def minutes(self) -> int:
        """The longest that a job may take, rounded up; a day unless --time is given.

        Examples:
            >>> [ClusterOptions(time=text).minutes() for text in ("90", "1:30:00", "1-12", "0:30")]
            [90, 90, 2160, 1]
        """
        return 24 * 60 if not self.time else parse_minutes(self.time)

    def extra(self) -> dict[str, str | bool]:
        """Further options for sbatch."""
        pairs = [text.removeprefix("--").partition("=") for text in self.slurm]
        for key, _, _ in pairs:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or key in OURS:
                known = "is set by this command" if key in OURS else "is no option of sbatch"
                raise UsageError(f"--slurm {key!r} {known}: give what sbatch knows, such as constraint=h100")
        return {key: value if equals else True for key, equals, value in pairs}


def runs_at_once(device: str) -> int:
    """How many runs this machine makes at a time: one for each core, or for each GPU."""
    return machine.cores() if on_cpu(device) else max(1, len(gpus_for(device)))


def parse_minutes(text: str) -> int:
    """Slurm's way to write a time, in whole minutes: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UsageError: If it is none.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    days, *rest = match.groups() if match else (None, None)
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0, 0)[:2]
    total = math.ceil(int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60)
    if total < 1:
        raise UsageError(f"--time {text!r} is no time: write minutes, HH:MM:SS or D-HH:MM:SS")
    return total
