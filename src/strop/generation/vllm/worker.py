"""The part of weight sync that runs in vLLM's worker processes: loading weights and fingerprinting them.

vLLM mixes ``StropWorker`` into its worker class (``worker_extension_cls``) and calls its methods by name on every rank
(``collective_rpc``). Values are passed as pickled bytes, since vLLM's encoding does not support dataclasses.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from strop.generation.vllm.draft_weights import PREFIX, load_draft, read_draft_shards
from strop.generation.vllm.launch import exit_with_driver
from strop.generation.vllm.vllm_patches import apply_patches
from strop.generation.vllm.weight_readback import WeightShard, read_adapter_shards, read_weight_shards, refresh_packed_copies
from strop.weight_sync.base import ChannelAddress, Manifest, Receiver, TensorFingerprint
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros

exit_with_driver()

apply_patches()  # at import: vLLM calls no method of a worker extension before it samples


class StropWorker:
    """A mixin for vLLM's worker, which provides ``rank``, ``device`` and ``model_runner``."""

    rank: int
    device: torch.device
    model_runner: Any
    _strop_receiver: Receiver | None = None
    _strop_draft = False  # whether weights of a draft head have arrived

    def strop_connect(self, address: bytes, first: int) -> None:
        """Connect to the sender at ``address`` as its receiver number ``first`` + rank."""
        self.strop_disconnect()
        channel: ChannelAddress = pickle.loads(address)
        self._strop_receiver = channel.connect(first + self.rank, self.device)

    def strop_disconnect(self) -> None:
        if self._strop_receiver is not None:
            self._strop_receiver.close()
            self._strop_receiver = None

    def strop_load_weights(self, manifest: bytes) -> bytes:
        """Receive one publish and load it into the model. Return the pickled (fingerprints, seconds).

        On a CPU the model is unchanged until all tensors have arrived. On a GPU there is no memory for a second copy: an aborted publish
        leaves the model unusable until the next one, and the caller must not resume before.
        """
        if self._strop_receiver is None:
            raise RuntimeError("no channel is connected")
        expected: Manifest = pickle.loads(manifest)
        started = time.perf_counter()
        fingerprints: dict[str, int] = {}
        incoming = self._strop_receiver.receive(expected)
        on_cpu = self.device.type == "cpu"
        tensors = _copy_and_fingerprint(incoming, fingerprints)
        self._strop_apply_weights(list(tensors) if on_cpu else tensors)
        missing = set(expected.names) - fingerprints.keys()
        if missing:
            raise RuntimeError(f"the publish ended without {', '.join(sorted(missing)[:3])}")
        return pickle.dumps((fingerprints, time.perf_counter() - started))

    def _strop_apply_weights(self, tensors: Any) -> None:
        drafted: dict[str, torch.Tensor] = {}
        self.model_runner.reload_weights(weights_iterator=_set_apart(tensors, drafted))
        if self.device.type == "cpu":
            refresh_packed_copies(self.model_runner.get_model())
        if drafted:
            load_draft(self.model_runner, drafted)
            self._strop_draft = True

    @torch.no_grad()
    def strop_read_fingerprints(self) -> bytes:
        """Return the pickled ``TensorFingerprint`` of this rank's shard of each tensor that it computes with, by name."""
        from vllm.distributed import get_tensor_model_parallel_rank

        # Not this process's rank in the engine: each pipeline stage shards its own layers over ranks 0 to tensor_parallel_size - 1.
        rank = get_tensor_model_parallel_rank()
        shards = read_weight_shards(self.model_runner.get_model(), rank)
        drafted = read_draft_shards(self.model_runner, rank) if self._strop_draft else ()
        return pickle.dumps(_fingerprint_shards((*shards, *drafted)))

    @torch.no_grad()
    def strop_read_adapter_fingerprints(self, adapter: int) -> bytes:
        """Return the same for the LoRA matrices of ``adapter``; empty if it is not loaded."""
        runner = self.model_runner
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            return pickle.dumps({})
        return pickle.dumps(_fingerprint_shards(read_adapter_shards(runner.get_model(), manager._adapter_manager, adapter)))


def _fingerprint_shards(shards: Iterable[WeightShard]) -> dict[str, TensorFingerprint]:
    fingerprints: dict[str, TensorFingerprint] = {}
    for shard in shards:
        row, _, column, _ = shard.region
        fingerprints[shard.name] = TensorFingerprint(
            fingerprint(normalize_zeros(shard.tensor), rows=row, columns=column), shard.region
        )
    return fingerprints


def _set_apart(
    tensors: Iterable[tuple[str, torch.Tensor]], drafted: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's tensors, and put those of its draft head into ``drafted``."""
    for name, tensor in tensors:
        if name.startswith(PREFIX):
            drafted[name.removeprefix(PREFIX)] = tensor
        else:
            yield name, tensor


def _copy_and_fingerprint(incoming: Any, fingerprints: dict[str, int]) -> Any:
    """Copy each incoming tensor and record its fingerprint.

    vLLM needs copies, since it loads a layer only when all its tensors have arrived.
    """
    for name, tensor in incoming:
        copy = tensor.clone()
        fingerprints[name] = fingerprint(copy)
        yield name, copy
