"""Section ``policy``."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig, subsection
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig


class ReferenceConfig(BaseConfig):
    """The frozen copy of the policy in the KL term."""

    offload: bool = Field(False, description="Keep it in CPU memory between uses.")


class PolicyConfig(ModelConfig):
    """The policy and its training."""

    generation_batch_size: int | None = Field(
        None,
        ge=1,
        description="Accepted for NeMo-RL recipes, without effect: the engine batches continuously, up to "
        "generation.torch_cfg.max_num_seqs (rollouts).",
    )
    reference: ReferenceConfig = subsection(ReferenceConfig)
    generation: GenerationConfig = subsection(GenerationConfig)
