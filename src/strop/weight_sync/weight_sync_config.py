"""Section ``weight_sync``: how weights reach engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from strop import plugins
from strop.base_config import BaseConfig, PathText, default_of
from strop.problems import Problem

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[("auto", *sorted(plugins.declared("transports")))]


class WeightSyncConfig(BaseConfig):
    """How new weights reach engines with their own copy, and how the transfer is verified."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    transport: TransportName = Field(
        "auto",
        description="memory: shared memory of one machine; cuda_ipc: device memory of one GPU; broadcast: gloo, or NCCL between GPUs; "
        "folder: files; auto chooses by the location of learner and engines.",
    )
    folder: PathText | None = Field(
        None,
        description="Folder for transport=folder, which must be visible to every engine; null is engines/weights in logger.log_dir.",
    )
    bucket_mb: float | None = Field(
        None, gt=0, description="Size of the buckets that weights are sent in; null is the transport's choice (MiB)."
    )
    senders: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Number of ranks of a learner over Ray that send weights, each a part of the tensors; auto: up to 4, and one where "
        "the transport is cuda_ipc or NCCL.",
    )
    timeout_seconds: float = Field(600.0, gt=0, description="How long a publish may take (seconds).")
    adapters_alone: bool = Field(
        True, description="With LoRA, send only the adapters, to base weights that the engine keeps; false sends merged weights."
    )
    proof: Literal["always", "first", "every_n"] = Field(
        "every_n",
        description="When to read weights back from the engine, compare fingerprints with the learner's tensor by tensor, and sample the "
        "canary: after every publish, after the first one of a run, or also after every proof_every-th. Versions and received weights "
        "are always compared.",
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

    def transport_errors(
        self, key: str, device: str, *, engines: int, colocated: bool, same_machine: bool = True
    ) -> Iterator[Problem]:
        """Yield why weights cannot reach engines in other processes from a learner on ``device`` (``auto``: not known yet).

        ``key``: of the generation section. ``engines``: their number. ``same_machine``: learner and engines are on the same one.
        """
        transport, transport_key = self.transport, f"{key}.weight_sync.transport"
        if transport == "cuda_ipc" and device == "cpu":
            yield Problem(
                transport_key,
                "found cuda_ipc, but policy.device is cpu, and there is no GPU memory to share",
                "Set it to auto or memory.",
            )
        elif transport == "cuda_ipc" and not colocated:
            yield Problem(
                transport_key,
                f"found cuda_ipc, but {key}.colocated.enabled is false: an engine on other GPUs cannot map the learner's memory",
                "Set it to auto, broadcast, memory or folder.",
            )
        elif transport == "cuda_ipc" and self.senders not in ("auto", 1):
            yield Problem(
                f"{key}.weight_sync.senders",
                f"found {self.senders}, with transport cuda_ipc: the engine can map the GPU memory of one rank, the one on its GPU",
                "Set it to auto or 1.",
            )
        elif transport == "cuda_ipc" and engines > 1:
            yield Problem(
                transport_key,
                f"found cuda_ipc, but only the first of {engines} engines is on the learner's GPU; the others "
                "cannot map its memory",
                f"Set it to memory or folder, or {key}.vllm_cfg.num_engines=1.",
            )
        elif transport == "memory" and not same_machine:
            yield Problem(
                transport_key,
                "found memory, but there are engines on other nodes than the learner's first rank, and they do not share its memory",
                "Set it to auto, broadcast, or folder with a folder that all nodes see.",
            )
        elif transport == "broadcast" and colocated and device.startswith("cuda") and same_machine:
            yield Problem(
                transport_key,
                f"found broadcast, but {key}.colocated.enabled is true: NCCL does not connect two processes on one GPU",
                f"Set it to auto or cuda_ipc, or {key}.colocated.enabled=false.",
            )


def choose_auto_transport(device: str, *, engines: int, colocated: bool, same_machine: bool) -> str:
    """Return the transport chosen by ``auto``. ``device``: the learner's device type, cpu or cuda."""
    if not same_machine:
        return "broadcast"
    if device == "cpu":
        return "memory"
    if not colocated:
        return "broadcast"
    return "cuda_ipc" if engines == 1 else "memory"  # only the first of several engines can access the learner's GPU
