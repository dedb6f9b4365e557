"""Mixtures of experts: where they are, how many experts they have, and what chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from muonsw.routing import names
from muonsw.routing.survey import Layer, Subject, Survey, bias_of, expert_counts, within

# How far below a mixture a matrix without a router's name may be and still be its router.
UNNAMED_DEPTH = 2


class Mixture(NamedTuple):
    """Experts at `path`, `count` of them, with their router somewhere under `scope`; `named` if their name says so."""

    path: str
    scope: str
    count: int
    named: bool


class Mixtures:
    """All mixtures of a model."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.found = list(dict.fromkeys(self._find()))

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
        scope = path.rpartition(".")[0]
        named = self._is_named(path, next(module.children()))
        if named or any(self._gate_of(layer, scope) and layer.gives == len(shapes) for layer in self.survey.layers):
            yield Mixture(self._outermost(path), self._outermost(path).rpartition(".")[0], len(shapes), named)

    def _stacked(self, path: str, module: nn.Module) -> Iterator[Mixture]:
        """Experts in one parameter: their count is an attribute, or the first axis of three."""
        own = [p for p in module._parameters.values() if p is not None and p.dim() >= 2]
        if not own or names.says_router(type(module).__name__):
            return
        outermost = self._outermost(path)
        scope = outermost.rpartition(".")[0] if outermost else ""
        counts = expert_counts(module)
        leading = {p.shape[0] for p in own if p.dim() > 2 and p.shape[0] > 1}
        named = bool(counts) or self._is_named(path, module)
        if named:
            yield from (Mixture(outermost, scope, count, True) for count in counts or leading)
            return
        for count in leading:
            if any(self._routes(layer, path) and layer.gives == count for layer in self.survey.layers):
                yield Mixture(path, path, count, False)

    def _is_named(self, path: str, element: nn.Module) -> bool:
        words = path.split(".")
        return any(names.says_expert(word) for word in (*words[-2:], type(element).__name__))

    def _outermost(self, path: str) -> str:
        """The widest module around `path` that is still called after experts."""
        best = path
        while (path := path.rpartition(".")[0]) and names.says_expert(path.rpartition(".")[2]):
            best = path
        return best

    def _gate_of(self, layer: Layer, scope: str) -> bool:
        last = layer.path.rpartition(".")
        return last[0] == scope and bool(names.GATE.match(last[2]) or names.ROUTER.search(last[2]))

    def _routes(self, layer: Layer, scope: str) -> bool:
        inside = layer.path.removeprefix(scope).split(".")
        return within(layer.path, scope) and any(names.GATE.match(w) or names.ROUTER.search(w) for w in inside)

    def around(self, subject: Subject) -> list[Mixture]:
        """Mixtures whose experts hold this parameter, the closest first."""
        found = [mixture for mixture in self.found if within(subject.path, mixture.path)]
        return sorted(found, key=lambda mixture: -len(mixture.path))

    def routed_by(self, subject: Subject) -> Mixture | None:
        """The mixture that this matrix chooses for: it has a row (or column) for each expert, and lies beside them."""
        named = self._named_router(subject)
        for mixture in self.found:
            inside = within(subject.path, mixture.path) and not (mixture.path == mixture.scope or named)
            if within(subject.path, mixture.scope) and not inside and self._counts_experts(subject, mixture):
                depth = len(subject.path.removeprefix(mixture.scope).strip(".").split("."))
                if named or (mixture.named and depth <= UNNAMED_DEPTH):
                    return mixture
        return None

    def _named_router(self, subject: Subject) -> bool:
        words = [*subject.words, subject.own]
        return any(names.GATE.match(word) or names.ROUTER.search(word) for word in words)

    def _counts_experts(self, subject: Subject, mixture: Mixture) -> bool:
        layer = self.survey.layer_of.get(subject.param)
        if layer is not None and not isinstance(subject.owner, nn.Linear):
            return mixture.count in subject.shape
        return (layer.gives if layer else None) == mixture.count or (layer is None and mixture.count in subject.shape)

    def stored_in_out(self, subject: Subject) -> bool:
        """Whether experts are kept as (..., in, out): a bias fits the last axis, or the width that the router reads tells."""
        rows, columns = subject.shape[-2:]
        bias = bias_of(subject.owner, subject.own)
        if bias is not None and bias.dim() >= 1 and rows != columns:
            return bool(bias.shape[-1] == columns)
        is_down = bool(names.DOWN.search(subject.own.lower()) or names.DOWN.search((subject.words or [""])[-1].lower()))
        for width in self._widths(subject):
            if (rows == width) != (columns == width):
                return (columns == width) == is_down
        return False

    def _widths(self, subject: Subject) -> Iterator[int]:
        """The widths that routers near these experts read."""
        for mixture in self.around(subject) or self.found:
            for layer in self.survey.layers:
                if within(layer.path, mixture.scope) and not within(layer.path, mixture.path):
                    yield from layer.reads


def tall_axis(subject: Subject, mixtures: list[Mixture]) -> tuple[int, int] | None:
    """The count and the axis of experts that are laid out in one tall or wide matrix, if it is one."""
    for mixture in mixtures:
        for axis in (0, 1):
            if subject.shape[axis] % mixture.count == 0 and subject.shape[axis] > mixture.count:
                return mixture.count, axis
    return None


def _signature(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def experts_view(subject: Subject, mixtures: Mixtures) -> dict[str, object] | None:
    """How Muon sees the experts in a parameter, or None if no expert's matrix can be seen in it."""
    around = mixtures.around(subject)
    if subject.param.dim() == 2:
        if isinstance(subject.owner, nn.Linear) or _is_one_expert(subject, around):
            return {}
        tall = tall_axis(subject, around)
        return None if tall is None else _tall_view(subject, mixtures, *tall)
    if subject.param.dim() < 2 or subject.shape[0] not in {mixture.count for mixture in around}:
        return None
    view: dict[str, object] = {"matrix": "stack"}
    return {**view, "transposed": True} if mixtures.stored_in_out(subject) else view


def _is_one_expert(subject: Subject, around: list[Mixture]) -> bool:
    """Whether the parameter belongs to a single element of a list of experts."""
    words = subject.path.split(".")
    return any(word.isdigit() for word in words[len(around[0].path.split(".")) :]) if around else False


def _tall_view(subject: Subject, mixtures: Mixtures, count: int, axis: int) -> dict[str, object]:
    """One matrix for each expert, cut along the axis that they share; stored as (out, in) or (in, out)."""
    swapped = mixtures.stored_in_out(subject)
    view: dict[str, object] = {"split_sizes": (subject.shape[axis] // count,) * count}
    if swapped:
        view["transposed"] = True
    return {**view, "split_dim": 1} if (axis == 1) != swapped else view

