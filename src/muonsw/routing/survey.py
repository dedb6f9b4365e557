"""What can be known of a model by looking at its modules: who owns a parameter, who reads what, what it declares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from muonsw.routing import names

TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase, nn.LocalResponseNorm)
RECURRENT = nn.RNNBase | nn.RNNCellBase
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Parametrizations of torch that change only the length of what is trained: it is still the layer's matrix.
RESCALING = frozenset({"_WeightNorm", "_SpectralNorm"})
_EXPERT_COUNT = re.compile(r"^((num|n|moe)_)?(\w+_)?experts?$")


class Subject(NamedTuple):
    """A parameter and its place in the model."""

    name: str
    param: Tensor
    own: str
    path: str
    owner: nn.Module

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also where it is sharded."""
        return tuple(self.param.shape)

    @property
    def words(self) -> list[str]:
        """The words of the owner's path that the model's author chose."""
        return names.meaningful(self.path.split(".")) if self.path else []

    @property
    def long_axes(self) -> int:
        """How many axes have more than one entry."""
        return sum(size > 1 for size in self.shape)


class Layer(NamedTuple):
    """Something that reads features: its place, how many it reads, and how many it gives (None for norms).

    `certain` is false where a bare matrix does not tell which of its axes is which; `down` if its name says that it
    leads back to the width of the model.
    """

    order: int
    path: str
    reads: tuple[int, ...]
    gives: int | None
    weight: Tensor | None
    certain: bool = True
    down: bool = False


