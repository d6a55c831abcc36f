"""Conversion of requests and completions between Strop and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from strop.columns import TokenColumn
from strop.generation.base import Completion
from strop.generation.vllm.vllm_config import MIN_TEMPERATURE
from strop.models.routing.recorded_experts import compact
from strop.models.routing.router_replay_config import NO_ROUTE, ROUTES
from strop.sampling import KEPT, Sampling, pad_kept_tokens


class RequestInterrupted(RuntimeError):
    """The engine ended the request before it was complete; it must be issued again."""


def to_sampling_params(sampling: Sampling, *, seed: int, max_tokens: int, stop_ids: Sequence[int]) -> SamplingParams:
    """Return vLLM's parameters for a request with room for ``max_tokens`` new tokens.

    Raises ValueError for options that vLLM would sample differently from what the learner computes.
    """
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature is {sampling.temperature}, but vLLM raises positive temperatures below {MIN_TEMPERATURE} to "
            f"{MIN_TEMPERATURE}: set it to 0 (greedy) or to at least {MIN_TEMPERATURE}"
        )
    if sampling.entropy:
        raise ValueError("vLLM does not report the entropy of the distributions it samples from; set Sampling.entropy=False")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=min(sampling.max_new_tokens, max_tokens),
        seed=None if sampling.greedy else seed & 0x7FFF_FFFF_FFFF_FFFF,
        stop=list(sampling.stop_strings) or None,
        stop_token_ids=sorted({*stop_ids, *sampling.stop_token_ids}),
        ignore_eos=True,  # the model's own stop tokens are among stop_ids
        logprobs=sampling.top_k if sampling.records_sampling_mask else 0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_completion(output: RequestOutput, sampling: Sampling, tokenizer: Any) -> Completion:
    """Convert vLLM's output to a ``Completion``. Raises RequestInterrupted if vLLM did not finish the request."""
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):
        raise RequestInterrupted(
            f"vLLM ended request {output.request_id} after {len(sample.token_ids)} tokens: {sample.finish_reason}"
        )
    tokens = torch.tensor(sample.token_ids, dtype=torch.int64)
    return Completion(
        tokens=tokens,
        logprobs=_logprobs(sample.logprobs, len(tokens)),
        versions=_token_versions(sample.weight_versions, len(tokens)),
        text=tokenizer.decode(sample.token_ids, skip_special_tokens=True),
        stopped=sample.finish_reason == "stop",
        columns={
            **({KEPT: _kept_ids(sample.logprobs, tokens)} if sampling.records_sampling_mask else {}),
            **_experts(sample.routed_experts, len(output.prompt_token_ids or ()) + len(tokens) - 1),
        },
    )


def _logprobs(flat: Any, length: int) -> Tensor:
    """Return the log-probabilities of the sampled tokens, [L] float32. vLLM lists the sampled token first at each position."""
    if flat is None or len(flat) != length:
        raise RuntimeError(f"vLLM reported {0 if flat is None else len(flat)} log-probabilities for {length} tokens")
    return torch.tensor([flat.logprobs[start] for start in flat.start_indices], dtype=torch.float32)


def _token_versions(spans: Any, length: int) -> Tensor:
    """Return the weight version of each token, [L] int32. Raises RuntimeError if vLLM does not report all of them."""
    if length and (not spans or spans[0].start != 0 or spans[-1].end < length):
        raise RuntimeError(f"vLLM did not report the weight version of all {length} tokens: {spans}")
    versions = torch.full((length,), -1, dtype=torch.int32)
    for span in spans or ():
        versions[span.start : span.end] = int(span.version)
    return versions


def _experts(experts: Any, read: int) -> dict[TokenColumn, Tensor]:
    """Return the experts of the tokens that the engine read, [read, layers, k]; nothing if it was not asked for them.

    vLLM's array [n, layers, k] begins with the prompt; if it ends early, the remaining tokens are routed by the learner. It has
    zeros for layers without experts, which are ignored.
    """
    if experts is None:
        return {}
    known = torch.from_numpy(experts.astype("int16"))[:read]
    return {ROUTES: compact(pad(known, (0, 0, 0, 0, 0, read - len(known)), value=NO_ROUTE))}


def _kept_ids(flat: Any, tokens: Tensor) -> Tensor:
    """Return the ids with positive probability after filtering, at each position, [L, K] int32."""
    rows = []
    for start, end, sampled in zip(flat.start_indices, flat.end_indices, tokens.tolist(), strict=True):
        kept = {flat.token_ids[position] for position in range(start, end) if flat.logprobs[position] > float("-inf")}
        rows.append(torch.tensor(sorted(kept | {sampled}), dtype=torch.int32))
    return pad_kept_tokens(rows)
