"""Data as the Tinker SDK sends it, and the batch that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.types import Batch, Totals

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"


class TinkerRequestError(ValueError):
    """A request that cannot be served as it is. The message says why, and what can."""


@dataclass(frozen=True, eq=False)
class TrainingDatum:
    """One sequence: the tokens that the model reads, and for each of them what is predicted after it."""

    tokens: Tensor  # [T] int64
    inputs: Mapping[str, Tensor]  # name -> [T], among them TARGETS, the token predicted after each


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackwardCall:
    """A call of ``forward`` or ``forward_backward``."""

    model_id: str
    seq_id: int  # its place among the calls of this model
    data: Sequence[TrainingDatum]
    loss: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def make_batch(data: Sequence[TrainingDatum], needed: Sequence[str]) -> Batch:
    """Put the data side by side; every token predicts its target. Raises TinkerRequestError if an input is missing or does not fit."""
    if not data:
        raise TinkerRequestError("forward_backward needs at least one datum")
    for index, datum in enumerate(data):
        for name in (TARGETS, *needed):
            _check_input(index, datum, name)
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    columns = {name: torch.cat([datum.inputs[name].float() for datum in data]) for name in needed}
    zeros = torch.zeros(int(lengths.sum()))
    return Batch(
        tokens=torch.cat([datum.tokens for datum in data]),
        positions=torch.cat([torch.arange(len(datum.tokens)) for datum in data]),
        segment_start=lengths.cumsum(0) - lengths,
        segment_parent=torch.full((len(data),), -1),
        source=torch.arange(len(zeros)),
        target=torch.cat([datum.inputs[TARGETS].long() for datum in data]),
        sequence=torch.arange(len(data)).repeat_interleave(lengths),
        rollout_logprobs=columns.get(LOGPROBS, zeros),
        versions=torch.zeros(len(zeros), dtype=torch.int32),
        advantages=columns.get(ADVANTAGES, zeros),
        mask=torch.ones(len(zeros)),
        leaf=torch.arange(len(data)),
        group=torch.arange(len(data)),
        rewards=torch.zeros(len(data), dtype=torch.float64),
        totals=Totals(len(zeros), len(data), len(data)),
        columns={WEIGHTS: columns[WEIGHTS]} if WEIGHTS in columns else {},
    )


def _check_input(index: int, datum: TrainingDatum, name: str) -> None:
    given = datum.inputs.get(name)
    if given is None:
        raise TinkerRequestError(
            f"datum {index} has no loss_fn_inputs[{name!r}]; it has {', '.join(sorted(datum.inputs)) or 'none'}"
        )
    if given.dim() != 1:
        raise TinkerRequestError(
            f"loss_fn_inputs[{name!r}] of datum {index} has {given.dim()} dimensions; several targets of one position are not served here"
        )
    if len(given) != len(datum.tokens):
        raise TinkerRequestError(
            f"loss_fn_inputs[{name!r}] of datum {index} has {len(given)} entries and its model_input {len(datum.tokens)} tokens; both "
            "need one for each position"
        )
