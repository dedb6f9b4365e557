"""What a run costs before it is started: parameters, FLOPs, memory, hours, what decay does, and an update on N GPUs.

Sizes and bytes are counted: tests hold them to what tensors take and ranks send. Times are sums over measured rates of
one GPU, held to its measured steps, and over assumed rates of links, which are marked as such (docs/scaling.md).
Products overlap with the exchange, gradients and gathered weights with the passes of the model: fully, which is the
best that can be.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, NamedTuple, get_args

from muonsw.algorithms import ALGORITHMS
from muonsw.decay import decay_factors
from muonsw.distributed.rounds import ROUNDS, SMALLEST_ROUND
from muonsw.lab.model import (
    MUON_LR_POWERS,
    ModelConfig,
    count,
    muon_lr_multiplier,
    preset,
    role_of,
    scalings,
    unallocated,
)
from muonsw.lab.model.loss import chunk_tokens
from muonsw.lab.paper import PAPER_BATCH_TOKENS, PrintedRecipe
from muonsw.lab.theory.schedule import MOST_STEPS, peak_lr_for_horizon, sampled
from muonsw.lab.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from muonsw.orthogonalize.iterations import gram_pays
from muonsw.step import ACCELERATOR_CHUNK_BYTES

FLOAT32, BFLOAT16 = 4, 2
STEPS = 5  # of Newton-Schulz
# Roles in the muP table whose parameters Muon moves.
MUON_ROLES = ("hidden", "residual")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Horizons at which the paper swept the peak learning rate, with AdamW.
TUNED_STEPS = (5_000, 20_000)
# Decay rules that are planned, and the peak that they divide by: the group's, or the undivided one.
DECAYS = {"constant": ("constant", "group"), "scaled": ("scaled", "group"), "scaled, base": ("scaled", "base")}

Strategy = Literal["ddp", "fsdp", "ep"]
Experts = Literal["stack", "rows"]
# Bytes that a pass over memory reads and writes for each parameter, from docs/performance.md: momentum, look-ahead and
# cast 14, division 4, decay and move 10, finite check 4; AdamW reads four numbers and writes three, and is checked.
MUON_PASSES, ADAMW_PASSES = 32, 32
# Bytes of an element on its way to the rank that orthogonalizes it (the momentum's dtype) and back (the products').
THERE, BACK = FLOAT32, BFLOAT16
# Buffers of the exchange: sent, received, whole and result, for two rounds in flight.
IN_FLIGHT = 8
# The compiler and the lab's kernels keep this share of the tensors that autograd would, and compute the rest again;
# fitted to the memory of three runs on one H200.
KEPT = 0.59
# Tokens travel to their experts and back, in the forward and in the backward pass, in bfloat16.
JOURNEYS = 4

# A model that exists on paper alone: about the size and shape of the largest open mixtures.
ON_PAPER: Mapping[str, ModelConfig] = {
    "moe-1t": ModelConfig(
        width=7168, layers=61, head_dim=128, experts=384, top_k=8, ff=2048, vocab=163_840, sequence=4096
    )
}


class H200:
    """Rates of one NVIDIA H200, in units a second (docs/performance.md)."""

    memory = 4.3e12  # bytes, read and written
    dense = 720e12  # FLOPs of products
    gram = 530e12  # useful FLOPs of `X X^T`, of which one triangle is computed
    short = 400e12  # useful FLOPs of the small symmetric products
    triangles = 512  # rows from which on one triangle is computed
    overhead = 1.3e-3  # seconds of a step that depend on nothing: launches and the last wave of each product
    capacity = 141e9  # bytes of memory
    latency = 20e-6  # seconds of a collective. Assumed.
    message = 1e-6  # seconds more for each further rank of it. Assumed.


def parse_amount(text: str) -> int:
    """A number of tokens as people write it.

    Raises:
        ValueError: If it is not a positive number, with what is understood.

    Examples:
        >>> parse_amount("197B"), parse_amount("1.5e9"), parse_amount("300M"), parse_amount("524,288")
        (197000000000, 1500000000, 300000000, 524288)
    """
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)", text.strip().replace(",", "").replace("_", ""), re.I)
    try:
        number = float(match.group(1)) * UNITS[match.group(2).upper()] if match else 0.0
    except ValueError:
        number = 0.0
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 197B, 300M, 1.5e9 or 524288")
    return round(number)


def amount(number: float, digits: int = 3) -> str:
    """A large number with the letter that `parse_amount` understands.

    Examples:
        >>> amount(18_350_080_000), amount(962_560), amount(197_132_288_000, 4), amount(999_960_000), amount(512)
        ('18.4B', '963K', '197.1B', '1B', '512')
    """
    rounded = float(f"{number:.{digits}g}")
    letter, unit = max(UNITS.items(), key=lambda one: one[1] if one[1] <= rounded else 0.0)
    return f"{rounded / unit:g}{letter}"


class ModelPart(NamedTuple):
    """Parameters that are moved in one way."""

    parameters: int
    stack: int  # how many matrices lie on each other in one tensor; 1 for plain matrices
    matrices: Mapping[tuple[int, int], int]  # those that Muon orthogonalizes, by short and long side; none for AdamW's


class ModelParts(NamedTuple):
    """A model, divided by what the optimizer and ranks do with it."""

    experts: ModelPart  # stacks of experts
    hidden: ModelPart  # other matrices of Muon
    rest: ModelPart  # what AdamW moves

    @property
    def muon(self) -> int:
        """Parameters that Muon moves."""
        return self.experts.parameters + self.hidden.parameters


@cache
def parts_of(config: ModelConfig) -> ModelParts:
    """Divide the modules that would be trained; fused projections count one by one.

    Examples:
        >>> parts = parts_of(ModelConfig(width=256))
        >>> parts.experts.parameters, sum(parts.experts.matrices.values()), parts.hidden.matrices
        (56623104, 288, {(256, 256): 48})
    """
    model = unallocated(config)
    fused, sizes = model.fused_projections(), Counter[str]()
    matrices: dict[str, Counter[tuple[int, int]]] = {"experts": Counter(), "hidden": Counter()}
    for name, param in model.named_parameters():
        if role_of(name) not in MUON_ROLES:
            sizes["rest"] += param.numel()
            continue
        part = "experts" if param.dim() == 3 and config.experts > 1 else "hidden"
        sizes[part] += param.numel()
        *stack, rows, columns = param.shape
        for size in next((sizes for pattern, sizes in fused.items() if fnmatchcase(name, pattern)), (rows,)):
            matrices[part][min(size, columns), max(size, columns)] += math.prod(stack)
    return ModelParts(
        ModelPart(sizes["experts"], config.experts, dict(matrices["experts"])),
        ModelPart(sizes["hidden"], 1, dict(matrices["hidden"])),
        ModelPart(sizes["rest"], 1, {}),
    )


def newton_schulz_flops(short: int, long: int) -> int:
    """FLOPs that Newton-Schulz takes for one matrix: three products in each of its steps."""
    return STEPS * (4 * short**2 * long + 2 * short**3)


def orthogonalizer_flops(config: ModelConfig) -> float:
    """FLOPs that Newton-Schulz takes in one update, every matrix by itself.

    Examples:
        >>> seven_squares = ModelConfig(width=64, layers=1, experts=1, top_k=1, ff=64)
        >>> orthogonalizer_flops(seven_squares) / (5 * 6 * 64**3)
        7.0
    """
    pairs = (pair for part in parts_of(config) for pair in part.matrices.items())
    return float(sum(number * newton_schulz_flops(*shape) for shape, number in pairs))


@dataclass(frozen=True)
class Cost:
    """Runs and what they take."""

    runs: int
    tokens: int  # trained on
    flops: float  # training, Newton-Schulz and evaluation together

    def hours(self, tflops: float, workers: int) -> float:
        """At a sustained rate for each run, with so many runs at a time."""
        return self.flops / (tflops * 1e12) / 3600.0 / max(1, min(workers, self.runs))


def cost(configs: Iterable[RunConfig]) -> Cost:
    """Of runs, equal ones counted once."""
    distinct = list(dict.fromkeys(configs))
    tokens = sum(config.steps * config.tokens_per_step for config in distinct)
    return Cost(len(distinct), tokens, math.fsum(map(run_flops, distinct)))


def run_flops(config: RunConfig) -> float:
    """FLOPs of one run: three passes a trained token, one a validated token, and Newton-Schulz in every update.

    Examples:
        >>> from muonsw.lab.train.presets import preset_run
        >>> f"{run_flops(preset_run('w256', '')):.2g}"
        '4e+18'
    """
    each = _flops_per_token(config.model)
    evaluations = 1 + math.ceil(config.steps / config.eval_every)
    validated = evaluations * (config.data.eval_windows or 0) * config.model.sequence
    muon = orthogonalizer_flops(config.model) if ALGORITHMS[config.optimizer.matrix_algorithm].matrices else 0.0
    return config.steps * (config.tokens_per_step * each + muon) + validated * each / 3.0


@cache
def _flops_per_token(config: ModelConfig) -> int:
    return count(config).flops_per_token


class Sharding(NamedTuple):
    """How a part lies on the ranks: `stack * cut * copies` of them."""

    stack: int = 1  # ranks over which stacks are divided
    cut: int = 1  # ranks over which each matrix is cut
    copies: int = 1  # ranks that hold the same
    stride: int = 1  # how far apart two neighbours of a cut are in the numbering of ranks

    def fullest(self, part: ModelPart) -> float:
        """The share of a stack on the rank that holds the most of it."""
        return math.ceil(part.stack / self.stack) / part.stack

    def held(self, part: ModelPart) -> float:
        """Elements of a part on the rank that holds the most."""
        return self.fullest(part) * part.parameters / self.cut


@dataclass(frozen=True)
class Setup:
    """The GPUs that train, all like the H200 that was measured: what each holds, sends and waits for."""

    gpus: int = 1
    """How many."""

    strategy: Strategy = "ddp"
    """ddp: a copy on each, Muon's matrices divided among them; fsdp: everything divided; ep: experts stay on their GPUs
    and tokens travel, the rest is divided."""

    experts: Experts = "stack"
    """Under fsdp: experts divided along their stack, or each by its rows."""

    replicas: int = 1
    """Copies: under fsdp of the whole model (HSDP), under ep of all but the experts."""

    micro_batch: int = 8
    """Sequences that a GPU computes at once, and whose activations it holds."""

    tflops: float = 400.0
    """What one GPU sustains in the model, in 1e12 FLOP a second: not what a data sheet says."""

    momentum_on_owner: bool = False
    """Under ddp: each momentum on one GPU alone."""

    recompute: bool = False
    """Keep the inputs of layers alone, and compute the rest again: a third more FLOPs."""

    gathered_bytes: Literal[2, 4] = 4
    """Bytes of a weight that is gathered; the trainer gathers float32."""

    period: int = 1
    """Orthogonalize matrices that are cut as wholes in every Nth update alone, and by rows in the others (MuonBP)."""

    gpus_per_node: int = 8
    """GPUs of one machine."""

    inside: float = 360.0
    """GB/s that a GPU receives from others of its machine while it sends as many. Assumed, not measured."""

    outside: float = 40.0
    """The same from other machines. Assumed, not measured."""

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: With the setting and what it must be.
        """
        for name, value, known in (("strategy", self.strategy, Strategy), ("experts", self.experts, Experts)):
            if value not in get_args(known):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(get_args(known))}")
        names = ("micro_batch", "tflops", "gathered_bytes", "period", "gpus_per_node", "inside", "outside")
        _require(**{name: getattr(self, name) for name in names})
        if self.gpus < 1 or self.replicas < 1 or self.gpus % self.replicas:
            raise ValueError(f"gpus={self.gpus} must be a positive multiple of replicas={self.replicas}")
        if self.replicas > 1 and self.strategy == "ddp":
            raise ValueError(f"replicas={self.replicas} needs strategy fsdp or ep: ddp has a copy on every GPU")

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model, or under "ep" of all but its experts."""
        return 1 if self.strategy == "ddp" else self.gpus // self.replicas

    def shardings(self, parts: ModelParts) -> tuple[Sharding, Sharding, Sharding]:
        """How each part of a model lies."""
        others, number = Sharding(cut=self.shards, copies=self.gpus // self.shards), parts.experts.stack
        experts = others
        if self.strategy == "fsdp" and number > 1 and self.experts == "stack":
            experts = Sharding(stack=min(self.shards, number), copies=self.replicas)
        elif self.strategy == "ep" and number > 1:
            stack = math.gcd(self.gpus, number)
            experts = Sharding(stack=stack, cut=self.gpus // stack, stride=stack)
        return experts, others, others

    def owners(self, sharding: Sharding) -> int:
        """Ranks among which the matrices of a part are divided."""
        return sharding.copies if self.strategy == "ddp" else sharding.cut

    def link(self, reach: int) -> float:
        """Bytes a second among ranks of which the first and the last are so far apart."""
        return 1e9 * (self.inside if reach <= self.gpus_per_node else self.outside)


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that holds the most."""

    weights: float  # float32
    gradients: float  # float32
    muon_state: float  # one float32 momentum for each element of hidden and expert matrices
    adamw_state: float  # two float32 averages for every other element
    activations: float  # an estimate of what a micro-batch keeps for its backward pass, see `activation_bytes`
    gathered: float  # bfloat16 copies of weights; those that are gathered, two layers at a time
    buffers: float  # of the optimizer's exchange and products, at most

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(vars(self).values())

    @property
    def adamw_only_state(self) -> float:
        """What AdamW for all parameters would keep instead of both states."""
        return 2 * self.weights


