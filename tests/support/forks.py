"""Processes of the tests are forks of a server (Python's ``forkserver``) that has imported what they need.

Importing torch and transformers takes longer than most of what is tested in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import pytest

PRELOAD = [
    "strop.models",
    "strop.cli",
    "strop.build",
    "strop.monitoring.plot",
    "strop.environments.arithmetic",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_fast",
    "safetensors.torch",
    "pandas",
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
]


def algorithms() -> list[str]:
    """The modules that the catalogue imports when an algorithm is named."""
    spec = find_spec("strop.algorithms")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py") if file.stem != "__init__"]
    return sorted(".".join(["strop.algorithms", *file.parts]) for file in files)


def forks() -> Any:
    """The context whose processes are such forks."""
    lost = [name for name in PRELOAD if name.startswith("strop.") and find_spec(name) is None]
    assert not lost, f"{lost} are not there: the server would go without them, and every run would import them itself"
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *algorithms()])
    return context


PARTS = ("ensure_running", "connect_to_new_process", "set_forkserver_preload", "get_inherited_fds")


@cache
def server_with(library: Literal["vllm", "megatron"]) -> forkserver.ForkServer:
    from strop.generation.vllm.launch import PRELOAD as vllm

    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOAD, *algorithms(), *(vllm if library == "vllm" else ["support.megatron_preload"])])
    return server


@contextmanager
def forks_with(library: Literal["vllm", "megatron"]) -> Iterator[None]:
    """Meanwhile processes are forks of another server, which has imported a large library as well."""
    server, before = server_with(library), {name: getattr(forkserver, name) for name in PARTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep
        )  # the server has no other way to ``support``
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
