"""The rules by which a parameter gets its role, in the order in which they are asked. Structure first, names last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from muonsw.routing import names
from muonsw.routing.experts import Mixtures
from muonsw.routing.heads import FUSED, find_head
from muonsw.routing.survey import (
    RECURRENT,
    Subject,
    Survey,
    bias_of,
    has_row_for_each_expert,
    is_in_out,
    is_norm,
    within,
)

View = dict[str, Any]

# Roles whose parameters are matrices inside the model: decayed, and orthogonalized under Muon.
MATRIX_ROLES = ("hidden", "experts", "convolution")
OTHER_ROLES = ("embedding", "head", "router", "norm", "bias", "vector", "depthwise", "lora", "unclear")
ROLES = (*MATRIX_ROLES, *OTHER_ROLES)

# Blocks in the weights of torch's recurrent layers, one for each gate, as torch documents them.
GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}

# The most coordinates that a network of positions reads, and the most linear maps that it has (CrossFormer's: four).
COORDINATES = 3
POSITION_MAPS = 4

LENGTHS = "the lengths of a weight's rows (weight norm)"

_HEAD_COUNT = re.compile(r"^(n|num)_(\w+_)?heads?$|^heads$")
_HEAD_SIZE = re.compile(r"^(d_head|head_dim|head_size|dim_head|d_kv)$")


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


class ModelFacts(NamedTuple):
    """What is known of the whole model."""

    survey: Survey
    mixtures: Mixtures


Rule = Callable[[Subject, ModelFacts], Decision | None]


def classify(model: nn.Module) -> Iterator[RoutedParameter]:
    """Name, role, reason and matrix view of each trainable parameter; tied weights come once."""
    survey = Survey(model)
    known = ModelFacts(survey, Mixtures(survey))
    for subject in survey.subjects():
        role, reason, view = next(decision for rule in RULES if (decision := rule(subject, known)) is not None)
        decayed = role in MATRIX_ROLES and subject.name not in survey.without_decay
        if role in MATRIX_ROLES and not decayed:
            reason += "; the model declares it without decay"
        yield RoutedParameter(subject.name, subject.param, role, reason, view, decayed)


def adapter(subject: Subject, known: ModelFacts) -> Decision | None:
    """Low-rank factors beside a frozen weight; PEFT says which parts of its layers they are.

    What it trains whole, modules and the rows of single tokens, has the role that it has without PEFT.
    """
    layered = any(hasattr(module, "adapter_layer_names") for _, module in known.survey.ancestors(subject.path))
    whole = bool(names.PEFT_WORDS & set(subject.path.split(".")) or names.TABLE.search(subject.own))
    inside = layered and not whole
    named = any(names.ADAPTER.search(word) for word in (*subject.words, subject.own))
    if not (inside or named) or subject.long_axes < 2 or "bias" in subject.own:
        return None
    return Decision("lora", "a low-rank factor of an adapter", _plain_view(subject, known))


def parametrized(subject: Subject, _: ModelFacts) -> Decision | None:
    """Pieces from which torch computes the weight, other than a matrix that is only rescaled."""
    module, own = subject.owner, subject.own
    if isinstance(module, ParametrizationList):
        if any("WeightNorm" in type(part).__name__ for part in module):
            return Decision("norm", LENGTHS, {})
        return Decision("unclear", "the weight is computed from it by a parametrization", {})
    if own.endswith("_g") and f"{own[:-2]}_v" in module._parameters:
        return Decision("norm", LENGTHS, {})
    return None


def bias(subject: Subject, _: ModelFacts) -> Decision | None:
    """Offsets; a table of offsets by position is an embedding."""
    if not names.BIAS.search(subject.own.lower()):
        return None
    if subject.param.dim() > 1 and names.TABLE.search(subject.own.lower()):
        return Decision("embedding", "a table of offsets", {})
    return Decision("bias", "it is added to features", {})


def norm(subject: Subject, _: ModelFacts) -> Decision | None:
    """Gains of norms, also where they have an axis for heads or space."""
    if is_norm(subject.owner):
        return Decision("norm", f"it belongs to {type(subject.owner).__name__}", {})
    called = "norm" in type(subject.owner).__name__.lower() or "norm" in subject.own.lower()
    if called and subject.long_axes <= 1:
        return Decision("norm", "a vector of something that is called a norm", {})
    return None


def embedding(subject: Subject, known: ModelFacts) -> Decision | None:
    """Tables that are looked up, also where the head shares them."""
    owners = known.survey.owners.get(subject.param, [subject.owner])
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return Decision("embedding", "rows are looked up in it", {})
    kind = type(subject.owner).__name__.lower()
    mapping = isinstance(subject.owner, nn.Linear | _ConvNd)
    declared = id(subject.owner) in known.survey.tables and subject.own == "weight"
    if not mapping and subject.long_axes == 2 and (declared or kind.endswith(("embedding", "embeddings"))):
        return Decision("embedding", "its module is an embedding", {})
    return None


def position(subject: Subject, known: ModelFacts) -> Decision | None:
    """Small MLPs from coordinates to position biases (`cpb_mlp` of Swin v2), which replace a table of positions.

    They read two or three coordinates, not features. Models declare them without decay, and Muon's updates, which do
    not shrink with the gradient, would then let them grow during the whole run.
    """
    if not isinstance(subject.owner, nn.Linear):
        return None
    for path, _ in known.survey.ancestors(subject.path):
        if names.POSITION.search(path.rpartition(".")[2].lower()):
            maps = [layer for layer in known.survey.layers if layer.gives and within(layer.path, path)]
            if 0 < len(maps) <= POSITION_MAPS and max(maps[0].reads) <= COORDINATES:
                reason = f"{path} computes positions from {max(maps[0].reads)} coordinates, in place of a table"
                return Decision("embedding", reason, _plain_view(subject, known))
    return None


def router(subject: Subject, known: ModelFacts) -> Decision | None:
    """A row for each of the experts beside it, or the name of a router."""
    called = names.GATE.match(subject.own) or names.says_router(subject.own)
    if subject.param.dim() != 2 or (has_row_for_each_expert(subject.owner, subject.param) and not called):
        return None
    mixture = known.mixtures.routed_by(subject)
    if mixture is not None:
        return Decision(
            "router", f"it chooses among the {mixture.experts} experts beside it", _plain_view(subject, known)
        )
    if any(names.says_router(word) for word in (*subject.words, subject.own, type(subject.owner).__name__)):
        return Decision("router", "it is called a router", _plain_view(subject, known))
    if any(names.MIXTURE.search(word) for word in subject.words[-2:-1]) and names.GATE.match(subject.words[-1]):
        return Decision("router", "it is called the gate of a mixture", _plain_view(subject, known))
    return None


def head(subject: Subject, known: ModelFacts) -> Decision | None:
    """Outputs of the model."""
    if subject.param.dim() < 2 or known.mixtures.around(subject):
        return None
    found = find_head(subject, known.survey)
    return None if found is None else Decision(*found, _plain_view(subject, known))


def vector(subject: Subject, _: ModelFacts) -> Decision | None:
    """At most one axis is longer than one: nothing to orthogonalize, whatever the number of axes."""
    if isinstance(subject.owner, _ConvNd) and subject.own == "weight":
        return None
    if subject.long_axes <= 1:
        return Decision("vector", "at most one of its axes is longer than one", {})
    return None


def convolution(subject: Subject, _: ModelFacts) -> Decision | None:
    """Kernels: one matrix for each group; a kernel for each channel is no matrix at all."""
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


def table(subject: Subject, known: ModelFacts) -> Decision | None:
    """Parameters of a module's own that are learned inputs or act entry by entry, as the model or their names say."""
    if isinstance(subject.owner, nn.Linear | _ConvNd | nn.MultiheadAttention | RECURRENT | nn.Bilinear):
        return None
    own = subject.own.lower()
    if names.TABLE.search(own):
        return Decision("embedding", "it is called a table, a position, a token or the like", {})
    if subject.shape[0] == 1:
        return Decision("embedding", "its first axis has one entry, as learned inputs have", {})
    if subject.name in known.survey.without_decay:
        return Decision("vector", "the model declares it without decay", {})
    if names.ELEMENTWISE.search(subject.own) and subject.own != "weight":
        return Decision("vector", "its name is one of parameters that act entry by entry", {})
    return None


