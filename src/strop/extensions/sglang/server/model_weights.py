"""The part of weight sync that runs in the processes that hold an engine's model: loading weights and fingerprinting them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.runtime_context import get_serving
from torch import Tensor

from strop.extensions.sglang.server.adapter_slot import AdapterSlot, read_adapters, without_adapters
from strop.extensions.sglang.server.sglang_readback import ModelShard, read_model_shards
from strop.weight_sync.base import AdapterFiles, ChannelAddress, Manifest, Receiver, TensorFingerprint
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros


class ModelWeights:
    """The weights of one tensor-parallel rank. Its methods are called by name, between two steps of the scheduler."""

    def __init__(self, manager: Any) -> None:
        """``manager``: SGLang's updater of weights, of this process."""
        self.manager = manager
        self.runner: Any = manager.tp_worker.model_runner
        self.rank: int = torch.distributed.get_rank(group=manager.tp_cpu_group)
        self.device = torch.device(self.runner.device)
        self.adapters = None if self.runner.lora_manager is None else AdapterSlot(self.runner.lora_manager, self.rank)
        self._receiver: Receiver | None = None
        self._names: dict[str, str] = {}  # SGLang's name of each published tensor -> its own, where they differ

    def connect(self, address: ChannelAddress, first: int) -> None:
        """Connect to the sender at ``address`` as its receiver number ``first`` + rank."""
        self.disconnect()
        device = torch.device("cuda", torch.cuda.current_device()) if self.device.type == "cuda" else self.device
        self._receiver = address.connect(first + self.rank, device)

    def disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @torch.no_grad()
    def load(self, manifest: Manifest) -> tuple[dict[str, int], float]:
        """Receive one publish and load it. Return the fingerprint of each tensor as it arrived, and seconds.

        On a CPU the model is unchanged until all tensors have arrived. On a GPU an aborted publish leaves it unusable until the next one.
        """
        if self._receiver is None:
            raise RuntimeError("no channel is connected")
        started = time.perf_counter()
        held = ((engine_name(self.runner.model, name), name) for name in manifest.names)
        self._names = {name: published for name, published in held if name != published}
        fingerprints: dict[str, int] = {}
        tensors = _fingerprint_each(self._receiver.receive(manifest), fingerprints)
        self._apply(list(tensors) if self.device.type == "cpu" else tensors)
        missing = set(manifest.names) - fingerprints.keys()
        if missing:
            raise RuntimeError(f"the publish ended without {', '.join(sorted(missing)[:3])}")
        return fingerprints, time.perf_counter() - started

    def _apply(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors into the model, and into a draft that shares its weights."""
        runners = [runner for _, runner in self.manager._select_runners("all")]
        loaded = list(tensors) if len(runners) > 1 else tensors
        for runner in runners:
            runner.weight_updater.begin_weight_update()
            with without_adapters(runner.model, getattr(runner, "lora_manager", None)):
                runner.model.load_weights((engine_name(runner.model, name), tensor) for name, tensor in loaded)
            runner.weight_updater.end_weight_update(run_post_load=False)

    @torch.no_grad()
    def load_adapter(self, files: AdapterFiles) -> float:
        """Replace the policy's adapters by those of a publish. Return the seconds that it took."""
        started = time.perf_counter()
        self._require_adapters().write(read_adapters(files))
        return time.perf_counter() - started

    def flush(self) -> bool:
        """Drop cached keys and values, and return whether that was possible: not while requests run."""
        return bool(self.manager.flush_cache(empty_cache=False))  # which on a CPU would only collect garbage, for half a second

    def version(self) -> str:
        """Return the version that the scheduler gives to tokens it samples now."""
        return str(get_serving().weight_version)

    @torch.no_grad()
    def fingerprints(self) -> dict[str, tuple[TensorFingerprint, ...]]:
        """Return the fingerprints of this rank's shards of each tensor that it computes with, by canonical name."""
        shards = read_model_shards(self.runner.model, self.rank)
        return fingerprint_shards(replace(shard, name=self._names.get(shard.name, shard.name)) for shard in shards)

    @torch.no_grad()
    def adapter_fingerprints(self) -> dict[str, tuple[TensorFingerprint, ...]]:
        """Return the same for the matrices of the adapters, which its kernels add to the base."""
        return fingerprint_shards(self._require_adapters().read())

    def _require_adapters(self) -> AdapterSlot:
        if self.adapters is None:
            raise RuntimeError("the engine was started without adapters")
        return self.adapters


def fingerprint_shards(shards: Iterable[ModelShard]) -> dict[str, tuple[TensorFingerprint, ...]]:
    found: dict[str, tuple[TensorFingerprint, ...]] = {}
    for shard in shards:
        row, _, column, _ = shard.region
        value = fingerprint(normalize_zeros(shard.tensor), rows=row, columns=column)
        found[shard.name] = (*found.get(shard.name, ()), TensorFingerprint(value, shard.region))
    return found


def _fingerprint_each(incoming: Iterable[tuple[str, Tensor]], fingerprints: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Copy each tensor, which is valid only until the next one, and record its fingerprint."""
    for name, tensor in incoming:
        copy = tensor.clone()
        fingerprints[name] = fingerprint(copy)
        yield name, copy


# Names of tensors in SGLang's models that read images: those of the hub's files, and Strop sends those of Transformers.


PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


def engine_name(model: Any, name: str) -> str:
    """Return the name under which a model of SGLang has a tensor."""
    if not hasattr(model, "visual"):
        return name
    for sent, held in PREFIXES:
        if name.startswith(sent):
            return held + name.removeprefix(sent)
    return name
