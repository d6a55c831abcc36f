"""What a step ran on, as far as it decides the last digits: packages, processor, and how many threads share a sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from strop.config import TrainingRunConfig
from strop.monitoring.run_starts import RunStart, describe_hardware, find_versions, read_run_starts

PACKAGES = ("strop", "torch", "transformers", "numpy", "megatron-core", "triton", "torchao", "peft")
HARDWARE = ("processor", "threads", "GPUs")


def find_start(folder: Path, step: int) -> RunStart:
    """Return the start of a run that trained a step; an empty one of a run that did not write its starts down."""
    return next((start for start in reversed(read_run_starts(folder)) if start.after_step < step), RunStart(after_step=0))


def use_threads(start: RunStart, config: TrainingRunConfig) -> None:
    """Compute with as many threads as the start of a run did, unless the configuration says how many."""
    threads = start.hardware.get("threads", "")
    if config.policy.num_threads is None and threads.isdigit() and 0 < int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


@contextmanager
def keep_threads() -> Iterator[None]:
    """Set the number of threads back at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def list_differences(start: RunStart) -> tuple[str, ...]:
    """Return what is different in this process from where a run was started: ``torch 2.12.0 -> 2.13.0``."""
    versions, hardware = find_versions(), describe_hardware()
    pairs = [(name, start.versions.get(name, ""), versions.get(name, "none")) for name in PACKAGES]
    pairs += [(name, start.hardware.get(name, ""), hardware.get(name, "none")) for name in HARDWARE]
    return tuple(f"{name} {then} -> {now}" for name, then, now in pairs if then and then != now)