def experts(subject: Subject, known: ModelFacts) -> Decision | None:
    """Matrices of routed experts: in a list, in a stack, or in one tall matrix."""
    around = known.mixtures.around(subject)
    if not around or has_row_for_each_expert(subject.owner, subject.param):
        return None
    view = known.mixtures.view(subject)
    if view is None:
        return None
    return Decision("experts", f"one of {around[0].experts} experts, or all of them in one parameter", view)


def known_module(subject: Subject, _: ModelFacts) -> Decision | None:
    """Layers of torch that keep several matrices in one parameter, in an order that torch documents."""
    module = subject.owner
    if isinstance(module, nn.MultiheadAttention):
        if subject.own != "in_proj_weight":
            return Decision("hidden", "a projection of attention", {})
        return Decision("hidden", "queries, keys and values of torch's attention", _blocks(subject, 3))
    if isinstance(module, RECURRENT):
        gates = next((count for kind, count in GATES.items() if isinstance(module, kind)), 1)
        fused = gates > 1 and not subject.own.startswith("weight_hr")
        return Decision("hidden", "a recurrent layer of torch", _blocks(subject, gates) if fused else {})
    return None


def linear(subject: Subject, known: ModelFacts) -> Decision | None:
    """Linear maps from features to features."""
    if isinstance(subject.owner, nn.Linear) or subject.param in known.survey.layer_of:
        return Decision("hidden", "a linear map inside the model" + _offer(subject), _plain_view(subject, known))
    return None


