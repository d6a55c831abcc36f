"""Explains what to set when a device ran out of memory in a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceMemoryFull(RuntimeError):
    """A pass did not fit into the memory of its device. The message says what to set."""


@contextmanager
def explain_full_memory(key: str, tokens: int, *, trains: bool) -> Iterator[None]:
    """Convert torch's error into DeviceMemoryFull. ``key``: the key of the token budget, whose value was ``tokens``; ``trains``:
    with a backward pass.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        section = key.partition(".")[0]
        further = f", {section}.dtensor_cfg.activation_checkpointing=true or activation_offload=true" if trains else ""
        raise DeviceMemoryFull(
            f"{key}: the device has no memory for a micro-batch of at most {tokens} tokens. Set it to a smaller number, at least "
            f"policy.max_total_sequence_length; if it is already that small, lower {section}.logprob_chunk_size{further}. The gradient "
            f"stays the same. torch reports: {error}"
        ) from error