@dataclass(frozen=True)
class UpdateCost:
    """What one update takes."""

    setup: Setup
    memory: Memory
    model_bytes: float  # that a GPU receives for weights, gradients and tokens
    optimizer_bytes: float  # that a GPU receives for Muon's exchange, on average over ranks
    model_seconds: float  # forward and backward, computing
    model_link_seconds: float  # what they wait for on links; hidden as far as it is less
    product_seconds: float  # orthogonalizing, on the rank with the most
    exchange_seconds: float  # the optimizer's exchange; hidden behind its products as far as it is less
    pass_seconds: float  # momentum, decay, AdamW: passes over memory
    overhead_seconds: float  # of the optimizer, whatever the size

    @property
    def optimizer_seconds(self) -> float:
        """A step of the optimizer."""
        return max(self.product_seconds, self.exchange_seconds) + self.pass_seconds + self.overhead_seconds

    @property
    def seconds(self) -> float:
        """All of it."""
        return max(self.model_seconds, self.model_link_seconds) + self.optimizer_seconds

    @property
    def optimizer_share(self) -> float:
        """The optimizer's part."""
        return self.optimizer_seconds / self.seconds


def plan_update(model: ModelConfig, setup: Setup, batch_tokens: int = PAPER_BATCH_TOKENS) -> UpdateCost:
    """Predict an update of so many tokens, on all GPUs together.

    Examples:
        >>> one = plan_update(ModelConfig(width=1024), Setup())
        >>> one.optimizer_bytes, f"{1e3 * one.optimizer_seconds:.0f} ms"
        (0.0, '29 ms')
    """
    setup.check()
    _require(batch_tokens=batch_tokens)
    parts = parts_of(model)
    *muon, (rest, as_rest) = zip(parts, setup.shardings(parts), strict=True)
    muon = [(part, sharding) for part, sharding in muon if part.parameters]
    flops = _flops_per_token(model) * (4 / 3 if setup.recompute else 1.0)
    traffic = list(_model_traffic(model, parts, setup, batch_tokens / setup.gpus))
    moved = MUON_PASSES * sum(sharding.held(part) for part, sharding in muon) + ADAMW_PASSES * as_rest.held(rest)
    return UpdateCost(
        setup=setup,
        memory=_memory(model, parts, setup),
        model_bytes=sum(size for size, _ in traffic),
        optimizer_bytes=math.fsum(_exchanged(*pair, setup) for pair in muon),
        model_seconds=flops * batch_tokens / (setup.gpus * setup.tflops * 1e12),
        model_link_seconds=sum(size / setup.link(reach) for size, reach in traffic),
        product_seconds=math.fsum(_product_seconds(*pair, setup) for pair in muon),
        exchange_seconds=math.fsum(_exchange_seconds(*pair, setup) for pair in muon),
        pass_seconds=moved / H200.memory,
        overhead_seconds=H200.overhead,
    )


