"""The training loop: batch, forward, backward, clip, step, schedule, telemetry, evaluate, checkpoint, log."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muonsw import Telemetry, machine
from muonsw.lab.errors import Diverged, Interrupted, StopRequest, UsageError, needed, stop_requests
from muonsw.lab.files import LOCK, locked, write_json
from muonsw.lab.tasks import naming_lines
from muonsw.lab.train.checkpoint import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    RESULT,
    Shelf,
    environment,
    recorded_settings,
    refuse_changes,
)
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.ranks import World, agreed
from muonsw.lab.train.records import Journal, MetricsFile, Sink
from muonsw.lab.train.state import Training, with_fingerprint
from muonsw.state import state_bytes
from muonsw.telemetry import TensorBoardSink, WandbSink

# After a checkpoint, wait at least 50 times as long as saving it took: saving costs at most 2% of the time.
SAVING_INTERVALS = 50


@dataclass(frozen=True)
class Watch:
    """Callbacks for what happens during a run."""

    started: Callable[[Training], None] = lambda _training: None  # before the first step
    record: Sink = lambda _record: None  # for every logged record
    note: Callable[[str], None] = lambda _text: None  # for messages about unusual events


def train(config: RunConfig, folder: Path, watch: Watch | None = None, world: World | None = None) -> dict[str, Any]:
    """Train to the end, resuming from the newest intact checkpoint in the folder, and return the result.

    Every rank calls it with the same config and folder.

    Raises:
        UsageError: If the run cannot start, or a file cannot be written.
        Diverged: If the loss explodes; the checkpoints are from before that.
        Interrupted: If a signal asked the process to stop; the run was saved.
    """
    world = world or World()
    watch = watch if watch and world.leads else Watch()
    config = world.together(lambda: with_fingerprint(config))
    busy = f"another process is training in {folder}: wait for it, or choose another folder"
    # With several ranks, an error in the user's code may only mean that another rank is lost.
    named, threads = naming_lines(config.task if world.alone else None), torch_threads(torch.get_num_threads())
    with named, stop_requests() as request, threads, ExitStack() as stack:
        # Before touching the folder: an invalid run must not leave files in it.
        try:
            training = Training(config, world)
        except ValueError as error:  # on all ranks, since they have the same settings
            raise agreed(UsageError(str(error))) from error

        # Lock the folder, and check that its settings are the same and that all ranks see it.
        world.leading(lambda: stack.enter_context(locked(folder, busy)))
        world.leading(lambda: refuse_changes(folder, recorded_settings(folder), config))

        def require_shared() -> None:
            if not (folder / LOCK).exists():
                different = f"{folder} is not the same folder on rank {world.rank} as on rank 0"
                raise UsageError(f"{different}: choose one on a disk that all ranks share")

        world.together(require_shared)
        shelf = Shelf(folder / CHECKPOINTS, config.keep, watch.note, world)
        shelf.resume(training)
        journal = Journal(training)
        world.leading(lambda: _open_files(journal, folder, watch, stack))
        watch.started(training)

        try:
            _take_steps(training, journal, shelf, request)
        except Diverged as error:
            saved = shelf.newest()
            last = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved"
            reason = f"{error}; {last}"
            outcome = {"diverged": error.step, "steps": error.step, "reason": reason}
            world.leading(lambda: write_json(folder / RESULT, outcome))
            raise Diverged(reason, error.step) from error
        epochs = training.task.epochs(training.step)
        result = {
            "steps": training.step,
            "final_loss": training.latest.loss,
            "best_loss": training.best.loss,
            "best_step": training.best.step,
            training.task.unit: training.step * training.task.per_step,
            **({} if epochs is None else {"epochs": epochs}),
            "seconds": training.seconds,
            "state_bytes": sum(state_bytes(training.optimizer.param_groups).values()),
            "skipped": training.guard.skipped,
        }
        world.leading(lambda: write_json(folder / RESULT, result))
        return result


def _open_files(journal: Journal, folder: Path, watch: Watch, stack: ExitStack) -> None:
    """Write the settings and the environment, and open the sinks."""
    training = journal.training
    config, world = training.config, training.world
    write_json(folder / CONFIG, config.as_data())
    roles: Counter[str] = Counter()
    for group in training.optimizer.param_groups:
        decays = "decayed" if group["weight_decay"] else "not decayed"
        roles[f"{group['role']} ({group['algorithm']}, {decays})"] += sum(p.numel() for p in group["params"])
    model, data = type(training.model).__name__, training.task.data(config.steps)
    content = {
        **environment(),
        "device": torch.cuda.get_device_name() if machine.gpus() else "cpu",
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "trained": {"model": model, "parameters": dict(roles), "data": data},
        **({} if world.alone else {"ranks": world.size}),
    }
    write_json(folder / ENVIRONMENT, content)
    metrics = MetricsFile(folder, after=training.step, note=watch.note)
    stack.callback(metrics.close)
    journal.sinks = [metrics, watch.record]
    if config.tensorboard:
        tensorboard = needed("torch.utils.tensorboard", "TensorBoard events need", "tensorboard")
        journal.sinks.append(TensorBoardSink(tensorboard.SummaryWriter(str(folder / "tensorboard"))))
    if config.wandb:
        # The id lets a resumed run append to its record.
        run = {"name": folder.name, "id": folder.name, "resume": "allow"}
        wandb = needed("wandb", "logging to Weights & Biases needs", "wandb")
        journal.sinks.append(WandbSink(wandb.init(project=config.wandb, config=config.as_data(), **run)))


def _take_steps(training: Training, journal: Journal, shelf: Shelf, request: StopRequest) -> None:
    config, world = training.config, training.world
    # When the last checkpoint was saved, and how long that took. Saving changes no result, so it may depend on time.
    saved, took = time.monotonic(), 0.0

    def evaluate() -> None:
        journal.catch_up()
        step, loss = training.evaluate()
        journal.write({"kind": "eval", "step": step, "loss": loss, **training.metrics})
        journal.restart_clock()

    training.settle()
    if training.step == 0:
        evaluate()
    observer: AbstractContextManager[Telemetry | None] = nullcontext()
    if every := config.telemetry_every:
        observer = Telemetry(training.optimizer, every=every, start_step=training.step, sink=journal.write)
    with observer as telemetry:
        for batches in training.batches():
            # The rate before muP multiplies it.
            lr = config.optimizer.lr * float(training.scheduler.lr_lambdas[0](training.step))
            if telemetry is not None and training.step == config.steps - 1:
                telemetry.every = 1
            losses, norm, _ = training.update(batches)
            journal.note_step(lr, losses, norm)

            last = training.step == config.steps
            if last or training.step % config.eval_every == 0:
                evaluate()
            age = time.monotonic() - saved
            late = 0 < config.checkpoint_seconds <= age and age >= SAVING_INTERVALS * took
            stop, due = divmod(world.largest(2 * (request.signal or 0) + late), 2)  # one collective for both
            if last or stop or due or training.step % config.checkpoint_every == 0:
                begun = time.monotonic()
                journal.catch_up()  # raises if the loss has diverged, which must not be saved
                training.seconds += begun - saved + took  # since the last checkpoint was begun
                shelf.save(training.checkpoint())
                journal.restart_clock()
                saved = time.monotonic()
                took = saved - begun
                stop = world.largest(request.signal or 0)  # a signal may have arrived while saving
            if stop and not last:
                message = f"stopped after {training.step} of {config.steps} steps, saved; "
                raise Interrupted(f"{message}rerun the same command to resume in {shelf.folder.parent}", stop)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
