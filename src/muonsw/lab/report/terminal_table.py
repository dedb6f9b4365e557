"""Old names of the printed tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.table import claims_table
from muonsw.lab.tables import print_table

__all__ = ["print_claims", "print_table"]


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    """Claims with what was said, what was found and the verdict; those that failed come first."""
    if claims:
        print_table(console, claims_table({"": claims}, ("expected", "measured")))