def _model_traffic(model: ModelConfig, parts: ModelParts, setup: Setup, tokens: float) -> Iterator[tuple[float, int]]:
    """Bytes that a rank receives for its tokens of an update, each with how far the ranks are apart.

    Divided weights are gathered for each forward and each backward pass of a micro-batch; gradients are added up once.
    """
    micro_batches = max(1, math.ceil(tokens / (setup.micro_batch * model.sequence)))
    for part, sharding in zip(parts, setup.shardings(parts), strict=True):
        divided = sharding.cut if setup.strategy == "ep" else sharding.cut * sharding.stack
        held = part.parameters / (sharding.cut * sharding.stack)
        reach = setup.shards if setup.strategy == "fsdp" else divided * sharding.stride
        yield (2 * micro_batches * setup.gathered_bytes + FLOAT32) * held * (divided - 1), reach
        yield 2 * FLOAT32 * (sharding.copies - 1) / sharding.copies * held, setup.gpus
    if setup.strategy == "ep":
        stack = setup.shardings(parts)[0].stack
        size = JOURNEYS * BFLOAT16 * tokens * model.top_k * model.width * model.layers
        yield size * (stack - 1) / stack, stack


def _exchanged(part: ModelPart, sharding: Sharding, setup: Setup) -> float:
    """Bytes that a rank receives in the exchange of a part, on average over steps."""
    if setup.strategy == "ddp":
        return BACK * (sharding.copies - 1) / sharding.copies * part.parameters
    others = (sharding.cut - 1) / sharding.cut**2
    return (THERE + BACK) * others * part.parameters / sharding.stack / setup.period


