"""Section ``generation`` (under ``policy``, or at the top of an evaluation): the inference engine and how it samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from strop.base_config import BaseConfig, follows, subsection
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.vllm.vllm_config import VllmConfig
from strop.weight_sync.weight_sync_config import WeightSyncConfig


def _check_top_k(value: int | None) -> int | None:
    if value is not None and value != -1 and value < 1:
        raise ValueError("top_k must be at least 1; null or -1 keeps every token")
    return value


TopK = Annotated[int | None, AfterValidator(_check_top_k)]


TopP = Annotated[float, Field(gt=0, le=1)]


Temperature = Annotated[float, Field(ge=0)]


TokenIds = Annotated[tuple[int, ...], Field(strict=False)]


Strings = Annotated[tuple[str, ...], Field(strict=False)]


class ColocatedResourcesConfig(BaseConfig):
    """Devices of generation when it is not colocated."""

    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of each node that generate (GPUs).")
    num_nodes: int | None = Field(None, ge=1, description="Nodes that only generate (nodes).")


class ColocatedConfig(BaseConfig):
    """Whether generation and training share devices."""

    enabled: bool = Field(True, description="Generate on the devices that train.")
    resources: ColocatedResourcesConfig = subsection(ColocatedResourcesConfig)


class MismatchConfig(BaseConfig):
    """Limits on the mismatch of engine and learner: token_mult_prob_error of the newest tokens of a training step."""

    warn: float | None = Field(1.2, gt=1, description="Warn above this; null never warns (factor).")
    warn_every: int = Field(20, ge=1, description="Warn at most once in this many steps (steps).")
    stop: float | None = Field(None, gt=1, description="End the run above this; null never does (factor).")
    stop_after: int = Field(3, ge=1, description="Steps in a row above stop that end the run (steps).")

    @field_validator("stop")
    @classmethod
    def _check_stop_above_warn(cls, value: float | None, info: ValidationInfo) -> float | None:
        warn = info.data.get("warn")
        if value is not None and warn is not None and value < warn:
            raise ValueError(f"it is below warn = {warn:g}, so the run would end without a warning; raise stop, or lower warn")
        return value


class GenerationConfig(BaseConfig):
    """The inference engine and how it samples."""

    backend: Literal["auto", "torch", "vllm", "sglang", "megatron"] = Field(
        "auto",
        description="Inference engine: vllm, in separate processes, or torch, built into Strop; auto is torch in this version.",
    )
    max_new_tokens: int = follows(
        "..max_total_sequence_length", standalone=512, ge=1, description="Longest completion of one turn (tokens)."
    )
    temperature: Temperature = Field(1.0, description="Sampling temperature; 0 is greedy.")
    top_p: TopP = Field(1.0, description="Sample from the smallest set of tokens with this probability; 1 turns it off.")
    top_k: TopK = Field(None, description="Sample from this many most likely tokens; null or -1 turns it off (tokens).")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Sample from tokens at least this times as likely as the most likely one; 0 turns it off."
    )
    keep_sampling_mask: bool = Field(
        False,
        description="Record which tokens top_k, top_p and min_p kept, and renormalise over them in the learner (arXiv "
        "2512.02556), so that ratios do not jump where the learner would keep others. Needs a top_k of at most "
        "4096, and up to 4 x top_k bytes for each sampled token.",
    )
    val_temperature: Temperature = follows(".temperature", standalone=1.0, description="temperature in validation.")
    val_top_p: TopP = follows(".top_p", standalone=1.0, description="top_p in validation.")
    val_top_k: TopK = follows(
        ".top_k", standalone=None, description="top_k in validation; -1 turns it off whatever top_k is (tokens)."
    )
    stop_token_ids: TokenIds | None = Field(None, description="Token ids that end a completion, besides the model's own.")
    stop_strings: Strings | None = Field(None, description="Texts that end a completion.")
    mismatch: MismatchConfig = subsection(MismatchConfig)
    torch_cfg: TorchGenerationConfig = subsection(TorchGenerationConfig)
    vllm_cfg: VllmConfig = subsection(VllmConfig)
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine, passed through; unknown ones are errors.",
    )
    weight_sync: WeightSyncConfig = subsection(WeightSyncConfig)
    colocated: ColocatedConfig = subsection(ColocatedConfig)

    @field_validator("keep_sampling_mask")
    @classmethod
    def _require_top_k(cls, value: bool, info: ValidationInfo) -> bool:
        filters = info.data.get("top_p", 1.0) < 1 or info.data.get("min_p", 0.0) > 0
        if value and filters and info.data.get("top_k") in (None, -1):
            raise ValueError(
                "it needs a top_k: top_p and min_p alone may keep most of the vocabulary, which would be recorded for every token; "
                "set top_k, for instance to 512"
            )
        return value

    def sampling_options(self, *, validation: bool = False) -> dict[str, Any]:
        """Return keyword arguments of ``strop.sampling.Sampling``."""
        top_k = self.val_top_k if validation else self.top_k
        return {
            "temperature": self.val_temperature if validation else self.temperature,
            "top_p": self.val_top_p if validation else self.top_p,
            "top_k": None if top_k == -1 else top_k,
            "min_p": self.min_p,
            "record_sampling_mask": self.keep_sampling_mask and not validation,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": self.stop_token_ids or (),
            "stop_strings": self.stop_strings or (),
        }
