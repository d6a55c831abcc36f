"""What the server of engines does once, before it forks: an engine and each of its workers would do it again, for seconds.

It imports vLLM, asks torch's compiler for the instructions of this machine, the Triton it has and the version of its own code (vLLM
compiles the look-up of divided embeddings and the choice of drafts, also in eager mode), and replaces Triton's kernels where there is no
Triton. It computes nothing and starts no thread: a fork has the thread that forks alone.
"""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import suppress
from importlib import import_module

log = logging.getLogger(__name__)

MODULES = [
    "strop.models.vision.torchvision_hook",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "strop.weight_sync.fingerprints",
    "torch._inductor.compile_fx",
]


def ask_compiler() -> None:
    """Without a compiler, say: whoever compiles asks again, and says what is missing."""
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    for ask in (pick_vec_isa, CacheBase.get_system, torch_key):
        with suppress(Exception):
            ask()


def replace_kernels() -> None:
    """Put vLLM's own functions in the place of Triton's kernels, for which it looks through every module, here and not in each worker."""
    try:
        from vllm.platforms import current_platform

        replaces = type(current_platform)
        with warnings.catch_warnings(action="ignore"):  # of what else is in the modules that it looks through
            replaces.register_triton_kernel_overrides()
        replaces.register_triton_kernel_overrides = classmethod(lambda platform: None)
    except (ImportError, AttributeError, ValueError) as error:
        log.warning("This vLLM replaces Triton's kernels in each worker, which takes it longer to start: %s", error)


gc.disable()  # it would go through a million objects that stay, again and again
for name in MODULES:
    with suppress(ImportError):  # whoever needs it imports it again, and says what is missing
        import_module(name)
ask_compiler()
replace_kernels()
gc.enable()
gc.collect()
gc.freeze()  # a fork neither looks through what is here for garbage nor copies its pages to do so
