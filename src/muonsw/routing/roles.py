"""The rules that assign a role to each parameter, in order: structure first, names last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonsw.routing import facts
from muonsw.routing.facts import Layer, ModelFacts, Subject, enclosing, is_norm, is_table, parent_of, within

View = dict[str, Any]

# Roles of the matrices inside the model, which are decayed, and orthogonalized under Muon.
MATRIX_ROLES = ("hidden", "experts", "convolution")
OTHER_ROLES = ("embedding", "head", "router", "norm", "bias", "vector", "depthwise", "lora", "unclear")
ROLES = (*MATRIX_ROLES, *OTHER_ROLES)

# Libraries whose `qkv` holds all queries, then all keys, then all values; and timm's exceptions, ordered by head.
QKV_LIBRARIES = frozenset({"timm", "torchvision", "transformers"})
HEAD_BY_HEAD = frozenset(f"timm.models.{file}" for file in ("efficientformer", "levit", "maxxvit", "tiny_vit"))
# The largest input width of a position network.
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
    """Route each trainable parameter; tied weights come once."""
    model_facts = ModelFacts(model)
    for subject in model_facts.subjects:
        if subject.param.requires_grad:
            decisions = (rule(subject, model_facts) for rule in RULES)
            role, reason, view = next(decision for decision in decisions if decision is not None)
            decayed = role in MATRIX_ROLES and subject.name not in model_facts.without_decay
            if role in MATRIX_ROLES and not decayed:
                reason += "; the model excludes it from decay"
            yield RoutedParameter(subject.name, subject.param, role, reason, view, decayed)


def adapter(subject: Subject, model: ModelFacts) -> Decision | None:
    """Low-rank factors of an adapter; parameters that PEFT trains in full keep their usual role."""
    modules = (model.modules[path] for path in enclosing(subject.path))
    full = bool(facts.PEFT_WORDS & set(subject.path.split(".")) or facts.TABLE.search(subject.key))
    inside = not full and any(hasattr(module, "adapter_layer_names") for module in modules)
    named = any(facts.ADAPTER.search(word) for word in subject.words)
    if not (inside or named) or subject.long_axes < 2 or "bias" in subject.key:
        return None
    return "lora", "a low-rank factor of an adapter", _plain_view(subject, model)


def bias(subject: Subject, _: ModelFacts) -> Decision | None:
    key = subject.key.lower()
    if not facts.BIAS.search(key):
        return None
    if subject.param.dim() > 1 and facts.TABLE.search(key):
        return "embedding", "a table of offsets", {}
    return "bias", "it is added to features", {}


def norm(subject: Subject, _: ModelFacts) -> Decision | None:
    if is_norm(subject.owner):
        return "norm", f"it belongs to {type(subject.owner).__name__}", {}
    named = "norm" in type(subject.owner).__name__.lower() or "norm" in subject.key.lower()
    if named and subject.long_axes <= 1:
        return "norm", "a vector whose name or class says norm", {}
    return None


def embedding(subject: Subject, model: ModelFacts) -> Decision | None:
    """Lookup tables, including those that the head shares."""
    if any(isinstance(owner, facts.TABLES) for owner in model.owners[subject.param]):
        return "embedding", "rows are looked up in it", {}
    if isinstance(subject.owner, nn.Linear | _ConvNd) or subject.long_axes != 2:
        return None
    declared = subject.owner in model.tables and subject.key == "weight"
    if declared or is_table(subject.owner):
        return "embedding", "its module is an embedding", {}
    return None


def position(subject: Subject, model: ModelFacts) -> Decision | None:
    """Small MLPs that compute position biases from coordinates (`cpb_mlp` of Swin v2), instead of a table.

    Models exclude them from decay, and Muon's updates do not shrink with the gradient, so they would keep growing.
    """
    if not isinstance(subject.owner, nn.Linear):
        return None
    for path in enclosing(subject.path):
        if facts.POSITION.search(path.rpartition(".")[2].lower()):
            first = next(layer for layer in model.maps if within(layer.path, path))
            if max(first.in_features) <= COORDINATES:
                reason = f"{path} computes positions from {max(first.in_features)} coordinates"
                return "embedding", reason, _plain_view(subject, model)
    return None


def router(subject: Subject, model: ModelFacts) -> Decision | None:
    """Matrices that choose among experts, by name or because they have one output per nearby expert."""
    shape, reason, layer = subject.param.shape, None, model.layer_of.get(subject.param)
    if len(shape) != 2 or subject.long_axes < 2:
        return None
    siblings = model.siblings[parent_of(layer.path)] if layer is not None and layer.path else ()
    if any(facts.names_router(word) for word in (*subject.words, type(subject.owner).__name__)):
        reason = "it is called a router"
    elif layer is not None and any(
        s is not layer and s.out_features and layer.out_features in s.in_features for s in siblings
    ):
        return None  # the gate of a gated MLP
    elif facts.GATE.match(subject.label):
        reason = "it is called a gate, and no sibling reads its output"
    elif model.experts_around(subject.path) is None:
        sizes = set(shape[:1] if isinstance(subject.owner, nn.Linear) else shape)  # a bare matrix has either layout
        if any(sizes & model.router_choices.get(path, set()) for path in list(enclosing(subject.path))[:3]):
            reason = "it has one output per nearby expert"
    return ("router", reason, _plain_view(subject, model)) if reason else None


def head(subject: Subject, model: ModelFacts) -> Decision | None:
    """Output layers: nothing in the model reads their output."""
    layer = model.layer_of.get(subject.param)
    if layer is None or model.experts_around(subject.path) is not None:
        return None
    reason = _why_output(layer, isinstance(subject.owner, _ConvNd), model)
    return ("head", reason, _plain_view(subject, model)) if reason else None


def vector(subject: Subject, _: ModelFacts) -> Decision | None:
    if subject.long_axes <= 1:
        return "vector", "at most one of its axes is longer than one", {}
    return None


def convolution(subject: Subject, _: ModelFacts) -> Decision | None:
    """Convolution kernels, one matrix per group; depthwise kernels are not matrices."""
    module = subject.owner
    if not isinstance(module, _ConvNd) or subject.key != "weight":
        return None
    if module.groups > 1 and module.groups == module.in_channels:
        return "depthwise", "each channel has separate filters, so its rows are unrelated", {}
    if module.out_channels == 1:
        return "vector", "a single filter", {}
    view = _kernel_view(module)
    if module.groups == 1:
        rows = "one column per input channel" if "transposed" in view else "one row per output channel"
        return "convolution", f"a convolution, {rows}", view
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
        return "unclear", "it holds several experts in an unknown layout", {}
    return "experts", f"one of {max(counts)} experts, or all of them in one parameter", view


def table(subject: Subject, model: ModelFacts) -> Decision | None:
    """Bare parameters that are learned inputs or act elementwise, by declaration or name."""
    if isinstance(subject.owner, nn.Linear | _ConvNd | nn.MultiheadAttention | facts.RECURRENT):
        return None
    if facts.TABLE.search(subject.key.lower()):
        return "embedding", "its name suggests a table, positions or tokens", {}
    if subject.param.shape[0] == 1:
        return "embedding", "its first axis has length one, like a learned input", {}
    if subject.name in model.without_decay:
        return "vector", "the model excludes it from decay", {}
    if facts.ELEMENTWISE.search(subject.key):
        return "vector", "its name suggests that it acts elementwise", {}
    return None


def known_module(subject: Subject, _: ModelFacts) -> Decision | None:
    """Layers of torch that hold several matrices in one parameter, in a documented order."""
    module = subject.owner
    if isinstance(module, nn.MultiheadAttention):
        if subject.key != "in_proj_weight":
            return "hidden", "a projection of attention", {}
        return "hidden", "queries, keys and values of torch's attention", _parts(subject, 3)
    if isinstance(module, facts.RECURRENT):
        gates = subject.param.shape[0] // module.hidden_size  # 4 for LSTM, 3 for GRU
        return "hidden", "a recurrent layer of torch", _parts(subject, gates) if gates > 1 else {}
    return None


def linear(subject: Subject, model: ModelFacts) -> Decision | None:
    if not isinstance(subject.owner, nn.Linear) and subject.param not in model.layer_of:
        return None
    view = _plain_view(subject, model)
    if _stacks_queries_keys_values(subject, model):
        view["split_sizes"] = (max(subject.param.shape) // 3,) * 3
        return "hidden", "queries, keys and values, each a linear map", view
    # Other fused names have several layouts, so only the user can confirm a split.
    fused = facts.FUSED.search(subject.label)
    hint = "; if it fuses several projections, split_sizes or heads separate them" if fused else ""
    return "hidden", "a linear map inside the model" + hint, view


def stack(subject: Subject, _: ModelFacts) -> Decision | None:
    """Projections fused in one parameter (3, out, in), with a name such as `qkv_w`."""
    shape = subject.param.shape
    if len(shape) == 3 and shape[0] in (2, 3, 4) and facts.FUSED.search(subject.key):
        return "hidden", f"a stack of {shape[0]} linear maps", {"matrix": "stack"}
    return None


def unclear(subject: Subject, _: ModelFacts) -> Decision:
    return "unclear", f"its shape {tuple(subject.param.shape)} and name match no rule", {}


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
    width = layer.out_features or 0
    is_read = any(other is not layer for other in model.readers.get(width, ()))
    if any(within(layer.path, path) for path in model.heads):
        return "the model declares it as its output layer"
    if _in_attention(layer, model):
        return None
    if width == model.vocabulary and not is_read:
        return "it has one output per row of the largest embedding"
    output = _enclosing_output(layer.path, model)
    if output is not None:  # a name alone is not enough: another layer may read it
        feeds = is_read if model.in_block(parent_of(output)) else _feeds_sibling(layer, output, model)
        return None if feeds else f"{output} is called an output, and nothing reads its {width} features"
    if model.in_block(layer.path):
        is_output = not is_read and width in model.outer_widths
        reason = f"nothing reads its {width} features, and a layer outside the repeated blocks has as many outputs"
        return reason if is_output else None
    neighbors = [other for other in model.maps if other is not layer]
    if not neighbors:
        return None
    if not is_read and not is_kernel:  # a convolution's output is often flattened before it is read
        return f"nothing in the model reads its {width} features"
    # The last layer is an output unless all layers have the same width; a kernel must be the only one of its width.
    outputs = {other.out_features for other in neighbors}
    inputs = {size for other in neighbors for size in other.in_features}
    differs = width not in outputs if is_kernel else outputs | inputs != {width}
    return f"it is the last layer of the model, with {width} outputs" if layer is model.maps[-1] and differs else None


def _in_attention(layer: Layer, model: ModelFacts) -> bool:
    holder, word = model.modules[parent_of(layer.path)], layer.path.rpartition(".")[2].lower()
    if isinstance(holder, nn.MultiheadAttention):
        return True
    siblings = [facts.QUERY_KEY_VALUE.search(name.lower()) for name in (word, *holder._modules)]
    return siblings[0] is not None and {match[1] for match in siblings if match} == {"q", "k", "v"}


def _enclosing_output(path: str, model: ModelFacts) -> str | None:
    for outer in enclosing(path):
        word = outer.rpartition(".")[2].lower()
        kind = type(model.modules[outer]).__name__.removeprefix("FSDP")  # from fully_shard
        head_class = kind.endswith("Head") and kind != "Head"  # plain Head is often an attention head
        if outer and (facts.HEAD.search(word) or (head_class and not word.isdigit())):
            return outer
    return None


def _feeds_sibling(layer: Layer, output: str, model: ModelFacts) -> bool:
    """Whether a layer inside the output module, or after it in its parent, reads this one."""
    for other in model.readers.get(layer.out_features or 0, ()):
        later = other.order > layer.order and within(other.path, parent_of(output))
        modulates = facts.MODULATION.search(other.path.lower())  # reads the condition instead
        if other is not layer and (later or within(other.path, output)) and not modulates:
            return True
    return False


def _stacks_queries_keys_values(subject: Subject, model: ModelFacts) -> bool:
    """Whether a fused projection surely is (queries, keys, values): GPT-2's `c_attn`, a known library's `qkv`."""
    layer = model.layer_of.get(subject.param)
    if layer is None or layer.out_features != 3 * layer.in_features[0]:
        return False
    holder = type(model.modules[parent_of(subject.path)])
    if subject.label == "c_attn":
        return "BigCode" not in holder.__name__  # its c_attn is ordered by head
    file = next(cls.__module__ for cls in holder.__mro__ if not cls.__module__.startswith("torch."))  # not FSDP's
    return subject.label == "qkv" and file.partition(".")[0] in QKV_LIBRARIES and file not in HEAD_BY_HEAD


def _plain_view(subject: Subject, model: ModelFacts) -> View:
    """The view under Muon, used if a pattern sends the parameter there."""
    if isinstance(subject.owner, _ConvNd):
        return _kernel_view(subject.owner)
    layer = model.layer_of.get(subject.param)
    return {"transposed": True} if layer is not None and layer.in_out else {}


def _kernel_view(module: _ConvNd) -> View:
    """One row per output channel; a transposed convolution stores its weight as (in, out / groups, ...)."""
    return {"matrix": "flatten", **({"transposed": True} if isinstance(module, _ConvTransposeNd) else {})}


def _parts(subject: Subject, count: int) -> View:
    return {"split_sizes": (subject.param.shape[0] // count,) * count}
