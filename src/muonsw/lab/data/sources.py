"""The names under which this was known before; see `muonsw.lab.data.corpus`."""

from muonsw.lab.data.corpus import FINEWEB

__all__ = ["FINEWEB"]
