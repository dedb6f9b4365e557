"""The names under which this was known before; see `muonsw.lab.model.counts`."""

from muonsw.lab.model.counts import orthogonalizer_flops

__all__ = ["orthogonalizer_flops"]
