"""Choose the transport that reaches every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strop import plugins
from strop.problems import Problem, raise_problems
from strop.weight_sync.base import Sender
from strop.weight_sync.weight_sync_config import WeightSyncConfig, choose_auto_transport

AUTO_SENDERS = 4  # default limit on the number of sending ranks


@dataclass(frozen=True, kw_only=True)
class EngineLocations:
    """Where the engines are, from the point of view of the sending process."""

    count: int = 1
    colocated: bool = True  # on the training devices
    same_machine: bool = True  # all engines are on the sender's machine
    host: str = "127.0.0.1"  # address of the sender's machine


@dataclass(frozen=True, kw_only=True)
class SenderSetup:
    """Arguments for creating senders. An entry point of the group ``strop.transports`` is a function from this to a
    SenderFactory.
    """

    config: WeightSyncConfig
    device: torch.device  # of the learner
    engines: EngineLocations
    folder: Path  # default folder of a file transport

    @property
    def bucket(self) -> dict[str, Any]:
        """The sender's argument ``bucket_size`` in bytes; empty: the transport's default."""
        return {} if self.config.bucket_mb is None else {"bucket_size": int(self.config.bucket_mb * 2**20)}


SenderFactory = Callable[[int], Sender]  # argument: the number of receivers


def make_sender_factory(
    config: WeightSyncConfig, device: torch.device, engines: EngineLocations, default_folder: Path
) -> SenderFactory:
    """Return a factory of senders for the configured transport. ``device``: the learner's. ``default_folder``: used by the file
    transport unless one is configured. Raises ValueError for a transport that cannot work.
    """
    raise_problems(
        config.transport_errors(
            "policy.generation",
            device.type,
            engines=engines.count,
            colocated=engines.colocated,
            same_machine=engines.same_machine,
        )
    )
    transport = choose_transport(device, engines) if config.transport == "auto" else config.transport
    factory: SenderFactory = plugins.load("transports", transport)(
        SenderSetup(config=config, device=device, engines=engines, folder=default_folder)
    )
    return factory


def choose_senders(
    config: WeightSyncConfig, device: torch.device, engines: EngineLocations, hosts: Sequence[str]
) -> tuple[int, ...]:
    """Return the ranks that send weights, rank 0 first and evenly spread: ``hosts`` are the machines of the ranks.

    Raises ValueError if more senders are configured than ranks can reach the engines.
    """
    transport = choose_transport(device, engines) if config.transport == "auto" else config.transport
    on_one_machine = transport in ("memory", "cuda_ipc")
    ranks = [rank for rank, host in enumerate(hosts) if not on_one_machine or host == hosts[0]]
    if config.senders != "auto" and config.senders > len(ranks):
        where = f"ranks that reach the engines over {transport}" if len(ranks) < len(hosts) else "ranks that train"
        raise_problems(
            [
                Problem(
                    "policy.generation.weight_sync.senders",
                    f"found {config.senders}, and there are {len(ranks)} {where}",
                    f"Set it to auto, or to at most {len(ranks)}.",
                )
            ]
        )
    one = transport == "cuda_ipc" or (transport == "broadcast" and uses_nccl(device, engines))
    count = config.senders if config.senders != "auto" else 1 if one else min(AUTO_SENDERS, len(ranks))
    return tuple(ranks[number * len(ranks) // count] for number in range(count))


def uses_nccl(device: torch.device, engines: EngineLocations) -> bool:
    """Whether a broadcast goes over NCCL."""
    return device.type == "cuda" and not engines.colocated


def choose_transport(device: torch.device, engines: EngineLocations) -> str:
    """Return the transport chosen by ``auto``."""
    return choose_auto_transport(
        device.type, engines=engines.count, colocated=engines.colocated, same_machine=engines.same_machine
    )
