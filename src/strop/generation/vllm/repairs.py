"""Mistakes of the supported vLLM versions that would change what is sampled, put right in its worker processes.

Its CPU build expands the temperature and top_k of a request to the places of its drafts in a copy that it throws away, and goes on with
memory nobody has written: sampled tokens then have another temperature, and log-probabilities of it. It also stops at a batch of
filtered requests without a single draft.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def repair_speculation_on_cpus() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_drafts(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        return constrain(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_drafts
    rejection_sampler.expand_batch_to_tokens = expand


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """[B] values of requests -> [num_tokens], where request i ends before ``cu_num_tokens[i]``; one value is replaced by another."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
