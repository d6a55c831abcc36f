"""Follow the tokens of a batch through the optimizer steps that train on them: what each term of the loss is at each token.

The terms are computed a second time, from the outputs that the learner returned and by the algorithm's own code (``loss_terms``), on the
CPU and over predicted tokens only: no network is run. Micro-batches and ranks do not matter, because a loss is a sum over them (law 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from strop.algorithms.base import Algorithm, LossFn, Outputs, TokenOutputs
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.algorithms.loss_terms import CLIPPED, CORRECTION, SELECTED, LossTerm, LossTerms, sum_tokens
from strop.lazy_torch import Tensor, torch
from strop.monitoring.rollout_store.token_columns import (
    LEFT_OUT,
    NO_REASON,
    NOT_SELECTED,
    OVERLONG,
    REJECTED,
    SEQUENCE_ERROR,
    TokenColumns,
)
from strop.types import Batch

WHOLE = "loss"  # the one term of an algorithm that does not say its terms


@dataclass(kw_only=True, eq=False)
class TokenTrace:
    """Collects the columns of one batch. A failure ends the trace and is noted; training goes on without it.

    Each optimizer step adds what its terms are at the tokens it trains on, divided by the number of optimizer steps of the batch, as the
    logged loss is a mean over them: the sum over all tokens is ``train/loss``, however often a token was trained on. The other columns
    are of the last time a token was trained on; ``clipped`` is set if it was clipped any time.
    """

    algorithm: Algorithm
    batch: Batch
    optimizer_steps: int
    note: Callable[[str], object]
    active: bool = True  # False: nothing is collected
    _columns: dict[str, Tensor] = field(default_factory=dict)
    _by_term: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {"loss_terms": {}, "loss_gradients": {}})

    def observe(self, learner: str, index: Tensor, prepared: Batch, outputs: Outputs, loss: LossFn) -> None:
        """Add an optimizer step of ``learner`` on the tokens ``index`` [n] of the batch. ``prepared``: as its loss read them."""
        if not self.active:
            return
        try:
            self._observe(learner, index, prepared, outputs, loss)
        except Exception as error:  # an algorithm of a user may raise anything
            self.active = False
            self.note(
                f"warning: the terms of the loss cannot be stored with the rollouts: {type(error).__name__}: {error}. Training goes "
                "on without them; set logger.token_columns=none to not ask for them"
            )

    def _observe(self, learner: str, index: Tensor, prepared: Batch, outputs: Outputs, loss: LossFn) -> None:
        leaves = _to_leaves(outputs)
        inputs: Any = replace(cast(Any, outputs), **leaves)
        with torch.enable_grad():
            found = self.algorithm.loss_terms(inputs, prepared, learner) or _whole_loss(loss, inputs, prepared)
            parts = [part for term in found.terms for part in term.parts()]
            gradients = [_differentiate(part.total(prepared), leaves) for part in parts]
        for part, gradient in zip(parts, gradients, strict=True):
            name = part.name if learner == "policy" else f"{learner}/{part.name}"
            self._add("loss_terms", name, index, part.per_token(prepared))
            if (of_logit := _of_logit(outputs, gradient)) is not None:
                self._add("loss_gradients", name, index, of_logit)
        if learner == "policy":
            self._keep(index, prepared, outputs, found.columns)

    def _add(self, kind: str, name: str, index: Tensor, values: Tensor) -> None:
        column = self._by_term[kind].setdefault(name, torch.zeros(len(self.batch.target), dtype=torch.float64))
        column[index] += values.double() / self.optimizer_steps

    def _keep(self, index: Tensor, prepared: Batch, outputs: Outputs, known: Mapping[str, Tensor]) -> None:
        """Keep what the step said of its tokens."""
        said = {"mask": prepared.mask > 0, "token_advantages": prepared.advantages}
        if isinstance(outputs, TokenOutputs):
            said |= {"trained_logprobs": outputs.logprobs, "entropy": outputs.entropy}
        if REFERENCE_LOGPROBS in prepared.columns:
            said["reference_logprobs"] = prepared.columns[REFERENCE_LOGPROBS]
        if CORRECTION in known:
            said["correction"] = known[CORRECTION]
        if CLIPPED in known:
            earlier = self._columns[CLIPPED][index] if CLIPPED in self._columns else False
            said[CLIPPED] = (known[CLIPPED] > 0) | earlier
        for name, values in {**said, "reasons": self._find_reasons(index, prepared, known)}.items():
            values = values.float() if values.is_floating_point() else values
            column = self._columns.setdefault(name, torch.zeros(len(self.batch.target), dtype=values.dtype))
            column[index] = values

    def _find_reasons(self, index: Tensor, prepared: Batch, known: Mapping[str, Tensor]) -> Tensor:
        """Return why tokens have no gradient, [n] uint8."""
        reasons = torch.full((len(index),), NO_REASON, dtype=torch.uint8)
        if SELECTED in known:
            reasons[known[SELECTED] == 0] = NOT_SELECTED
        reasons[prepared.mask == 0] = SEQUENCE_ERROR
        if CORRECTION in known:
            reasons[known[CORRECTION] == 0] = REJECTED
        overlong = getattr(self.algorithm, "overlong_filtering", False)
        reasons[self.batch.mask[index] == 0] = OVERLONG if overlong else LEFT_OUT
        return reasons

    def columns(self) -> TokenColumns | None:
        """Return what was collected; None if nothing was, or the policy was not trained."""
        if not self.active or "reasons" not in self._columns:
            return None
        return TokenColumns(
            sequence=self.batch.sequence,
            columns={name: column for name, column in self._columns.items() if name != "reasons"},
            reasons=self._columns["reasons"],
            by_term={kind: {name: each.float() for name, each in terms.items()} for kind, terms in self._by_term.items()},
            at_end=self.algorithm.predict == "last_token",
        )


def _to_leaves(outputs: Outputs) -> dict[str, Tensor]:
    """Return the outputs that a loss may differentiate, as leaves."""
    columns = {item.name: getattr(outputs, item.name) for item in fields(outputs)}
    return {
        name: value.detach().clone().requires_grad_()
        for name, value in columns.items()
        if value is not None and value.is_floating_point()
    }


def _whole_loss(loss: LossFn, outputs: Outputs, batch: Batch) -> LossTerms:
    """Return the loss of an algorithm that does not say its terms as one term, spread evenly over the counted tokens."""
    value, _ = loss(outputs, batch)
    counted = (batch.mask > 0).to(value.dtype)
    return LossTerms([LossTerm(WHOLE, 1.0, value * counted / counted.sum().clamp(min=1), sum_tokens)])


def _differentiate(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the derivative of a term for each output; none for a term without gradient."""
    if not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {name: each for name, each in zip(leaves, found, strict=True) if each is not None}


def _of_logit(outputs: Outputs, gradient: Mapping[str, Tensor]) -> Tensor | None:
    """Return the derivative of a term for the logit of each sampled token, [N], from those for the network's outputs.

    With p the token's probability and H the entropy of its distribution, d log p / dz = 1 - p and dH / dz = -p (log p + H), z being the
    logit at the sampling temperature. For a loss that reads K candidates it is the norm over their logits, and for a network with a
    scalar head the derivative for its value.
    """
    if not isinstance(outputs, TokenOutputs):
        return gradient.get("values", torch.zeros_like(outputs.values))
    probability = outputs.logprobs.exp()
    found = torch.zeros_like(outputs.logprobs)
    if "logprobs" in gradient:
        found = found + gradient["logprobs"] * -torch.expm1(outputs.logprobs)
    if "entropy" in gradient:
        # p log p is 0 for a token of probability 0
        found = found - gradient["entropy"] * (torch.xlogy(probability, probability) + probability * outputs.entropy)
    if "candidates" in gradient and outputs.candidates is not None:
        own = gradient["candidates"]
        found = (own - outputs.candidates.exp() * own.sum(-1, keepdim=True)).norm(dim=-1)
    return torch.where(torch.isfinite(found), found, 0.0)
