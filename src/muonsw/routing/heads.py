"""Outputs: maps whose result the model gives away instead of reading it again."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from muonsw.routing import names
from muonsw.routing.survey import Layer, Subject, Survey, within

# Projections that are often fused into one: two (keys and values, gate and up, scale and shift), three, four, six.
FUSED = (2, 3, 4, 6)


def find_head(subject: Subject, survey: Survey) -> tuple[str, str] | None:
    """The role ("head", or "unclear" where it could be one) and the reason; None where the map feeds another."""
    layer = survey.layer_of.get(subject.param)
    if layer is None:
        return None
    if any(within(layer.path, path) and not survey.readers(layer, path) for path in survey.heads):
        return "head", "the model declares it as its output layer"
    if layer.gives == survey.vocabulary and not survey.readers(layer):
        return "head", "it gives one number for each row of the largest embedding"
    output = _output_around(subject, survey)
    if _concatenated(layer, survey):
        return None
    if output is not None and not survey.in_block(_holder(output)):
        if not survey.readers(layer, output) and not survey.readers(layer, _holder(output), later=True):
            return "head", f"{output} is called an output, and nothing after it reads its {layer.gives} features"
        return None
    if survey.in_block(layer.path):
        return _in_a_block(layer, output, survey)
    return _outside_blocks(layer, subject, survey)


def _in_a_block(layer: Layer, output: str | None, survey: Survey) -> tuple[str, str] | None:
    """Inside repeated parts most maps feed another; an output is called so or is as wide as one, and nothing reads it."""
    as_wide = any(o.gives == layer.gives and not survey.in_block(o.path) for o in survey.layers if o is not layer)
    if (output is None and not as_wide) or survey.readers(layer):
        return None
    return "head", f"nothing reads its {layer.gives} features, and " + (
        "it is as wide as an output outside" if output is None else f"{output} is called an output"
    )


def _outside_blocks(layer: Layer, subject: Subject, survey: Survey) -> tuple[str, str] | None:
    if _is_last(layer, survey):
        return "head", f"it is the last layer of the model and the only one that gives {layer.gives} features"
    if isinstance(subject.owner, _ConvNd) or survey.readers(layer):
        return None
    return _fused_or_head(layer, survey)


def _fused_or_head(layer: Layer, survey: Survey) -> tuple[str, str] | None:
    """A size that nothing reads is an output, unless a neighbour reads a half or a third of it."""
    holder = _holder(layer.path)
    while holder and isinstance(survey.modules[holder], nn.Sequential):
        holder = _holder(holder)
    gives = layer.gives or 0
    parts = {gives // k for k in FUSED if gives % k == 0 and gives // k > 1}
    near = [other for other in survey.layers if other is not layer and within(other.path, holder) and parts & set(other.reads)]
    if any(other.order > layer.order for other in near):
        return None
    if near:
        return "unclear", f"nothing reads its {gives} features, but a neighbour reads a part of that size"
    return "head", f"nothing in the model reads its {gives} features"


def _output_around(subject: Subject, survey: Survey) -> str | None:
    """The innermost module around the parameter that is called an output, by its name or its class."""
    for path, module in survey.ancestors(subject.path):
        word = path.rpartition(".")[2]
        if names.says_head(word) or (not word.isdigit() and _is_head_class(module)):
            return path
    return None


def _is_head_class(module: nn.Module) -> bool:
    """Whether the class name ends in "Head", as RegressionHead does; plain Head is often one head of attention."""
    kind = type(module).__name__
    return kind.endswith("Head") and kind != "Head"


def _is_last(layer: Layer, survey: Survey) -> bool:
    """Whether no layer comes after it, and no other gives as many features, as the layers of a trunk would."""
    gives = [other for other in survey.layers if other.gives is not None]
    unique = all(other.gives != layer.gives for other in gives[:-1])
    return layer is gives[-1] and len(gives) > 1 and unique and layer.gives not in layer.reads


def _concatenated(layer: Layer, survey: Survey) -> bool:
    """Whether a list of equal modules gives pieces of what a layer beside it reads as a whole, as heads of attention."""
    for path, _ in survey.ancestors(layer.path):
        holder = survey.modules[_holder(path)]
        if isinstance(holder, nn.ModuleList):
            whole = (layer.gives or 0) * len(holder)
            beside = _holder(_holder(path))
            kinds = {type(element) for element in holder}
            readers = (other for other in survey.layers if within(other.path, beside) and whole in other.reads)
            return len(holder) > 1 and len(kinds) == 1 and any(not within(o.path, _holder(path)) for o in readers)
    return False


def _holder(path: str) -> str:
    return path.rpartition(".")[0]
