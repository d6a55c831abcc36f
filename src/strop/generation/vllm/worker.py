"""The part of weight sync that runs in vLLM's worker processes: loading weights and fingerprinting them.

vLLM mixes ``StropWorker`` into its worker class (``worker_extension_cls``) and calls its methods by name on every rank
(``collective_rpc``). Values are passed as pickled bytes, since vLLM's encoding does not support dataclasses.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from strop.generation.vllm.engine_weights import KeptSinks, map_names, quantize_arriving, rename_for_engine
from strop.generation.vllm.launch import exit_with_driver
from strop.generation.vllm.vllm_patches import apply_patches
from strop.generation.vllm.weight_readback import (
    WeightShard,
    read_adapter_shards,
    read_weight_shards,
    recover_log,
    refresh_packed_copies,
)
from strop.models.checkpoint_names import CheckpointNames
from strop.models.quantization.quantization_plan import QuantizationPlan
from strop.weight_sync.base import ChannelAddress, Manifest, Receiver, TensorFingerprint
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros

exit_with_driver()

apply_patches()  # at import: before sampling, vLLM calls no method of a worker extension


class StropWorker:
    """A mixin for vLLM's worker, which provides ``rank``, ``device`` and ``model_runner``."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _strop_receiver: Receiver | None = None
    _strop_checkpoint: CheckpointNames | None = None
    _strop_draft = False  # whether weights of a draft head have arrived
    _strop_sent_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})  # of the last publish
    _strop_names: Mapping[str, str] = MappingProxyType({})  # vLLM's name of each published tensor -> its own, if they differ
    _strop_logs: Mapping[str, torch.Tensor] = MappingProxyType({})  # A_log of Mamba's layers, as they arrived

    def strop_connect(self, address: bytes, first: int) -> None:
        """Connect to the sender at ``address`` as its receiver number ``first`` + rank, counted over all copies of the engine."""
        self.strop_disconnect()
        channel: ChannelAddress = pickle.loads(address)
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._strop_receiver = channel.connect(first + rank, self.device)

    def strop_disconnect(self) -> None:
        if self._strop_receiver is not None:
            self._strop_receiver.close()
            self._strop_receiver = None

    def strop_load_weights(self, manifest: bytes, plan: bytes) -> bytes:
        """Receive one publish and load it into the model. Return the pickled (fingerprints, seconds).

        ``plan``: the pickled ``QuantizationPlan`` of a model with low-precision kernels, or None.

        On a CPU the model is unchanged until all tensors have arrived. On a GPU there is no memory for a second copy: an aborted publish
        leaves the model unusable until the next one, and the caller must not resume before.
        """
        if self._strop_receiver is None:
            raise RuntimeError("no channel is connected")
        expected: Manifest = pickle.loads(manifest)
        if self._strop_checkpoint is None:
            self._strop_checkpoint = CheckpointNames.of(self.vllm_config.model_config.model)
        self._strop_names = map_names(self.model_runner.get_model(), expected.names, self._strop_checkpoint)
        started = time.perf_counter()
        self._strop_sent_dtypes = {entry.name: entry.dtype for entry in expected.entries}
        fingerprints: dict[str, int] = {}
        incoming = self._strop_receiver.receive(expected)
        on_cpu = self.device.type == "cpu"
        logs: dict[str, torch.Tensor] = {}
        self._strop_logs = logs
        tensors = _copy_and_fingerprint(incoming, fingerprints, logs)
        tensors = list(tensors) if on_cpu else tensors
        quantization: QuantizationPlan | None = pickle.loads(plan)
        if quantization is not None:
            tensors = quantize_arriving(tensors, quantization, expected.names)
        self._strop_apply_weights(tensors)
        missing = set(expected.names) - fingerprints.keys()
        if missing:
            raise RuntimeError(f"the publish ended without {', '.join(sorted(missing)[:3])}")
        return pickle.dumps((fingerprints, time.perf_counter() - started))

    def _strop_apply_weights(self, tensors: Any) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        drafted: dict[str, torch.Tensor] = {}
        model, kept = self.model_runner.get_model(), KeptSinks(_set_apart(tensors, drafted))
        assert self._strop_checkpoint is not None
        self.model_runner.reload_weights(weights_iterator=rename_for_engine(model, kept, self._strop_checkpoint))
        kept.copy_into(model, get_tensor_model_parallel_rank())
        if self.device.type == "cpu":
            refresh_packed_copies(self.model_runner.get_model())
        if drafted:
            load_draft(self.model_runner, drafted)
            self._strop_draft = True

    @torch.no_grad()
    def strop_read_fingerprints(self) -> bytes:
        """Return the pickled fingerprints of this rank's shards of each tensor in use, by name; for experts, one each."""
        from vllm.distributed import get_tensor_model_parallel_rank

        # Not this process's rank in the engine: each pipeline stage shards its own layers over ranks 0 to tensor_parallel_size - 1.
        rank = get_tensor_model_parallel_rank()
        shards = read_weight_shards(self.model_runner.get_model(), rank)
        named = (replace(shard, name=self._strop_names.get(shard.name, shard.name)) for shard in shards)
        drafted = read_draft_shards(self.model_runner, rank) if self._strop_draft else ()
        recovered = (recover_log(shard, self._strop_logs.get(shard.name)) for shard in named)
        return pickle.dumps(_fingerprint_shards((*recovered, *drafted), self._strop_sent_dtypes))

    @torch.no_grad()
    def strop_read_adapter_fingerprints(self, adapter: int) -> bytes:
        """Return the same for the LoRA matrices of ``adapter``; empty if it is not loaded."""
        runner = self.model_runner
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            return pickle.dumps({})
        shards = read_adapter_shards(runner.get_model(), manager._adapter_manager, adapter)
        return pickle.dumps(_fingerprint_shards(replace(shard, name=self._name_adapter(shard.name)) for shard in shards))

    def _name_adapter(self, name: str) -> str:
        """Return the published name of an adapter matrix, based on its layer's name."""
        layer, _, matrix = name.rpartition(".")
        published = self._strop_names.get(f"{layer}.weight")
        return name if published is None else f"{published.removesuffix('.weight')}.{matrix}"


