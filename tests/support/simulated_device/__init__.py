"""A simulated GPU for tests: the device ``sim``, on PyTorch's private-use backend, with the CPU's memory and operators.

    from support import simulated_device
    simulated_device.install()          # compiles device.cpp once per machine: half a minute
    model.to("sim")
    with simulated_device.counting() as counts:
        ...
    assert counts["host reads"] <= 1

``torch.sim`` is to it what ``torch.cuda`` is to a GPU, so code that asks ``is_gpu(device)`` and ``torch.get_device_module(device)`` takes
the paths of a GPU. Results equal those of the CPU to the bit, as far as the same operators run.

Strict about:

- devices: an operator refuses tensors of two devices, but for scalars and indices, which CUDA takes from the CPU too;
- dtypes: integers have no matrix products; the fused attention takes what CUDA's takes, in the shapes in which that does;
- memory: what nothing was written to is NaN, or -1;
- waiting: what a copy that is not blocking brings to pinned memory is there once the stream, an event after it or the device was
  synchronized, or the host has read something; until then there are NaNs;
- graphs: a capture computes nothing, and refuses what reads a value on the host or copies from or to pageable memory. A replay runs the
  operators that were recorded on the memory that they were recorded with. Captures are per thread.

Counts: launches (a replay is one), host reads, pageable and pinned uploads, downloads and pinned downloads, synchronizations, bytes copied,
and bytes held with their peak.

Cannot find: faults of CUDA's and Triton's kernels, races between streams (all work is done in the order in which it is launched) or with
pinned memory that is written to while it is being sent, fragmentation, anything about speed, CUDA IPC and NCCL, and what is
asked of ``torch.cuda`` or a device "cuda" by name. A graph keeps all memory that its operators took, so peaks are higher than on a GPU.

A process that has computed a backward pass cannot install it any more (autograd has a thread for each device, started once), and one
that has installed it has an accelerator until its end. So tests run on it in processes of their own: ``in_process.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from support.simulated_device.build import find_obstacle, load

NAMES = (
    "launches",
    "host reads",
    "pageable uploads",
    "pinned uploads",
    "downloads",
    "pinned downloads",
    "synchronizations",
    "copied bytes",
)

__all__ = ["compiled_segments", "count_operators", "counting", "find_obstacle", "install"]


@cache
def install() -> Any:
    """Make ``sim`` a device of this process, and return its native half."""
    from support.simulated_device.flash_attention import register_flash_attention
    from support.simulated_device.module import make_module

    refuse_replaced_functions()
    native = load()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", make_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    native.register_hooks()
    register_flash_attention(native)
    return native


def refuse_replaced_functions() -> None:
    """Once imported, vLLM's worker for a CPU has torch neither pin memory nor wait: copies would stay NaN, and nothing say why."""
    functions = {
        "torch.Tensor.pin_memory": torch.Tensor.pin_memory,
        "torch.accelerator.synchronize": torch.accelerator.synchronize,
    }
    for name, function in functions.items():
        module = getattr(function, "__module__", None) or "torch"  # a method of torch's own has none
        if not module.startswith("torch"):
            raise RuntimeError(f"{name} was replaced by {module}, which this process should not have imported")


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yield what is counted in the block, complete at its end; with "peak bytes", beyond those that were held before it."""
    native = install()
    native.clear_counts()
    native.reset_peak()
    held, counts = native.held_bytes(), dict.fromkeys(NAMES, 0)
    yield counts
    counts.update(native.counts())
    counts["peak bytes"] = native.peak_bytes() - held


@contextmanager
def compiled_segments() -> Iterator[None]:
    """Run what a GPU compiles of a layer as the launches that torch.compile makes of it."""
    from strop.models.layers import segments
    from support.graph_launches import compile_as_graph
    from support.simulated_device.flash_attention import as_kernel

    native, counts = install(), list[int]()
    compile_graph = compile_as_graph(counts.append)

    def stand_in(*arguments: Any) -> Any:
        graph = as_kernel(native, compile_graph(*arguments), 0)

        def run(*tensors: Any) -> Any:
            results = graph(*tensors)
            for _ in range(counts.pop()):
                native.count("launches")
            return results

        return run

    compile_segment, segments.compile_segment = segments.compile_segment, stand_in  # type: ignore[assignment]
    try:
        with segments.compiling_segments():
            yield
    finally:
        segments.compile_segment = compile_segment


def count_operators() -> dict[str, int]:
    """Return how often each operator ran since the last ``counting`` began, the most frequent first."""
    return dict(sorted(install().operators().items(), key=lambda item: -item[1]))
