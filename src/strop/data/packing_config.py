"""Sections ``sequence_packing`` and ``dynamic_batching``: the size of micro-batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig

TokenBudget = Annotated[int, Field(ge=1)] | Literal["auto"]
"""Tokens of a micro-batch; auto is the largest number that fits into memory, measured by the run."""

CPU_TOKENS = 2048  # default of a micro-batch on a CPU, where larger ones are no faster and take more memory
GPU_TOKENS = 16_384  # default on a GPU where memory is not measured, and of passes without gradients
LARGEST_TOKENS = 1 << 15  # that a measured budget may have: a longer pass is not faster


class SequencePackingConfig(BaseConfig):
    """Micro-batches of flat rows without padding, within a token budget."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        True,
        description="Pack rollouts into flat rows; false pads them to the longest of the batch and uses the budgets of dynamic_batching.",
    )
    train_mb_tokens: TokenBudget | None = Field(
        None,
        description="Token budget of a training micro-batch; auto is the largest that fits into free memory, at most 32768, measured by "
        "the run and saved in its checkpoints. null is max_total_sequence_length x train_micro_batch_size; if that is null too, auto on a "
        "GPU (16384 where memory cannot be measured), and 2048 on a CPU; at least max_total_sequence_length (tokens).",
    )
    logprob_mb_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of a micro-batch scored without gradients. null is max_total_sequence_length x "
        "logprob_batch_size; if that is null too, 16384 on a GPU and 2048 on a CPU, at least max_total_sequence_length (tokens).",
    )
    prefix_sharing: bool = Field(True, description="Store and compute a group's prompt once instead of once per rollout.")


class DynamicBatchingConfig(BaseConfig):
    """Token budgets of padded micro-batches, used if sequence_packing is off."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        False, description="Cut by tokens: true means sequence_packing.enabled=true with the budgets of this section."
    )
    train_mb_tokens: TokenBudget | None = Field(
        None,
        description="As sequence_packing.train_mb_tokens, of rows with padding (tokens).",
    )
    logprob_mb_tokens: int | None = Field(
        None,
        ge=1,
        description="As sequence_packing.logprob_mb_tokens, of rows with padding (tokens).",
    )


def require_number(budget: TokenBudget) -> int:
    """Return a budget that is a number. Raises ValueError for auto, if memory cannot be measured."""
    if budget == "auto":
        raise ValueError("train_mb_tokens: found auto, but this learner measures no memory; set it to a number of tokens")
    return budget
