"""Facts about a model that the rules use: layers, experts, repeated blocks, declarations; and patterns for names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

TORCH_NORMS = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _NormBase
RECURRENT = nn.RNNBase | nn.RNNCellBase
TABLES = nn.Embedding | nn.EmbeddingBag
LISTS = nn.ModuleList | nn.ModuleDict
# torch's parametrizations that only rescale the trained tensor, so it is still the layer's matrix.
RESCALING = frozenset({"_WeightNorm", "_SpectralNorm"})

# Words that torch.compile, FSDP, activation checkpointing and Lightning put into names.
WRAPPER_WORDS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# Classes that hold the wrapped model in `module`; in other classes that is an ordinary name.
WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel"})
# What PEFT adds to names: the wrapped model, the adapted layer, the trained copy.
PEFT_PREFIX = "base_model.model."
PEFT_WORDS = frozenset({"base_layer", "modules_to_save"})

# Patterns for names; the rules use them last, after structure.
EXPERT_COUNT = re.compile(r"^((num|n|moe)_)?(\w+_)?experts?$")
ROUTER = re.compile(r"(^|_|k)(router|routing)($|_)")
GATE = re.compile(r"^(gate|gating|gate_network|wg|w_gate|switch|selector)(_weight)?$")
MIXTURE = re.compile(r"(^|_)(moe|mixture)($|_)")
EXPERT = re.compile(r"(?<!shared)(^|_)experts?($|_|\d)")
DOWN = re.compile(r"(^|_)(down|w2|wo|o|out|output|fc2|post|c_proj)($|_|\d)")
HEAD = re.compile(
    r"(^|_)(heads?|classifiers?|logits?|scores?|predictors?|predictions?|pred|outputs|class_embed|bbox_(embed|reg))"
    r"(_(dist\w*|aux|\d+))?$|^(output|embed_out|unembed|unembedding|final(_layer)?)$"
)
# Queries, keys or values of attention: q_proj, to_k, wv, value.
QUERY_KEY_VALUE = re.compile(r"(?:^|_|w)(q|k|v)(?:uer(?:y|ies)|eys?|alues?)?(?:$|_)")
MODULATION = re.compile(r"modulation|ada_?(ln|norm)|film")
POSITION = re.compile(r"(^|_)(cpb|rel_?pos|pos|position|positional|meta)($|_)")
ADAPTER = re.compile(r"(^|_)(lora|hada|lokr)_", re.IGNORECASE)
BIAS = re.compile(r"(^|_)bias(es)?($|_)|bias$")
TABLE = re.compile(
    r"emb(ed(ding)?s?)?($|_|\d)|pos($|_)|position|token|table|registers?|latents?|quer(y|ies)|prompt|codebook|codevector|"
    r"relative|(^|_)rel($|_)|prototype|centroid|attention_biases"
)
ELEMENTWISE = re.compile(
    r"(^|_)(scale|gain|gamma|alpha|beta|lambda|temperature|decay|mix|mask|threshold|freqs?|inv_freq)($|_|\d)|"
    r"^A(_log)?$|_log$|^D$"
)
LINEAR = re.compile(
    r"(^|_)(weight|kernel|proj(ection)?|linear|w|in_proj_weight|fc|qkvo?|kv)($|_|\d)|^[wW][_a-z]?\d?$|^[wW]_|^v1$"
)
FUSED = re.compile(r"qkv|query_key_value|queries_keys_values|c_attn|(^|_)kv($|_)|gate_up|up_gate", re.IGNORECASE)


class Subject(NamedTuple):
    """A parameter, the layer that owns it, and its name there."""

    name: str
    param: Tensor
    key: str
    path: str
    owner: nn.Module

    @property
    def words(self) -> list[str]:
        """The parts of the name that the model's author chose, without PEFT's words and adapter names."""
        path = self.path.split(".") if self.path else []
        pairs = zip(["", *path], path, strict=False)
        words = [word for before, word in pairs if word not in PEFT_WORDS and before != "modules_to_save"]
        return [*words, self.key]

    @property
    def label(self) -> str:
        """The word that describes the parameter: its own name, or its layer's if it is just `weight`."""
        return self.words[-2] if self.key == "weight" and len(self.words) > 1 else self.key

    @property
    def long_axes(self) -> int:
        return sum(size > 1 for size in self.param.shape)


