"""Processes of the tests are forks of a server (Python's ``forkserver``) that has imported what they need.

Importing torch, transformers and Strop takes longer than most of what is tested in a process of its own: ``fork_preload``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from typing import Any, Literal

import pytest

PRELOAD = "support.fork_preload"
PARTS = ("ensure_running", "connect_to_new_process", "set_forkserver_preload", "get_inherited_fds")


def forks() -> Any:
    """The context whose processes are such forks."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    with path_to_support():
        forkserver.ensure_running()
    return context


@contextmanager
def path_to_support() -> Iterator[None]:
    """A server that is started meanwhile finds ``support``; it has no other way to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield


class ForkedServer(forkserver.ForkServer):
    """A server that is itself a fork of the first one, so that the library alone is left for it to import."""

    def __init__(self, modules: list[str]) -> None:
        super().__init__()
        self.modules = modules

    def ensure_running(self) -> None:
        if self._forkserver_pid is None:
            forks()  # the first one
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forkserver.util, "spawnv_passfds", self.fork)
                super().ensure_running()

    def fork(self, interpreter: str, arguments: list[str], descriptors: list[int]) -> int:
        passed = [reduction.DupFd(descriptor) for descriptor in descriptors]
        process = forks().Process(target=serve_forks, args=(*passed, self.modules), daemon=True)
        process.start()
        return int(process.pid)


def serve_forks(listener: Any, alive: Any, modules: list[str]) -> None:
    forkserver.main(listener.detach(), alive.detach(), modules)


def fork_own_server() -> None:
    """Have the server that this process starts for vLLM be a fork of it, as it is now, where it has imported vLLM."""
    from strop.generation.vllm.launch import start_fork_server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver.util, "spawnv_passfds", fork_passing)
        start_fork_server()


def fork_passing(interpreter: str, arguments: list[str], descriptors: list[int]) -> int:
    """Run ``python -c COMMAND`` as a fork of this process, which keeps these descriptors only: its other ends have to be closed."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for first, last in pairwise([2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, last)
        resource_tracker._resource_tracker._fd = None
        exec(arguments[-1], {})
        code = 0
    finally:
        os._exit(code)


@cache
def server_with(library: Literal["vllm", "megatron"]) -> forkserver.ForkServer:
    from strop.generation.vllm.launch import PRELOAD as vllm

    return ForkedServer(vllm if library == "vllm" else ["support.megatron_preload"])


@contextmanager
def forks_with(library: Literal["vllm", "megatron"]) -> Iterator[None]:
    """Meanwhile processes are forks of another server, which has imported a large library as well."""
    server, before = server_with(library), {name: getattr(forkserver, name) for name in PARTS}
    with path_to_support():
        server.ensure_running()
    for name in PARTS:
        setattr(forkserver, name, getattr(server, name))
    forkserver.set_forkserver_preload = lambda modules: None
    try:
        yield
    finally:
        for name, part in before.items():
            setattr(forkserver, name, part)


with_vllm = partial(forks_with, "vllm")
