"""What every engine in separate processes is asked about its section ``NAME_cfg``, which ``backend: NAME`` samples with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, EnvironmentVariables, Precision


@dataclass(frozen=True, kw_only=True)
class AutoEngine:
    """The engine that ``auto`` chooses if there is a GPU, and the reason."""

    name: Literal["torch", "vllm"] = "torch"
    reason: str
    detail: str = ""  # more of the reason, for a warning
    lacking: bool = False  # whether vLLM would be chosen if it supported the configuration


class EngineConfig(BaseConfig):
    """An engine in separate processes. An extension attaches its section to ``GenerationConfig`` as ``NAME_cfg``."""

    title: ClassVar[str]  # what messages call the engine
    article: ClassVar[str] = "a"
    length_key: ClassVar[str] = "max_model_len"  # the key of max_model_len
    size_key: ClassVar[str] = "tensor_parallel_size"  # the key that engine_size grows with

    num_engines: int | None = Field(
        None,
        ge=1,
        description="Engines, each with all weights; null is as many as fit on the GPUs of a Ray cluster, otherwise 1 (engines).",
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of each engine process; null is the learner's number (threads)."
    )
    max_restarts: int = Field(3, ge=0, description="Consecutive restarts of a dead engine before the run stops (restarts).")
    startup_seconds: float = Field(600.0, gt=0, description="How long an engine may take to become ready (seconds).")
    env_vars: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of the engine processes only."
    )

    if TYPE_CHECKING:  # keys or properties of each section

        @property
        def dtype(self) -> Precision:
            """The engine's compute data type, and that of weights that are not quantised."""

        @property
        def max_model_len(self) -> int:
            """Longest prompt and completion together (tokens)."""

        @property
        def engine_size(self) -> int:
            """The number of ranks of one engine, each on its own device."""

    @property
    def num_local_engines(self) -> int:
        """The number of engines of a run in one process; null means 1."""
        return self.num_engines or 1

    def require_library(self) -> None:
        """Raise ValueError unless the engine's processes have its library, or are assumed to have it."""

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine can be sent LoRA adapters without the base weights."""
        return True

    @property
    def draft_method(self) -> str | None:
        """How the engine drafts; None: it does not."""
        return None

    @property
    def memory_share(self) -> float | None:
        """Share of a GPU's memory for weights and KV cache; None: the engine's own choice."""
        return None

    @property
    def uses_node_packages(self) -> bool:
        """Whether the engine's processes have the packages of the node that they are on."""
        return True

    def describe(self) -> str:
        """Return what ``--dry-run --assume-gpus`` says of an engine."""
        share = self.memory_share
        memory = f"{self.title}'s choice of each GPU's memory" if share is None else f"{share:.0%} of each GPU's memory"
        return f"{self.dtype}, {memory}, conversations of at most {self.max_model_len} tokens, {self.size_key} {self.engine_size}"
