"""The terms of a policy gradient's loss as the token ledger shows them: objective, clip, correction, selection, KL, entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from strop.algorithms.base import TokenOutputs
from strop.algorithms.loss_terms import CLIPPED, CORRECTION, SELECTED, LossTerm, LossTerms
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.composition import Composition
from strop.algorithms.policy_gradient.corrections.step_weights import correction_weights
from strop.lazy_torch import Tensor
from strop.types import Batch


def split_terms(
    algorithm: Composition, outputs: TokenOutputs, batch: Batch, terms: Sequence[LossTerm], columns: Mapping[str, Tensor]
) -> LossTerms:
    """Return the terms of a loss with the objective divided into what it is without a clip, and what each part changes.

    A stage that cannot change anything, because the algorithm has no such part, is left out. ``columns``: what the loss logs, [N] each.
    """
    objective, *others = terms
    stages = dict(objective.stages)
    known: dict[str, Tensor] = {}
    if isinstance(algorithm.objective, BoundedObjective):
        unbounded = algorithm.objective.unbounded(algorithm.policy_tokens(outputs, batch))
        stages = {"objective": unbounded, "clip": stages.pop("objective"), **stages}
        known[CLIPPED] = sum((columns[name] for name in algorithm.objective.bound_columns), 0 * outputs.logprobs).clamp(max=1)
    if algorithm.corrections:
        known[CORRECTION] = correction_weights(algorithm.corrections, algorithm.mismatch(outputs.logprobs, batch))[0]
    else:
        del stages["correction"]
    if "tokens_selected" in columns:
        known[SELECTED] = columns["tokens_selected"]
    return LossTerms(
        terms=[replace(objective, stages=stages), *others], columns={name: each.detach() for name, each in known.items()}
    )