class Survey:
    """One look at a model, from which every decision about its parameters is taken.

    Wrappers, such as those of torch.compile and activation checkpointing, are neither in `modules` nor in names.
    """

    def __init__(self, model: nn.Module) -> None:
        # a wrapper and what is in it have one name, and the inner comes later
        self.modules = {names.clean_name(model, path): module for path, module in model.named_modules()}
        self.parameters = [(names.clean_name(model, name), param) for name, param in model.named_parameters()]
        self.owners = self._find_owners()
        self.layers = self._turned(list(self._find_layers()))
        self.layer_of = {layer.weight: layer for layer in self.layers if layer.weight is not None}
        self.reading: dict[int, list[Layer]] = {}
        self.held_by: dict[str, list[Layer]] = {}
        for layer in self.layers:
            self.held_by.setdefault(holder_of(layer.path), []).append(layer)
            for size in set(layer.reads):
                self.reading.setdefault(size, []).append(layer)
        self._blocks: dict[str, bool] = {}
        self.classes = Counter(type(module) for path, module in self.modules.items() if not _is_copy(path))
        self.heads = self._declared_heads()
        self.tables = self._declared_tables()
        self.without_decay = self._declared_without_decay()
        rows = [m.num_embeddings for m in self.modules.values() if isinstance(m, nn.Embedding)]
        self.vocabulary = max(rows, default=None)
        self.outside = {layer.gives for layer in self.layers if layer.gives and not self.in_block(layer.path)}

    def subjects(self) -> Iterator[Subject]:
        """Every trainable parameter once, under its first name."""
        for name, param in self.parameters:
            if param.requires_grad:
                path, own = self._place(*name.rpartition(".")[::2])
                yield Subject(name, param, own, path, self.modules[path])

    def _place(self, path: str, own: str) -> tuple[str, str]:
        """The layer that a parameter belongs to and its name there, whatever torch keeps between the two."""
        while path and isinstance(self.modules[path], nn.ParameterList | nn.ParameterDict):
            path, _, own = path.rpartition(".")
        module = self.modules[path]
        if isinstance(module, ParametrizationList) and own == _trained_matrix(module):
            layer, _, own = f".{path}".rpartition(".parametrizations.")
            return layer[1:], own
        is_direction = own.endswith("_v") and f"{own[:-2]}_g" in module._parameters
        is_original = own.endswith("_orig") and own[:-5] not in module._parameters
        return path, own[:-2] if is_direction else own[:-5] if is_original else own

    def ancestors(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """The module itself and those around it, the innermost first, without the model itself."""
        while path:
            yield path, self.modules[path]
            path = holder_of(path)

    def in_block(self, path: str) -> bool:
        """Whether a module lies in a repeated part of the model: an element of a list, or a class used twice."""
        if not path:
            return False
        if path not in self._blocks:
            repeated = bool(self.modules[path]._modules) and self._is_repeated(path)
            self._blocks[path] = repeated or self.in_block(holder_of(path))
        return self._blocks[path]

    def _is_repeated(self, path: str) -> bool:
        module, holder = self.modules[path], self.modules[holder_of(path)]
        if isinstance(holder, nn.ModuleList | nn.ModuleDict) and not isinstance(module, nn.ModuleList):
            return "modules_to_save" not in path.split(".")[-2:]
        return not isinstance(module, CONTAINERS) and self.classes[type(module)] > 1

    def is_read(self, layer: Layer, scope: str = "", *, later: bool = False) -> bool:
        """Whether another layer under `scope` reads as many features as this one gives."""
        return any(
            other is not layer and within(other.path, scope) and (not later or other.order > layer.order)
            for other in self.reading.get(layer.gives or 0, ())
        )

    def _find_owners(self) -> dict[Tensor, list[nn.Module]]:
        owners: dict[Tensor, list[nn.Module]] = {}
        for path, module in self.modules.items():
            for own, param in module._parameters.items():
                if param is not None:
                    owners.setdefault(param, []).append(self.modules[self._place(path, own)[0]])
        return owners

    def _turned(self, layers: list[Layer]) -> list[Layer]:
        """Bare matrices the other way round where only that fits: others know the size of one axis alone."""
        widths = {size for layer in layers if layer.certain for size in (*layer.reads, layer.gives)}

        def fits_turned(layer: Layer) -> bool:
            reads, gives = set(layer.reads) <= widths, layer.gives in widths
            return not layer.certain and reads != gives and (reads if layer.down else gives)

        return [
            layer._replace(reads=(layer.gives or 0,), gives=layer.reads[0]) if fits_turned(layer) else layer
            for layer in layers
        ]

    def _find_layers(self) -> Iterator[Layer]:
        for order, (path, module) in enumerate(self.modules.items()):
            if not _is_copy(path) and not names.ADAPTER.search(path):
                yield from _layers_of(order, path, module)

    def _declared_heads(self) -> list[str]:
        """Paths of the modules that a model itself calls its output: Hugging Face's word, timm's, torch's softmax."""
        found: list[Any] = [m for m in self.modules.values() if isinstance(m, nn.AdaptiveLogSoftmaxWithLoss)]
        for module in self.modules.values():
            for method in ("get_output_embeddings", "get_classifier"):
                answer = _ask(module, method)
                found.extend(answer if isinstance(answer, tuple | list) else [answer])
        declared = {id(names.unwrapped(module)) for module in found if isinstance(module, nn.Module)}
        return [path for path, module in self.modules.items() if id(module) in declared and path]

    def _declared_tables(self) -> set[int]:
        answers = (_ask(module, "get_input_embeddings") for module in self.modules.values())
        return {id(names.unwrapped(answer)) for answer in answers if isinstance(answer, nn.Module)}

    def _declared_without_decay(self) -> set[str]:
        """Names that timm's models list, as timm itself reads them, and parameters that carry a mark."""
        marked = {name for name, p in self.parameters if getattr(p, "_no_weight_decay", False)}
        for path, module in self.modules.items():
            listed = _ask(module, "no_weight_decay")
            if isinstance(listed, set | frozenset | list | tuple | dict):
                marked |= {f"{path}.{name}" if path else str(name) for name in listed}
        return marked


def holder_of(path: str) -> str:
    """The path of the module around another."""
    return path.rpartition(".")[0]


def within(path: str, scope: str) -> bool:
    """Whether a module's path lies under another's, or is it."""
    return not scope or path == scope or path.startswith(scope + ".")


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: one of torch's, or one whose class name ends as theirs do."""
    stem = type(module).__name__.lower().rstrip("0123d")
    return isinstance(module, TORCH_NORMS) or stem.endswith("norm")


def is_in_out(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (in, out), as the Conv1D of GPT-2 does."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear):
        return False
    if hasattr(module, "nf") and hasattr(module, "nx"):
        return True
    return bias is not None and tuple(bias.shape) == (weight.shape[1],) and weight.shape[0] != weight.shape[1]


def bias_of(module: nn.Module, own: str) -> Tensor | None:
    """The bias that belongs to a weight of the same module: `bias` to `weight`, `x_bias` to `x` and `x_weight`."""
    candidates = [own.replace("weight", "bias"), f"{own}_bias"] if "weight" in own else [f"{own}_bias"]
    return next((module._parameters[name] for name in candidates if module._parameters.get(name) is not None), None)


def is_linear(module: nn.Module, own: str, weight: Tensor) -> bool:
    """Whether a bare matrix is a linear map: its module knows its sizes, a bias fits, or class or name say so."""
    if weight.dim() != 2 or is_norm(module) or _is_table(module) or has_row_for_each_expert(module, weight):
        return False
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    bias = bias_of(module, own)
    fits = bias is not None and bias.dim() == 1 and bias.shape[0] in weight.shape
    kind = type(module).__name__.lower()
    return (
        sizes == tuple(weight.shape)
        or fits
        or any(word in kind for word in ("linear", "dense", "conv1d"))
        or bool(names.LINEAR.search(own) and not names.TABLE.search(own))
    )


def expert_counts(module: nn.Module) -> set[int]:
    """How many experts a module says it has; a router says it too, but has none."""
    if names.says_router(type(module).__name__):
        return set()
    counts = {key: value for key, value in vars(module).items() if _EXPERT_COUNT.match(key)}
    return {value for value in counts.values() if isinstance(value, int) and value > 1}


def has_row_for_each_expert(module: nn.Module, weight: Tensor) -> bool:
    """Whether every expert is one row, laid out flat, so that no matrix can be seen in it."""
    return weight.dim() == 2 and weight.shape[0] in expert_counts(module)


def _is_table(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or kind.endswith(("embedding", "embeddings"))


def _trained_matrix(parametrized: ParametrizationList) -> str | None:
    """Under which name a parametrized weight is trained as the matrix it is; None where it is computed otherwise."""
    kinds = {type(part).__name__ for part in parametrized}
    if not kinds <= RESCALING:
        return None
    return "original1" if "_WeightNorm" in kinds else "original"


def _weight_of(module: nn.Module) -> Tensor | None:
    """What is trained as a layer's weight; weight norm, spectral norm and pruning keep it under other names."""
    own = module._parameters
    found = next((own[name] for name in ("weight", "weight_v", "weight_orig") if own.get(name) is not None), None)
    held = getattr(module, "parametrizations", None)
    if found is None and isinstance(held, nn.ModuleDict) and "weight" in held:
        parametrized = held["weight"]
        found = parametrized._parameters.get(_trained_matrix(cast("ParametrizationList", parametrized)) or "")
    return found


def _layers_of(order: int, path: str, module: nn.Module) -> Iterator[Layer]:
    weight = _weight_of(module)
    if isinstance(module, nn.Linear):
        yield Layer(order, path, (module.in_features,), module.out_features, weight)
    elif isinstance(module, _ConvNd):
        yield Layer(order, path, (module.in_channels,), module.out_channels, weight)
    elif isinstance(module, RECURRENT):
        directions = 1 + getattr(module, "bidirectional", False)
        yield Layer(order, path, (module.input_size,), module.hidden_size * directions, None)
    elif isinstance(module, nn.MultiheadAttention):
        yield Layer(order, path, (module.embed_dim, module.kdim, module.vdim), module.embed_dim, None)
    elif isinstance(module, nn.Bilinear):
        yield Layer(order, path, (module.in1_features, module.in2_features), module.out_features, None)
    elif is_norm(module):
        yield Layer(order, path, _normalized(module), None, None)
    elif not isinstance(module, ParametrizationList) and not _is_table(module):
        yield from _bare_layers(order, path, module)


def _bare_layers(order: int, path: str, module: nn.Module) -> Iterator[Layer]:
    for own, param in module._parameters.items():
        if param is None or param.dim() < 2 or param.shape[0] == 1:
            continue
        if param.dim() > 2:
            yield Layer(order, path, tuple(param.shape[-2:]), None, None)
        elif is_linear(module, own, param):
            rows, columns = param.shape
            gives, reads = (columns, rows) if is_in_out(module) else (rows, columns)
            certain = hasattr(module, "in_features") or bias_of(module, own) is not None
            yield Layer(order, path, (reads,), gives, param, certain, bool(names.DOWN.search(own.lower())))


def _normalized(module: nn.Module) -> tuple[int, ...]:
    """Sizes that a norm reads, also where it has no weights."""
    found: list[Any] = [size for param in module._parameters.values() if param is not None for size in param.shape]
    for key in ("normalized_shape", "num_features", "num_channels"):
        value = getattr(module, key, ())
        found += list(value) if isinstance(value, tuple | list) else [value]
    return tuple(size for size in found if isinstance(size, int))


def _ask(module: nn.Module, method: str) -> Any:
    """What a model says of itself; a model that cannot answer says nothing."""
    if not callable(getattr(type(module), method, None)):
        return None
    try:
        return getattr(module, method)()
    except (NotImplementedError, AttributeError, TypeError):
        return None


def _is_copy(path: str) -> bool:
    """Whether PEFT keeps this module as the untouched original of one that it trains."""
    return "original_module" in path.split(".")
