"""The rules that give a parameter its role, in order: structure first, names last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonsw.routing import facts
from muonsw.routing.facts import Layer, ModelFacts, Subject, holder_of, is_norm, is_table, outwards, within

View = dict[str, Any]

# Roles whose parameters are matrices inside the model: decayed, and orthogonalized under Muon.
MATRIX_ROLES = ("hidden", "experts", "convolution")
OTHER_ROLES = ("embedding", "head", "router", "norm", "bias", "vector", "depthwise", "lora", "unclear")
ROLES = (*MATRIX_ROLES, *OTHER_ROLES)

# Blocks in the weights of torch's recurrent layers, one for each gate, as torch documents them.
GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
# Libraries whose `qkv` holds all queries, then all keys, then all values, and timm's exceptions, which go head by head.
QKV_LIBRARIES = frozenset({"timm", "torchvision", "transformers"})
HEAD_BY_HEAD = frozenset(f"timm.models.{file}" for file in ("efficientformer", "levit", "maxxvit", "tiny_vit"))
# The most coordinates that a position network reads.
COORDINATES = 3


class RoutedParameter(NamedTuple):
    name: str
    param: Tensor
    role: str
    reason: str
    view: View
    decayed: bool


# A role, the reason in one sentence, and the matrix view under Muon.
Decision = tuple[str, str, View]
Rule = Callable[[Subject, ModelFacts], Decision | None]


def classify(model: nn.Module) -> Iterator[RoutedParameter]:
    """Name, role, reason and matrix view of each trainable parameter; tied weights come once."""
    known = ModelFacts(model)
    for subject in known.subjects:
        if subject.param.requires_grad:
            role, reason, view = next(decision for rule in RULES if (decision := rule(subject, known)) is not None)
            decayed = role in MATRIX_ROLES and subject.name not in known.without_decay
            if role in MATRIX_ROLES and not decayed:
                reason += "; the model declares it without decay"
            yield RoutedParameter(subject.name, subject.param, role, reason, view, decayed)


def adapter(subject: Subject, model: ModelFacts) -> Decision | None:
    """Low-rank factors of an adapter; parameters that PEFT trains in full keep their usual role."""
    around = (model.modules[path] for path in outwards(subject.path))
    whole = bool(facts.PEFT_WORDS & set(subject.path.split(".")) or facts.TABLE.search(subject.key))
    inside = not whole and any(hasattr(module, "adapter_layer_names") for module in around)
    named = any(facts.ADAPTER.search(word) for word in subject.words)
    if not (inside or named) or subject.long_axes < 2 or "bias" in subject.key:
        return None
    return "lora", "a low-rank factor of an adapter", _plain_view(subject, model)


def bias(subject: Subject, _: ModelFacts) -> Decision | None:
    """Offsets; a table of offsets by position is an embedding."""
    if not facts.BIAS.search(subject.key.lower()):
        return None
    if subject.param.dim() > 1 and facts.TABLE.search(subject.key.lower()):
        return "embedding", "a table of offsets", {}
    return "bias", "it is added to features", {}


def norm(subject: Subject, _: ModelFacts) -> Decision | None:
    if is_norm(subject.owner):
        return "norm", f"it belongs to {type(subject.owner).__name__}", {}
    called = "norm" in type(subject.owner).__name__.lower() or "norm" in subject.key.lower()
    if called and subject.long_axes <= 1:
        return "norm", "a vector of something that is called a norm", {}
    return None


def embedding(subject: Subject, model: ModelFacts) -> Decision | None:
    """Lookup tables, even if the head shares them."""
    if any(isinstance(owner, facts.TABLES) for owner in model.owners[subject.param]):
        return "embedding", "rows are looked up in it", {}
    if isinstance(subject.owner, nn.Linear | _ConvNd) or subject.long_axes != 2:
        return None
    declared = subject.owner in model.tables and subject.key == "weight"
    if declared or is_table(subject.owner):
        return "embedding", "its module is an embedding", {}
    return None


def position(subject: Subject, model: ModelFacts) -> Decision | None:
    """Small MLPs from coordinates to position biases (`cpb_mlp` of Swin v2), which replace a table of positions.

    Models declare them without decay, and Muon's updates, which do not shrink with the gradient, would let them grow
    during the whole run.
    """
    if not isinstance(subject.owner, nn.Linear):
        return None
    for path in outwards(subject.path):
        if facts.POSITION.search(path.rpartition(".")[2].lower()):
            first = next(layer for layer in model.maps if within(layer.path, path))
            if max(first.reads) <= COORDINATES:
                reason = f"{path} computes positions from {max(first.reads)} coordinates, in place of a table"
                return "embedding", reason, _plain_view(subject, model)
    return None


def router(subject: Subject, model: ModelFacts) -> Decision | None:
    """Matrices that choose among experts, by name or because they have one output for each expert nearby."""
    shape, reason, layer = subject.param.shape, None, model.layer_of.get(subject.param)
    if len(shape) != 2 or subject.long_axes < 2:
        return None
    beside = model.beside[holder_of(layer.path)] if layer is not None and layer.path else ()
    if any(facts.says_router(word) for word in (*subject.words, type(subject.owner).__name__)):
        reason = "it is called a router"
    elif layer is not None and any(o is not layer and o.gives and layer.gives in o.reads for o in beside):
        return None  # the gate of a gated MLP
    elif facts.GATE.match(subject.called):
        reason = "it is called a gate, and no layer beside it reads what it gives"
    elif model.experts_around(subject.path) is None:
        sizes = set(shape[:1] if isinstance(subject.owner, nn.Linear) else shape)  # a bare matrix may lie either way
        if any(sizes & model.choices.get(path, set()) for path in list(outwards(subject.path))[:3]):
            reason = "it gives one number for each of the experts beside it"
    return ("router", reason, _plain_view(subject, model)) if reason else None


def head(subject: Subject, model: ModelFacts) -> Decision | None:
    """Output layers: nothing in the model reads their features."""
    layer = model.layer_of.get(subject.param)
    if layer is None or model.experts_around(subject.path) is not None:
        return None
    reason = _why_output(layer, isinstance(subject.owner, _ConvNd), model)
    return ("head", reason, _plain_view(subject, model)) if reason else None


def vector(subject: Subject, _: ModelFacts) -> Decision | None:
    """At most one axis is longer than one: nothing to orthogonalize, whatever the number of axes."""
    if subject.long_axes <= 1:
        return "vector", "at most one of its axes is longer than one", {}
    return None


def convolution(subject: Subject, _: ModelFacts) -> Decision | None:
    """Kernels: one matrix for each group; a kernel for each channel is not a matrix."""
    module = subject.owner
    if not isinstance(module, _ConvNd) or subject.key != "weight":
        return None
    if module.groups > 1 and module.groups == module.in_channels:
        return "depthwise", "each channel has filters of its own, so rows have nothing in common", {}
    if module.out_channels == 1:
        return "vector", "a single filter", {}
    view = _kernel_view(module)
    if module.groups == 1:
        return "convolution", "a convolution, one row for each output channel", view
    view |= {"heads": module.groups, "split_dim": 1} if "transposed" in view else {"heads": module.groups}
    return "convolution", f"a convolution of {module.groups} groups, one matrix each", view


def experts(subject: Subject, model: ModelFacts) -> Decision | None:
    path = model.experts_around(subject.path)
    if path is None:
        return None
    counts, view = model.experts[path], View()
    if subject.param.dim() > 2:
        in_out = model.stored_in_out(subject.path, subject.key, subject.param)
        view = {"matrix": "stack", "transposed": True} if in_out else {"matrix": "stack"}
        fits = subject.param.shape[0] in counts
    else:
        fits = path != subject.path or isinstance(subject.owner, nn.Linear)
    if not fits:
        return "unclear", "it holds several experts, and nothing tells where each of them is", {}
    return "experts", f"one of {max(counts)} experts, or all of them in one parameter", view


def table(subject: Subject, model: ModelFacts) -> Decision | None:
    """Bare parameters that are learned inputs or act elementwise, as the model or their names say."""
    if isinstance(subject.owner, nn.Linear | _ConvNd | nn.MultiheadAttention | facts.RECURRENT):
        return None
    if facts.TABLE.search(subject.key.lower()):
        return "embedding", "it is called a table, a position, a token or the like", {}
    if subject.param.shape[0] == 1:
        return "embedding", "its first axis has length one, as learned inputs have", {}
    if subject.name in model.without_decay:
        return "vector", "the model declares it without decay", {}
    if facts.ELEMENTWISE.search(subject.key) and subject.key != "weight":
        return "vector", "its name is one of parameters that act elementwise", {}
    return None


def known_module(subject: Subject, _: ModelFacts) -> Decision | None:
    """Layers of torch that keep several matrices in one parameter, in an order that torch documents."""
    module = subject.owner
    if isinstance(module, nn.MultiheadAttention):
        if subject.key != "in_proj_weight":
            return "hidden", "a projection of attention", {}
        return "hidden", "queries, keys and values of torch's attention", _parts(subject, 3)
    if isinstance(module, facts.RECURRENT):
        gates = next((count for kind, count in GATES.items() if isinstance(module, kind)), 1)
        fused = gates > 1 and not subject.key.startswith("weight_hr")
        return "hidden", "a recurrent layer of torch", _parts(subject, gates) if fused else {}
    return None


def linear(subject: Subject, model: ModelFacts) -> Decision | None:
    if not isinstance(subject.owner, nn.Linear) and subject.param not in model.layer_of:
        return None
    view = _plain_view(subject, model)
    if _stacks_queries_keys_values(subject, model):
        view["split_sizes"] = (max(subject.param.shape) // 3,) * 3
        return "hidden", "queries, keys and values, each a linear map", view
    # Other layouts differ under one name, and only the reader of the model's code can confirm a split.
    fused = facts.FUSED.search(subject.called)
    hint = "; if it fuses several projections, split_sizes or heads separate them" if fused else ""
    return "hidden", "a linear map inside the model" + hint, view


def stack(subject: Subject, _: ModelFacts) -> Decision | None:
    """Queries, keys and values in one parameter (3, out, in), as a name such as `qkv_w` tells."""
    shape = subject.param.shape
    if len(shape) == 3 and shape[0] in (2, 3, 4) and facts.FUSED.search(subject.key):
        return "hidden", f"{shape[0]} linear maps side by side", {"matrix": "stack"}
    return None


def unclear(subject: Subject, _: ModelFacts) -> Decision:
    return "unclear", f"nothing tells what its axes {tuple(subject.param.shape)} mean", {}


RULES: tuple[Rule, ...] = (
    adapter,
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


def _why_output(layer: Layer, is_kernel: bool, model: ModelFacts) -> str | None:
    gives = layer.gives or 0
    is_read = any(other is not layer for other in model.reading.get(gives, ()))
    if any(within(layer.path, path) for path in model.heads):
        return "the model declares it as its output layer"
    if _in_attention(layer, model):
        return None
    if gives == model.vocabulary and not is_read:
        return "it gives one number for each row of the largest embedding"
    output = _output_around(layer.path, model)
    if output is not None:  # a name alone is not enough: another layer may read what is called an output
        feeds = is_read if model.in_block(holder_of(output)) else _feeds_beside(layer, output, model)
        return None if feeds else f"{output} is called an output, and nothing reads its {gives} features"
    if model.in_block(layer.path):
        is_output = not is_read and gives in model.given_outside
        return f"nothing reads its {gives} features, and an output outside is as wide" if is_output else None
    others = [other for other in model.maps if other is not layer]
    if not others:
        return None  # a model of one layer has no inside and no outside
    if not is_read and not is_kernel:  # what a convolution gives is often flattened before it is read
        return f"nothing in the model reads its {gives} features"
    # The last layer is an output unless all layers have one width; a kernel must be the only one of its width.
    widths = {other.gives for other in others}
    if not is_kernel:
        widths = set() if widths | {size for other in others for size in other.reads} != {gives} else {gives}
    is_output = layer is model.maps[-1] and gives not in widths
    return f"it is the last layer of the model, and gives {gives} features" if is_output else None


def _in_attention(layer: Layer, model: ModelFacts) -> bool:
    holder, word = model.modules[holder_of(layer.path)], layer.path.rpartition(".")[2].lower()
    if isinstance(holder, nn.MultiheadAttention):
        return True
    siblings = [facts.QUERY_KEY_VALUE.search(name.lower()) for name in (word, *holder._modules)]
    return siblings[0] is not None and {match[1] for match in siblings if match} == {"q", "k", "v"}


def _output_around(path: str, model: ModelFacts) -> str | None:
    for around in outwards(path):
        word = around.rpartition(".")[2].lower()
        kind = type(model.modules[around]).__name__.removeprefix("FSDP")  # of fully_shard
        head_class = kind.endswith("Head") and kind != "Head"  # plain Head is often one head of attention
        if around and (facts.HEAD.search(word) or (head_class and not word.isdigit())):
            return around
    return None


def _feeds_beside(layer: Layer, output: str, model: ModelFacts) -> bool:
    """Whether a layer of an output module, or after it in the module around, reads this one."""
    for other in model.reading.get(layer.gives or 0, ()):
        later = other.order > layer.order and within(other.path, holder_of(output))
        modulates = facts.MODULATION.search(other.path.lower())  # it reads the condition instead
        if other is not layer and (later or within(other.path, output)) and not modulates:
            return True
    return False


def _stacks_queries_keys_values(subject: Subject, model: ModelFacts) -> bool:
    """Whether a fused projection is certainly (queries, keys, values): GPT-2's `c_attn`, a known library's `qkv`."""
    layer = model.layer_of.get(subject.param)
    if layer is None or layer.gives != 3 * layer.reads[0]:
        return False
    holder = type(model.modules[holder_of(subject.path)])
    if subject.called == "c_attn":
        return "BigCode" not in holder.__name__  # it goes head by head
    written = next(cls.__module__ for cls in holder.__mro__ if not cls.__module__.startswith("torch."))  # not FSDP's
    library = written.partition(".")[0]
    return subject.called == "qkv" and library in QKV_LIBRARIES and written not in HEAD_BY_HEAD


def _plain_view(subject: Subject, model: ModelFacts) -> View:
    """The view under Muon, if a pattern sends the parameter there."""
    if isinstance(subject.owner, _ConvNd):
        return _kernel_view(subject.owner)
    layer = model.layer_of.get(subject.param)
    return {"transposed": True} if layer is not None and layer.in_out else {}


def _kernel_view(module: _ConvNd) -> View:
    """A row for each output channel; a transposed convolution keeps its weight as (in, out / groups, ...)."""
    return {"matrix": "flatten", **({"transposed": True} if isinstance(module, _ConvTransposeNd) else {})}


def _parts(subject: Subject, count: int) -> View:
    return {"split_sizes": (subject.param.shape[0] // count,) * count}
