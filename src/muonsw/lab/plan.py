"""`muonsw plan`: predict the cost of a run, on one GPU or thousands.

Bytes are exact: tests compare them with allocated tensors and sent messages. Times follow from measured rates of one
GPU and assumed rates of links (docs/guide/distributed.md), with perfect overlap of communication and computation.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Literal, NamedTuple

from rich.console import Console
from tyro.conf import OmitArgPrefixes

from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.exchange import ROUNDS, SMALLEST_ROUND
from muonsw.lab.console import Column, Table, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.model import ModelConfig, count, preset, role_of, unallocated
from muonsw.lab.model.loss import chunk_tokens
from muonsw.lab.options import unset
from muonsw.lab.paper import PAPER_BATCH_TOKENS
from muonsw.lab.train.config import RunConfig, preset_run
from muonsw.orthogonalize.iterations import gram_saves
from muonsw.step import ACCELERATOR_CHUNK_BYTES

FLOAT32, BFLOAT16 = 4, 2
NS_STEPS = 5
MUON_ROLES = ("hidden", "residual")  # roles of the muP table that Muon trains
# Bytes that a step reads and writes per parameter (docs/performance.md). Muon: momentum, look-ahead and cast 14,
# division 4, decay and move 10, finite check 4. AdamW: reads four numbers, writes three, finite check.
PASS_BYTES = 32
IN_FLIGHT = 8  # buffers of the exchange: sent, received, full matrix and result, for two rounds
COMPILED = 0.59  # share of autograd's tensors that a compiled model keeps; fitted to three runs on one H200
JOURNEYS = 4  # a token travels to its experts and back, in the forward and the backward pass
NODE = 8  # GPUs per machine
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class H200:
    """Measured rates of one NVIDIA H200, per second (docs/performance.md), and assumed rates of its links."""

    memory = 4.3e12  # bytes, read and written
    dense = 720e12  # FLOPs of products
    gram = 530e12  # useful FLOPs of `X X^T`, computing one triangle
    short = 400e12  # useful FLOPs of the small symmetric products
    triangles = 512  # with at least this many rows, only one triangle is computed
    overhead = 1.3e-3  # constant seconds per step: launches and the last wave of each product
    capacity = 141e9  # bytes of memory
    # Assumed: bytes that a GPU receives from its own machine and from others, seconds of a collective, and additional
    # seconds per further rank.
    inside, outside, latency, message = 360e9, 40e9, 20e-6, 1e-6


def parse_amount(text: str) -> int:
    """Parse a number of tokens such as 197B.

    Examples:
        >>> parse_amount("197B"), parse_amount("1.5e9"), parse_amount("300M"), parse_amount("524,288")
        (197000000000, 1500000000, 300000000, 524288)
    """
    match = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d+)?)\s*([kmbt]?)", re.sub("[,_]", "", text.strip()), re.IGNORECASE)
    number = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 197B, 300M, 1.5e9 or 524288")
    return round(number)


def amount(number: float, digits: int = 3) -> str:
    """Format a large number for `parse_amount`.

    Examples:
        >>> amount(18_350_080_000), amount(962_560), amount(197_132_288_000, 4), amount(999_960_000), amount(512)
        ('18.4B', '963K', '197.1B', '1B', '512')
    """
    rounded = float(f"{number:.{digits}g}")
    letter, unit = max(UNITS.items(), key=lambda pair: pair[1] if pair[1] <= rounded else 0.0)
    return f"{rounded / unit:g}{letter}"


class ModelPart(NamedTuple):
    """Parameters that are trained in the same way."""

    parameters: int
    matrices: Mapping[tuple[int, int], int]  # by (short, long) shape, the number of matrices that Muon orthogonalizes


class ModelParts(NamedTuple):
    """A model, divided by optimizer and sharding."""

    experts: ModelPart  # stacks of experts
    hidden: ModelPart  # other matrices of Muon
    adamw: ModelPart  # trained by AdamW


@cache
def parts_of(config: ModelConfig) -> ModelParts:
    """Divide a model, counting fused projections separately.

    Examples:
        >>> parts = parts_of(ModelConfig(width=256))
        >>> parts.experts.parameters, sum(parts.experts.matrices.values()), parts.hidden.matrices
        (56623104, 288, {(256, 256): 48})
    """
    model = unallocated(config)
    fused = model.fused_projections()
    parameters = Counter[str]()
    matrices: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for name, param in model.named_parameters():
        if role_of(name) not in MUON_ROLES:
            parameters["adamw"] += param.numel()
            continue
        part = "experts" if param.dim() == 3 else "hidden"
        parameters[part] += param.numel()
        *stack, rows, columns = param.shape
        for size in next((sizes for pattern, sizes in fused.items() if fnmatchcase(name, pattern)), (rows,)):
            matrices[part][min(size, columns), max(size, columns)] += math.prod(stack)
    return ModelParts(*(ModelPart(parameters[part], dict(matrices[part])) for part in ModelParts._fields))


def newton_schulz_flops(short: int, long: int) -> int:
    """FLOPs of Newton-Schulz for one matrix: three products per iteration."""
    return NS_STEPS * (4 * short**2 * long + 2 * short**3)


def orthogonalizer_flops(config: ModelConfig) -> float:
    """FLOPs of Newton-Schulz in one optimizer step."""
    return float(
        sum(n * newton_schulz_flops(*shape) for part in parts_of(config) for shape, n in part.matrices.items())
    )


class Cost(NamedTuple):
    """The total cost of several runs."""

    runs: int
    tokens: int  # trained on
    flops: float  # training, Newton-Schulz and evaluation together

    def hours(self, tflops: float, workers: int) -> float:
        """Hours at a sustained rate per run, with this many runs at a time."""
        return self.flops / (tflops * 1e12) / 3600.0 / max(1, min(workers, self.runs))


def cost(configs: Iterable[RunConfig]) -> Cost:
    """Add up distinct runs: three passes per trained token, one per validation token, and Newton-Schulz."""
    distinct, tokens, flops = dict.fromkeys(configs), 0, 0.0
    for config in distinct:
        per_token = count(config.decoder).flops_per_token
        evaluations = 1 + math.ceil(config.steps / config.eval_every)
        validated = evaluations * (config.tokens.eval_windows or 0) * config.decoder.sequence
        muon = orthogonalizer_flops(config.decoder) if ALGORITHMS[config.optimizer.matrix_algorithm].matrices else 0.0
        flops += config.steps * (config.tokens_per_step * per_token + muon) + validated * per_token / 3.0
        tokens += config.steps * config.tokens_per_step
    return Cost(len(distinct), tokens, flops)


class Sharding(NamedTuple):
    """How `stack * cut * copies` ranks share a part."""

    stack: int = 1  # ranks that divide stacks
    cut: int = 1  # ranks that divide each matrix
    copies: int = 1  # ranks with the same data
    stride: int = 1  # difference of rank between two neighbours of a cut

    def held(self, experts: int) -> float:
        """The share of a stack on the fullest rank."""
        return math.ceil(experts / self.stack) / experts


@dataclass(frozen=True)
class Setup:
    """The GPUs, each like the H200 that we measured."""

    gpus: int = 1
    """Number of GPUs."""
    strategy: Literal["ddp", "fsdp", "ep"] = "ddp"
    """ddp: a copy on each GPU; fsdp: everything sharded; ep: experts stay on their GPUs and tokens travel."""
    experts: Literal["stack", "rows"] = "stack"
    """Under fsdp: shard experts along their stack, or each by its rows."""
    replicas: int = 1
    """Copies of the model under fsdp (HSDP), or of all but the experts under ep."""
    micro_batch: int = 8
    """Sequences that a GPU computes at once."""
    tflops: float = 400.0
    """TFLOP/s that one GPU sustains in the model; not the number on its data sheet."""

    def check(self) -> None:
        """Raise a ValueError that names the first invalid setting."""
        for name in ("micro_batch", "tflops"):
            if not 0.0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value} must be positive and finite")
        if self.gpus < 1 or self.replicas < 1 or self.gpus % self.replicas:
            raise ValueError(f"gpus={self.gpus} must be a positive multiple of replicas={self.replicas}")
        if self.replicas > 1 and self.strategy == "ddp":
            raise ValueError(f"replicas={self.replicas} needs strategy fsdp or ep: ddp has a copy on every GPU")
        if self.experts == "rows" and self.strategy != "fsdp":
            raise ValueError(f"experts=rows needs strategy fsdp, not {self.strategy}")

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model, or of all but the experts under ep."""
        return 1 if self.strategy == "ddp" else self.gpus // self.replicas

    def shardings(self, experts: int) -> tuple[Sharding, Sharding]:
        """The sharding of experts, and of everything else."""
        dense = Sharding(cut=self.shards, copies=self.gpus // self.shards)
        if self.strategy == "fsdp" and self.experts == "stack":
            return Sharding(stack=min(self.shards, experts), copies=self.replicas), dense
        if self.strategy == "ep":
            stack = math.gcd(self.gpus, experts)
            return Sharding(stack=stack, cut=self.gpus // stack, stride=stack), dense
        return dense, dense


def link(reach: int) -> float:
    """Bytes per second between ranks whose numbers differ by up to `reach`."""
    return H200.inside if reach <= NODE else H200.outside


@dataclass
class Memory:
    """Bytes on the fullest GPU."""

    weights: float = 0.0  # float32
    gradients: float = 0.0  # float32
    muon_state: float = 0.0  # a float32 momentum for hidden and expert matrices
    adamw_state: float = 0.0  # two float32 averages for the parameters of AdamW
    activations: float = 0.0  # an estimate, for one micro-batch
    gathered: float = 0.0  # bfloat16 copies of weights, and gathered weights of two layers at a time
    buffers: float = 0.0  # at most, for the optimizer's exchange and products

    @property
    def total(self) -> float:
        return math.fsum(vars(self).values())


@dataclass
class StepCost:
    """The cost of one step."""

    memory: Memory = field(default_factory=Memory)
    model_bytes: float = 0.0  # received by a GPU: weights, gradients and tokens
    optimizer_bytes: float = 0.0  # received by a GPU in Muon's exchange, on average over ranks
    optimizer_collectives: int = 0  # at most, including the reduction by which ranks agree
    model_seconds: float = 0.0  # computing forward and backward
    model_link_seconds: float = 0.0  # the model's traffic, which overlaps with computing
    product_seconds: float = 0.0  # orthogonalizing, on the busiest rank
    exchange_seconds: float = 0.0  # the optimizer's traffic, which overlaps with its products
    pass_seconds: float = 0.0  # momentum, decay, AdamW: passes over memory

    @property
    def optimizer_seconds(self) -> float:
        return max(self.product_seconds, self.exchange_seconds) + self.pass_seconds + H200.overhead

    @property
    def seconds(self) -> float:
        return max(self.model_seconds, self.model_link_seconds) + self.optimizer_seconds

    @property
    def optimizer_share(self) -> float:
        return self.optimizer_seconds / self.seconds


def plan_step(model: ModelConfig, setup: Setup, batch_tokens: int = PAPER_BATCH_TOKENS) -> StepCost:
    """Predict a step of this many tokens over all GPUs.

    Examples:
        >>> step = plan_step(ModelConfig(width=1024), Setup())
        >>> step.optimizer_bytes, f"{1e3 * step.optimizer_seconds:.0f} ms"
        (0.0, '29 ms')
    """
    parts, step = parts_of(model), StepCost()
    add_orthogonalizing(step, model, setup)
    memory, (experts, dense) = step.memory, setup.shardings(model.experts)

    # The model's traffic: sharded weights are gathered in both passes of every micro-batch, gradients are reduced once,
    # and under ep tokens travel to their experts.
    def receive(size: float, reach: int) -> None:
        step.model_bytes += size
        step.model_link_seconds += size / link(reach)

    tokens = batch_tokens / setup.gpus
    micro_batches = max(1, math.ceil(tokens / (setup.micro_batch * model.sequence)))
    for part, sharding in zip(parts, (experts, dense, dense), strict=True):
        divided = sharding.cut if setup.strategy == "ep" else sharding.cut * sharding.stack
        shard = part.parameters / (sharding.cut * sharding.stack)
        reach = setup.shards if setup.strategy == "fsdp" else divided * sharding.stride
        receive((2 * micro_batches + 1) * FLOAT32 * shard * (divided - 1), reach)
        receive(2 * FLOAT32 * (sharding.copies - 1) / sharding.copies * shard, setup.gpus)
    if setup.strategy == "ep":
        sent = JOURNEYS * BFLOAT16 * tokens * model.top_k * model.width * model.layers
        receive(sent * (experts.stack - 1) / experts.stack, experts.stack)

    # Memory and time of the fullest rank.
    muon = experts.held(model.experts) * parts.experts.parameters / experts.cut + parts.hidden.parameters / dense.cut
    adamw = parts.adamw.parameters / dense.cut
    memory.weights = memory.gradients = FLOAT32 * (muon + adamw)
    memory.muon_state, memory.adamw_state = FLOAT32 * muon, 2 * FLOAT32 * adamw
    memory.activations = COMPILED * activation_bytes(model, setup.micro_batch)
    memory.gathered = BFLOAT16 * sum(part.parameters for part in parts)
    if setup.shards > 1:  # gathered at a time: the current layer, the next one, and the parameters of AdamW
        stack = experts.stack if setup.strategy == "ep" else 1
        layer = (parts.experts.parameters / stack + parts.hidden.parameters) / model.layers
        memory.gathered = FLOAT32 * (2 * layer + parts.adamw.parameters) + BFLOAT16 * layer
    step.model_seconds = count(model).flops_per_token * batch_tokens / (setup.gpus * setup.tflops * 1e12)
    step.pass_seconds = PASS_BYTES * (muon + adamw) / H200.memory
    return step


def add_orthogonalizing(step: StepCost, model: ModelConfig, setup: Setup) -> None:
    """Add products of Muon's matrices on the busiest rank, and the exchange with their owners."""
    memory = step.memory
    step.optimizer_collectives = int(setup.gpus > 1)
    for part, sharding in zip(parts_of(model), setup.shardings(model.experts), strict=False):
        owners = sharding.copies if setup.strategy == "ddp" else sharding.cut
        held = sharding.held(model.experts)
        for shape, number in part.matrices.items():
            step.product_seconds += orthogonalizing(*shape) * math.ceil(round(number * held) / owners)
        share = FLOAT32 * part.parameters / sharding.stack / owners
        if owners == 1 or not share:
            memory.buffers = max(memory.buffers, 2 * min(ACCELERATOR_CHUNK_BYTES, share))
            continue
        if setup.strategy == "ddp":
            collectives, received = 1, BFLOAT16 * (owners - 1) / owners * part.parameters
        else:
            collectives = 2  # momenta travel to the owner and directions back
            received = (FLOAT32 + BFLOAT16) * (owners - 1) / owners**2 * part.parameters / sharding.stack
        room = min(ACCELERATOR_CHUNK_BYTES, max(SMALLEST_ROUND, math.ceil(share / ROUNDS)))
        memory.buffers = max(memory.buffers, IN_FLIGHT * room)
        collectives *= math.ceil(share / room)
        waiting = collectives * (H200.latency + H200.message * (owners - 1))
        step.optimizer_collectives += collectives
        step.optimizer_bytes += received
        step.exchange_seconds += received / link(owners * sharding.stride) + waiting


def orthogonalizing(short: int, long: int) -> float:
    """Seconds to orthogonalize one matrix of many, with the products of `muonsw.orthogonalize.iterations`."""
    if short < H200.triangles:
        return newton_schulz_flops(short, long) / H200.dense
    segments = 2 if gram_saves(short, long) > 0 else NS_STEPS
    symmetric = NS_STEPS + 3 * (NS_STEPS - segments)
    long_products = segments * short**2 * long
    return long_products / H200.gram + symmetric * short**3 / H200.short + 2 * long_products / H200.dense


def activation_bytes(config: ModelConfig, sequences: int) -> int:
    """Estimate the bytes that an eager forward pass keeps for its backward in bfloat16 autocast.

    The coefficients count the tensors that autograd saves. Per token, a layer keeps 36 bytes per unit of width (norms
    and stream in float32, attention in bfloat16), and each expert of the token 4 bytes per unit of width and 8 per unit
    of its inner width. The loss holds the bfloat16 logits of one chunk.
    """
    tokens, width = sequences * config.sequence, config.width
    layer = 36 * width + config.top_k * (4 * width + 8 * config.ff_width)
    logits = BFLOAT16 * min(tokens, chunk_tokens(config.vocab, BFLOAT16)) * config.vocab
    return tokens * (config.layers * layer + 12 * width) + logits


def gib(size: float, digits: int = 2) -> str:
    return f"{size / 2**30:.{digits}f} GiB"


@dataclass(frozen=True)
class Plan:
    """Predict the cost of a run: parameters, FLOPs, memory, hours and traffic.

    Nothing is trained. `muonsw advise` predicts what weight decay will do.
    """

    preset: Annotated[str, unset()] = ""
    """The model: w128, w256, w512, w768, w1024, mini or demo."""
    tokens: Annotated[str, unset(metavar="AMOUNT")] = ""
    """Tokens to train on, such as 197B, 300M or 1.5e9."""
    batch_tokens: Annotated[str, unset(metavar="AMOUNT")] = ""
    """Tokens per step. Default: the preset's."""
    setup: OmitArgPrefixes[Setup] = field(default_factory=Setup)

    def run(self) -> int:
        if not self.preset or not self.tokens:
            raise UsageError("give --preset and --tokens, such as --preset w1024 --tokens 197B")
        setup = self.setup
        try:
            setup.check()
            model, batch = preset(self.preset), preset_run(self.preset, "").tokens_per_step
            batch = parse_amount(self.batch_tokens) if self.batch_tokens else batch
            steps = math.ceil(parse_amount(self.tokens) / batch)
        except ValueError as error:
            raise UsageError(str(error)) from error

        sizes, step = count(model), plan_step(model, setup, batch)
        memory, tokens, hours = step.memory, steps * batch, steps * step.seconds / 3600.0
        flops = float(sizes.flops_per_token) * tokens
        newton_schulz = orthogonalizer_flops(model) * steps / flops
        console = Console()
        time = f"{hours:,.1f} hours" if hours >= 0.1 else f"{3600 * hours:.3g} seconds"
        gpus = "1 GPU" if setup.gpus == 1 else f"{setup.gpus:,} GPUs ({setup.strategy})"
        needs = f"{'it' if setup.gpus == 1 else 'each'} needs {gib(memory.total, 1)}"
        fits = " of" if memory.total <= H200.capacity else ", more than"
        say(console, f"{time} on {gpus}; {needs}{fits} the {gib(H200.capacity, 0)} of an H200.")
        rows = [
            ("parameters", f"{sizes.total:,}", f"{sizes.active:,} of them active per token"),
            ("steps", f"{steps:,}", f"of {batch:,} tokens"),
            ("tokens", amount(tokens, 4), f"{tokens / sizes.active:.0f} per active parameter"),
            ("FLOPs", f"{flops:.3g}", f"Newton-Schulz adds {100 * newton_schulz:.1f}%"),
            ("weights", gib(memory.weights), "float32; gradients take as much"),
            ("optimizer state", gib(memory.muon_state + memory.adamw_state), f"AdamW alone: {gib(2 * memory.weights)}"),
            ("activations", gib(memory.activations), f"estimate: {setup.micro_batch} sequences at once, compiled"),
            ("copies and buffers", gib(memory.gathered + memory.buffers), "at most"),
            ("forward and backward", f"{1e3 * step.model_seconds:,.1f} ms", f"at {setup.tflops:g} TFLOP/s per GPU"),
            ("optimizer", f"{1e3 * step.optimizer_seconds:,.1f} ms", f"{100 * step.optimizer_share:.1f}% of a step"),
        ]
        if setup.gpus > 1:
            for name, size, seconds in (
                ("optimizer receives", step.optimizer_bytes, step.exchange_seconds),
                ("model receives", step.model_bytes, step.model_link_seconds),
            ):
                rows.append((name, f"{size / 1e6:,.1f} MB", f"in {1e3 * seconds:,.1f} ms, at assumed link speeds"))
        print_table(console, Table("plan", "", [Column("")] * 3, rows))
        return 0
