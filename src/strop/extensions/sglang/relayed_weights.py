"""Weights by the ways that SGLang itself offers: this process receives them from the learner and hands them to the server.

``distributed``: broadcast over a process group (gloo on a CPU, NCCL on GPUs) that the server joins, ``update_weights_from_distributed``.
``tensors``: shared memory of this machine, ``update_weights_from_tensor``. ``disk``: files, ``update_weights_from_disk``. All three cost a
copy more than ``direct``, in which the processes that hold the model receive the weights themselves.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.extensions.sglang.sglang_config import SglangConfig
from strop.weight_sync.base import ChannelAddress, Manifest, Receiver
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.transports.shared_folder import save_tensors

dist: Any = torch.distributed  # the functions used here are untyped
Post = Callable[[str, dict[str, Any]], Awaitable[Any]]
NamedTensor = tuple[str, Tensor]
JOIN_LIMIT = timedelta(seconds=60)  # for the server's ranks to join the group
BUCKET_BYTES = 256 << 20  # of one request
_groups = itertools.count()  # their names are unique in this process


class RelayedWeights:
    """The relay of one engine."""

    def __init__(self, config: SglangConfig, post: Post) -> None:
        self.config, self.post = config, post
        self._receiver: Receiver | None = None
        self._group: Any = None
        self._name = f"strop-{os.getpid()}-{next(_groups)}"

    def connect(self, address: ChannelAddress, number: int) -> None:
        """Connect to the learner as its receiver ``number``."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.connect(number, torch.device("cpu"))

    async def load(self, manifest: Manifest) -> tuple[dict[str, int], float]:
        """Receive one publish and hand it on. Return the fingerprint of each tensor as it arrived here, and seconds."""
        started = time.perf_counter()
        tensors = await asyncio.to_thread(self._receive, manifest)
        fingerprints = {name: fingerprint(tensor) for name, tensor in tensors}
        hand_on = {"distributed": self._broadcast, "tensors": self._send_tensors, "disk": self._send_files}
        await hand_on[self.config.weight_loading](tensors)
        return fingerprints, time.perf_counter() - started

    def _receive(self, manifest: Manifest) -> list[NamedTensor]:
        if self._receiver is None:
            raise RuntimeError("no channel is connected")
        return [(name, tensor.clone()) for name, tensor in self._receiver.receive(manifest)]

    async def _broadcast(self, tensors: Sequence[NamedTensor]) -> None:
        if self._group is None:
            await self._join()
        on_gpu = torch.cuda.is_available()
        await self.post("/begin_weight_update", {})
        for bucket in _buckets(tensors):
            body = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._name,
                "flush_cache": False,
            }
            asked = asyncio.ensure_future(self.post("/update_weights_from_distributed", body))
            for _, tensor in bucket:
                sent = tensor.cuda() if on_gpu else tensor
                await asyncio.to_thread(dist.broadcast, sent.contiguous(), 0, group=self._group)
            _require_success(await asked)
        await self.post("/end_weight_update", {})

    async def _join(self) -> None:
        """Form a group of this process and the server's ranks."""
        size = self.config.engine_size + 1
        # made before the server is asked, which would wait for it for half an hour and answer nothing else
        store = _serve_store(size)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        body = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self._name,
            "backend": backend,
        }
        asked = asyncio.ensure_future(self.post("/init_weights_update_group", body))
        self._group = await asyncio.to_thread(_join_group, backend, store, size, self._name)
        _require_success(await asked)

    async def _send_tensors(self, tensors: Sequence[NamedTensor]) -> None:
        await self.post("/begin_weight_update", {})
        for bucket in _buckets(tensors):
            payload = base64.b64encode(_pickle_tensors(bucket)).decode()
            body = {"serialized_named_tensors": [payload] * self.config.engine_size, "flush_cache": False}
            _require_success(await self.post("/update_weights_from_tensor", body))
        await self.post("/end_weight_update", {})

    async def _send_files(self, tensors: Sequence[NamedTensor]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="strop-weights-"))
        try:
            await asyncio.to_thread(save_tensors, dict(tensors), folder / "model.safetensors")
            _require_success(
                await self.post(
                    "/update_weights_from_disk", {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _buckets(tensors: Sequence[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield the tensors in order, in lists of about ``BUCKET_BYTES``."""
    bucket, size = list[NamedTensor](), 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _pickle_tensors(bucket: Sequence[NamedTensor]) -> bytes:
    """Return tensors by the names of files in shared memory: open files cannot be handed to a process that is not a child's child."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        memory = io.BytesIO()
        ForkingPickler(memory).dump(list(bucket))
        return memory.getvalue()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def _serve_store(size: int) -> Any:
    """Serve a TCPStore on the loopback interface; torch's own listener would be on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, size, True, timeout=JOIN_LIMIT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _join_group(backend: str, store: Any, size: int, name: str) -> Any:
    """Return a process group in which this process is the first of ``size``. SGLang's ranks join it by the same store and name."""
    c10d: Any = dist.distributed_c10d
    named = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(size, 0, [], c10d.Backend(backend), named, group_name=name, timeout=JOIN_LIMIT)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _require_success(answer: dict[str, Any]) -> None:
    if not answer.get("success", True):
        raise RuntimeError(f"SGLang did not take the weights: {answer.get('message')}")
