"""Mixtures of experts: where they are, how many experts they have, and what chooses among them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from muonsw.routing import names
from muonsw.routing.facts import ModelFacts, Subject, expert_counts, holder_of, outwards, within

# How deep below a mixture a matrix without a router's name may be and still be its router.
UNNAMED_DEPTH = 2


class Mixture(NamedTuple):
    """Experts at `path` with their router somewhere under `scope`.

    Experts in a list are modules under `path`; stacked ones are parameters of the module at `path` itself, whose
    number of experts can be any of `counts`. `named` if a name or an attribute says that they are experts.
    """

    path: str
    scope: str
    counts: frozenset[int]
    listed: bool
    named: bool


class Mixtures:
    """All mixtures of a model."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.by_path: dict[str, Mixture] = {}
        self.by_scope: dict[str, list[Mixture]] = {}
        for path, module in facts.modules.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                mixture = self._listed(path, module)
            else:
                mixture = self._stacked(path, module)
            if mixture is not None:
                self.by_path.setdefault(mixture.path, mixture)
                self.by_scope.setdefault(mixture.scope, []).append(mixture)

    def _listed(self, path: str, module: nn.Module) -> Mixture | None:
        """Equal modules in a list that are called experts, or that a gate beside the list counts."""
        shapes = [[(name, p.shape) for name, p in element.named_parameters()] for element in module.children()]
        shapes = [shape for shape in shapes if shape]
        if len(shapes) < 2 or shapes.count(shapes[0]) != len(shapes):
            return None
        beside = self.facts.held_by.get(holder_of(path), ())
        named = _is_named(path, names.unwrapped(next(module.children())))
        if not named and not any(names.says_gate(layer.path) and layer.gives == len(shapes) for layer in beside):
            return None
        outermost = _outermost(path)
        return Mixture(outermost, holder_of(outermost), frozenset({len(shapes)}), listed=True, named=named)

    def _stacked(self, path: str, module: nn.Module) -> Mixture | None:
        """Experts in one parameter: an attribute counts them, or the first of three axes."""
        own = {name: p for name, p in module._parameters.items() if p is not None and p.dim() > 1}
        if not own or names.says_router(type(module).__name__):
            return None
        leading = {p.shape[0] for p in own.values() if p.dim() > 2 and p.shape[0] > 1}
        declared = expert_counts(module)
        named = bool(declared) or _is_named(path, module)
        if named:
            counts, scope = declared or leading, holder_of(_outermost(path))
        else:  # nothing is called an expert, but a gate inside the module gives as many numbers as the stack is high
            gates = {size for name, p in own.items() if names.says_gate(name) and p.dim() == 2 for size in p.shape}
            for layer in self.facts.maps if leading else ():
                inside = layer.path.removeprefix(path).split(".")
                if within(layer.path, path) and any(names.says_gate(word) for word in inside):
                    gates.add(layer.gives or 0)
            counts, scope = leading & gates, path
        return Mixture(path, scope, frozenset(counts), listed=False, named=named) if counts else None

    def around(self, subject: Subject) -> Mixture | None:
        """The closest mixture whose experts hold this parameter."""
        found = (self.by_path[path] for path in outwards(subject.path) if path in self.by_path)
        return next((mixture for mixture in found if mixture.listed or mixture.path == subject.path), None)

    def routed_by(self, subject: Subject) -> Mixture | None:
        """The mixture that this matrix chooses for: it has a row (or column) for each expert, and lies beside them."""
        named = any(names.says_gate(word) for word in (*subject.words, subject.own))
        experts = None if names.says_gate(subject.own) else self.around(subject)
        is_module = isinstance(subject.owner, nn.Linear)  # a bare matrix may be stored either way
        sizes = set(subject.shape[:1] if is_module else subject.shape)
        if self._feeds_sibling(subject):
            return None
        for mixture in (mixture for path in outwards(subject.path) for mixture in self.by_scope.get(path, ())):
            depth = len(subject.path.removeprefix(mixture.scope).strip(".").split("."))
            near = named or (mixture.named and depth <= UNNAMED_DEPTH)
            if near and mixture != experts and sizes & mixture.counts:
                return mixture
        return None

    def _feeds_sibling(self, subject: Subject) -> bool:
        """Whether a layer of the same module reads what this one gives, as down reads gate; nothing reads choices."""
        layer = self.facts.layer_of.get(subject.param)
        beside = self.facts.held_by.get(holder_of(subject.path), ()) if subject.path else ()
        return layer is not None and any(o is not layer and o.gives and layer.gives in o.reads for o in beside)

    def view(self, subject: Subject) -> dict[str, Any] | None:
        """How Muon sees the experts in a parameter, or None if it shows no expert's matrix."""
        mixture = self.around(subject)
        if mixture is None or subject.param.dim() < 2:
            return None
        if subject.param.dim() == 2:  # several experts in one matrix would have to be cut apart first
            return {} if mixture.listed or isinstance(subject.owner, nn.Linear) else None
        if subject.shape[0] not in mixture.counts:
            return None
        in_out = self.facts.stored_in_out(subject.path, subject.own, subject.param)
        return {"matrix": "stack", "transposed": True} if in_out else {"matrix": "stack"}


def _is_named(path: str, element: nn.Module) -> bool:
    return any(names.says_expert(word) for word in (*path.split(".")[-2:], type(element).__name__))


def _outermost(path: str) -> str:
    """The outermost module around `path` that is still called after experts."""
    best = path
    while (path := holder_of(path)) and names.says_expert(path.rpartition(".")[2]):
        best = path
    return best