def _exchange_seconds(part: ModelPart, sharding: Sharding, setup: Setup) -> float:
    """On links, with the latency of every collective."""
    ranks = setup.owners(sharding)
    if ranks == 1:
        return 0.0
    share = FLOAT32 * part.parameters / sharding.stack / ranks
    collectives = math.ceil(share / _room(share)) * (1 if setup.strategy == "ddp" else 2)
    waiting = collectives * (H200.latency + H200.message * (ranks - 1)) / setup.period
    return _exchanged(part, sharding, setup) / setup.link(ranks * sharding.stride) + waiting


def _room(share: float) -> float:
    """Bytes of matrices that a rank may own in a round, given those that it owns in all."""
    return min(ACCELERATOR_CHUNK_BYTES, max(SMALLEST_ROUND, math.ceil(share / ROUNDS)))


def _product_seconds(part: ModelPart, sharding: Sharding, setup: Setup) -> float:
    """Of products on the rank with the most, on average over steps."""
    here = {shape: round(number * sharding.fullest(part)) for shape, number in part.matrices.items()}
    whole = heaviest([(orthogonalizing(*shape), number) for shape, number in here.items()], setup.owners(sharding))
    if setup.period == 1 or sharding.cut == 1:
        return whole
    blocks = 0.0
    for (rows, columns), number in here.items():
        blocks += number * orthogonalizing(*sorted((math.ceil(rows / sharding.cut), columns)))
    return (whole + (setup.period - 1) * blocks) / setup.period


