"""``torch.sim``: what ``torch.cuda`` has, as far as Strop and its tests ask for it."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.simulated_device.graphs import Graph, make_capture

MEMORY = 8 << 30  # bytes that the device says it has


def make_module(native: Any) -> Any:
    module: Any = ModuleType("torch.sim")
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_in_bad_fork": False,
        "is_bf16_supported": True, "get_device_capability": (9, 0), "get_device_name": "a simulated GPU",
        "mem_get_info": (MEMORY, MEMORY), "get_amp_supported_dtype": [torch.float16, torch.bfloat16, torch.float32],
        "get_device_properties": SimpleNamespace(total_memory=MEMORY, uuid="sim-0", name="a simulated GPU"),
        "graph_pool_handle": (0, 0),
    }  # fmt: skip
    nothing = ("empty_cache", "manual_seed", "manual_seed_all", "set_device", "_lazy_init", "ipc_collect")
    for name, value in {**answers, **dict.fromkeys(nothing)}.items():
        setattr(module, name, lambda *args, value=value, **kwargs: value)
    module.get_rng_state_all = lambda: []  # it draws the CPU's numbers
    module.set_rng_state_all = lambda states: None
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda *args: None
    module.memory_allocated = module.memory_reserved = lambda *args: native.held_bytes()
    module.max_memory_allocated = lambda *args: native.peak_bytes()
    module.reset_peak_memory_stats = lambda *args: native.reset_peak()
    module.synchronize = lambda *args: torch.accelerator.synchronize()
    module.Event = torch.Event
    module.Stream = lambda device="sim", **options: torch.Stream(device=torch.device(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=20)
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.device = lambda device: nullcontext()
    module.CUDAGraph, module.graph = (lambda: Graph(native)), make_capture(native)
    return module
