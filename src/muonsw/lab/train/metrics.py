"""The names under which this was known before; see `muonsw.lab.train.records`."""

from muonsw.lab.train.folder import METRICS as FILE
from muonsw.lab.train.records import Record, Sink

__all__ = ["FILE", "Record", "Sink"]