def orthogonalizing(short: int, long: int) -> float:
    """Seconds of the products of one matrix among many: see `muonsw.orthogonalize.iterations` for how many there are.

    Examples:
        >>> f"{1e6 * orthogonalizing(1024, 2816):.0f} us"
        '65 us'
    """
    if short < H200.triangles:
        return newton_schulz_flops(short, long) / H200.dense
    segments = 2 if gram_pays(short, long, STEPS) else STEPS
    symmetric = STEPS + 3 * (STEPS - segments)
    long_products = segments * short**2 * long
    return long_products / H200.gram + symmetric * short**3 / H200.short + 2 * long_products / H200.dense


def heaviest(costs: Iterable[tuple[float, int]], owners: int) -> float:
    """The load of the most loaded of the owners: costs, each with how often it is there, are given out largest first.

    Examples:
        >>> heaviest([(1.0, 2), (8.0, 1), (2.0, 1), (4.0, 1)], 2)
        8.0
    """
    loads = [0.0] * owners
    for one, number in sorted(costs, reverse=True):
        for _ in range(number):
            heapq.heapreplace(loads, loads[0] + one)
    return max(loads)


def _memory(model: ModelConfig, parts: ModelParts, setup: Setup) -> Memory:
    """What training with Muon holds in bfloat16 autocast over float32 weights."""
    experts, others, _ = setup.shardings(parts)
    muon = experts.held(parts.experts) + others.held(parts.hidden)
    rest = others.held(parts.rest)
    on_owner = setup.momentum_on_owner and setup.strategy == "ddp"
    return Memory(
        weights=FLOAT32 * (muon + rest),
        gradients=FLOAT32 * (muon + rest),
        muon_state=FLOAT32 * (parts.muon / setup.gpus if on_owner else muon),
        adamw_state=2 * FLOAT32 * rest,
        activations=_activations(model, setup),
        gathered=_gathered(model, parts, setup),
        buffers=_buffers(parts, setup),
    )


