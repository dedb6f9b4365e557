"""The rules by which a parameter gets its role, in the order in which they are asked. Structure first, names last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from muonsw.routing import names
from muonsw.routing.experts import Mixtures
from muonsw.routing.facts import (
    RECURRENT,
    TABLES,
    Layer,
    ModelFacts,
    Subject,
    expert_counts,
    holder_of,
    is_norm,
    is_table,
    outwards,
    within,
)

View = dict[str, Any]

# Roles whose parameters are matrices inside the model: decayed, and orthogonalized under Muon.
MATRIX_ROLES = ("hidden", "experts", "convolution")
OTHER_ROLES = ("embedding", "head", "router", "norm", "bias", "vector", "depthwise", "lora", "unclear")
ROLES = (*MATRIX_ROLES, *OTHER_ROLES)

# Blocks in the weights of torch's recurrent layers, one for each gate, as torch documents them.
GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
# How many projections are often fused into one: keys and values, gate and up, scale and shift: 2; and so on.
FUSED = (2, 3, 4, 6)
# Libraries whose `qkv` keeps all queries, then all keys, then all values, and the files of timm that go head by head.
QKV_LIBRARIES = frozenset({"timm", "torchvision", "transformers"})
HEAD_BY_HEAD = frozenset(f"timm.models.{file}" for file in ("efficientformer", "levit", "maxxvit", "tiny_vit"))
# The most coordinates that a network of positions reads.
COORDINATES = 3

LENGTHS = "the lengths of a weight's rows (weight norm)"


class RoutedParameter(NamedTuple):
    """What was decided for one parameter, and why."""

    name: str
    param: Tensor
    role: str
    reason: str
    view: View
    decayed: bool


class Decision(NamedTuple):
    """A role, the reason in one sentence, and how Muon must see the parameter if it is to."""

    role: str
    reason: str
    view: View


class Context(NamedTuple):
    """What the rules know about the whole model."""

    facts: ModelFacts
    mixtures: Mixtures


Rule = Callable[[Subject, Context], Decision | None]


def classify(model: nn.Module) -> Iterator[RoutedParameter]:
    """Name, role, reason and matrix view of each trainable parameter; tied weights come once."""
    facts = ModelFacts(model)
    known = Context(facts, Mixtures(facts))
    for subject in facts.subjects():
        role, reason, view = next(decision for rule in RULES if (decision := rule(subject, known)) is not None)
        decayed = role in MATRIX_ROLES and subject.name not in facts.without_decay
        if role in MATRIX_ROLES and not decayed:
            reason += "; the model declares it without decay"
        yield RoutedParameter(subject.name, subject.param, role, reason, view, decayed)


def adapter(subject: Subject, known: Context) -> Decision | None:
    """Low-rank factors beside a frozen weight; what PEFT trains whole has the role that it has without PEFT."""
    around = (known.facts.modules[path] for path in outwards(subject.path))
    whole = bool(names.PEFT_WORDS & set(subject.path.split(".")) or names.TABLE.search(subject.own))
    inside = not whole and any(hasattr(module, "adapter_layer_names") for module in around)
    named = any(names.ADAPTER.search(word) for word in (*subject.words, subject.own))
    if not (inside or named) or subject.long_axes < 2 or "bias" in subject.own:
        return None
    return Decision("lora", "a low-rank factor of an adapter", _plain_view(subject, known))


def parametrized(subject: Subject, _: Context) -> Decision | None:
    """Pieces from which torch computes the weight, other than a matrix that is only rescaled."""
    module, own = subject.owner, subject.own
    if isinstance(module, ParametrizationList):
        if any("WeightNorm" in type(part).__name__ for part in module):
            return Decision("norm", LENGTHS, {})
        return Decision("unclear", "the weight is computed from it by a parametrization", {})
    if own.endswith("_g") and f"{own[:-2]}_v" in module._parameters:
        return Decision("norm", LENGTHS, {})
    return None


def bias(subject: Subject, _: Context) -> Decision | None:
    """Offsets; a table of offsets by position is an embedding."""
    if not names.BIAS.search(subject.own.lower()):
        return None
    if subject.param.dim() > 1 and names.TABLE.search(subject.own.lower()):
        return Decision("embedding", "a table of offsets", {})
    return Decision("bias", "it is added to features", {})


def norm(subject: Subject, _: Context) -> Decision | None:
    """Gains of norms, also with an axis for heads or space."""
    if is_norm(subject.owner):
        return Decision("norm", f"it belongs to {type(subject.owner).__name__}", {})
    called = "norm" in type(subject.owner).__name__.lower() or "norm" in subject.own.lower()
    if called and subject.long_axes <= 1:
        return Decision("norm", "a vector of something that is called a norm", {})
    return None


def embedding(subject: Subject, known: Context) -> Decision | None:
    """Tables that are looked up, also if the head shares them."""
    owners = known.facts.owners.get(subject.param, [subject.owner])
    if any(isinstance(owner, TABLES) for owner in owners):
        return Decision("embedding", "rows are looked up in it", {})
    if isinstance(subject.owner, nn.Linear | _ConvNd) or subject.long_axes != 2:
        return None
    declared = subject.owner in known.facts.tables and subject.own == "weight"
    if declared or is_table(subject.owner):
        return Decision("embedding", "its module is an embedding", {})
    return None


def position(subject: Subject, known: Context) -> Decision | None:
    """Small MLPs from coordinates to position biases (`cpb_mlp` of Swin v2), which replace a table of positions.

    Models declare them without decay, and Muon's updates, which do not shrink with the gradient, would let them grow
    during the whole run.
    """
    if not isinstance(subject.owner, nn.Linear):
        return None
    for path in outwards(subject.path):
        if names.POSITION.search(path.rpartition(".")[2].lower()):
            first = next(layer for layer in known.facts.maps if within(layer.path, path))
            if max(first.reads) <= COORDINATES:
                reason = f"{path} computes positions from {max(first.reads)} coordinates, in place of a table"
                return Decision("embedding", reason, _plain_view(subject, known))
    return None


def router(subject: Subject, known: Context) -> Decision | None:
    """A row for each of the experts beside it, or the name of a router."""
    flat_experts = subject.shape[:1] and subject.shape[0] in expert_counts(subject.owner)
    if subject.param.dim() != 2 or (flat_experts and not names.says_gate(subject.own)):
        return None
    reason = None
    if known.mixtures.routed_by(subject) is not None:
        reason = "it gives one number for each of the experts beside it"
    elif any(names.says_router(word) for word in (*subject.words, subject.own, type(subject.owner).__name__)):
        reason = "it is called a router"
    elif any(names.MIXTURE.search(word) for word in subject.words[-2:-1]) and names.GATE.match(subject.words[-1]):
        reason = "it is called the gate of a mixture"
    return Decision("router", reason, _plain_view(subject, known)) if reason else None


def head(subject: Subject, known: Context) -> Decision | None:
    """Outputs: maps whose result the model gives away instead of reading it again."""
    layer = known.facts.layer_of.get(subject.param)
    if layer is None or known.mixtures.around(subject) is not None:
        return None
    found = _find_head(layer, isinstance(subject.owner, _ConvNd), known.facts)
    return None if found is None else Decision(*found, _plain_view(subject, known))


def vector(subject: Subject, _: Context) -> Decision | None:
    """At most one axis is longer than one: nothing to orthogonalize, whatever the number of axes."""
    if isinstance(subject.owner, _ConvNd) and subject.own == "weight":
        return None
    if subject.long_axes <= 1:
        return Decision("vector", "at most one of its axes is longer than one", {})
    return None


def convolution(subject: Subject, _: Context) -> Decision | None:
    """Kernels: one matrix for each group; a kernel for each channel is not a matrix."""
    module = subject.owner
    if not isinstance(module, _ConvNd) or subject.own != "weight":
        return None
    if module.groups > 1 and module.groups == module.in_channels:
        return Decision("depthwise", "each channel has filters of its own, so rows have nothing in common", {})
    if module.out_channels == 1:
        return Decision("vector", "a single filter", {})
    view = _kernel_view(module)
    if module.groups == 1:
        return Decision("convolution", "a convolution, one row for each output channel", view)
    view |= {"heads": module.groups, "split_dim": 1} if "transposed" in view else {"heads": module.groups}
    return Decision("convolution", f"a convolution of {module.groups} groups, one matrix each", view)


def experts(subject: Subject, known: Context) -> Decision | None:
    """Matrices of routed experts, in a list or in a stack."""
    mixture = known.mixtures.around(subject)
    view = known.mixtures.view(subject)
    if mixture is None or view is None:
        return None
    return Decision("experts", f"one of {max(mixture.counts)} experts, or all of them in one parameter", view)


def table(subject: Subject, known: Context) -> Decision | None:
    """A module's own parameters that are learned inputs or act elementwise, as the model or their names say."""
    if isinstance(subject.owner, nn.Linear | _ConvNd | nn.MultiheadAttention | RECURRENT):
        return None
    if names.TABLE.search(subject.own.lower()):
        return Decision("embedding", "it is called a table, a position, a token or the like", {})
    if subject.shape[0] == 1:
        return Decision("embedding", "its first axis has length one, as learned inputs have", {})
    if subject.name in known.facts.without_decay:
        return Decision("vector", "the model declares it without decay", {})
    if names.ELEMENTWISE.search(subject.own) and subject.own != "weight":
        return Decision("vector", "its name is one of parameters that act elementwise", {})
    return None


