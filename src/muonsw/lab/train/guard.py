"""The names under which this was known before; see `muonsw.lab.errors`."""

from muonsw.lab.errors import Diverged

__all__ = ["Diverged"]
