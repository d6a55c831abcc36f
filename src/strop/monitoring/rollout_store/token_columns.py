"""Per-token results of an update, as columns of stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Why a token has no gradient. Tokens of the environment and of excluded rollouts do not count in the loss at all.
REASONS = ("", "environment", "left_out", "overlong", "sequence_error", "rejected", "not_selected", "not_predicted")
NO_REASON, ENVIRONMENT, LEFT_OUT, OVERLONG, SEQUENCE_ERROR, REJECTED, NOT_SELECTED, NOT_PREDICTED = range(len(REASONS))

FLOATS = ("trained_logprobs", "entropy", "reference_logprobs", "token_advantages", "correction")
FLAGS = ("mask", "clipped")
BY_TERM = ("loss_terms", "loss_gradients")
NAMES = (*FLOATS, *FLAGS, "mask_reason", *BY_TERM)  # fields of a RolloutRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumns:
    """The columns of a batch over its predicted tokens, [N] each; columns that the algorithm lacks are left out."""

    sequence: Tensor  # [N] the rollout of each token, ascending
    num_rollouts: int
    columns: Mapping[str, Tensor]  # FLOATS and FLAGS
    reasons: Tensor  # [N] uint8, an index into REASONS
    by_term: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # BY_TERM -> term -> [N]
    at_end: bool = False  # one value for each rollout, at its last sampled token

    def split(self, rollouts: Sequence[Sequence[bool]]) -> list[dict[str, Any]]:
        """Return the columns of each rollout as fields of its record, given which of its tokens were sampled."""
        import torch

        ends = torch.bincount(self.sequence, minlength=self.num_rollouts).cumsum(0).tolist()
        return [
            self._of_rollout(slice(start, end), torch.tensor(sampled, dtype=torch.bool))
            for start, end, sampled in zip([0, *ends[:-1]], ends, rollouts, strict=True)
        ]

    def _of_rollout(self, tokens: slice, sampled: Tensor) -> dict[str, Any]:
        places = sampled.nonzero().squeeze(1)
        places = places[-1:] if self.at_end else places
        if len(places) != tokens.stop - tokens.start:
            return {}  # nothing was sampled; the predicted token is not part of the completion

        def expand(column: Tensor, fill: int = 0) -> tuple[Any, ...]:
            expanded = column.new_full((len(sampled),), fill)
            expanded[places] = column[tokens]
            return tuple(expanded.tolist())

        reasons = list(expand(self.reasons, ENVIRONMENT))
        if self.at_end:
            for place in sampled.nonzero().squeeze(1)[:-1].tolist():
                reasons[place] = NOT_PREDICTED
        return {
            **{name: expand(column) for name, column in self.columns.items()},
            "mask_reason": tuple(REASONS[reason] for reason in reasons),
            **{name: {term: expand(column) for term, column in terms.items()} for name, terms in self.by_term.items()},
        }
