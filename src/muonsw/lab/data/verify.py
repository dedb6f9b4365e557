"""The names under which this was known before; see `muonsw.lab.data.shards`."""

from muonsw.lab.data.shards import Checked, verify_folder

__all__ = ["Checked", "verify_folder"]
