"""The names under which this was known before; see `muonsw.lab.train.export`."""

from muonsw.lab.train.export import sample

__all__ = ["sample"]
