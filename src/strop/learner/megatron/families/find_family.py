"""The families, and the one of a configuration."""

from __future__ import annotations

from typing import Any

from strop.learner.megatron.families.family import Family
from strop.learner.megatron.families.llama import Llama
from strop.learner.megatron.families.qwen import Qwen, QwenMoe

FAMILIES: tuple[Family, ...] = (Llama(), Qwen(), QwenMoe())


def find_family(hf_config: Any) -> Family:
    """Return the family of a Hugging Face configuration. Raises ValueError if there is none."""
    for family in FAMILIES:
        if hf_config.model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(
        f"Megatron Core's models here do not include {hf_config.model_type}; they are those of the types {known}. "
        "policy.backend=torch trains any"
    )
