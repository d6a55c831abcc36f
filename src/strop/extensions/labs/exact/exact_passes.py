"""The passes of a network in one order of additions: what ``strop.models.fixed_order`` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.extensions.labs.exact.exact_attention import KEY_BLOCK, ExactTree, attend_cached
from strop.extensions.labs.exact.exact_modules import ExactMode, make_exact, restore_modules
from strop.extensions.labs.exact.row_products import NotExactError, PackedWeights, exact_linear
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.loading import is_vision_config
from strop.models.logprobs.lm_head import LMHead
from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits

log = logging.getLogger(__name__)


class ExactPasses:
    """The exact forward passes of one model, whose modules are changed in place."""

    key_block = KEY_BLOCK

    def __init__(self, model: Any) -> None:
        """Raises NotExactError for a model with operations that have no exact form."""
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.weights: PackedWeights = make_exact(model.get_decoder(), vocabulary)
        self.forget_weights()  # they are loaded, or restored, after this
        log.info("exact_on_policy: learner and engine compute with products, attention and functions of fixed order")

    def plan_tree(self, start: Tensor, length: Tensor, parent: Tensor, device: torch.device) -> ExactTree:
        return ExactTree(start, length, parent, device)

    def attend_cached(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
        return attend_cached(query, key, value, positions, spec)

    def compute_logits(self, hidden: Tensor, head: LMHead) -> Tensor:
        logits = exact_linear(hidden, head.weight, head.bias, self.weights)
        with ExactMode(self.weights):
            return head.transform_logits(logits)

    def token_logprobs(
        self,
        hidden: Tensor,
        target: Tensor,
        head: LMHead,
        sampling: Sampling,
        chunk: int,
        candidates: Tensor | None = None,
        *,
        squared_probs: bool = False,
    ) -> TokenOutputs:
        """hidden [N, H], target [N] -> log-probabilities and entropies [N] under the sampling distribution, at least float32.

        ``candidates`` [N, K]: further ids to return log-probabilities of. ``squared_probs``: also the log of the sum of p^2. The
        backward pass computes the logits of ``chunk`` rows again.
        """

        def compute(rows: Tensor, tokens: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
            scaled = filtered_logits(self.compute_logits(rows, head), sampling, tokens)
            outputs = [*self.sampled_logprobs(scaled, tokens)]
            if others is not None or squared_probs:
                logs = scaled.log_softmax(-1)
                outputs += [] if others is None else [logs.gather(1, others)]
                outputs += [(2 * logs.detach()).logsumexp(-1)] if squared_probs else []
            return tuple(outputs)

        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, max(len(hidden), 1), chunk):
            rows, tokens = hidden[start : start + chunk], target[start : start + chunk]
            others = None if candidates is None else candidates[start : start + chunk]
            parts.append(_maybe_checkpoint(compute, rows, tokens, others))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        squares = columns.pop() if squared_probs else None
        return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)

    def sampled_logprobs(self, scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logs = scaled.log_softmax(-1)
        terms = logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)
        terms = torch.cat([terms, terms]) if len(terms) == 1 else terms  # the sum of a single long row is shared by the threads
        return logs.gather(1, tokens[:, None]).squeeze(1), -terms.sum(-1)[: len(logs)]

    def forget_weights(self) -> None:
        self.weights.clear()

    def find_stale(self, weight: Tensor) -> Tensor | None:
        return self.weights.find_stale(weight)

    def restore_modules(self, model: Any) -> None:
        restore_modules(model)


def make_network_exact(network: Network) -> None:
    """From now on, compute the same bits for a token regardless of its neighbours. Raises NotExactError for an unsupported model."""
    if is_vision_config(network.model.config):
        raise NotExactError(
            f"policy.exact_on_policy: {type(network.model).__name__} has a vision tower, which exact mode does not support; set it to "
            "false"
        )
    if not network.packed:
        raise NotExactError(
            f"policy.exact_on_policy: {type(network.model).__name__} cannot read packed rows "
            f"({network.fallback or 'sequence packing is off'}), and padded rows have no fixed order of additions; set it to false"
        )
    network.exact = ExactPasses(network.model)


def _maybe_checkpoint(compute: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return compute(*inputs)
    outputs: tuple[Tensor, ...] = checkpoint(compute, *inputs, use_reentrant=False)
    return outputs
