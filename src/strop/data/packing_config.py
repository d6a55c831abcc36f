"""Sections ``sequence_packing`` and ``dynamic_batching``: the size of micro-batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, follows

TokenBudget = Annotated[int, Field(ge=1)] | Literal["auto"]
"""Tokens of a micro-batch; auto is the largest number that fits into memory, measured when the run starts."""


class SequencePackingConfig(BaseConfig):
    """Micro-batches of flat rows without padding, within a token budget."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        True,
        description="Pack rollouts into flat rows; false pads them to the longest of the batch and uses the budgets of dynamic_batching.",
    )
    train_mb_tokens: TokenBudget = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        description="Token budget of a training micro-batch; auto is the largest that fits into free memory, measured at the start of "
        "the run and saved in its checkpoints (tokens).",
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
    """Token budgets of padded micro-batches, used if sequence_packing is off."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        False, description="Cut by tokens: true means sequence_packing.enabled=true with the budgets of this section."
    )
    train_mb_tokens: TokenBudget = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        description="Token budget of a training micro-batch, padding included; auto is the largest that fits into free memory, measured "
        "at the start of the run and saved in its checkpoints (tokens).",
    )
    logprob_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..logprob_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a micro-batch scored without gradients, padding included (tokens).",
    )


def require_number(budget: TokenBudget) -> int:
    """Return a budget that is a number. Raises ValueError for auto, if memory cannot be measured."""
    if budget == "auto":
        raise ValueError("train_mb_tokens: found auto, but this learner measures no memory; set it to a number of tokens")
    return budget


def format_micro_batches(budget: TokenBudget) -> str:
    """Describe the size of micro-batches."""
    return "micro-batches as large as memory allows (auto)" if budget == "auto" else f"micro-batches of at most {budget} tokens"
