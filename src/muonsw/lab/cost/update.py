"""What one update takes on one GPU or many: memory, bytes on links, seconds.

Bytes are counted: tests hold them to what tensors take and ranks send. Times are sums over measured rates of one GPU,
held to its measured steps, and over assumed rates of links, which are marked as such (docs/scaling.md). Products
overlap with the exchange, gradients and gathered weights with the passes of the model: fully, which is the best that
can be.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from muonsw.distributed.rounds import ROUNDS, SMALLEST_ROUND
from muonsw.lab.cost.parts import STEPS, ModelPart, ModelParts, flops_per_token, newton_schulz_flops, parts_of
from muonsw.lab.model import ModelConfig
from muonsw.lab.model.loss import chunk_tokens
from muonsw.lab.paper import PAPER_BATCH_TOKENS
from muonsw.orthogonalize.iterations import gram_saves
from muonsw.step import ACCELERATOR_CHUNK_BYTES

FLOAT32, BFLOAT16 = 4, 2
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
        require(**{name: getattr(self, name) for name in names})
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
    require(batch_tokens=batch_tokens)
    parts = parts_of(model)
    *muon, (rest, as_rest) = zip(parts, setup.shardings(parts), strict=True)
    muon = [(part, sharding) for part, sharding in muon if part.parameters]
    flops = flops_per_token(model) * (4 / 3 if setup.recompute else 1.0)
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
    segments = 2 if gram_saves(short, long) > 0 else STEPS
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
    return Memory(
        weights=FLOAT32 * (muon + rest),
        gradients=FLOAT32 * (muon + rest),
        muon_state=FLOAT32 * muon,
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


def require(**values: float) -> None:
    """Refuse numbers that are not positive and finite.

    Raises:
        ValueError: With the first.
    """
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
