"""A reward model that batches concurrent requests of one conversation each.

score(tokens) --+
score(tokens) --+--> queue --> one thread: a padded batch -> scores [B] --> one score per caller
score(tokens) --+
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.attention.rotary_scaling import fix_rotary_length
from strop.models.loading import cast_weights
from strop.models.network import disable_dropout
from strop.models.value_network import apply_score_layer, get_score_layer, load_classifier


@dataclass(frozen=True, kw_only=True)
class ScorerLimits:
    """Limits of one batch."""

    conversations: int = 32
    tokens: int = 16384  # including padding; a longer conversation is a separate batch
    wait: float = 0.005  # seconds that a batch's first request waits for others


@dataclass(frozen=True)
class ScoreRequest:
    tokens: Sequence[int]
    future: Future[float] = field(default_factory=Future)


class RewardScorer:
    """Scores conversations with a sequence classifier with one label and fixed weights. Callers may be on several event loops."""

    def __init__(self, model: Any, *, precision: torch.dtype = torch.float32, limits: ScorerLimits | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.precision = precision
        self.limits = limits or ScorerLimits()
        self.device = next(model.parameters()).device
        self.batches = 0  # batches scored so far
        self._queue: queue.SimpleQueue[ScoreRequest] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        threading.Thread(target=self._serve, name="strop-reward-model", daemon=True).start()

    async def score(self, tokens: Sequence[int]) -> float:
        """Return the score of a whole conversation. Raises ValueError for an empty one, and any error of the model."""
        if not tokens:
            raise ValueError("the conversation has no tokens, and a reward model reads its score at the last token")
        request = ScoreRequest(tokens)
        self._queue.put(request)
        return await asyncio.wrap_future(request.future)

    @torch.no_grad()
    def score_batch(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores of several conversations, [B] float32 on the CPU, from one forward pass."""
        lengths = torch.tensor([len(row) for row in rows])
        padding = int(getattr(self.model.config, "pad_token_id", None) or 0)
        tokens = torch.full((len(rows), int(lengths.max())), padding)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(list(row))
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == torch.bfloat16):
            return self._forward(tokens.to(self.device), mask.to(self.device), lengths.to(self.device) - 1).float().cpu()

    def _forward(self, tokens: Tensor, mask: Tensor, last: Tensor) -> Tensor:
        if not isinstance(getattr(self.model, "score", None), nn.Linear):  # an encoder, which has its own pooling
            logits: Tensor = self.model(input_ids=tokens, attention_mask=mask).logits[:, 0]
            return logits
        hidden = self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        layer = get_score_layer(self.model)  # a model spread over several devices ends on a different one than it begins
        hidden = hidden[torch.arange(len(tokens), device=hidden.device), last.to(hidden.device)]
        return apply_score_layer(layer, hidden.to(layer.weight.device))

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        waiting: list[ScoreRequest] = []
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            self._collect_requests(waiting)
            count = self._count_fitting(waiting)
            self._score_requests(waiting[:count])
            del waiting[:count]

    def _collect_requests(self, waiting: list[ScoreRequest]) -> None:
        deadline = time.monotonic() + self.limits.wait
        while len(waiting) < self.limits.conversations:
            try:
                waiting.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return

    def _count_fitting(self, waiting: Sequence[ScoreRequest]) -> int:
        """Return the number of requests, counted from the first, that fit into one batch."""
        longest = 0
        for count, request in enumerate(waiting):
            longest = max(longest, len(request.tokens))
            if count and (count == self.limits.conversations or longest * (count + 1) > self.limits.tokens):
                return count
        return len(waiting)

    def _score_requests(self, requests: Sequence[ScoreRequest]) -> None:
        active = [request for request in requests if request.future.set_running_or_notify_cancel()]
        if not active:
            return
        try:
            scores = self.score_batch([request.tokens for request in active]).tolist()
        except Exception as error:  # every caller gets the error; the thread continues
            for request in active:
                request.future.set_exception(error)
            return
        self.batches += 1
        for request, score in zip(active, scores, strict=True):
            request.future.set_result(score)


def load_reward_scorer(
    name: str,
    *,
    device: str,
    device_map: str | Mapping[str, int | str] | None = None,
    precision: torch.dtype,
    limits: ScorerLimits | None = None,
) -> RewardScorer:
    """Load a trained sequence classifier with one label: a folder of ``strop rm``, or a Hugging Face model.

    ``device_map`` spreads its layers over several devices instead of ``device``: "balanced" uses all GPUs; otherwise as mapped.

    Raises ModelNotFound, and ValueError for several labels or a model without a trained score layer.
    """
    model = load_classifier(name, init_std=0.0)  # a score layer missing in the files is loaded as zeros
    if not get_score_layer(model).weight.any():
        raise ValueError(
            f"model_name: {name} has no trained score layer: it is a language model, not a reward model; set it to a sequence classifier "
            "with one label, such as the folder that strop rm saves (policy/weights)"
        )
    disable_dropout(model)
    fix_rotary_length(model, model.config.get_text_config().max_position_embeddings)  # independent of the rest of the batch
    cast_weights(model, precision)
    placed = model.to(device) if device_map is None else _place_layers(model, device_map)
    return RewardScorer(placed, precision=precision, limits=limits)


def _place_layers(model: Any, device_map: str | Mapping[str, int | str]) -> Any:
    """Place the layers on several devices, which a batch passes through in order. Raises ValueError for a map that does not fit."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import check_device_map, get_balanced_memory

    if device_map == "balanced":
        whole = list(getattr(model, "_no_split_modules", None) or ())
        device_map = infer_auto_device_map(model, get_balanced_memory(model, no_split_module_classes=whole), whole)
    check_device_map(model, device_map)
    return dispatch_model(model, device_map)
