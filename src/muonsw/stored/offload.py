"""State in pinned host memory: fetched before it is needed, returned after it was used, both beside the step.

Copies to the device run ahead of the step on a stream of their own, by about a chunk; copies back run on another, so
that both directions of the bus are used while the device computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

State = Mapping[str, Tensor]


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A stream for copies to the device and one for copies to the host; their order is what keeps a step right."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostCopies:
    """The state of several parameters on its way between host and device.

    Args:
        device: where the step computes.
        states: of each parameter the tensors in host memory, in the order in which they will be asked for.
        ahead: how many bytes are fetched before they are asked for.
    """

    def __init__(self, device: torch.device, states: Sequence[State], ahead: int) -> None:
        self._states, self._ahead = states, ahead
        self._there: dict[int, tuple[dict[str, Tensor], torch.cuda.Event]] = {}
        self._sent: set[int] = set()
        self._bytes = 0
        self._to_device, self._to_host = _streams(device)
        self._to_device.wait_stream(self._to_host)  # what the last step returned must have arrived

    def fetch(self, number: int) -> dict[str, Tensor]:
        """The tensors of a parameter on the device; the next ones are sent for."""
        if number not in self._there:
            self._to_device.wait_stream(self._to_host)  # in case it has just been returned
            self._send_for(number)
        tensors, arrived = self._there.pop(number)
        stream = torch.cuda.current_stream(self._to_device.device)
        stream.wait_event(arrived)
        for tensor in tensors.values():
            tensor.record_stream(stream)
        self._bytes -= sum(tensor.nbytes for tensor in tensors.values())
        for other in range(number + 1, len(self._states)):
            if self._bytes >= self._ahead:
                break
            if other not in self._sent:
                self._send_for(other)
        return tensors

    def _send_for(self, number: int) -> None:
        self._sent.add(number)
        device = self._to_device.device
        with torch.cuda.stream(self._to_device):
            tensors = {key: host.to(device, non_blocking=True) for key, host in self._states[number].items()}
            self._there[number] = tensors, self._to_device.record_event()
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def give_back(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of a parameter back to the host, once the device has computed them."""
        self._to_host.wait_stream(torch.cuda.current_stream(self._to_host.device))
        with torch.cuda.stream(self._to_host):
            for key, tensor in tensors.items():
                self._states[number][key].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._to_host)


def wait_for_host(device: torch.device) -> None:
    """Wait until everything that was returned has arrived in host memory."""
    _streams(device)[1].synchronize()