def _activations(model: ModelConfig, setup: Setup) -> float:
    if not setup.recompute:
        return KEPT * activation_bytes(model, setup.micro_batch)
    inputs = FLOAT32 * setup.micro_batch * model.sequence * model.width * model.layers
    return inputs + KEPT * activation_bytes(replace(model, layers=1), setup.micro_batch)


def activation_bytes(config: ModelConfig, sequences: int) -> int:
    """Estimated bytes that one eager forward pass keeps for its backward in bfloat16 autocast, copies of weights apart.

    A layer keeps 36 bytes a token for each unit of the width (norms and the stream in float32, attention in bfloat16),
    and for each expert of a token 4 for each unit of the width and 8 for each of the expert's; the coefficients count
    the tensors that autograd saves. The loss holds the bfloat16 logits of one chunk. Fragmentation and temporaries of
    the backward pass are not in it.
    """
    tokens, width = sequences * config.sequence, config.width
    layer = 36 * width + config.top_k * (4 * width + 8 * config.ff_width)
    logits = BFLOAT16 * min(tokens, chunk_tokens(config.vocab, BFLOAT16)) * config.vocab
    return tokens * (config.layers * layer + 12 * width) + logits


def _gathered(model: ModelConfig, parts: ModelParts, setup: Setup) -> float:
    """Copies in bfloat16, and weights that are whole for a while: the layer at work, the next one, and the rest."""
    if setup.shards == 1:
        return BFLOAT16 * (parts.muon + parts.rest.parameters)
    stack = setup.shardings(parts)[0].stack if setup.strategy == "ep" else 1
    layer = (parts.experts.parameters / stack + parts.hidden.parameters) / model.layers
    return setup.gathered_bytes * (2 * layer + parts.rest.parameters) + BFLOAT16 * layer


