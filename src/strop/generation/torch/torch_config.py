"""Section ``torch_cfg``: the built-in torch engine."""

from __future__ import annotations

from pydantic import Field

from strop.generation.torch.speculation import DraftingConfig

LEAST_CACHE_GB = 2.0


class TorchGenerationConfig(DraftingConfig):
    """The built-in torch engine: continuous batching on the learner's module, or with Ray in processes with their own weights."""

    num_engines: int | None = Field(
        None,
        ge=1,
        description="Engines in separate processes, with Ray; null is as many as fit on the GPUs, otherwise 1 (engines).",
    )
    kv_cache_memory_gb: float | None = Field(
        None, gt=0, description="Memory of the KV cache; null is 2 on a CPU, and a tenth of a GPU's memory, at least 2 (GiB)."
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences decoded together (sequences).")
    prefill_tokens: int = Field(4096, ge=1, description="Prompt tokens in one forward pass (tokens).")
    paged_cache: bool | None = Field(
        None,
        description="Keep keys and values in pages that sequences can share; false reserves memory for the longest sequence in each "
        "slot; null is true on a CPU.",
    )
    speculative_lookup: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of draft tokens looked up in the prompt and completion per step; 0 turns it off (tokens).",
    )
    prepack_weights: bool | None = Field(
        None,
        description="Keep a copy of the weights in the CPU's matmul layout: faster decoding, more memory; null decides by "
        "device.",
    )
    compiled_kernels: bool | None = Field(
        None,
        description="Decode with kernels that are compiled once on each machine (CPU, g++); null uses them where they work, unless "
        "prepack_weights is false.",
    )
    cuda_graphs: bool = Field(True, description="Capture decoding steps as CUDA graphs on a GPU.")

    def cache_memory_gb(self, gpu_memory_gb: float | None) -> float:
        """Return the memory of the KV cache on a GPU with this much memory; None: on a CPU (GiB)."""
        return self.kv_cache_memory_gb or max(LEAST_CACHE_GB, (gpu_memory_gb or 0.0) / 10)
