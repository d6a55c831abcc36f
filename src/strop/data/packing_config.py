"""Sections ``sequence_packing`` and ``dynamic_batching``: how micro-batches are cut."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from strop.base_config import BaseConfig, follows


class SequencePackingConfig(BaseConfig):
    """Micro-batches of flat rows without padding, within a token budget."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        True,
        description="Pack rollouts into flat rows; false pads them to the longest of the batch, and the budgets of "
        "dynamic_batching hold.",
    )
    train_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a training micro-batch (tokens).",
    )
    logprob_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..logprob_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a micro-batch scored without gradients (tokens).",
    )
    prefix_sharing: bool = Field(True, description="Store and compute a group's prompt once instead of once per rollout.")


class DynamicBatchingConfig(BaseConfig):
    """Token budgets of padded micro-batches, where sequence_packing is off."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        False, description="Cut by tokens: true means sequence_packing.enabled=true with the budgets of this section."
    )
    train_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a training micro-batch, padding included (tokens).",
    )
    logprob_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..logprob_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a micro-batch scored without gradients, padding included (tokens).",
    )
