"""The cost model of docs/scaling.md: what each of N GPUs holds, sends and waits for in an update, before anyone has N.

Sizes and bytes are counted: tests hold them to what ranks hold and send. Times are sums over measured rates of one GPU,
held to its measured steps, and over assumed rates of links, which are marked as such: several GPUs have not been
measured. Products overlap with the exchange, gradients and gathered weights with the passes of the model, both fully,
which is the best that can be.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from muonsw.distributed.plan import ROUNDS, SMALLEST_ROUND
from muonsw.lab.model import ModelConfig, count
from muonsw.lab.model.counts import BFLOAT16, FLOAT32, MUON_ROLES, activation_bytes, muon_matrices, parameter_shapes
from muonsw.lab.model.init import role_of
from muonsw.orthogonalize.iterations import gram_pays
from muonsw.step import ACCELERATOR_CHUNK_BYTES

STRATEGIES = ("ddp", "fsdp", "ep")
EXPERTS = ("stack", "rows")
STEPS = 5
# Bytes that a pass over memory reads and writes for each parameter, from docs/performance.md: momentum, look-ahead and
# cast 14, division 4, decay and move 10, finite check 4; AdamW reads four numbers and writes three, and is checked.
MUON_PASSES, ADAMW_PASSES = 32, 32
# Buffers of the exchange: sent, received, whole and result, for two rounds in flight.
IN_FLIGHT = 8
# The compiler and the lab's kernels keep this share of the tensors that autograd would, and compute the rest again;
# fitted to the memory of three runs on one H200.
KEPT = 0.59
# Tokens travel to their experts and back, in the forward and in the backward pass, in bfloat16.
JOURNEYS, TOKEN_BYTES = 4, 2


@dataclass(frozen=True)
class Hardware:
    """Rates of one GPU and of its links, in units a second.

    Attributes:
        memory: Bytes, read and written.
        dense: FLOPs of products.
        gram: Useful FLOPs of `X X^T`, of which one triangle is computed.
        short: Useful FLOPs of the small symmetric products.
        triangles: Rows from which on one triangle is computed.
        overhead: Seconds of an optimizer step that depend on nothing: launches and the last wave of each product.
        capacity: Bytes of memory.
        node: GPUs of one machine.
        inside: Bytes that a GPU sends to others of its node while it receives as many. Assumed.
        outside: The same between nodes. Assumed.
        latency: Seconds of a collective. Assumed.
        message: Seconds more for each further rank of it. Assumed.
    """

    memory: float = 4.3e12
    dense: float = 720e12
    gram: float = 530e12
    short: float = 400e12
    triangles: int = 512
    overhead: float = 1.3e-3
    capacity: float = 141e9
    node: int = 8
    inside: float = 360e9
    outside: float = 40e9
    latency: float = 20e-6
    message: float = 1e-6

    def link(self, reach: int) -> float:
        """Bytes a second among ranks of which the first and the last are so far apart."""
        return self.inside if reach <= self.node else self.outside


# One NVIDIA H200; see docs/performance.md for what was measured.
H200 = Hardware()

# A model that nobody has trained here: about the size and shape of the largest open mixtures.
ON_PAPER: Mapping[str, ModelConfig] = {
    "moe-1t": ModelConfig(
        width=7168, layers=61, head_dim=128, experts=384, top_k=8, ff=2048, vocab=163_840, sequence=4096
    )
}


@dataclass(frozen=True)
class ModelPart:
    """Parameters that are spread in one way.

    Attributes:
        parameters: How many numbers.
        stack: How many matrices lie on each other in one tensor; 1 for plain matrices.
        matrices: Those that Muon orthogonalizes, by rows and columns; none for AdamW's.
    """

    parameters: int
    stack: int
    matrices: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class ModelParts:
    """A model, divided by what ranks do with it."""

    experts: ModelPart
    hidden: ModelPart
    rest: ModelPart


@cache
def parts_of(model: ModelConfig) -> ModelParts:
    """Stacks of experts, other matrices of Muon, and what AdamW moves.

    Examples:
        >>> parts = parts_of(ModelConfig(width=256))
        >>> parts.experts.parameters, sum(parts.experts.matrices.values()), parts.hidden.matrices
        (56623104, 288, {(256, 256): 48})
    """
    sizes, stacked = dict[str, int](), set[str]()
    for name, shape in parameter_shapes(model):
        sizes[name] = math.prod(shape)
        if len(shape) == 3 and model.experts > 1:
            stacked.add(name)
    muon = {name for name in sizes if role_of(name) in MUON_ROLES}
    matrices = Counter((min(pair), max(pair)) for pair in muon_matrices(model))
    attention = Counter({(model.width, model.width): 4 * model.layers})
    hidden = attention if stacked else matrices
    return ModelParts(
        ModelPart(sum(sizes[name] for name in stacked), model.experts, dict(matrices - hidden)),
        ModelPart(sum(sizes[name] for name in muon - stacked), 1, dict(hidden)),
        ModelPart(sum(sizes[name] for name in sizes.keys() - muon), 1, {}),
    )


@dataclass(frozen=True)
class Spread:
    """How a part lies on the ranks: `stack * cut * copies` of them.

    Attributes:
        stack: Ranks over which stacks are divided.
        cut: Ranks over which each matrix is cut.
        copies: Ranks that hold the same.
        stride: How far apart two neighbours of a cut are in the numbering of ranks.
    """

    stack: int = 1
    cut: int = 1
    copies: int = 1
    stride: int = 1

    def held(self, part: ModelPart) -> float:
        """Numbers of a part on the rank that holds the most."""
        return math.ceil(part.stack / self.stack) / part.stack * part.parameters / self.cut


@dataclass(frozen=True)
class RankLayout:
    """A strategy for so many GPUs.

    Attributes:
        gpus: How many.
        strategy: "ddp" has copies everywhere and divides Muon's matrices among them; "fsdp" divides everything; "ep"
            sends tokens to experts that stay where they are, and divides the rest like "fsdp".
        experts: Under "fsdp", whether experts are divided along their "stack" or each by its "rows".
        replicas: How many copies there are: under "fsdp" of the whole (HSDP), under "ep" of all but the experts.
    """

    gpus: int
    strategy: str = "fsdp"
    experts: str = "stack"
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} must be one of {', '.join(STRATEGIES)}")
        if self.experts not in EXPERTS:
            raise ValueError(f"experts={self.experts!r} must be one of {', '.join(EXPERTS)}")
        if self.gpus < 1 or self.replicas < 1 or self.gpus % self.replicas:
            raise ValueError(f"gpus={self.gpus} must be a positive multiple of replicas={self.replicas}")
        if self.replicas > 1 and self.strategy == "ddp":
            raise ValueError(f"replicas={self.replicas} needs strategy fsdp or ep: ddp has a copy on every GPU")

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model, or under "ep" of all but its experts."""
        return 1 if self.strategy == "ddp" else self.gpus // self.replicas

    def of_experts(self, part: ModelPart) -> Spread:
        """How stacks lie."""
        if self.strategy == "ddp" or part.stack == 1 or (self.strategy == "fsdp" and self.experts == "rows"):
            return self.of_others()
        if self.strategy == "fsdp":
            return Spread(stack=min(self.shards, part.stack), copies=self.replicas)
        stack = math.gcd(self.gpus, part.stack)
        return Spread(stack=stack, cut=self.gpus // stack, stride=stack)

    def of_others(self) -> Spread:
        """How everything else lies."""
        return Spread(cut=self.shards, copies=self.gpus // self.shards)


@dataclass(frozen=True)
class Scenario:
    """What a run on several GPUs depends on, beside its model.

    Attributes:
        layout: How the model lies on the GPUs.
        batch_tokens: Tokens in an update, on all GPUs.
        micro_batch: Sequences that a GPU computes at once.
        tflops: What one GPU sustains in the model, in 1e12 FLOPs a second.
        hardware: Rates of GPU and links.
        there: Bytes of a number on its way to the rank that orthogonalizes it (the dtype of the momentum).
        back: Bytes of a number on its way back (the dtype of the products).
        gathered: Bytes of a weight that is gathered for the model; the lab's trainer gathers float32.
        momentum_on_owner: Under ddp, whether each momentum lives on one rank alone.
        recompute: Whether layers keep their input alone, and compute the rest again in the backward pass.
        period: Matrices that are cut are orthogonalized whole in every so many steps, and by each rank's own rows in
            the others (MuonBP). Our optimizer does not do that: above 1 it is a question on paper.
    """

    layout: RankLayout
    batch_tokens: int
    micro_batch: int = 8
    tflops: float = 400.0
    hardware: Hardware = H200
    there: int = 4
    back: int = 2
    gathered: int = 4
    momentum_on_owner: bool = False
    recompute: bool = False
    period: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "micro_batch", "tflops", "there", "back", "gathered", "period"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the GPU that holds the most.

    Attributes:
        weights: float32.
        gradients: float32.
        muon_state: Momentum, float32.
        adamw_state: Two averages, float32.
        activations: What a micro-batch keeps for its backward pass; an estimate.
        gathered: Copies of weights that the model computes with: two layers at a time, or all where none is divided.
        buffers: Of the optimizer's exchange and products, at most.
    """

    weights: float
    gradients: float
    muon_state: float
    adamw_state: float
    activations: float
    gathered: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(vars(self).values())


@dataclass(frozen=True)
class RankPlan:
    """An update on N GPUs.

    Attributes:
        layout: How the model lies.
        memory: Bytes on one GPU.
        model_bytes: That a GPU receives for weights, gradients and tokens.
        optimizer_bytes: That a GPU receives for Muon's exchange, on average over ranks.
        model_seconds: Forward and backward, computing.
        model_link_seconds: What they wait for on links; hidden as far as it is less.
        product_seconds: Orthogonalizing, on the rank with the most.
        exchange_seconds: The optimizer's exchange; hidden behind its products as far as it is less.
        pass_seconds: Momentum, decay, AdamW: passes over memory.
        overhead_seconds: Of the optimizer, whatever the size.
    """

    layout: RankLayout
    memory: RankMemory
    model_bytes: float
    optimizer_bytes: float
    model_seconds: float
    model_link_seconds: float
    product_seconds: float
    exchange_seconds: float
    pass_seconds: float
    overhead_seconds: float

    @property
    def optimizer_seconds(self) -> float:
        """A step of the optimizer."""
        return max(self.product_seconds, self.exchange_seconds) + self.pass_seconds + self.overhead_seconds

    @property
    def step_seconds(self) -> float:
        """An update."""
        return max(self.model_seconds, self.model_link_seconds) + self.optimizer_seconds

    @property
    def optimizer_share(self) -> float:
        """The optimizer's part of an update."""
        return self.optimizer_seconds / self.step_seconds

    @property
    def longest(self) -> str:
        """What takes the optimizer longest."""
        terms = {
            "products": self.product_seconds,
            "exchange": self.exchange_seconds,
            "passes over memory": self.pass_seconds,
            "overhead": self.overhead_seconds,
        }
        return max(terms, key=lambda name: terms[name])


def plan_ranks(model: ModelConfig, scenario: Scenario) -> RankPlan:
    """Predict an update on several GPUs.

    Examples:
        >>> one = plan_ranks(ModelConfig(width=1024), Scenario(RankLayout(1), batch_tokens=524_288))
        >>> one.optimizer_bytes, f"{1e3 * one.optimizer_seconds:.0f} ms"
        (0.0, '29 ms')
    """
    parts, layout, hardware = parts_of(model), scenario.layout, scenario.hardware
    met = [(parts.experts, layout.of_experts(parts.experts)), (parts.hidden, layout.of_others())]
    met = [(part, spread) for part, spread in met if part.parameters]
    flops = count(model).flops_per_token * (4 / 3 if scenario.recompute else 1.0)
    sent, link_seconds = _traffic_of_model(model, parts, scenario)
    muon, rest = sum(spread.held(part) for part, spread in met), layout.of_others().held(parts.rest)
    return RankPlan(
        layout=layout,
        memory=_memory(model, parts, scenario),
        model_bytes=sent,
        optimizer_bytes=math.fsum(_exchanged(part, spread, scenario) for part, spread in met),
        model_seconds=flops * scenario.batch_tokens / (layout.gpus * scenario.tflops * 1e12),
        model_link_seconds=link_seconds,
        product_seconds=math.fsum(_products(part, spread, scenario) for part, spread in met),
        exchange_seconds=math.fsum(_exchange_seconds(part, spread, scenario) for part, spread in met),
        pass_seconds=(MUON_PASSES * muon + ADAMW_PASSES * rest) / hardware.memory,
        overhead_seconds=hardware.overhead,
    )


def _exchanged(part: ModelPart, spread: Spread, scenario: Scenario) -> float:
    """Bytes that a rank receives in the exchange of a part, on average over steps."""
    if scenario.layout.strategy == "ddp":
        return scenario.back * (spread.copies - 1) / spread.copies * part.parameters
    others = (spread.cut - 1) / spread.cut**2
    return (scenario.there + scenario.back) * others * part.parameters / spread.stack / scenario.period


def _exchange_seconds(part: ModelPart, spread: Spread, scenario: Scenario) -> float:
    """On links, with the latency of every collective."""
    ranks, hardware = _owners(spread, scenario), scenario.hardware
    if ranks == 1:
        return 0.0
    share = FLOAT32 * part.parameters / spread.stack / ranks
    rounds = math.ceil(share / _room(share))
    journeys = 1 if scenario.layout.strategy == "ddp" else 2
    waiting = journeys * rounds * (hardware.latency + hardware.message * (ranks - 1)) / scenario.period
    return _exchanged(part, spread, scenario) / hardware.link(ranks * spread.stride) + waiting


def _room(share: float) -> float:
    """Bytes of matrices that a rank may own in a round, given those that it owns in all."""
    return min(ACCELERATOR_CHUNK_BYTES, max(SMALLEST_ROUND, math.ceil(share / ROUNDS)))


def _owners(spread: Spread, scenario: Scenario) -> int:
    """Ranks among which the matrices of a part are divided."""
    return spread.copies if scenario.layout.strategy == "ddp" else spread.cut


def _products(part: ModelPart, spread: Spread, scenario: Scenario) -> float:
    """Seconds of products on the rank with the most, on average over steps."""
    share, owners = math.ceil(part.stack / spread.stack) / part.stack, _owners(spread, scenario)
    here = {shape: round(number * share) for shape, number in part.matrices.items()}
    kinds = [(orthogonalizing(*shape, scenario.hardware), number) for shape, number in here.items()]
    whole = heaviest(kinds, owners)
    if scenario.period == 1 or spread.cut == 1:
        return whole
    blocks = 0.0
    for (rows, columns), number in here.items():
        block = sorted((math.ceil(rows / spread.cut), columns))
        blocks += number * orthogonalizing(block[0], block[1], scenario.hardware)
    return (whole + (scenario.period - 1) * blocks) / scenario.period


def orthogonalizing(short: int, long: int, hardware: Hardware = H200) -> float:
    """Seconds of the products of one matrix among many: see `muonsw.orthogonalize.iterations` for how many there are.

    Examples:
        >>> f"{1e6 * orthogonalizing(1024, 2816):.0f} us"
        '65 us'
    """
    if short < hardware.triangles:
        return STEPS * (4 * short**2 * long + 2 * short**3) / hardware.dense
    segments = 2 if gram_pays(short, long, STEPS) else STEPS
    symmetric = STEPS + 3 * (STEPS - segments)
    long_products = segments * short**2 * long
    return long_products / hardware.gram + symmetric * short**3 / hardware.short + 2 * long_products / hardware.dense


def heaviest(costs: Iterable[tuple[float, int]], owners: int) -> float:
    """The load of the most loaded rank: costs given out largest first, each to the rank with the least so far.

    Args:
        costs: Each with how many matrices have it.
        owners: Ranks.

    Examples:
        >>> heaviest([(1.0, 2), (8.0, 1), (2.0, 1), (4.0, 1)], 2)
        8.0
    """
    loads = [0.0] * owners
    for cost, number in sorted(costs, reverse=True):
        if loads[0] == max(loads):  # all ranks have the same, so that many can be given at once
            each, number = divmod(number, owners)  # noqa: PLW2901
            loads = [loads[0] + each * cost] * owners
        for _ in range(number):
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def _traffic_of_model(model: ModelConfig, parts: ModelParts, scenario: Scenario) -> tuple[float, float]:
    """Bytes that a rank receives for the model in an update, and their seconds on links.

    Divided weights are gathered for each forward and each backward pass of a micro-batch; gradients are added up once.
    """
    layout, hardware = scenario.layout, scenario.hardware
    tokens = scenario.batch_tokens / layout.gpus
    micro_batches = max(1, math.ceil(tokens / (scenario.micro_batch * model.sequence)))
    bytes_sent, seconds = 0.0, 0.0

    def send(size: float, reach: int) -> None:
        nonlocal bytes_sent, seconds
        bytes_sent += size
        seconds += size / hardware.link(reach)

    spreads = (layout.of_experts(parts.experts), layout.of_others(), layout.of_others())
    for part, spread in zip((parts.experts, parts.hidden, parts.rest), spreads, strict=True):
        divided = spread.cut if layout.strategy == "ep" else spread.cut * spread.stack
        held = part.parameters / (spread.cut * spread.stack)
        others = held * (divided - 1)
        reach = layout.shards if layout.strategy == "fsdp" else divided * spread.stride
        send((2 * micro_batches * scenario.gathered + FLOAT32) * others, reach)
        send(2 * FLOAT32 * (spread.copies - 1) / spread.copies * held, layout.gpus)
    if layout.strategy == "ep":
        stack = spreads[0].stack
        size = JOURNEYS * TOKEN_BYTES * tokens * model.top_k * model.width * model.layers
        send(size * (stack - 1) / stack, stack)
    return bytes_sent, seconds


def _memory(model: ModelConfig, parts: ModelParts, scenario: Scenario) -> RankMemory:
    layout = scenario.layout
    experts, others = layout.of_experts(parts.experts), layout.of_others()
    muon = experts.held(parts.experts) + others.held(parts.hidden)
    rest = others.held(parts.rest)
    owned = (parts.experts.parameters + parts.hidden.parameters) / layout.gpus
    on_owner = scenario.momentum_on_owner and layout.strategy == "ddp"
    return RankMemory(
        weights=FLOAT32 * (muon + rest),
        gradients=FLOAT32 * (muon + rest),
        muon_state=FLOAT32 * (owned if on_owner else muon),
        adamw_state=2 * FLOAT32 * rest,
        activations=_activations(model, scenario),
        gathered=_gathered(model, parts, scenario),
        buffers=_buffers(parts, scenario),
    )


def _activations(model: ModelConfig, scenario: Scenario) -> float:
    if not scenario.recompute:
        return KEPT * activation_bytes(model, scenario.micro_batch)
    inputs = FLOAT32 * scenario.micro_batch * model.sequence * model.width * model.layers
    return inputs + KEPT * activation_bytes(replace(model, layers=1), scenario.micro_batch)


def _gathered(model: ModelConfig, parts: ModelParts, scenario: Scenario) -> float:
    """Copies in bfloat16, and weights that are whole for a while: the layer at work, the next one, and the rest."""
    layout, experts = scenario.layout, parts.experts.parameters
    if layout.shards == 1:
        return BFLOAT16 * (experts + parts.hidden.parameters + parts.rest.parameters)
    stack = layout.of_experts(parts.experts).stack if layout.strategy == "ep" else 1
    layer = (experts / stack + parts.hidden.parameters) / model.layers
    return scenario.gathered * (2 * layer + parts.rest.parameters) + BFLOAT16 * layer


def _buffers(parts: ModelParts, scenario: Scenario) -> float:
    """Eight rounds where matrices travel; two batches where they do not."""
    sizes = []
    spreads = (scenario.layout.of_experts(parts.experts), scenario.layout.of_others())
    for part, spread in zip((parts.experts, parts.hidden), spreads, strict=True):
        owners = _owners(spread, scenario)
        share = FLOAT32 * part.parameters / spread.stack / owners
        sizes.append(IN_FLIGHT * _room(share) if owners > 1 else 2 * min(ACCELERATOR_CHUNK_BYTES, share))
    return max(sizes)
