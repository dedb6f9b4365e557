"""Outputs: maps whose result the model gives away instead of reading it again."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from muonsw.routing import names
from muonsw.routing.survey import Layer, Subject, Survey, holder_of, within

# Projections that are often fused into one: two (keys and values, gate and up, scale and shift), three, four, six.
FUSED = (2, 3, 4, 6)


def find_head(subject: Subject, survey: Survey) -> tuple[str, str] | None:
    """The role ("head", or "unclear" where it could be one) and the reason; None where the map feeds another."""
    layer = survey.layer_of.get(subject.param)
    if layer is None:
        return None
    if any(within(layer.path, path) and not survey.is_read(layer, path) for path in survey.heads):
        return "head", "the model declares it as its output layer"
    if names.MODULATION.search(layer.path.lower()) and any((layer.gives or 0) / n in survey.reading for n in FUSED):
        return None  # scale and shift for a layer beside it
    paired = survey.in_block(layer.path) and _has_twin(layer, survey)
    if layer.gives == survey.vocabulary and not survey.is_read(layer) and not paired:
        return "head", "it gives one number for each row of the largest embedding"
    output = _output_around(subject, survey)
    if output is not None:
        return _called_output(layer, output, survey)
    if survey.in_block(layer.path):
        return None if paired else _in_a_block(layer, survey)
    return _outside_blocks(layer, subject, survey)


def _has_twin(layer: Layer, survey: Survey) -> bool:
    """Whether a layer of the same module has the same sizes, as values beside keys: a block has no two outputs."""
    holder = holder_of(layer.path)
    alike = (other for other in survey.held_by[holder] if (other.reads, other.gives) == (layer.reads, layer.gives))
    return not isinstance(survey.modules[holder], nn.ModuleList) and any(other is not layer for other in alike)


def _called_output(layer: Layer, output: str, survey: Survey) -> tuple[str, str] | None:
    """A name alone is not enough: inside a block nothing may read it at all, outside nothing in it and after it."""
    holder = holder_of(output)
    if survey.in_block(holder):
        is_read = survey.is_read(layer)
    else:
        is_read = survey.is_read(layer, output) or survey.is_read(layer, holder, later=True)
    if is_read or _is_concatenated(layer, survey):
        return None
    return "head", f"{output} is called an output, and nothing reads its {layer.gives} features"


def _in_a_block(layer: Layer, survey: Survey) -> tuple[str, str] | None:
    """Inside repeated parts a map feeds another, unless it is as wide as an output outside and nothing reads it."""
    if layer.gives not in survey.outside or survey.is_read(layer) or _is_concatenated(layer, survey):
        return None
    return "head", f"nothing reads its {layer.gives} features, and an output outside is as wide"


def _outside_blocks(layer: Layer, subject: Subject, survey: Survey) -> tuple[str, str] | None:
    if sum(other.gives is not None for other in survey.layers) == 1:
        return None  # a model of one layer has no inside and no outside
    if _ends_final_layer(layer, survey):
        return "head", f"it is the last map of {holder_of(layer.path)}"
    last = layer is [other for other in survey.layers if other.gives is not None][-1]
    if last and _gives_alone(layer, survey):
        return "head", f"it is the last layer of the model and the only one that gives {layer.gives} features"
    if isinstance(subject.owner, _ConvNd):
        return None
    if not survey.is_read(layer):
        return _fused_or_head(layer, survey)
    if last and _may_be_output(layer, survey):
        return "unclear", f"it is the last layer, but others read {layer.gives} features too"
    return None


def _ends_final_layer(layer: Layer, survey: Survey) -> bool:
    """Whether it is the last map of a module called final; modulation beside it reads the condition, not its result."""
    holder = holder_of(layer.path)
    later = (other for other in survey.layers if other.order > layer.order and within(other.path, holder))
    feeds = any(layer.gives in other.reads and not names.MODULATION.search(other.path.lower()) for other in later)
    return bool(names.FINAL.match(holder.rpartition(".")[2])) and not feeds


def _may_be_output(layer: Layer, survey: Survey) -> bool:
    """Whether a last layer whose features others could read may be an output: nothing else in the model is one.

    The end of a list, of torch's attention, of a language model (its output is as wide as its embedding) and of a
    trunk of one width throughout are not.
    """
    others = [other for other in survey.layers if other is not layer and other.gives is not None]
    widths = {size for other in others for size in (*other.reads, other.gives)}
    inside = isinstance(survey.modules[holder_of(layer.path)], nn.ModuleList | nn.MultiheadAttention)
    has_output = any(not survey.is_read(other) for other in others if not survey.in_block(other.path))
    return not inside and not has_output and survey.vocabulary is None and widths != {layer.gives}


def _fused_or_head(layer: Layer, survey: Survey) -> tuple[str, str] | None:
    """A size that nothing reads is an output, unless a neighbour reads parts of it, or it with others as a whole."""
    gives, around = layer.gives or 0, _neighbourhood(layer, survey)
    near = [other for other in survey.layers if other is not layer and within(other.path, around)]
    beside = survey.modules[holder_of(layer.path)].children()
    counts = {*FUSED, *(len(module) for module in beside if isinstance(module, nn.ModuleList) and len(module))}
    parts = {gives // count for count in counts if gives % count == 0 and gives > count}
    wholes = {gives * count for count in FUSED} - set(layer.reads)  # what it reads itself is the width of the trunk
    if any(other.order > layer.order and (parts | wholes) & set(other.reads) for other in near):
        return None
    if any(parts & set(other.reads) for other in near):
        return "unclear", f"nothing reads its {gives} features, but a neighbour reads a part of that size"
    return "head", f"nothing in the model reads its {gives} features"


def _neighbourhood(layer: Layer, survey: Survey) -> str:
    """The closest module around a layer that holds others too."""
    path = holder_of(layer.path)
    while path and sum(within(other.path, path) for other in survey.layers) < 2:
        path = holder_of(path)
    while path and isinstance(survey.modules[path], nn.Sequential):
        path = holder_of(path)
    return path


def _output_around(subject: Subject, survey: Survey) -> str | None:
    """The innermost module around the parameter that is called an output, by its name or its class.

    The maps of a normalizing flow inside it are no outputs: they give parameters of a transformation.
    """
    for path, module in survey.ancestors(subject.path):
        word = path.rpartition(".")[2]
        if names.FLOW.search(word):
            return None
        if names.says_head(word) or (not word.isdigit() and _is_head_class(module)):
            return path
    return None


def _is_head_class(module: nn.Module) -> bool:
    """Whether the class name ends in "Head", as RegressionHead does; plain Head is often one head of attention."""
    kind = type(module).__name__.removeprefix("FSDP")  # of fully_shard
    return kind.endswith("Head") and kind != "Head"


def _gives_alone(layer: Layer, survey: Survey) -> bool:
    """Whether no other layer gives as many features, as the layers of a trunk would."""
    others = (other for other in survey.layers if other is not layer)
    return layer.gives not in layer.reads and all(other.gives != layer.gives for other in others)


def _is_concatenated(layer: Layer, survey: Survey) -> bool:
    """Whether a list of equal modules gives pieces of what a layer beside it reads whole, as heads of attention do."""
    for path, _ in survey.ancestors(layer.path):
        holder = survey.modules[holder_of(path)]
        if isinstance(holder, nn.ModuleList):
            whole = (layer.gives or 0) * len(holder)
            scope = holder_of(holder_of(path))
            readers = (other for other in survey.reading.get(whole, ()) if within(other.path, scope))
            alike = len(holder) > 1 and len({type(element) for element in holder}) == 1
            return alike and any(not within(other.path, holder_of(path)) for other in readers)
    return False
