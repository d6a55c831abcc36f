"""What a family of models has to say, the families, and the one of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from strop.extensions.megatron.families.architecture import Architecture
from strop.extensions.megatron.families.deepseek_family import DeepSeek
from strop.extensions.megatron.families.gemma import Gemma, Gemma2
from strop.extensions.megatron.families.llama import Llama
from strop.extensions.megatron.families.mistral import Mistral, Mixtral
from strop.extensions.megatron.families.nemotron import Nemotron
from strop.extensions.megatron.families.qwen import Qwen, QwenMoe
from strop.extensions.megatron.families.weight_rules import WeightRule


class Family(Protocol):
    """Models with one way to read a Hugging Face configuration and to name weights."""

    model_types: ClassVar[tuple[str, ...]]  # of Hugging Face configurations

    def architecture(self, hf_config: Any) -> Architecture:
        """Return what the model is made of. Raises ValueError for what Megatron Core's model cannot do."""
        ...

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        """Return where the weights of the Hugging Face model are in Megatron Core's."""
        ...


FAMILIES: tuple[Family, ...] = (Llama(), Qwen(), QwenMoe(), Mistral(), Mixtral(), Gemma(), Gemma2(), DeepSeek(), Nemotron())

# Types of models that are refused for their own reason.
REFUSED = {
    "nemotron_h": "its Mamba layers carry a state along a sequence, which rows with shared prompts do not have one of, and Megatron Core's "
    "need the packages mamba-ssm and causal-conv1d and a GPU",
    "gemma3": "it has a vision tower; its text models are of type gemma3_text",
}


def find_family(hf_config: Any) -> Family:
    """Return the family of a Hugging Face configuration. Raises ValueError if there is none."""
    for family in FAMILIES:
        if hf_config.model_type in family.model_types:
            return family
    if hf_config.model_type in REFUSED:
        raise ValueError(
            f"Megatron Core's learner does not train models of type {hf_config.model_type}: {REFUSED[hf_config.model_type]}. "
            "Set policy.backend=torch"
        )
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(
        f"Megatron Core's models here do not include {hf_config.model_type}; they are those of the types {known}. "
        "policy.backend=torch trains any"
    )
