"""Mixtures of experts: where they are, how many experts they have, and what chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from muonsw.routing import names
from muonsw.routing.survey import Layer, Subject, Survey, bias_of, expert_counts, holder_of, within

# How far below a mixture a matrix without a router's name may be and still be its router.
UNNAMED_DEPTH = 2


class Mixture(NamedTuple):
    """Experts at `path`, `experts` of them, and their router somewhere under `scope`.

    `named` if a name says that they are experts, `listed` if each is a module of its own; otherwise they are
    parameters of the module at `path` itself.
    """

    path: str
    scope: str
    experts: int
    named: bool
    listed: bool


class Mixtures:
    """All mixtures of a model."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.by_path: dict[str, list[Mixture]] = {}
        self.by_scope: dict[str, list[Mixture]] = {}
        for mixture in dict.fromkeys(self._find()):
            self.by_path.setdefault(mixture.path, []).append(mixture)
            self.by_scope.setdefault(mixture.scope, []).append(mixture)

    def _find(self) -> Iterator[Mixture]:
        for path, module in self.survey.modules.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                yield from self._listed(path, module)
            else:
                yield from self._stacked(path, module)

    def _listed(self, path: str, module: nn.Module) -> Iterator[Mixture]:
        """Experts as equal modules in a list: called so, or counted by a gate beside the list."""
        shapes = [shape for element in module.children() if (shape := _signature(element))]
        if len(shapes) < 2 or shapes.count(shapes[0]) != len(shapes):
            return
        named = _is_named(path, names.unwrapped(next(module.children())))
        beside = self.survey.held_by.get(holder_of(path), ())
        if named or any(_is_called_router(layer.path) and layer.gives == len(shapes) for layer in beside):
            outermost = _outermost(path)
            yield Mixture(outermost, holder_of(outermost), len(shapes), named, listed=True)

    def _stacked(self, path: str, module: nn.Module) -> Iterator[Mixture]:
        """Experts in one parameter: their number is an attribute, or the first axis of three."""
        own = [p for p in module._parameters.values() if p is not None and p.dim() >= 2]
        if not own or names.says_router(type(module).__name__):
            return
        declared = expert_counts(module)
        leading = {p.shape[0] for p in own if p.dim() > 2 and p.shape[0] > 1}
        if declared or _is_named(path, module):
            scope = holder_of(_outermost(path))
            for number in declared or leading:
                yield Mixture(path, scope, number, named=True, listed=False)
        elif leading:
            routed = {layer.gives for layer in self.survey.layers if _routes(layer, path)}
            gates = (p for name, p in module._parameters.items() if p is not None and _is_called_router(name))
            routed |= {size for gate in gates if gate.dim() == 2 for size in gate.shape}
            yield from (Mixture(path, path, number, named=False, listed=False) for number in leading & routed)

    def around(self, subject: Subject) -> list[Mixture]:
        """Mixtures whose experts hold this parameter, the closest first."""
        return [
            mixture
            for path in _outwards(subject.path)
            for mixture in self.by_path.get(path, ())
            if mixture.listed or path == subject.path
        ]

    def routed_by(self, subject: Subject) -> Mixture | None:
        """The mixture that this matrix chooses for: it has a row (or column) for each expert, and lies beside them."""
        named = any(_is_called_router(word) for word in (*subject.words, subject.own))
        experts = [] if _is_called_router(subject.own) else self.around(subject)
        for mixture in (mixture for path in _outwards(subject.path) for mixture in self.by_scope.get(path, ())):
            if mixture in experts or not self._counts(subject, mixture):
                continue
            depth = len(subject.path.removeprefix(mixture.scope).strip(".").split("."))
            if (named or (mixture.named and depth <= UNNAMED_DEPTH)) and not self._feeds_sibling(subject):
                return mixture
        return None

    def _counts(self, subject: Subject, mixture: Mixture) -> bool:
        """Whether a matrix gives one number for each expert; a bare one may be stored either way."""
        if isinstance(subject.owner, nn.Linear):
            return subject.owner.out_features == mixture.experts
        return mixture.experts in subject.shape

    def _feeds_sibling(self, subject: Subject) -> bool:
        """Whether a layer of the same module reads what this one gives, as down reads gate; nothing reads choices."""
        layer = self.survey.layer_of.get(subject.param)
        beside = self.survey.held_by.get(holder_of(subject.path), ()) if subject.path else ()
        return layer is not None and any(o is not layer and o.gives and layer.gives in o.reads for o in beside)

    def stored_in_out(self, subject: Subject) -> bool:
        """Whether experts are kept as (..., in, out): their biases tell, or the width that is read beside them."""
        rows, columns = subject.shape[-2:]
        bias = bias_of(subject.owner, subject.own)
        if bias is not None and rows != columns:
            return bool(bias.shape[-1] == columns)
        is_down = any(names.DOWN.search(word.lower()) for word in (subject.own, *subject.words[-1:]))
        for width in self._widths_beside(subject):
            if (rows == width) != (columns == width):
                return (columns == width) == is_down
        return False

    def _widths_beside(self, subject: Subject) -> Iterator[int]:
        """The widths that routers and other layers beside these experts read."""
        for mixture in self.around(subject):
            for layer in self.survey.layers:
                if layer.gives and within(layer.path, mixture.scope) and not within(layer.path, mixture.path):
                    yield from layer.reads

    def view(self, subject: Subject) -> dict[str, Any] | None:
        """How Muon sees the experts in a parameter, or None if no expert's matrix can be seen in it."""
        around = self.around(subject)
        if subject.param.dim() == 2:
            return {} if around[0].listed or isinstance(subject.owner, nn.Linear) else self._tall_view(subject, around)
        if subject.param.dim() < 2 or subject.shape[0] not in {mixture.experts for mixture in around}:
            return None
        stack = {"matrix": "stack"}
        return {**stack, "transposed": True} if self.stored_in_out(subject) else stack

    def _tall_view(self, subject: Subject, around: list[Mixture]) -> dict[str, Any] | None:
        """All experts in one tall or wide matrix: one part each, cut along the axis that they share."""
        for mixture in around:
            for axis, size in enumerate(subject.shape):
                if size % mixture.experts == 0 and size > mixture.experts:
                    swapped = self.stored_in_out(subject)
                    view: dict[str, Any] = {"split_sizes": (size // mixture.experts,) * mixture.experts}
                    view |= {"transposed": True} if swapped else {}
                    return view | ({"split_dim": 1} if (axis == 1) != swapped else {})
        return None


def _outwards(path: str) -> Iterator[str]:
    """A path and those around it, to the model itself."""
    while path:
        yield path
        path = holder_of(path)
    yield ""


def _signature(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def _is_named(path: str, element: nn.Module) -> bool:
    return any(names.says_expert(word) for word in (*path.split(".")[-2:], type(element).__name__))


def _is_called_router(path: str) -> bool:
    word = path.rpartition(".")[2]
    return bool(names.GATE.match(word)) or names.says_router(word)


def _routes(layer: Layer, scope: str) -> bool:
    inside = layer.path.removeprefix(scope).split(".")
    return within(layer.path, scope) and any(_is_called_router(word) for word in inside)


def _outermost(path: str) -> str:
    """The widest module around `path` that is still called after experts."""
    best = path
    while (path := holder_of(path)) and names.says_expert(path.rpartition(".")[2]):
        best = path
    return best
