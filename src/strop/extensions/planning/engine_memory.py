"""The memory of an inference engine on one of its devices: weights and the cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from strop.extensions.planning.model_size import ModelSize

WORKSPACE = 1.5 * 2**30  # of CUDA graphs, activations and buffers of an engine on a GPU


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What the memory of an engine depends on, besides the model."""

    name: str  # torch, vllm, sglang
    size: int = 1  # devices of an engine
    on_cpu: bool = False
    weight_bytes: float = 2.0  # of a number
    cache_bytes: float = 2.0
    shares_weights: bool = False  # it runs the learner's own module
    memory_share: float | None = None  # of a device that it reserves; None: it takes ``cache_limit``
    cache_limit: float = 2.0 * 2**30  # bytes for the cache
    most_sequences: int = 256  # decoded together
    longest: int = 2048  # tokens of a conversation
    size_key: str = "policy.generation.vllm_cfg.tensor_parallel_size"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one of its devices of ``limit`` bytes."""

    model: ModelSize
    setup: EngineSetup
    limit: float

    @property
    def weights(self) -> float:
        """Bytes of its own weights; of the embedded engine on a CPU the copy in the layout of the products."""
        copied = self.model.layer_weights if self.setup.shares_weights else self.model.weights
        if self.setup.shares_weights and not self.setup.on_cpu:
            return 0.0
        return self.setup.weight_bytes * copied / self.setup.size

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache for a token, on one device."""
        return self.setup.cache_bytes * self.model.cache_width / self.setup.size

    @property
    def cache(self) -> float:
        """Bytes that the cache may take."""
        if self.setup.memory_share is None:
            needed = self.bytes_per_token * self.setup.longest * self.setup.most_sequences
            return min(self.setup.cache_limit, needed)
        return max(0.0, self.setup.memory_share * self.limit - self.weights - self.workspace)

    @property
    def workspace(self) -> float:
        return 0.0 if self.setup.on_cpu else WORKSPACE

    @property
    def sequences(self) -> float:
        """Sequences of the greatest length that the cache holds at a time."""
        return self.cache / (self.bytes_per_token * self.setup.longest)

    @property
    def parts(self) -> dict[str, float]:
        found = {"engine weights": self.weights, "cache": self.cache, "engine workspace": self.workspace}
        return {name: size for name, size in found.items() if size}
