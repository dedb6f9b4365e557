"""The names under which stopping was known before; see `muonsw.lab.processes`."""

from muonsw.lab.errors import Interrupted as Interrupted
from muonsw.lab.processes import StopRequest as StopRequest
from muonsw.lab.processes import stop_requests as stop_requests
