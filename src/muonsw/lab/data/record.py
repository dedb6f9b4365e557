"""The names under which this was known before; see `muonsw.lab.data.shards`."""

from muonsw.lab.data.shards import RECORD, SPLITS, Group, Prepared, Split, open_split, read_record

__all__ = ["RECORD", "SPLITS", "Group", "Prepared", "Split", "open_split", "read_record"]
