"""Follow the tokens of a batch through the optimizer steps that train on them: what each term of the loss is at each token.

The terms are computed a second time, from the outputs that the learner returned and by the algorithm's own code (``loss_terms``), on the
CPU and over predicted tokens only: no network is run. Micro-batches and ranks do not matter, because a loss is a sum over them (law 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from strop.algorithms.base import (
    CLIPPED,
    CORRECTION,
    SELECTED,
    Algorithm,
    LossFn,
    LossTerm,
    LossTerms,
    Outputs,
    TokenOutputs,
    sum_tokens,
)
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.lazy_torch import Tensor, torch
from strop.monitoring.rollout_store.token_values import (
    LEFT_OUT,
    NO_REASON,
    NOT_SELECTED,
    OVERLONG,
    REJECTED,
    SEQUENCE_ERROR,
    TokenColumns,
)
from strop.trainer.listeners import OptimizerPass
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
    active: bool = field(default=True, init=False)  # False: it failed
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
        logits = _Logits.of(outputs)
        for part, gradient in zip(parts, gradients, strict=True):
            name = part.name if learner == "policy" else f"{learner}/{part.name}"
            self._add("loss_terms", name, index, part.per_token(prepared))
            self._add("loss_gradients", name, index, logits.differentiate(gradient))
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
        left_out = {
            "reasons",
            *(["trained_logprobs"] if self.optimizer_steps == 1 else []),
        }  # the latter are learner_logprobs then
        columns = {name: column for name, column in self._columns.items() if name not in left_out}
        by_term = {kind: {name: each.float() for name, each in terms.items()} for kind, terms in self._by_term.items()}
        return TokenColumns(
            sequence=self.batch.sequence,
            num_rollouts=self.batch.num_sequences,
            columns={**columns, **({"entropy": _round(columns["entropy"])} if "entropy" in columns else {})},
            reasons=self._columns["reasons"],
            by_term={**by_term, "loss_gradients": {name: _round(each) for name, each in by_term["loss_gradients"].items()}},
            at_end=self.algorithm.predict == "last_token",
        )


def trace_tokens(
    algorithm: Algorithm, batch: Batch, passes: Sequence[OptimizerPass], note: Callable[[str], object]
) -> TokenColumns | None:
    """Return what each term of the loss was at each token of a batch, over the passes of its update."""
    steps = len(passes) // max(len({(each.learner, each.policy) for each in passes}), 1)
    trace = TokenTrace(algorithm=algorithm, batch=batch, optimizer_steps=steps, note=note)
    for each in passes:
        trace.observe(each.learner, each.index, each.batch, each.outputs, each.loss)
    return trace.columns()


def _round(values: Tensor) -> Tensor:
    """Round float32 to 12 significant bits, 1 part in 8,000: what is looked at need not fill a disk with noise."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x800) & ~0xFFF).view(torch.float32)


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


@dataclass(frozen=True, eq=False)
class _Logits:
    """The derivatives of a network's outputs for the logit of each sampled token, [N] each.

    With p the token's probability and H the entropy of its distribution, d log p / dz = 1 - p and dH / dz = -p (log p + H), z being the
    logit at the sampling temperature.
    """

    outputs: Outputs
    of_logprob: Tensor | None = None
    of_entropy: Tensor | None = None

    @classmethod
    def of(cls, outputs: Outputs) -> _Logits:
        if not isinstance(outputs, TokenOutputs):
            return cls(outputs)
        probability = outputs.logprobs.exp()  # p log p is 0 for a token of probability 0
        of_entropy = -(torch.xlogy(probability, probability) + probability * outputs.entropy)
        return cls(outputs, of_logprob=1 - probability, of_entropy=of_entropy)

    def differentiate(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return the derivative of a term for the logit of each sampled token, [N], from those for the outputs.

        For a loss that reads K candidates it is the norm over their logits, and for a network with a scalar head the derivative for its
        value.
        """
        outputs = self.outputs
        if not isinstance(outputs, TokenOutputs):
            return gradient.get("values", torch.zeros_like(outputs.values))
        found = torch.zeros_like(outputs.logprobs)
        if "logprobs" in gradient and self.of_logprob is not None:
            found = gradient["logprobs"] * self.of_logprob
        if "entropy" in gradient and self.of_entropy is not None:
            found = found + gradient["entropy"] * self.of_entropy
        if "candidates" in gradient and outputs.candidates is not None:
            own = gradient["candidates"]
            found = (own - outputs.candidates.exp() * own.sum(-1, keepdim=True)).norm(dim=-1)
        return torch.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)
