"""The embedded engine with its own copy of the model, for learners that are sharded or run elsewhere.

The same continuous batching (``TorchEngine``) runs on a copy of the model that only generates. Weights arrive through a channel, as for any
other engine, and are copied into the module in place, so tied weights stay tied.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.generation.base import Completion
from strop.generation.torch.model_runner import SlotPrompt
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, base_weights, load_adapters, lora_layers
from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.base import (
    AdapterFiles,
    CanarySample,
    ChannelAddress,
    EngineDied,
    LoadReceipt,
    Manifest,
    Receiver,
    TensorFingerprint,
)
from strop.weight_sync.exporter import LocalAdapterSource
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros

T = TypeVar("T")

NO_VERSION = -1


class StandaloneTorchEngine:
    """An ``Engine`` in the calling process. It starts without weights, so requests wait until the first ``resume``.

    Running requests may be suspended while weights change (``keep_running``). They continue with the keys and values they have, or
    recompute them after ``reset_prefix_cache(running=True)``.
    """

    receivers = 1

    def __init__(self, name: str, make_engine: Callable[[], TorchEngine], dtype: torch.dtype) -> None:
        """Create an engine that is not started yet.

        Args:
            name: The engine's name in messages.
            make_engine: Builds the model, with arbitrary weights, and an engine on it. Called at every start.
            dtype: Data type of the published weights.
        """
        self.name = name
        self.make_engine = make_engine
        self.dtype = dtype
        self.version = NO_VERSION
        self._loaded_version = NO_VERSION  # version of the weights in the module
        self._resumed = asyncio.Event()
        self._engine: TorchEngine | None = None
        self._receiver: Receiver | None = None
        self._sent_dtypes: dict[str, torch.dtype] = {}  # tensor name -> data type as sent

    # --- start and close --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.close()
        self._engine = await asyncio.to_thread(self.make_engine)

    async def close(self) -> None:
        self._resumed.clear()
        self.version = self._loaded_version = NO_VERSION
        self._disconnect()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
            del engine
            gc.collect()  # a module with reference cycles would otherwise be freed only after the next one is built

    @property
    def alive(self) -> bool:
        return self._engine is not None and self._engine.failure is None

    def _require_alive(self) -> TorchEngine:
        if self._engine is None:
            raise EngineDied(f"{self.name} is not started")
        if (failure := self._engine.failure) is not None:
            raise EngineDied(f"{self.name} has stopped: {type(failure).__name__}: {failure}") from failure
        return self._engine

    # --- sampling ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        await self._resumed.wait()
        engine = self._require_alive()
        return await self._await_engine(
            engine, engine.generate(prompt, sampling=sampling, seed=seed, session=session, images=images)
        )

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        engine = self._require_alive()
        cached = len(prompt) - engine.runner.count_unread(SlotPrompt(0, tuple(prompt)))
        completion = await self._await_engine(engine, engine.generate_with_priority(prompt, sampling=sampling, seed=seed))
        return CanarySample(tokens=completion.tokens, logprobs=completion.logprobs, cached=cached, columns=completion.columns)

    async def _await_engine(self, engine: TorchEngine, completion: Awaitable[T]) -> T:
        """Await a completion. Raises EngineDied if the engine failed, because an error in a step is not the fault of one request."""
        try:
            return await completion
        except Exception as error:
            if engine.failure is not None:
                raise EngineDied(f"{self.name} stopped while generating: {type(error).__name__}: {error}") from error
            raise

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def connect(self, address: ChannelAddress, first: int) -> None:
        self._disconnect()
        self._receiver = await asyncio.to_thread(address.connect, first, self._require_alive().runner.network.device)

    def _disconnect(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def pause(self, *, keep_running: bool) -> None:
        self._resumed.clear()
        if keep_running:
            self._require_alive().freeze()
        else:
            await self._require_alive().drain()
            self._require_alive()  # a failure of the engine ends the wait too

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        engine = self._require_alive()
        self.version = self._loaded_version = NO_VERSION
        started = time.perf_counter()
        fingerprints = await asyncio.to_thread(self._receive, engine, manifest)
        await asyncio.to_thread(engine.activate_version, version)
        self._sent_dtypes = {entry.name: entry.dtype for entry in manifest.entries}
        self._loaded_version = version
        return LoadReceipt(version=version, fingerprints=fingerprints, seconds=time.perf_counter() - started)

    @torch.no_grad()
    def _receive(self, engine: TorchEngine, manifest: Manifest) -> dict[str, tuple[int, ...]]:
        """Copy one publish into the module and return the fingerprints of the tensors that arrived."""
        if self._receiver is None:
            raise RuntimeError(f"{self.name}: no channel is connected")
        weights = dict(base_weights(engine.runner.network.model))
        self._check_manifest(manifest, weights)
        fingerprints: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._receiver.receive(manifest):
            fingerprints[name] = (fingerprint(tensor),)
            weights[name].copy_(tensor)
        if missing := set(manifest.names) - fingerprints.keys():
            raise RuntimeError(f"{self.name}: the publish ended without {', '.join(sorted(missing)[:3])}")
        return fingerprints

    def _check_manifest(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError if the manifest does not match this model, or would leave some of its weights unset."""
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        for entry in manifest.entries:
            if shapes.get(entry.name) != entry.shape:
                mismatch = f"has it as {shapes[entry.name]}" if entry.name in shapes else "has no tensor of that name"
                raise RuntimeError(
                    f"{self.name} is sent {entry.name} {entry.shape}, but its model {mismatch}: build it from the learner's configuration"
                )
        covered = {weights[name].data_ptr() for name in manifest.names}
        if missing := [name for name, tensor in weights.items() if tensor.numel() and tensor.data_ptr() not in covered]:
            raise RuntimeError(
                f"{self.name}: {', '.join(missing[:3])} would keep arbitrary values: they are neither sent nor tied to sent tensors; "
                "build its model from the learner's configuration, where they may be tied (tie_word_embeddings)"
            )

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        """Load into the adapters of the same configuration that ``make_engine`` added. Raises RuntimeError if the model has none."""
        engine = self._require_alive()
        model = engine.runner.network.model
        if not lora_layers(model):
            raise RuntimeError(
                f"{self.name} is sent adapters, but its model has none: build it with the learner's dtensor_cfg.lora_cfg"
            )
        self.version = self._loaded_version = NO_VERSION
        started = time.perf_counter()
        await asyncio.to_thread(_load_adapter_files, model, adapter)
        await asyncio.to_thread(engine.activate_version, version)
        received = {name: (value,) for name, value in LocalAdapterSource(model).fingerprints(self.dtype).items()}
        self._loaded_version = version
        return LoadReceipt(version=version, fingerprints=received, seconds=time.perf_counter() - started)

    async def use_own_weights(self, version: int) -> None:
        """Serve with the weights that ``make_engine`` loaded, as ``version``, without a publish."""
        await asyncio.to_thread(self._require_alive().activate_version, version)
        self._loaded_version = version
        await self.resume(version)

    async def read_back_fingerprints(self) -> Mapping[str, tuple[TensorFingerprint, ...]]:
        return await asyncio.to_thread(self._read_back, self._require_alive())

    @torch.no_grad()
    def _read_back(self, engine: TorchEngine) -> dict[str, tuple[TensorFingerprint, ...]]:
        """Fingerprint the weights in the data types used for sending; the module's may be wider."""
        fingerprints: dict[str, tuple[TensorFingerprint, ...]] = {}
        for name, tensor in engine.runner.named_weights():
            dtype = self._sent_dtypes.get(name, self.dtype) if tensor.is_floating_point() else tensor.dtype
            rows = tensor.shape[0] if tensor.dim() else 1
            region = (0, rows, 0, tensor.numel() // max(rows, 1))
            fingerprints[name] = (TensorFingerprint(fingerprint(normalize_zeros(tensor.to(dtype))), region),)
        return fingerprints

    async def resume(self, version: int) -> None:
        engine = self._require_alive()
        if self._loaded_version != version:
            raise RuntimeError(
                f"{self.name} cannot resume with weights of version {version}: it holds those of version {self._loaded_version}"
            )
        engine.resume_requests()
        self.version = version
        self._resumed.set()

    async def reset_prefix_cache(self, *, running: bool) -> None:
        engine = self._require_alive()
        engine.runner.reset_prefix_cache()
        if running:
            engine.recompute_running()
            engine.runner.reset_prefix_cache()

    async def sleep(self) -> None:
        """Free cached prefixes and unused allocator memory. Weights and the key-value cache of the slots stay."""
        self._require_alive().runner.reset_prefix_cache()
        if is_gpu(device := self._require_alive().runner.network.device):
            torch.get_device_module(device).empty_cache()

    async def wake(self) -> None:
        self._require_alive()

    def counters(self) -> Mapping[str, float]:
        if self._engine is None:
            return {}
        counts = self._engine.counters
        return {
            "prompt_tokens": float(counts.prompt_tokens),
            "sampled_tokens": float(counts.sampled_tokens),
            "prefix_queries": float(counts.queried_tokens),
            "prefix_hits": float(max(0, counts.queried_tokens - counts.prompt_tokens)),
            "drafted_tokens": float(counts.drafted_tokens),
            "accepted_tokens": float(counts.accepted_tokens),
            "preemptions": float(counts.preemptions),
            "engine_steps": float(counts.decode_steps),
            "running_requests": float(counts.running_requests),
            "waiting_requests": float(counts.waiting_requests),
        }


def _load_adapter_files(model: torch.nn.Module, adapter: AdapterFiles) -> None:
    with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
        folder = Path(name)
        (folder / WEIGHTS_FILE).write_bytes(adapter.weights)
        (folder / CONFIG_FILE).write_text(adapter.config)
        load_adapters(model, folder)
