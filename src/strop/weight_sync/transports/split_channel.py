"""A channel from several senders: each sends its part of the tensors over its own transport.

    rank 0   MemorySender     tensors dealt to it   ------>  thread 0  }
    rank 1   MemorySender     tensors dealt to it   ------>  thread 1  }  one tensor at a time to the engine, as they arrive
    rank 2   MemorySender     tensors dealt to it   ------>  thread 2  }

The senders gather their tensors from each other's shards, so none may wait for another's tensors to be read: the receiver takes
whatever arrives first. Tensors of one sender arrive in the order of the manifest; the order between senders is arbitrary.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.weight_sync.base import ChannelAddress, Manifest, Receiver
from strop.weight_sync.transports.dealing import split_manifest


@dataclass(frozen=True)
class SplitAddress:
    """The addresses of several senders, in the order used to distribute tensors."""

    parts: tuple[ChannelAddress, ...]

    def connect(self, index: int, device: torch.device) -> SplitReceiver:
        """Connect to every sender. Raises TransportError if one is gone."""
        receivers: list[Receiver] = []
        try:
            for part in self.parts:
                receivers.append(part.connect(index, device))
        except BaseException:
            _close_all(receivers)
            raise
        return SplitReceiver(receivers, device)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """An arrived tensor; without one, the end of a part or its error."""

    name: str = ""
    tensor: Tensor | None = None
    error: BaseException | None = None
    taken: threading.Event = field(default_factory=threading.Event)  # the engine is done with the tensor


class SplitReceiver:
    """Receives from several senders at once, each in a thread. A failure in one part ends the whole publish; reconnect after it."""

    def __init__(self, receivers: Sequence[Receiver], device: torch.device) -> None:
        self.receivers, self.device = tuple(receivers), device

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one publish as they arrive. Raises TransportError like the transports of the parts."""
        arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        stopped = threading.Event()
        parts = [
            (receiver, part)
            for receiver, part in zip(self.receivers, split_manifest(manifest, len(self.receivers)), strict=True)
            if part.entries
        ]
        for receiver, part in parts:
            arguments = (receiver, part, arrivals, stopped)
            threading.Thread(target=self._receive_part, args=arguments, name="strop-weights", daemon=True).start()
        remaining, complete = len(parts), False
        try:
            while remaining:
                arrival = arrivals.get()
                if arrival.error is not None:
                    raise arrival.error
                if arrival.tensor is None:
                    remaining -= 1
                    continue
                try:
                    yield arrival.name, arrival.tensor
                finally:
                    arrival.taken.set()
            complete = True
        finally:
            stopped.set()
            if not complete:
                self.close()  # the other senders' transfers cannot be completed

    def _receive_part(
        self, receiver: Receiver, part: Manifest, arrivals: queue.SimpleQueue[_Arrival], stopped: threading.Event
    ) -> None:
        """Hand over the tensors of one sender, one by one. Runs in its own thread."""
        incoming: Any = receiver.receive(part)  # a generator
        try:
            if is_gpu(self.device):
                torch.get_device_module(self.device).set_device(self.device)
            for name, tensor in incoming:
                arrival = _Arrival(name, tensor)
                arrivals.put(arrival)
                while not arrival.taken.wait(0.5) and not stopped.is_set():
                    pass
                if stopped.is_set():
                    return
            arrivals.put(_Arrival())
        except BaseException as error:
            arrivals.put(_Arrival(error=error))
        finally:
            with suppress(Exception):  # a channel closed in the meantime raises again
                incoming.close()

    def close(self) -> None:
        _close_all(self.receivers)


def _close_all(receivers: Sequence[Receiver]) -> None:
    for receiver in receivers:
        with suppress(Exception):  # the others must be closed too
            receiver.close()
