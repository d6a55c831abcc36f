"""What a family of models has to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from strop.learner.megatron.families.architecture import Architecture
from strop.learner.megatron.families.weight_rules import WeightRule


class Family(Protocol):
    """Models with one way to read a Hugging Face configuration and to name weights."""

    model_types: ClassVar[tuple[str, ...]]  # of Hugging Face configurations

    def architecture(self, hf_config: Any) -> Architecture:
        """Return what the model is made of. Raises ValueError for what Megatron Core's model cannot do."""
        ...

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        """Return where the weights of the Hugging Face model are in Megatron Core's."""
        ...
