"""Conversion of requests and completions between Strop and SGLang."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.generation.base import Completion
from strop.models.vision.vision_processor import VisionProcessor
from strop.sampling import KEPT, Sampling, pad_kept_tokens
from strop.types import PromptImage

SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF


class RequestAborted(RuntimeError):
    """SGLang ended the request before it was complete."""


def to_request(
    prompt: Sequence[int], sampling: Sampling, *, seed: int, max_tokens: int, stop_ids: Sequence[int], salt: str, sampler: str
) -> dict[str, Any]:
    """Return the body of a request with room for ``max_tokens`` new tokens. ``salt``: prompts with different ones share no keys and values.

    Raises ValueError for options that SGLang would sample differently from what the learner computes.
    """
    if sampling.entropy:
        raise ValueError("SGLang does not report the entropy of the distributions it samples from; set Sampling.entropy=False")
    if sampling.top_k == 1 and not sampling.greedy:
        raise ValueError(
            f"top_k is 1 at temperature {sampling.temperature}, which SGLang takes for greedy sampling and reports other "
            "log-probabilities for: set temperature to 0, or top_k to 2 or more"
        )
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": min(sampling.max_new_tokens, max_tokens),
        "stop_token_ids": sorted({*stop_ids, *sampling.stop_token_ids}),
        "stop": list(sampling.stop_strings),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if not sampling.greedy:
        options |= {
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": seed & SEED_BITS,
        }
    return {
        "input_ids": list(prompt),
        "sampling_params": options,
        "return_logprob": True,
        "return_sampling_mask": needs_mask(sampling, sampler),
        "extra_key": salt,
    }


def needs_mask(sampling: Sampling, sampler: str) -> bool:
    """Whether SGLang must say which tokens it kept: to record them, or because its own sampler's log-probabilities precede its filters."""
    if sampling.greedy:
        return False
    return sampling.records_sampling_mask or (sampler == "sglang" and sampling.filtered)


def to_completion(answer: Mapping[str, Any], sampling: Sampling, tokenizer: Any, *, sampler: str) -> Completion:
    """Convert SGLang's answer to a ``Completion``. Raises RequestAborted if SGLang did not finish the request."""
    info = answer["meta_info"]
    reason = info["finish_reason"] or {"type": "nothing"}
    if reason["type"] not in ("stop", "length"):
        raise RequestAborted(
            f"SGLang ended a request after {info.get('completion_tokens', 0)} tokens: {reason['type']} {reason.get('message', '')}".strip()
        )
    reported = info.get("output_token_logprobs") or []
    tokens = torch.tensor([token for _, token, *_ in reported], dtype=torch.int64)
    if len(tokens) != info["completion_tokens"]:
        raise RuntimeError(f"SGLang reported {len(tokens)} log-probabilities for {info['completion_tokens']} tokens")
    return Completion(
        tokens=tokens,
        logprobs=read_logprobs(info, sampling, sampler),
        versions=read_versions(info.get("weight_versions"), len(tokens)),
        text=tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
        stopped=reason["type"] == "stop",
        columns={KEPT: read_kept_ids(info, tokens)} if sampling.records_sampling_mask else {},
    )


def read_logprobs(info: Mapping[str, Any], sampling: Sampling, sampler: str) -> Tensor:
    """Return the log-probabilities of the sampled tokens under the distribution that sampled, [L] float32.

    SGLang's own sampler reports those before its filters; those over the tokens that it kept come with the sampling mask.
    """
    if sampler == "sglang" and sampling.filtered and not sampling.greedy:
        over_kept = info.get("output_token_sampling_logprobs")
        if over_kept is None or len(over_kept) != info["completion_tokens"]:
            raise RuntimeError(
                "SGLang did not report log-probabilities over the tokens that top_k, top_p and min_p kept, and the others are of another "
                "distribution; set policy.generation.sglang_cfg.sampler=strop"
            )
        return torch.tensor([each[0] if isinstance(each, list) else each for each in over_kept], dtype=torch.float32)
    return torch.tensor([value for value, *_ in info["output_token_logprobs"]], dtype=torch.float32)


def read_versions(spans: Sequence[Mapping[str, Any]] | None, length: int) -> Tensor:
    """Return the weight version of each token, [L] int32. Raises RuntimeError if SGLang does not report all of them."""
    if length and (not spans or spans[0]["start"] != 0 or spans[-1]["end"] < length):
        raise RuntimeError(f"SGLang did not report the weight version of all {length} tokens: {spans}")
    versions = torch.full((length,), -1, dtype=torch.int32)
    for span in spans or ():
        versions[span["start"] : span["end"]] = int(span["version"])
    return versions


def read_kept_ids(info: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return the ids that each token was sampled from, [L, K] int32."""
    masks = info.get("output_token_sampling_mask") or []
    if len(masks) != len(tokens):
        raise RuntimeError(f"SGLang reported the kept tokens of {len(masks)} of {len(tokens)} tokens")
    return pad_kept_tokens(
        [torch.tensor(sorted({*mask, token}), dtype=torch.int32) for mask, token in zip(masks, tokens.tolist(), strict=True)]
    )


class SharedPixels:
    """The images of requests that run now: requests with an image in common share its file."""

    def __init__(self, vision: VisionProcessor, folder: Path) -> None:
        self._vision, self._folder = vision, folder
        self._users = Counter[str]()  # of each file, by the hash of its image
        self._written: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def hold(self, images: Sequence[PromptImage], *, salt: str) -> AsyncIterator[list[str]]:
        """Write the images' pixels and yield what the request says of each; the files are there until it ends.

        ``salt`` names the weights: what the tower made of an image is not reused with others. Raises ImageError.
        """
        names = [image.digest for image in images]
        self._users.update(names)
        try:
            for image in images:
                if image.digest not in self._written:
                    self._written[image.digest] = asyncio.create_task(asyncio.to_thread(self._write, image))
                await asyncio.shield(self._written[image.digest])  # a request that is cancelled leaves it to the others
            yield [
                json.dumps(
                    {
                        "file": self._path(image).name,
                        "start": image.start,
                        "length": image.length,
                        "identity": f"{image.digest} {salt}",
                    }
                )
                for image in images
            ]
        finally:
            self._users.subtract(names)
            for image in {image.digest: image for image in images}.values():
                if self._users[image.digest] <= 0:
                    del self._users[image.digest]
                    self._remove(image)

    def _path(self, image: PromptImage) -> Path:
        return self._folder / f"pixels-{image.digest}.pt"

    def _write(self, image: PromptImage) -> None:
        torch.save(dict(self._vision.pixels(image)), self._path(image))

    def _remove(self, image: PromptImage) -> None:
        if (task := self._written.pop(image.digest, None)) is not None:
            task.add_done_callback(partial(self._unlink, image))  # at once, where it is written

    def _unlink(self, image: PromptImage, _: asyncio.Task[None]) -> None:
        if image.digest not in self._written:  # by a later request
            self._path(image).unlink(missing_ok=True)
