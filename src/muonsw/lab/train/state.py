"""A run in memory: model, optimizer, schedule and batches, and their checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from muonsw import AdamWSW, MuonSW, machine
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.adamw import ADAMW
from muonsw.decay import DECAY_RULES, decay_factors, decays
from muonsw.kernels.graphs import Recording, recorded
from muonsw.lab.errors import Diverged, UsageError
from muonsw.lab.model import Decoder, ModelConfig, muon_lr_multiplier, role_of, scalings
from muonsw.lab.tasks import (
    Batch,
    DecoderTask,
    LossParts,
    Task,
    TaskConfig,
    UserTask,
    map_tensors,
    tensors_of,
    to_device,
    with_file,
    with_tokens,
)
from muonsw.lab.theory.schedule import lr_scheduler
from muonsw.lab.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    full_tensor,
    load_optimizer,
    optimizer_tensors,
    sharded_like,
)
from muonsw.lab.train.config import MUON_SETTINGS, OptimizerConfig, RunConfig
from muonsw.lab.train.ranks import PlacedModel, World
from muonsw.peak import eta_max

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Consecutive losses that must be too high: one bad batch is not a divergence.
PATIENCE = 3

# Eager calls before the capture, which compile kernels and allocate state.
WARM_CALLS = 3
# A graph keeps all activations in memory; beyond this many tokens, launch times no longer matter.
MOST_TOKENS = 65_536

Options = dict[str, Any]
Result = TypeVar("Result")


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    steps: int | None = None,
    process_group: ProcessGroup | None = None,
    patterns: Mapping[str, Options] | None = None,
) -> MuonSW | AdamWSW:
    """Build one optimizer for a model, routed by role, with muP's learning-rate multipliers for a decoder.

    Shard the model first. The ranks of `process_group` have copies of the model and share Muon's work. `steps` is the
    length of the run, for decay rules that depend on it; `patterns` is the routing of a task.
    """
    shared: Options = {name: getattr(config, name) for name in ("lr", "weight_decay", "decay", "peak", "norm")}
    shared |= {"target_norm": config.target_norm, "total_steps": steps, "patterns": patterns or {}}
    if isinstance(model, Decoder):
        roles = {name: _decoder_options(model, name, config) for name, _ in model.named_parameters()}
        shared["patterns"] = {**roles, **shared["patterns"]}
    if config.algorithm == "adamw":
        return AdamWSW.for_model(model, betas=config.betas, **shared)
    # Pass only what differs from the defaults: a model without AdamW parameters refuses AdamW options.
    adamw: Options = {} if config.betas == ADAMW.defaults["betas"] else {"betas": config.betas}
    adamw |= {} if config.adam_lr is None else {"lr": config.adam_lr}
    if config.preset:
        chosen: Options = {"preset": config.preset}
        if "ns_dtype" in ALGORITHMS[config.matrix_algorithm].defaults:
            chosen["ns_dtype"] = config.ns_dtype
    else:
        chosen = {name: getattr(config, name) for name in ("ns_dtype", *MUON_SETTINGS)}
    return MuonSW.for_model(model, adamw=adamw, process_group=process_group, **chosen, **shared)


def _decoder_options(model: Decoder, name: str, config: OptimizerConfig) -> Options:
    """Options of one parameter beyond the defaults of its role."""
    role, matrices = role_of(name), ALGORITHMS[config.matrix_algorithm].matrices
    rule = {"decay": config.unnormalized} if role == "hidden" and config.unnormalized else {}
    if config.algorithm == "adamw":
        return {"lr_multiplier": scalings(model.config)[role].lr, **rule}
    if role in ("hidden", "residual"):
        options: Options = {"lr_multiplier": muon_lr_multiplier(model.config, config.muon_lr), **rule}
        # Split fused projections into their matrices, unless queries, keys and values count as one.
        for pattern, sizes in model.fused_projections().items():
            fused = pattern.endswith("qkv.weight") and config.qkv == "fused"
            if matrices and not fused and name.endswith(pattern.lstrip("*")):
                options["split_sizes"] = sizes
        return options
    if role == "router" and config.router == "muon":
        return {"algorithm": config.matrix_algorithm, "weight_decay": config.weight_decay}
    # An algorithm for any shape, such as Lion, would also accept these parameters; leave them to AdamW.
    return {} if matrices else {"algorithm": "adamw"}


def require_decay_below_one(optimizer: torch.optim.Optimizer, multiple: Callable[[int], float], steps: int) -> None:
    """Raise a `ValueError` if some step of this schedule would decay a weight by more than itself."""
    for group in optimizer.param_groups:
        rule, lr, lam = group["decay"], float(group["initial_lr"]), float(group["weight_decay"])
        if DECAY_RULES[rule].uses_gradient or not decays(group):
            continue  # known, and checked, only in the step
        # Rules that do not depend on the step decay most at the peak.
        rates = [lr * multiple(step) for step in range(steps)] if DECAY_RULES[rule].uses_step else [lr]
        phi = max(decay_factors(rule, lam, rates, eta_max({**group, "resolved_peak_lr": lr}) or 0.0))
        if phi > 1:
            size = f"a peak learning rate of {lr:g} with weight_decay={lam:g} (decay {rule!r})"
            fix = "lower lambda or the learning rate"
            raise ValueError(f"{size} would remove {phi:g} times the weight in one step: {fix}")


class Evaluation(NamedTuple):
    """A validation loss after this many steps."""

    step: int
    loss: float


class Gradients(NamedTuple):
    """The result of forward and backward passes, on the device."""

    losses: LossParts
    norm: Tensor  # before clipping
    grads: list[Tensor | None]


class Training:
    """A run in memory, ready to take its next step; its config comes from `with_fingerprint`."""

    def __init__(self, config: RunConfig, world: World | None = None) -> None:
        self.config, self.world = config, world or World()
        self.step = 0  # completed
        self.seconds = 0.0  # training time up to the last checkpoint
        self.best = self.latest = Evaluation(0, math.nan)
        self.metrics: dict[str, float] = {}  # of the latest evaluation, without the loss
        self._measured: tuple[str, ...] = ()  # the names of all measurements
        self.guard = LossGuard()
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = self.world.together(self._device_of_rank)
        self.task = self.world.together(lambda: open_task(config, self.world.size))
        self.model = self.task.model(config.seed).to(self.device)
        if config.weights == "bfloat16":
            for parameter in self.model.parameters():  # not buffers: rotations need float32
                parameter.data = parameter.data.bfloat16()
        if not self.world.alone:
            self.task.join_ranks(self.model, self.world.size)
        self.module = self.task.computing_loss(self.model)
        self.placed = PlacedModel(self.module, config, self.world, self.device)
        self.forward = self.placed.forward
        # By default, a user's task is not compiled.
        if config.compile == "on" or (config.compile == "auto" and config.task is None and self.device.type == "cuda"):
            # Reuse code that an earlier run in this process compiled for the same shapes, and drop it if shapes differ:
            # the compiler keeps few variants of a function, and beyond those it silently falls back to eager.
            global _compiled_shape  # noqa: PLW0603 (the compiler's own store belongs to the process, too)
            shape = config.task or config.decoder, config.batch // config.accumulation
            if shape != _compiled_shape:
                torch.compiler.reset()
                _compiled_shape = shape
            self.forward = torch.compile(self.forward)
        patterns = self.task.patterns(self.model, config.optimizer.weight_decay)
        group = self.placed.process_group
        self.optimizer = build_optimizer(self.model, config.optimizer, config.steps, group, patterns)
        # Replay small steps as CUDA graphs, because launching takes longer than computing. A user's task may do work on
        # the host, which a graph would not repeat.
        graphs = self.world.alone and self.device.type == "cuda" and config.task is None and config.graphs != "off"
        if graphs and config.graphs == "auto":
            graphs = config.accumulation == 1 and config.tokens_per_step <= MOST_TOKENS
        self.replayed_gradients = GraphedFunction(self.gradients, self.device) if graphs else None
        self.replayed_score = GraphedFunction(self.score, self.device) if graphs else None
        multiple = config.schedule.multiple(config.steps)
        self.scheduler = lr_scheduler(self.optimizer, multiple)
        require_decay_below_one(self.optimizer, multiple, config.steps)

    def _device_of_rank(self) -> torch.device:
        """The device in the config, or this rank's GPU if there are several ranks."""
        device, world = resolve_device(self.config.device), self.world
        if world.alone or device.type != "cuda":
            return device
        if world.local >= (gpus := machine.gpus()):
            many = f"there is no GPU for rank {world.rank}: its machine has {gpus}"
            raise UsageError(f"{many}; start at most as many processes there, or set device to cpu")
        torch.cuda.set_device(world.local)
        return torch.device("cuda", world.local)

    def settle(self) -> None:
        """Run one backward pass under DDP and discard it."""
        # DDP's first pass sums gradients in another order than later ones, so resuming would change the last bits.
        if self.placed.strategy != "ddp":
            return
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.forward_backward(self._micro_batches(self.step)[:1])
        for name, buffer in self.module.named_buffers():
            buffer.copy_(before[name])
        self.optimizer.zero_grad(set_to_none=True)

    def batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each remaining step, on the device."""
        return map(self._micro_batches, range(self.step, self.config.steps))

    def _micro_batches(self, step: int) -> list[Batch]:
        ranks, rank = self.world.size, self.world.rank
        parts = self.task.micro_batches(step, ranks=ranks, rank=rank, accumulation=self.config.accumulation)
        return [to_device(batch, self.device) for batch in parts]

    def forward_backward(self, batches: list[Batch]) -> LossParts:
        """Accumulate the gradients of a step; return its losses, averaged over micro-batches, on the device."""
        parts = []
        for number, batch in enumerate(batches, start=1):
            with self.placed.backward_pass(last=number == len(batches)):
                with self.autocast():
                    losses = self.task.loss(self.forward, batch)
                (losses.total / len(batches)).backward()
            parts.append(losses)
        means = (torch.stack([value.detach() for value in values]).mean(0) for values in zip(*parts, strict=True))
        return type(parts[0])(*means)

    def update(self, batches: list[Batch]) -> Gradients:
        """Take a step; raise a `UsageError` if the optimizer refuses its rate or decay."""
        result = (self.replayed_gradients or self.gradients)(batches)
        for parameter, grad in zip(self.model.parameters(), result.grads, strict=True):
            parameter.grad = grad  # a graph always writes to the same memory, an eager pass allocates
        try:
            self.optimizer.step()
        except ValueError as error:
            raise UsageError(f"step {self.step + 1} cannot be taken: {error}") from error
        self.scheduler.step()
        self.step += 1
        return result

    def gradients(self, batches: list[Batch]) -> Gradients:
        """The forward and backward passes of a step, and clipping; a graph may capture them."""
        self.optimizer.zero_grad(set_to_none=True)
        losses, limit = self.forward_backward(batches), self.config.optimizer.clip or math.inf
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        return Gradients(losses, norm, [parameter.grad for parameter in self.model.parameters()])

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Average the measurements over the validation batches, which are the same for every run on this data."""
        total, rows = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.placed.share_buffers()
        self.module.eval()
        for batch, size in self.task.validation(ranks=self.world.size, rank=self.world.rank):
            total = total + (self.replayed_score or self.score)([to_device(batch, self.device)]) * size
            rows += size
        self.module.train()
        *sums, rows_of_all = self.world.total(torch.tensor([*total.tolist(), rows], dtype=torch.float64)).tolist()
        self.metrics = dict(zip(self._measured, (value / rows_of_all for value in sums), strict=True))
        self.latest = Evaluation(self.step, self.metrics.pop("loss"))
        if math.isnan(self.best.loss) or self.latest.loss < self.best.loss:
            self.best = self.latest
        return self.latest

    def score(self, batches: list[Batch]) -> Tensor:
        """The loss of a validation batch, then the task's other measurements."""
        (batch,) = batches
        with torch.no_grad(), self.autocast():
            values = self.task.evaluation(self.module, batch)
        self._measured = self._measured or tuple(values)
        if values.keys() != set(self._measured):
            names = f"{', '.join(values)} for one validation batch and {', '.join(self._measured)} for another"
            raise UsageError(f"the task measures {names}: metrics(model, batch) must always return the same names")
        return torch.stack([torch.as_tensor(values[name], device=self.device).double() for name in self._measured])

    def autocast(self) -> AbstractContextManager[object]:
        precision = self.config.precision
        enabled = precision == "bfloat16" or (precision == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if enabled else nullcontext()

    def checkpoint(self) -> Checkpoint:
        """Everything needed to resume from here; only rank 0 gets the tensors."""
        self.placed.share_buffers()
        optimizer, groups = optimizer_tensors(self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "groups": groups,
            "guard": asdict(self.guard),
            "best": self.best,
            "latest": self.latest,
            "seconds": self.seconds,
            "threads": torch.get_num_threads(),
            "config": self.config.as_data(),
        }
        weights, names = self.model.state_dict(), dict.fromkeys(first_names(self.model).values())
        parts = {"model": {name: weights[name] for name in names}, "optimizer": optimizer, "random": random}
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
        for part, values in parts.items():
            for name, tensor in values.items():
                full = full_tensor(tensor.detach())  # on all ranks
                if self.world.leads:
                    # Copies, because safetensors refuses tensors that share memory.
                    tensors[part][name] = full.to("cpu", copy=True).contiguous()
        return Checkpoint(self.step, tensors, state)

    def load(self, saved: Checkpoint) -> None:
        """Resume from a checkpoint as if the run had never stopped; raise a `CheckpointError` if it does not fit."""
        try:
            weights, here = saved.tensors["model"], self.model.state_dict(keep_vars=True)
            names = first_names(self.model)
            self.model.load_state_dict({name: sharded_like(here[name], weights[names[name]]) for name in names})
            load_optimizer(self.optimizer, saved.tensors["optimizer"], saved.state["groups"])
            # The schedule is a function of the step; the groups contain the current learning rates.
            self.scheduler.last_epoch, self.scheduler._step_count = saved.step, saved.step + 1
            # JSON writes a number that is not finite as None.
            guard = saved.state["guard"]
            self.guard = LossGuard(**{**guard, "lowest": math.inf if guard["lowest"] is None else guard["lowest"]})
            self.best, self.latest = (
                Evaluation(step, math.nan if loss is None else loss)
                for step, loss in (saved.state["best"], saved.state["latest"])
            )
            self.step, self.seconds = saved.step, saved.state["seconds"]
            # Another number of threads would change the rounding of sums.
            if not self.config.threads:
                torch.set_num_threads(saved.state["threads"])
            torch.set_rng_state(saved.tensors["random"]["cpu"])
            if "cuda" in saved.tensors["random"] and self.device.type == "cuda":
                torch.cuda.set_rng_state(saved.tensors["random"]["cuda"], self.device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"the one after step {saved.step} does not fit this run ({reason})") from error


def open_task(config: RunConfig, ranks: int = 1) -> Task:
    """Open a run's data and task; raise a `UsageError` if ranks cannot divide a batch, or a file cannot be used."""
    if config.batch % (ranks * config.accumulation):
        split = f"accumulation={config.accumulation} micro-batches on each of {ranks} ranks"
        raise UsageError(f"batch={config.batch} does not split into {split}: choose a multiple")
    if config.task is not None:
        return UserTask(config.task, batch=config.batch, seed=config.seed)
    micro = config.batch // (config.accumulation * ranks)
    return DecoderTask(config.decoder, config.tokens, batch=config.batch, micro=micro, seed=config.seed)


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Map each name in a model's state to the first name of the same tensor, so that tied tensors are saved once."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


_compiled_shape: tuple[ModelConfig | TaskConfig, int] | None = None


@dataclass
class LossGuard:
    """Stops a run whose loss stays far above its minimum, or that skips many steps in a row."""

    lowest: float = math.inf
    strikes: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    def watch(self, config: RunConfig, step: int, loss: float, norm: float) -> None:
        """Raise `Diverged` if the loss is not finite or stays too high, or too many steps in a row were skipped."""
        advice = "lower the learning rate or the weight decay, or lengthen the warmup"
        if not math.isfinite(loss):
            raise Diverged(f"the loss of step {step} is {loss}; {advice}", step)
        self.strikes = self.strikes + 1 if loss > self.lowest + config.diverged else 0
        self.lowest = min(self.lowest, loss)
        if self.strikes >= PATIENCE:
            raise Diverged(f"the loss of step {step} is {loss:.4g}, up from {self.lowest:.4g}; {advice}", step)
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= config.skipped:
            many = f"the gradients of {self.skipped_in_a_row} steps in a row, up to step {step}, are not finite"
            fix = "check model and precision, lower the learning rate, or allow more with the setting `skipped`"
            raise Diverged(f"{many}, so these steps were skipped; {fix}", step)


def resolve_device(name: str) -> torch.device:
    """The device with this name; raise a `UsageError` if it cannot be used here."""
    if name == "auto":
        return torch.device("cuda" if machine.gpus() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # raises for the meta device, whose tensors have no data
    except (RuntimeError, AssertionError, ImportError) as error:
        available = "cpu, cuda or auto" if machine.gpus() else "cpu or auto, because there is no GPU"
        raise UsageError(f"device {name!r} cannot be used here: choose {available}") from error
    return device


def with_fingerprint(config: RunConfig) -> RunConfig:
    """Add the hash of the tokens or of the task's file; raise a `UsageError` if the config has a different one."""
    if config.task is not None:
        return replace(config, task=with_file(config.task))
    return replace(config, data=with_tokens(config.tokens, config.decoder))


class GraphedFunction(Generic[Result]):
    """A function that is captured as a CUDA graph and replayed on new batches of the same shape.

    It never waits for the device. Each call overwrites the result of the previous one. If capturing fails, it warns and
    stays eager, as it is in its first calls.
    """

    def __init__(self, function: Callable[[list[Batch]], Result], device: torch.device) -> None:
        self.function = function
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls = 0
        self._graph: Recording | None = None
        self._captured: list[Tensor] = []  # what the graph reads
        self._result: Result | None = None

    def __call__(self, batches: list[Batch]) -> Result:
        self._calls += 1
        device, tensors = self._stream.device, tensors_of(batches)
        if self._calls == WARM_CALLS + 1:
            copies = map_tensors(Tensor.clone, batches)
            self._captured = tensors_of(copies)

            def program() -> None:
                self._result = self.function(copies)

            try:  # capture a call without running it
                self._graph = recorded(program, device, stream=self._stream)
            except RuntimeError as error:
                warnings.warn(f"steps are not replayed as a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
        if self._graph is None or [t.shape for t in tensors] != [t.shape for t in self._captured]:
            # On the stream of the capture: autograd remembers the stream on which it first saw the weights.
            current = torch.cuda.current_stream(device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = self.function(batches)
            current.wait_stream(self._stream)
            return result
        assert self._result is not None
        for captured, new in zip(self._captured, tensors, strict=True):
            captured.copy_(new, non_blocking=True)
        self._graph.replay()
        return self._result
