"""Section ``weight_sync``: how weights reach engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from strop.base_config import BaseConfig, default_of
from strop.problems import Problem


class WeightSyncConfig(BaseConfig):
    """How new weights reach engines with their own copy, and how the transfer is verified."""

    transport: Literal["auto", "memory", "cuda_ipc", "broadcast", "folder"] = Field(
        "auto",
        description="memory: shared memory of one machine; cuda_ipc: device memory of one GPU; broadcast: gloo, or NCCL "
        "between GPUs; folder: files; auto chooses by where learner and engines are.",
    )
    folder: str | None = Field(
        None, description="Folder of transport folder, which every engine must see; null is engines/weights in logger.log_dir."
    )
    bucket_mb: float | None = Field(
        None, gt=0, description="Size of the buckets that weights are sent in; null is the transport's choice (MiB)."
    )
    timeout_seconds: float = Field(600.0, gt=0, description="How long a publish may take (seconds).")
    adapters_alone: bool = Field(
        True, description="With LoRA, send only the adapters, to base weights that the engine keeps; false sends merged weights."
    )
    proof: Literal["always", "first", "every_n"] = Field(
        "every_n",
        description="When to read weights back from the engine, compare fingerprints with the learner's, tensor by tensor, "
        "and sample the canary: after every publish, after the first of a run, or also after every "
        "proof_every-th. Versions and received weights are compared every time.",
    )
    proof_every: int = Field(10, ge=1, description="Period of every_n (publishes).")
    canary_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest mean difference between the engine's and the learner's log-probabilities of the canary's "
        "tokens; null is 0.002 in float32 and 0.1 in bfloat16 (nats).",
    )

    def vllm_warnings(self, key: str) -> Iterator[Problem]:
        """Yield which options have no effect in a run with vLLM engines."""
        if self.proof != "every_n" and self.proof_every != default_of(self, "proof_every"):
            yield Problem(f"{key}.proof_every", f"it has no effect: {key}.proof is {self.proof}, and it is the period of every_n")
        if self.folder is not None and self.transport != "folder":
            yield Problem(
                f"{key}.folder",
                f"it has no effect: {key}.transport is {self.transport}, which writes no files",
                f"Set {key}.transport=folder to use it.",
            )
        if self.transport == "folder" and self.bucket_mb != default_of(self, "bucket_mb"):
            yield Problem(f"{key}.bucket_mb", f"it has no effect: {key}.transport=folder chooses the size of its files")