class Layer(NamedTuple):
    """A layer or bare matrix; `out_features` is None for norms and stacks."""

    order: int
    path: str
    in_features: tuple[int, ...]
    out_features: int | None
    weight: Tensor | None = None
    in_out: bool = False


class ModelFacts:
    """Everything that the rules look up, under names without wrappers such as torch.compile's."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(_named_modules(model, "", set()))
        self.subjects: list[Subject] = []  # every parameter once, under its first name
        self.owners: dict[Tensor, list[nn.Module]] = {}
        weights: dict[str, Tensor] = {}
        for path, module in self.modules.items():
            for key, param in module._parameters.items():
                if param is not None:
                    layer, layer_key = self._locate(path, key)
                    if param not in self.owners:
                        name = f"{path}.{key}" if path else key
                        self.subjects.append(Subject(name, param, layer_key, layer, self.modules[layer]))
                    self.owners.setdefault(param, []).append(self.modules[layer])
                    if layer_key == "weight":
                        weights[layer] = param
        self._find_layers(weights)
        self._find_experts()
        self._find_blocks()
        self._find_declarations()

    def _locate(self, path: str, key: str) -> tuple[str, str]:
        """Find a parameter's layer and its name there, through torch's lists and parametrizations."""
        while path and isinstance(self.modules[path], nn.ParameterList | nn.ParameterDict):
            path, _, key = path.rpartition(".")
        module = self.modules[path]
        if isinstance(module, ParametrizationList):
            kinds = {type(part).__name__ for part in module}
            if kinds <= RESCALING and key == ("original1" if "_WeightNorm" in kinds else "original"):
                layer, _, key = f".{path}".rpartition(".parametrizations.")
                return layer[1:], key
        # torch's older functions for weight norm, spectral norm and pruning
        if key == "weight_orig" or (key == "weight_v" and "weight_g" in module._parameters):
            key = "weight"
        return path, key

    def _find_layers(self, weights: dict[str, Tensor]) -> None:
        """List the layers in order; orient bare matrices by the widths that other layers read."""
        # Leave out PEFT's modules: frozen originals, and factors that no other layer reads.
        # What follows `modules_to_save` is the adapter's name, which may be anything.
        names = {path: path.partition(".modules_to_save.")[0] for path in self.modules}
        paths = [p for p, name in names.items() if "original_module" not in p.split(".") and not ADAPTER.search(name)]
        sizes = {path: _declared_sizes(self.modules[path]) for path in paths}
        self._widths: dict[str, dict[int, None]] = {}  # the input widths under each path, in order
        for path, declared in sizes.items():
            if declared is not None:
                for outer in enclosing(path):
                    self._widths.setdefault(outer, {}).update(dict.fromkeys(declared[0]))
        layers: list[Layer] = []
        for order, (path, declared) in enumerate(sizes.items()):
            module = self.modules[path]
            if declared is not None:
                is_map = isinstance(module, nn.Linear | _ConvNd)
                layers.append(Layer(order, path, *declared, weights.get(path) if is_map else None))
            elif not isinstance(module, ParametrizationList) and not is_table(module):
                for key, param in module._parameters.items():
                    if param is None or param.dim() < 2 or param.shape[0] == 1:
                        continue
                    if param.dim() > 2:
                        layers.append(Layer(order, path, tuple(param.shape[-2:]), None))
                    elif _is_linear(module, key, param):
                        in_out = self.stored_in_out(path, key, param)
                        rows, columns = reversed(param.shape) if in_out else param.shape
                        layers.append(Layer(order, path, (columns,), rows, param, in_out))
        self.maps = [layer for layer in layers if layer.out_features is not None]
        self.layer_of = {layer.weight: layer for layer in layers if layer.weight is not None}
        self.readers: dict[int, list[Layer]] = {}
        self.siblings: dict[str, list[Layer]] = {}
        for layer in layers:
            self.siblings.setdefault(parent_of(layer.path), []).append(layer)
            for size in set(layer.in_features):
                self.readers.setdefault(size, []).append(layer)

    def stored_in_out(self, path: str, key: str, weight: Tensor) -> bool:
        """Whether a bare matrix is (in, out), judged by its class, its bias or the input widths around it."""
        module, (rows, columns) = self.modules[path], weight.shape[-2:]
        if hasattr(module, "nf") and hasattr(module, "nx"):  # the Conv1D of GPT-2
            return True
        for name in (key.replace("weight", "bias"), f"{key}_bias"):
            bias = module._parameters.get(name)
            if bias is not None and name != key and rows != columns:
                return bool(bias.shape[-1] == columns)
        is_down = any(DOWN.search(word.lower()) for word in (key, path.rpartition(".")[2]))
        for outer in enclosing(path):
            for width in self._widths.get(outer, ()):
                if (rows == width) != (columns == width):
                    return (columns == width) == is_down
        return False

    def _find_experts(self) -> None:
        """Find routed experts, by name or by the attribute that counts them."""
        self.experts: dict[str, set[int]] = {}  # possible counts, by the path of a list or stack
        self.router_choices: dict[str, set[int]] = {}  # the same counts, by the path that contains the router
        for path, module in self.modules.items():
            parts = list(module.children()) if isinstance(module, LISTS) else []
            parts = [part for part in parts if any(True for _ in part.parameters())]
            matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
            kind = type(unwrapped(parts[0]) if parts else module).__name__
            if not (parts or matrices) or names_router(kind):
                continue
            declared = expert_counts(module)
            counts = declared or {len(parts), *(p.shape[0] for p in matrices if p.dim() > 2)} - {0, 1}
            named = any(EXPERT.search(_snake_case(word)) for word in (*path.split(".")[-2:], kind))
            if counts and (named or declared or MIXTURE.search(path.rpartition(".")[2])):
                self.experts[path] = counts
                self.router_choices.setdefault(parent_of(path), set()).update(counts)

    def experts_around(self, path: str) -> str | None:
        """The path of the innermost enclosing experts: a list of modules, or the module with the stack."""
        paths = (outer for outer in enclosing(path) if outer in self.experts)
        return next((outer for outer in paths if outer == path or isinstance(self.modules[outer], LISTS)), None)

    def _find_blocks(self) -> None:
        """Find repeated modules: elements of lists, and modules whose class occurs twice."""
        classes = Counter(map(type, self.modules.values()))
        self._blocks: set[str] = set()
        for path, module in self.modules.items():
            repeated = classes[type(module)] > 1 and not isinstance(module, nn.Sequential | LISTS)
            if isinstance(self.modules[parent_of(path)], LISTS):
                repeated = not isinstance(module, nn.ModuleList)
            if repeated and module._modules and path:
                self._blocks.add(path)
        self.outer_widths = {layer.out_features for layer in self.maps if not self.in_block(layer.path)}

    def _find_declarations(self) -> None:
        """Ask the model for its output layers, its input tables and the parameters that it excludes from decay."""
        outputs: list[Any] = [m for m in self.modules.values() if isinstance(m, nn.AdaptiveLogSoftmaxWithLoss)]
        tables = []
        self.without_decay = {s.name for s in self.subjects if getattr(s.param, "_no_weight_decay", False)}
        for path, module in self.modules.items():
            for method in ("get_output_embeddings", "get_classifier"):
                answer = _ask(module, method)
                outputs.extend(answer if isinstance(answer, tuple | list) else [answer])
            tables.append(_ask(module, "get_input_embeddings"))
            listed = _ask(module, "no_weight_decay")
            if isinstance(listed, set | frozenset | list | tuple | dict):
                self.without_decay |= {f"{path}.{name}" if path else str(name) for name in listed}
        declared = {unwrapped(module) for module in outputs if isinstance(module, nn.Module)}
        self.heads = [path for path, module in self.modules.items() if module in declared and path]
        self.tables = {unwrapped(module) for module in tables if isinstance(module, nn.Module)}
        rows = (module.num_embeddings for module in self.modules.values() if isinstance(module, nn.Embedding))
        self.vocabulary = max(rows, default=None)

    def in_block(self, path: str) -> bool:
        return any(outer in self._blocks for outer in enclosing(path))


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def enclosing(path: str) -> Iterator[str]:
    """A path and its ancestors, up to the model itself."""
    while path:
        yield path
        path = parent_of(path)
    yield ""


def within(path: str, scope: str) -> bool:
    return not scope or path == scope or path.startswith(scope + ".")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms, or a class named like one."""
    return isinstance(module, TORCH_NORMS) or type(module).__name__.lower().rstrip("0123d").endswith("norm")


