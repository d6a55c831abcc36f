"""What a driver needs to know about a rank to divide a batch for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How the ranks of one network cut a batch into micro-batches: the arguments of ``strop.data.balance.partition_batch``."""

    ranks: int  # that read different micro-batches
    token_budget: int  # of a micro-batch
    padded: bool = False
    whole_groups: bool = False
    fills_up: bool = False  # the schedule may run dummies in addition to those that keep ranks in step


@dataclass(frozen=True, kw_only=True)
class ShareRequest:
    """The share of a batch that one rank reads in one kind of pass. Ranks that read the same micro-batches have equal requests."""

    rule: SplitRule
    number: int  # of the share, from 0
    read_columns: bool = False  # whether it reads what engines recorded of the tokens that they read
