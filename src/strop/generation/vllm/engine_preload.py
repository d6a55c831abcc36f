"""One-time imports in the fork server, so that engine and worker processes start without paying for them.

It imports vLLM, makes torch's compiler detect this machine's instructions, its Triton and the version of its own code (vLLM
compiles the lookup of sharded embeddings and the choice of drafts, even in eager mode), and replaces Triton's kernels where
there is no Triton. It computes nothing and starts no thread, because a fork has only the forking thread.
"""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import suppress
from importlib import import_module

log = logging.getLogger(__name__)

MODULES = [
    "strop.models",  # its hook, before torchvision is imported
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "strop.weight_sync.fingerprints",
    "torch._inductor.compile_fx",
]


def ask_compiler() -> None:
    """Let torch's compiler detect the machine. Does nothing without a compiler: code that compiles detects again, and reports
    what is missing.
    """
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    for ask in (pick_vec_isa, CacheBase.get_system, torch_key):
        with suppress(Exception):
            ask()


def replace_kernels() -> None:
    """Replace Triton's kernels by vLLM's own functions here rather than in each worker, because it searches through every module."""
    try:
        from vllm.platforms import current_platform

        replaces = type(current_platform)
        with warnings.catch_warnings(action="ignore"):  # warnings from the other modules it searches
            replaces.register_triton_kernel_overrides()
        replaces.register_triton_kernel_overrides = classmethod(lambda platform: None)
    except (ImportError, AttributeError, ValueError) as error:
        log.warning("This vLLM replaces Triton's kernels in each worker, which slows down its start: %s", error)


gc.disable()  # otherwise it would repeatedly traverse a million permanent objects
for name in MODULES:
    with suppress(ImportError):  # code that needs it imports it again, and reports what is missing
        import_module(name)
ask_compiler()
replace_kernels()
gc.enable()
gc.collect()
gc.freeze()  # so that forks neither collect these objects nor copy their pages
