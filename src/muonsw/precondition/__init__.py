"""What becomes of a momentum before it is orthogonalized: members of the `precondition` slot, by name."""

from __future__ import annotations

from muonsw.precondition.equalize import EQUALIZE
from muonsw.precondition.muon2 import MUON2
from muonsw.precondition.sign import SIGN
from muonsw.precondition.soap import SOAP
from muonsw.registry import Registry
from muonsw.slots import Slot, SlotMember

PRECONDITIONERS: Registry[SlotMember] = Registry("precondition")
PRECONDITIONERS.register("muon2", MUON2)
PRECONDITIONERS.register("sign", SIGN)
PRECONDITIONERS.register("equalize", EQUALIZE)
PRECONDITIONERS.register("soap", SOAP)

PRECONDITION = Slot("precondition", PRECONDITIONERS)

__all__ = ["EQUALIZE", "MUON2", "PRECONDITION", "PRECONDITIONERS", "SIGN"]
