"""The names under which stopping was known before; see `muonsw.lab.processes`."""

from muonsw.lab.errors import Interrupted
from muonsw.lab.processes import StopRequest, stop_requests

__all__ = ["Interrupted", "StopRequest", "stop_requests"]