def _fingerprint_shards(
    shards: Iterable[WeightShard], sent_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> dict[str, tuple[TensorFingerprint, ...]]:
    fingerprints: dict[str, list[TensorFingerprint]] = {}
    for shard in shards:
        tensor = _in_sent_dtype(shard.tensor, sent_dtypes.get(shard.name))
        value = fingerprint(normalize_zeros(tensor), rows=shard.row, columns=shard.column)
        fingerprints.setdefault(shard.name, []).append(TensorFingerprint(value, shard.region))
    return {name: tuple(parts) for name, parts in fingerprints.items()}


def _in_sent_dtype(tensor: torch.Tensor, sent: torch.dtype | None) -> torch.Tensor:
    """Return a tensor that vLLM stores in a wider type in the type it was sent in, if all its values are representable."""
    if sent is None or sent == tensor.dtype or not sent.is_floating_point:
        return tensor
    narrow = tensor.to(sent)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _set_apart(
    tensors: Iterable[tuple[str, torch.Tensor]], drafted: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's tensors, and move those of its draft head into ``drafted``."""
    for name, tensor in tensors:
        if name.startswith(PREFIX):
            drafted[name.removeprefix(PREFIX)] = tensor
        else:
            yield name, tensor


def _copy_and_fingerprint(incoming: Any, fingerprints: dict[str, int], logs: dict[str, torch.Tensor]) -> Any:
    """Copy each incoming tensor and record its fingerprint; keep those of ``logs``.

    vLLM needs copies, since it loads a layer only when all its tensors have arrived.
    """
    for name, tensor in incoming:
        copy = tensor.clone()
        fingerprints[name] = fingerprint(copy)
        if name.endswith(".A_log"):
            logs[name] = copy
        yield name, copy


# The weights of a draft head trained by the learner, in vLLM's drafter: loading them at a publish, and reading them back.


PREFIX = "draft."  # prefix of their names in a publish


def load_draft(runner: Any, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a head, under the names of its checkpoint. Raises RuntimeError for an engine that has no drafter."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    model = _drafter(runner)
    reload_weights(runner.vllm_config, model, iter(weights.items()), None, True)
    if runner.device.type == "cpu":
        refresh_packed_copies(model)


def read_draft_shards(runner: Any, rank: int) -> Iterator[WeightShard]:
    """Yield this rank's shard of each tensor of the drafter, named as in a publish. The embeddings are the policy's."""
    model = _drafter(runner)
    single = len(model.model.layers) == 1
    for shard in read_weight_shards(model, rank):
        name = shard.name.removeprefix("model.")
        if not name.startswith("embed_tokens"):
            yield replace(shard, name=PREFIX + (name.replace("layers.0.", "midlayer.", 1) if single else name))


def _drafter(runner: Any) -> Any:
    """Return the draft model of vLLM's model runner: V2 and newer V1 expose it, older ones have it in ``drafter``."""
    if callable(get_draft_model := getattr(runner, "get_draft_model", None)):
        model = get_draft_model()
    else:
        model = getattr(getattr(runner, "drafter", None), "model", None)
    if model is None:
        raise RuntimeError(
            "weights of a draft head were published, but this engine has no drafter that takes them: set "
            "policy.generation.vllm_cfg.speculation.method=eagle3, or policy.draft.enabled=false"
        )
    return model
