"""A device that ran out of memory in a pass: what to set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceMemoryFull(RuntimeError):
    """A pass did not fit into the memory of its device. The message says what to set."""


@contextmanager
def explain_full_memory(key: str, tokens: int, *, trains: bool) -> Iterator[None]:
    """Raise DeviceMemoryFull for torch's error. ``key``: of the token budget, which was ``tokens``; ``trains``: with a backward pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        section = key.partition(".")[0]
        further = f", {section}.dtensor_cfg.activation_checkpointing=true or activation_offload=true" if trains else ""
        raise DeviceMemoryFull(
            f"{key}: the device has no memory for a micro-batch of at most {tokens} tokens. Set it to a smaller number, at least "
            f"policy.max_total_sequence_length; if it is that already, lower {section}.logprob_chunk_size{further}. The gradient stays "
            f"the same. torch reports: {error}"
        ) from error