def maps_on_an_axis(subject: Subject, _: ModelFacts) -> Decision | None:
    """Projections with an axis for heads, (width, heads, size) or (heads, in, out), as the module's own sizes tell.

    Or with one for queries, keys and values, (3, out, in), as a name such as `qkv` tells.
    """
    if subject.param.dim() != 3:
        return None
    config = getattr(subject.owner, "config", None)
    sizes = {**(vars(config) if hasattr(config, "__dict__") else {}), **vars(subject.owner)}
    counts = {value for key, value in sizes.items() if _HEAD_COUNT.match(key) and isinstance(value, int)}
    lengths = {value for key, value in sizes.items() if _HEAD_SIZE.match(key) and isinstance(value, int)}
    first, second, third = subject.shape
    if second in counts and third in lengths:
        back = bool(names.DOWN.search(subject.own.lower()))
        view: View = {"matrix": "flatten"} if back else {"matrix": "flatten", "transposed": True}
        return Decision("hidden", f"a projection with an axis for its {second} heads", view)
    offsets = bias_of(subject.owner, subject.own)
    fused = first in FUSED and names.FUSED.search(subject.own)
    if fused or first in counts or (offsets is not None and offsets.shape in ((first, second), (first, third))):
        swapped = offsets is not None and second != third and tuple(offsets.shape) == (first, third)
        view = {"matrix": "stack", "transposed": True} if swapped else {"matrix": "stack"}
        return Decision("hidden", f"{first} linear maps side by side", view)
    return None


def unclear(subject: Subject, _: ModelFacts) -> Decision:
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
    maps_on_an_axis,
    unclear,
)


def _plain_view(subject: Subject, known: ModelFacts) -> View:
    """How Muon sees a matrix or kernel of its own, should a pattern send it there."""
    if isinstance(subject.owner, _ConvNd):
        return _kernel_view(subject.owner)
    layer = known.survey.layer_of.get(subject.param)
    swapped = layer is not None and layer.gives != subject.shape[0]
    return {"transposed": True} if swapped or is_in_out(subject.owner) else {}


def _kernel_view(module: _ConvNd) -> View:
    """A row for each output channel; a transposed convolution keeps its weight as (in, out / groups, ...)."""
    return {"matrix": "flatten", **({"transposed": True} if isinstance(module, _ConvTransposeNd) else {})}


def _blocks(subject: Subject, count: int) -> View:
    return {"split_sizes": (subject.shape[0] // count,) * count}


def _offer(subject: Subject) -> str:
    """A hint at splits, which only the reader of the model's code can confirm: layouts differ under one name."""
    word = (subject.words or [""])[-1]
    if not names.FUSED.search(word):
        return ""
    return "; if several projections lie in it, split_sizes or heads part them"