def _buffers(parts: ModelParts, setup: Setup) -> float:
    """Eight rounds where matrices travel; two batches where they do not."""
    sizes = []
    for part, sharding in zip(parts[:2], setup.shardings(parts), strict=False):
        owners = setup.owners(sharding)
        share = FLOAT32 * part.parameters / sharding.stack / owners
        sizes.append(IN_FLIGHT * _room(share) if owners > 1 else 2 * min(ACCELERATOR_CHUNK_BYTES, share))
    return max(sizes)


@dataclass(frozen=True)
class GroupPlan:
    """Hidden and expert matrices under one rule for their learning rate."""

    name: str  # the algorithm with the rule
    peak_lr: float  # highest learning rate of the group
    totals: Mapping[str, float]  # total decay, the sum of phi over the run, by `DECAYS`
    phi_peak: float  # the share of a weight that a step at the peak takes, under both rules with the group's peak
    phi_peak_over_memory: float  # phi_peak / (1 - beta); well under one, or weights shrink while momentum remembers


def plan_groups(
    model: ModelConfig | None, peak_lr: float, steps: int, multiples: list[float], optimizer: OptimizerConfig
) -> tuple[GroupPlan, ...]:
    """Learning rates and decay of hidden matrices by every rule; without a model, by the learning rate as it is."""
    muon, adamw = 1.0 - optimizer.momentum, 1.0 - optimizer.betas[0]
    rules = [("Muon", 1.0, muon)]
    if model is not None:
        rules = [(f"Muon, {rule}", muon_lr_multiplier(model, rule), muon) for rule in MUON_LR_POWERS]
        rules.append(("AdamW", scalings(model)["hidden"].lr, adamw))
    groups = []
    for name, multiplier, forgets in rules:
        own, totals = peak_lr * multiplier, {}
        for title, (rule, peak) in DECAYS.items():
            lrs = (own * multiple for multiple in multiples)
            phis = decay_factors(rule, optimizer.weight_decay, lrs, own if peak == "group" else peak_lr)
            totals[title] = steps * math.fsum(phis) / len(multiples)
        phi = optimizer.weight_decay * own
        groups.append(GroupPlan(name, own, totals, phi, phi / forgets))
    return tuple(groups)


@dataclass(frozen=True)
class RunPlan:
    """A run, computed without running it."""

    model: ModelConfig
    parameters: int
    active: int  # parameters that one token uses
    steps: int
    batch_tokens: int  # tokens in an update
    tokens: int  # of the whole run
    tokens_per_active: float
    peak_lr: float  # base learning rate at its highest
    peak_lr_from: str
    weight_decay: float
    final_fraction: float  # what is left of the learning rate in the last step
    warmup_steps: int
    groups: tuple[GroupPlan, ...]  # hidden and expert matrices under every rule that the lab knows
    flops_per_token: int  # forward and backward
    flops: float  # of the whole run, without the orthogonalizer
    orthogonalizer_share: float  # what Newton-Schulz adds to them
    update: UpdateCost  # memory and times of one update
    hours: float  # of all updates


def plan(
    model: ModelConfig,
    steps: int,
    *,
    batch_tokens: int = PAPER_BATCH_TOKENS,
    peak_lr: float | None = None,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
    setup: Setup | None = None,
) -> RunPlan:
    """Compute a run of so many steps, on one GPU unless `setup` has more.

    Without a peak learning rate the horizon gives one. Of the optimizer weight decay and momenta are read.

    Examples:
        >>> result = plan(preset("w256"), 35_000)
        >>> result.parameters, f"{result.peak_lr:.4f}", result.warmup_steps
        (72677632, '0.0105', 1000)
    """
    optimizer, schedule = optimizer or OptimizerConfig(), schedule or ScheduleConfig()
    _require(steps=steps, batch_tokens=batch_tokens)
    sizes, tokens = count(model), steps * batch_tokens
    horizon = max(1, round(tokens / PAPER_BATCH_TOKENS))
    chosen = peak_lr_for_horizon(horizon) if peak_lr is None else peak_lr
    _require(peak_lr=chosen)
    flops = float(sizes.flops_per_token) * tokens
    multiples = sampled(schedule.multiple(steps), steps)
    update = plan_update(model, setup or Setup(), batch_tokens)
    return RunPlan(
        model=model,
        parameters=sizes.total,
        active=sizes.active,
        steps=steps,
        batch_tokens=batch_tokens,
        tokens=tokens,
        tokens_per_active=tokens / sizes.active,
        peak_lr=chosen,
        peak_lr_from="given" if peak_lr is not None else _horizon_note(horizon),
        weight_decay=optimizer.weight_decay,
        final_fraction=multiples[-1],
        warmup_steps=schedule.warmup(steps),
        groups=plan_groups(model, chosen, steps, multiples, optimizer),
        flops_per_token=sizes.flops_per_token,
        flops=flops,
        orthogonalizer_share=orthogonalizer_flops(model) * steps / flops,
        update=update,
        hours=steps * update.seconds / 3600.0,
    )


