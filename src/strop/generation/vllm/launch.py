"""Fast engine startup on a CPU: engine processes are forks of a process that has already imported vLLM.

vLLM starts the core of an engine, and the core its workers, as fresh interpreters, each of which spends eight seconds on importing torch's
compiler and vLLM. Here a server process (Python's ``forkserver``) imports them once, without computing anything. Every engine core is a
fork of the server, and every worker a fork of its core. An engine that died restarts in a quarter of the time.

Used only on a CPU: with CUDA, vLLM starts its processes itself.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from strop.weight_sync.transports.connection import is_process_alive

log = logging.getLogger(__name__)

PRELOAD = ["strop.generation.vllm.engine_preload"]
DRIVER_PID_VARIABLE = "STROP_DRIVER"  # environment variable: pid of the process that started the engine
DRIVER_POLL_SECONDS = 1.0  # between two checks of the driver
SPIN_SECONDS = 0.05  # how long a waiting process of an engine keeps its core; vLLM's default is 1 s
THREADS_VARIABLE = "OMP_NUM_THREADS"  # OpenMP reads it only when it is loaded, which happens once, in the server


LAUNCHING = threading.Lock()  # held by the engine whose settings are in effect in this process


@contextmanager
def leave_when_launched(settings: ExitStack) -> Iterator[None]:
    """Close ``settings``, this process's settings for engine processes, as soon as the engine processes run."""
    from vllm.v1.engine import core_client

    launch = core_client.launch_core_engines

    @contextmanager
    def launch_and_leave(*arguments: Any, **options: Any) -> Iterator[Any]:
        with launch(*arguments, **options) as launched:
            settings.close()
            yield launched

    core_client.launch_core_engines = launch_and_leave
    try:
        yield
    finally:
        core_client.launch_core_engines = launch


def start_fork_server() -> None:
    """Start the fork server, which imports in the background. Does nothing if it already runs."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


@contextmanager
def fork_engine_cores(output: Path | None) -> Iterator[None]:
    """Make vLLM start engine cores inside this context as forks of the server. Their output goes to ``output``."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    context = multiprocessing.get_context("forkserver")
    make_context, run = utils.get_mp_context, EngineCoreProc.run_engine_core
    utils.get_mp_context = lambda: context
    EngineCoreProc.run_engine_core = ForkedEngineCore(output)
    try:
        yield
    finally:
        utils.get_mp_context, EngineCoreProc.run_engine_core = make_context, staticmethod(run)


class ForkedEngineCore:
    """Replacement of ``EngineCoreProc.run_engine_core`` that runs in the new process, with this process's environment at pickling."""

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
            redirect_standard_output(self.output)
        setproctitle.getproctitle()  # first call: it locates the title's memory through the original environment
        os.environ.clear()
        os.environ.update(self.environment)
        if threads := self.environment.get(THREADS_VARIABLE):
            torch.set_num_threads(int(threads))
        multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
        shorten_spins()
        end_without_collecting()
        EngineCoreProc.run_engine_core(*arguments, **options)


def shorten_spins() -> None:
    """Make this process and its forks sleep instead of spin while they wait, so that their cores are free for the learner.

    An engine's core and its workers each spin for a second after every message, which is most of the time with a small model.
    """
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        initialize = SpinCondition.__init__
    except (ImportError, AttributeError) as error:
        log.warning("This vLLM spins while its processes wait for each other, which takes cores from the learner: %s", error)
        return

    def initialize_and_shorten(self: Any, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_SECONDS)

    SpinCondition.__init__ = initialize_and_shorten


def end_without_collecting() -> None:
    """Keep the server's objects frozen in this process and its forks, because vLLM would search them for garbage at exit."""
    gc.unfreeze = lambda: None


def redirect_standard_output(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def exit_with_driver() -> None:
    """Watch the driver from a thread of a worker process. When it ends, end this process and, if it is a separate one, the engine core."""
    if driver := os.environ.get(DRIVER_PID_VARIABLE):
        threading.Thread(target=_watch_driver, args=(int(driver), os.getppid()), name="strop-guardian", daemon=True).start()


def _watch_driver(driver: int, parent: int) -> None:
    while is_process_alive(driver):
        time.sleep(DRIVER_POLL_SECONDS)
    if parent not in (driver, 1):
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)
