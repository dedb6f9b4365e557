"""What runs around the orthogonalizer: a preconditioner of momentum before it, a normalizer of directions after it."""

from __future__ import annotations

from muonsw.registry import Registry
from muonsw.slots.base import ELEMENTWISE as ELEMENTWISE
from muonsw.slots.base import EMPTY_SLOTS as EMPTY_SLOTS
from muonsw.slots.base import Slot as Slot
from muonsw.slots.base import SlotMember as SlotMember
from muonsw.slots.base import StateSpec as StateSpec
from muonsw.slots.base import wide_dtype as wide_dtype
from muonsw.slots.normalize import ADAMUON as ADAMUON
from muonsw.slots.normalize import AXES as AXES
from muonsw.slots.normalize import MUON_PLUS as MUON_PLUS
from muonsw.slots.normalize import NORMUON as NORMUON
from muonsw.slots.precondition import EQUALIZE as EQUALIZE
from muonsw.slots.precondition import MUON2 as MUON2
from muonsw.slots.precondition import SIGN as SIGN
from muonsw.slots.precondition import SOAP as SOAP

PRECONDITIONERS: Registry[SlotMember] = Registry("precondition")
PRECONDITIONERS.register("muon2", MUON2)
PRECONDITIONERS.register("sign", SIGN)
PRECONDITIONERS.register("equalize", EQUALIZE)
PRECONDITIONERS.register("soap", SOAP)

NORMALIZERS: Registry[SlotMember] = Registry("normalize")
NORMALIZERS.register("normuon", NORMUON)
NORMALIZERS.register("adamuon", ADAMUON)
NORMALIZERS.register("muon_plus", MUON_PLUS)

PRECONDITION = Slot("precondition", PRECONDITIONERS)
NORMALIZE = Slot("normalize", NORMALIZERS)