def _horizon_note(horizon: int) -> str:
    if horizon < TUNED_STEPS[0]:
        return f"capped: the horizon rule is not known below {TUNED_STEPS[0]:,} steps of {PAPER_BATCH_TOKENS:,} tokens"
    known = "" if horizon <= TUNED_STEPS[1] else f", beyond the {TUNED_STEPS[1]:,} it was tuned for"
    return f"0.02 (T/5000)^(-1/3) with T = {horizon:,} steps of {PAPER_BATCH_TOKENS:,} tokens{known}"


def _require(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")


@dataclass(frozen=True)
class RecipePlan:
    """What decay does under a printed recipe; None where that needs a number of steps and none is known."""

    recipe: PrintedRecipe
    batch_tokens: int | None  # printed, or given by the user
    steps: int | None  # printed, or tokens over batch
    decay_tokens: float  # total of constant decay times the batch in tokens, which needs no number of steps
    scaled_over_constant: float  # total decay of the scaled rule relative to the constant one
    final_ratio: float  # the same in the last step
    equal_total_weight_decay: float  # lambda at which scaled decay takes as much in total as constant decay
    groups: tuple[GroupPlan, ...] | None  # the printed learning rate; for the paper's own runs every rule of the lab


def plan_recipe(
    recipe: PrintedRecipe, *, batch_tokens: int | None = None, schedule: ScheduleConfig | None = None
) -> RecipePlan:
    """Compute what decay does under a printed recipe; the batch is needed where the paper does not print one.

    Examples:
        >>> from muonsw.lab.paper import RECIPES
        >>> result = plan_recipe(RECIPES["kimi-k2"])
        >>> result.steps, round(result.scaled_over_constant, 2), round(result.final_ratio, 2)
        (None, 0.73, 0.1)
    """
    if recipe.batch_tokens is not None and batch_tokens not in (None, recipe.batch_tokens):
        raise ValueError(f"{recipe.title} has a batch of {recipe.batch_tokens:,} tokens; leave --batch-tokens out")
    batch = recipe.batch_tokens or batch_tokens
    steps = recipe.steps or (None if batch is None else math.ceil(recipe.tokens / batch))
    without_warmup = ScheduleConfig(warmup_steps=None if recipe.steps else 0)
    shape = replace(schedule or without_warmup, final_fraction=recipe.final_fraction)
    updates = steps or MOST_STEPS
    multiples = sampled(shape.multiple(updates), updates)
    optimizer = OptimizerConfig(weight_decay=recipe.weight_decay)
    mean, mean_square = (math.fsum(one**power for one in multiples) / len(multiples) for power in (1, 2))
    model = preset(recipe.preset) if recipe.preset else None
    return RecipePlan(
        recipe=recipe,
        batch_tokens=batch,
        steps=steps,
        decay_tokens=recipe.weight_decay * recipe.peak_lr * mean * recipe.tokens,
        scaled_over_constant=mean_square / mean,
        final_ratio=multiples[-1],
        equal_total_weight_decay=recipe.weight_decay * mean / mean_square,
        groups=None if steps is None else plan_groups(model, recipe.peak_lr, steps, multiples, optimizer),
    )
