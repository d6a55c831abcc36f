"""What goes to vLLM and comes back: requests with their images, completions, and its counters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm import RequestOutput, SamplingParams
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.loggers import StatLoggerBase

from strop.columns import TokenColumn
from strop.generation.base import COUNTERS, Completion
from strop.generation.vllm.vllm_config import MIN_TEMPERATURE
from strop.models.import_hooks import is_for_another_torch
from strop.models.routing.recorded_experts import compact
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.models.vision.vision_processor import VisionProcessor
from strop.sampling import KEPT, Sampling, pad_kept_tokens
from strop.types import PromptImage


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


# Images in vLLM's requests.
#
# vLLM receives the learner's pixels and image tokens: nothing is resized or tokenized twice, so both see the same. vLLM's own
# image processor provides only the names of its inputs.

log = logging.getLogger(__name__)

IMAGE = "image"  # vLLM's name of the modality
CHECKED_KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")  # families compared with the learner's log-probabilities, on vLLM 0.32
TILES = "num_patches"  # vLLM's name for the number of pictures per image that the tower reads, in families that cut it


@cache
def warn_if_unchecked(kind: str) -> None:
    """Warn once that a family's images were not tested with vLLM."""
    if kind not in CHECKED_KINDS:
        log.warning(
            "images of %s in vLLM were not compared with the learner's (only those of %s were): watch train/token_mult_prob_error, or "
            "set policy.generation.backend=torch",
            kind,
            ", ".join(CHECKED_KINDS),
        )


def make_image_input(
    processor: Any, vision: VisionProcessor, prompt: Sequence[int], images: Sequence[PromptImage], *, salt: str
) -> Any:
    """Return a prompt with images in the form vLLM's engine takes.

    Args:
        processor: vLLM's processor of the model.
        vision: Creates the pixels.
        prompt: Tokens, including all image tokens.
        images: Their positions and files.
        salt: Identifies the weights: keys and values, and image features, are not reused with others.
    """
    warn_if_unchecked(str(vision.family.config.model_type))
    pixels = join_pixels([vision.pixels(image) for image in images])
    fields = processor._get_mm_fields_config(pixels, {})
    items = MultiModalKwargsItems.from_hf_inputs(pixels, fields)
    places = [find_rows(prompt, image, vision.image_token_id) for image in images]
    hashes = [f"{image.digest} {salt}" for image in images]
    return mm_input(list(prompt), items, {IMAGE: hashes}, {IMAGE: places}, cache_salt=salt)


def find_rows(prompt: Sequence[int], image: PromptImage, placeholder: int) -> PlaceholderRange:
    """Return the positions of an image's rows; there may be other tokens between them."""
    rows = torch.tensor([token == placeholder for token in prompt[image.start : image.end]])
    return PlaceholderRange(offset=image.start, length=image.length, is_embed=None if bool(rows.all()) else rows)


def join_pixels(pixels: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the pixels of images, and count the pictures of each. Scalars concern only tokens, and are left out."""
    names = [name for name, tensor in pixels[0].items() if tensor.dim()]
    joined = {name: torch.cat([each[name] for each in pixels]) for name in names}
    return {**joined, TILES: torch.tensor([len(each["pixel_values"]) for each in pixels])}


# How vLLM inspects a model's class before it starts an engine.


def inspect_models_here() -> None:
    """Make vLLM import model classes in this process if torchvision does not match torch, because a fresh process could not
    import them.

    vLLM uses a separate process only to avoid initializing CUDA in this one, and there is no CUDA in this case.
    """
    if is_for_another_torch():
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()


# Cumulative statistics of a vLLM engine, summed from those sent with its outputs.


class EngineStats:
    """Sums since the engine was started."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def make_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        return _StatLogger(self)

    def read(self) -> Mapping[str, float]:
        return dict(self.sums)


class _StatLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        sums = self.stats.sums
        if iteration_stats is not None:
            sums["prompt_tokens"] += iteration_stats.num_prompt_tokens
            sums["sampled_tokens"] += iteration_stats.num_generation_tokens
            sums["preemptions"] += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            sums["prefix_queries"] += scheduler_stats.prefix_cache_stats.queries
            sums["prefix_hits"] += scheduler_stats.prefix_cache_stats.hits
            sums["engine_steps"] += 1  # of each copy, if the engine has several
            sums["running_requests"] += scheduler_stats.num_running_reqs
            sums["waiting_requests"] += scheduler_stats.num_waiting_reqs
            sums["cache_usage"] += scheduler_stats.kv_cache_usage
            if (drafts := scheduler_stats.spec_decoding_stats) is not None:
                sums["drafted_tokens"] += drafts.num_draft_tokens
                sums["accepted_tokens"] += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Log nothing; the base class requires this method."""
