"""Processes of the tests are forks of a server (Python's ``forkserver``) that has imported what they need.

Importing torch, transformers and Strop takes longer than most of what is tested in a process of its own: ``fork_preload``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver
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


@cache
def server_with(library: Literal["vllm", "megatron"]) -> forkserver.ForkServer:
    from strop.generation.vllm.launch import PRELOAD as vllm

    server = forkserver.ForkServer()
    server.set_forkserver_preload([PRELOAD, *(vllm if library == "vllm" else ["support.megatron_preload"])])
    return server


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
