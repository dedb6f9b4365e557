"""What becomes of a momentum before it is orthogonalized: members of the `precondition` slot, by name."""

from __future__ import annotations

from muonsw.registry import Registry
from muonsw.slots import Slot, SlotMember

PRECONDITIONERS: Registry[SlotMember] = Registry("precondition")

PRECONDITION = Slot("precondition", PRECONDITIONERS)

__all__ = ["PRECONDITION", "PRECONDITIONERS"]
