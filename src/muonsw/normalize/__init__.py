"""What becomes of an orthogonalized direction: members of the `normalize` slot, by name."""

from __future__ import annotations

from muonsw.normalize.adamuon import ADAMUON
from muonsw.normalize.muon_plus import MUON_PLUS
from muonsw.normalize.normuon import NORMUON
from muonsw.registry import Registry
from muonsw.slots import Slot, SlotMember

NORMALIZERS: Registry[SlotMember] = Registry("normalize")
NORMALIZERS.register("normuon", NORMUON)
NORMALIZERS.register("adamuon", ADAMUON)
NORMALIZERS.register("muon_plus", MUON_PLUS)

NORMALIZE = Slot("normalize", NORMALIZERS)

__all__ = ["ADAMUON", "MUON_PLUS", "NORMALIZE", "NORMALIZERS", "NORMUON"]