def known_module(subject: Subject, _: Context) -> Decision | None:
    """Layers of torch that keep several matrices in one parameter, in an order that torch documents."""
    module = subject.owner
    if isinstance(module, nn.MultiheadAttention):
        if subject.own != "in_proj_weight":
            return Decision("hidden", "a projection of attention", {})
        return Decision("hidden", "queries, keys and values of torch's attention", _parts(subject, 3))
    if isinstance(module, RECURRENT):
        gates = next((count for kind, count in GATES.items() if isinstance(module, kind)), 1)
        fused = gates > 1 and not subject.own.startswith("weight_hr")
        return Decision("hidden", "a recurrent layer of torch", _parts(subject, gates) if fused else {})
    return None


def linear(subject: Subject, known: Context) -> Decision | None:
    """Linear maps from features to features."""
    if not isinstance(subject.owner, nn.Linear) and subject.param not in known.facts.layer_of:
        return None
    if known.mixtures.around(subject) is not None and not isinstance(subject.owner, nn.Linear):
        return None  # several experts in one matrix
    view = _plain_view(subject, known)
    if _stacks_queries_keys_values(subject, known.facts):
        view["split_sizes"] = (max(subject.shape) // 3,) * 3
        return Decision("hidden", "queries, keys and values, each a linear map", view)
    # Other layouts differ under one name, and only the reader of the model's code can confirm a split.
    fused = subject.words and names.FUSED.search(subject.words[-1])
    hint = "; if it fuses several projections, split_sizes or heads separate them" if fused else ""
    return Decision("hidden", "a linear map inside the model" + hint, view)


def stack(subject: Subject, _: Context) -> Decision | None:
    """Queries, keys and values in one parameter (3, out, in), as a name such as `qkv_w` tells."""
    if subject.param.dim() != 3 or subject.shape[0] not in FUSED or not names.FUSED.search(subject.own):
        return None
    return Decision("hidden", f"{subject.shape[0]} linear maps side by side", {"matrix": "stack"})


def unclear(subject: Subject, _: Context) -> Decision:
    """What no rule explains."""
    return Decision("unclear", f"nothing tells what its axes {subject.shape} mean", {})


RULES: tuple[Rule, ...] = (
    adapter,
    parametrized,
    bias,
    norm,
    embedding,
    position,
    router,
    head,
    vector,
    convolution,
    experts,
    table,
    known_module,
    linear,
    stack,
    unclear,
)


def _find_head(layer: Layer, is_kernel: bool, facts: ModelFacts) -> tuple[str, str] | None:
    """The role, "head" or "unclear" in doubt, and the reason; None if the layer feeds another."""
    gives, is_read = layer.gives or 0, facts.is_read(layer)
    if any(within(layer.path, path) and not facts.is_read(layer, path) for path in facts.heads):
        return "head", "the model declares it as its output layer"
    if _in_attention(layer, facts) or (_read_in_parts(layer, facts) and names.MODULATION.search(layer.path.lower())):
        return None
    if gives == facts.vocabulary and not is_read:
        return "head", "it gives one number for each row of the largest embedding"
    output = _output_around(layer.path, facts)
    if output is not None:  # a name alone is not enough: another layer may read what is called an output
        feeds = is_read if facts.in_block(holder_of(output)) else _feeds_beside(layer, output, facts)
        return None if feeds else ("head", f"{output} is called an output, and nothing reads its {gives} features")
    if not facts.in_block(layer.path):
        return _outside_blocks(layer, is_kernel, facts)
    if is_read or gives not in facts.outside:
        return None
    return "head", f"nothing reads its {gives} features, and an output outside is as wide"


def _outside_blocks(layer: Layer, is_kernel: bool, facts: ModelFacts) -> tuple[str, str] | None:
    """Outside the repeated blocks, a layer whose features nothing reads is an output."""
    if len(facts.maps) == 1:
        return None  # a model of one layer has no inside and no outside
    gives, is_last = layer.gives, layer is facts.maps[-1]
    others = [other for other in facts.maps if other is not layer]
    if is_last and gives not in layer.reads and all(other.gives != gives for other in others):
        return "head", f"it is the last layer of the model and the only one that gives {gives} features"
    if is_kernel:
        return None  # what a convolution gives is often flattened before it is read
    if not facts.is_read(layer):
        parts = _read_in_parts(layer, facts)
        siblings = facts.held_by[holder_of(layer.path)]
        if any(other.order > layer.order and parts & set(other.reads) for other in siblings):
            return None  # fused projections, such as gate and up before down
        if parts:
            return "unclear", f"nothing reads its {gives} features, but a layer reads a part of that size"
        return "head", f"nothing in the model reads its {gives} features"
    if not is_last or facts.vocabulary is not None:
        return None
    # The last layer may be an output as wide as the features, unless another is, or all layers have one width.
    widths = {size for other in others for size in (*other.reads, other.gives)}
    has_output = any(not facts.is_read(other) for other in others if not facts.in_block(other.path))
    if has_output or widths == {gives}:
        return None
    return "unclear", f"it is the last layer, but others read {gives} features too"


def _read_in_parts(layer: Layer, facts: ModelFacts) -> set[int]:
    """The sizes of equal parts of a layer's result that other layers read."""
    parts = {(layer.gives or 0) / count for count in FUSED}
    return {int(part) for part in parts if part in facts.reading}


def _in_attention(layer: Layer, facts: ModelFacts) -> bool:
    """Whether it is a projection of torch's attention, or has siblings for queries, keys and values."""
    holder = facts.modules[holder_of(layer.path)]
    if isinstance(holder, nn.MultiheadAttention):
        return True
    own = names.QUERY_KEY_VALUE.search(layer.path.rpartition(".")[2].lower())
    siblings = (names.QUERY_KEY_VALUE.search(name.lower()) for name in holder._modules) if own else ()
    return {found[1] for found in siblings if found} == {"q", "k", "v"}


def _output_around(path: str, facts: ModelFacts) -> str | None:
    """The innermost module that is called an output by its name or class."""
    for around in outwards(path):
        word = around.rpartition(".")[2].lower()
        kind = type(facts.modules[around]).__name__.removeprefix("FSDP")  # of fully_shard
        head_class = kind.endswith("Head") and kind != "Head"  # plain Head is often one head of attention
        if around and (names.HEAD.search(word) or (head_class and not word.isdigit())):
            return around
    return None


def _feeds_beside(layer: Layer, output: str, facts: ModelFacts) -> bool:
    """Whether a layer of an output module, or after it in the module around, reads this one."""
    for other in facts.reading.get(layer.gives or 0, ()):
        later = other.order > layer.order and within(other.path, holder_of(output))
        modulates = names.MODULATION.search(other.path.lower())  # it reads the condition instead
        if other is not layer and (later or within(other.path, output)) and not modulates:
            return True
    return False


def _stacks_queries_keys_values(subject: Subject, facts: ModelFacts) -> bool:
    """Whether a fused projection is certainly (queries, keys, values): GPT-2's `c_attn`, a known library's `qkv`."""
    layer = facts.layer_of.get(subject.param)
    if layer is None or not subject.words or layer.gives != 3 * layer.reads[0]:
        return False
    holder = type(facts.modules[holder_of(subject.path)])
    if subject.words[-1] == "c_attn":
        return "BigCode" not in holder.__name__  # it goes head by head
    written = next(cls.__module__ for cls in holder.__mro__ if not cls.__module__.startswith("torch."))  # not FSDP's
    library = written.partition(".")[0]
    return subject.words[-1] == "qkv" and library in QKV_LIBRARIES and written not in HEAD_BY_HEAD


def _plain_view(subject: Subject, known: Context) -> View:
    """How Muon sees a matrix or kernel of its own, should a pattern send it there."""
    if isinstance(subject.owner, _ConvNd):
        return _kernel_view(subject.owner)
    layer = known.facts.layer_of.get(subject.param)
    return {"transposed": True} if layer is not None and layer.in_out else {}


def _kernel_view(module: _ConvNd) -> View:
    """A row for each output channel; a transposed convolution keeps its weight as (in, out / groups, ...)."""
    return {"matrix": "flatten", **({"transposed": True} if isinstance(module, _ConvTransposeNd) else {})}


def _parts(subject: Subject, count: int) -> View:
    return {"split_sizes": (subject.shape[0] // count,) * count}