def is_table(module: nn.Module) -> bool:
    return isinstance(module, TABLES) or type(module).__name__.lower().endswith(("embedding", "embeddings"))


def expert_counts(module: nn.Module) -> set[int]:
    """The numbers of experts that a module's attributes declare; a router's do not count."""
    if names_router(type(module).__name__):
        return set()
    counts = (value for key, value in vars(module).items() if EXPERT_COUNT.match(key))
    return {value for value in counts if isinstance(value, int) and value > 1}


def _is_linear(module: nn.Module, key: str, weight: Tensor) -> bool:
    """Whether a bare matrix is a linear map, judged by its name and class."""
    kind = type(module).__name__.lower()
    named = LINEAR.search(key) is not None and not TABLE.search(key)
    named = named or any(word in kind for word in ("linear", "dense", "conv1d"))
    # A matrix with one row per expert holds flattened experts.
    return named and not is_norm(module) and weight.shape[0] not in expert_counts(module)


def _declared_sizes(module: nn.Module) -> tuple[tuple[int, ...], int | None] | None:
    """The input and output widths of a torch layer or a norm; None for anything else."""
    if isinstance(module, nn.Linear):
        return (module.in_features,), module.out_features
    if isinstance(module, _ConvNd):
        return (module.in_channels,), module.out_channels
    if isinstance(module, RECURRENT):
        return (module.input_size,), module.hidden_size * (1 + getattr(module, "bidirectional", False))
    if isinstance(module, nn.MultiheadAttention):
        return (module.embed_dim, module.kdim, module.vdim), module.embed_dim
    if is_norm(module):
        return tuple(size for param in module._parameters.values() if param is not None for size in param.shape), None
    return None


def _ask(module: nn.Module, method: str) -> Any:
    if not callable(getattr(type(module), method, None)):
        return None
    try:
        return getattr(module, method)()
    except (NotImplementedError, AttributeError, TypeError):
        return None


def _named_modules(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, by its path without wrappers; the content comes later and replaces its wrapper."""
    seen.add(module)
    yield path, module
    for word, part in module.named_children():
        if part not in seen:
            inner = path if _is_wrappers(module, word) else f"{path}.{word}" if path else word
            yield from _named_modules(part, inner, seen)


def unwrapped(module: nn.Module) -> nn.Module:
    inner = next((part for word, part in module.named_children() if _is_wrappers(module, word)), None)
    return module if inner is None else unwrapped(inner)


def _is_wrappers(module: nn.Module, word: str) -> bool:
    classes = {cls.__name__ for cls in type(module).__mro__}
    return word in WRAPPER_WORDS or (word == "module" and bool(classes & WRAPPER_CLASSES))


def names_router(word: str) -> bool:
    return bool(ROUTER.search(_snake_case(word)))


def _snake_case(word: str) -> str:
    """A class name in snake case, without fully_shard's prefix: `top_krouter` for TopKRouter."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word.removeprefix("FSDP")).lower()
