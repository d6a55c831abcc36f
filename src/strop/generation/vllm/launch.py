"""Engines that start in seconds on a CPU: their processes are forks of one that has imported vLLM.

vLLM starts the core of an engine, and that its workers, as fresh interpreters, each of which imports torch's compiler and vLLM for eight
seconds. Here a server process (Python's ``forkserver``) imports them once, without computing anything, and every core is a fork of it, and
every worker a fork of its core. An engine that is started anew after its death is back in a quarter of the time.

Only on a CPU: what CUDA, or a library preloaded for it, makes of a fork is vLLM's business.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

PRELOAD = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "strop.weights.fingerprints",
]
THREADS = "OMP_NUM_THREADS"  # read when the library is loaded: in the server, for all that come


def start_server() -> None:
    """Begin to import, beside whatever this process does next; nothing where the server runs already."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


@contextmanager
def forked_processes(output: Path | None) -> Iterator[None]:
    """Cores that vLLM starts meanwhile are forks of the server, and write to ``output``."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    context = multiprocessing.get_context("forkserver")
    make_context, run = utils.get_mp_context, EngineCoreProc.run_engine_core
    utils.get_mp_context = lambda: context
    EngineCoreProc.run_engine_core = Core(output)
    try:
        yield
    finally:
        utils.get_mp_context, EngineCoreProc.run_engine_core = make_context, staticmethod(run)


class Core:
    """Runs in the new process, in place of ``EngineCoreProc.run_engine_core``, with the environment that this one has when it is sent."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.environment: Mapping[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"output": self.output, "environment": dict(os.environ)}

    def __call__(self, *arguments: Any, **options: Any) -> None:
        import setproctitle
        import torch
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.executor import multiproc_executor

        if self.output is not None:
            _write_to(self.output)
        setproctitle.getproctitle()  # it finds the memory of the title by the environment as the process began with it
        os.environ.clear()
        os.environ.update(self.environment)
        if threads := self.environment.get(THREADS):
            torch.set_num_threads(int(threads))
        multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
        EngineCoreProc.run_engine_core(*arguments, **options)


def _write_to(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
