"""Which formula belongs to which advantage of Strop, and which laws it obeys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from conformance import formulas_advantages as formulas

Formula = Callable[[Sequence[float], Sequence[float], float], list[float]]  # rewards, lengths, reward of the greedy rollout


@dataclass(frozen=True)
class GroupCase:
    part: str
    formula: Formula
    options: dict[str, Any] = field(default_factory=dict)
    relative: bool = True  # exactly zero where the group does not vary
    shift: bool = True  # a constant added to all rewards changes nothing
    scale: Literal["invariant", "follows"] | None = "invariant"  # what a factor on all rewards does
    zero_sum: bool = True
    monotone: bool = True
    success: bool = False  # rewards are success rates: negative ones are refused

    def __str__(self) -> str:
        return " ".join([self.part, *(f"{name}={value}" for name, value in self.options.items())])


GROUP_ADVANTAGES = [
    GroupCase("group_relative", lambda rewards, *_: formulas.grpo(rewards)),
    GroupCase("group_relative", lambda rewards, *_: formulas.dr_grpo(rewards), {"normalize": False}, scale="follows"),
    GroupCase("group_relative", lambda rewards, *_: formulas.grpo_leave_one_out(rewards), {"leave_one_out": True}),
    GroupCase(
        "group_relative", lambda rewards, *_: formulas.rloo(rewards), {"leave_one_out": True, "normalize": False}, scale="follows"
    ),
    GroupCase(
        "group_relative",
        lambda rewards, *_: formulas.plain(rewards),
        {"baseline": False, "normalize": False},
        relative=False,
        shift=False,
        scale="follows",
        zero_sum=False,
    ),
    GroupCase("group_relative", lambda rewards, *_: formulas.grpo_unbiased(rewards), {"deviation": "unbiased"}),
    GroupCase(
        "group_relative",
        lambda rewards, *_: formulas.grpo_others(rewards),
        {"leave_one_out": True, "deviation": "others"},
        scale=None,  # where the others are equal, the credit is not divided
        zero_sum=False,
    ),
    GroupCase("leave_one_out", lambda rewards, *_: formulas.rloo(rewards), scale="follows"),
    GroupCase(
        "plain_reward", lambda rewards, *_: formulas.plain(rewards), relative=False, shift=False, scale="follows", zero_sum=False
    ),
    GroupCase(
        "greedy_baseline",
        lambda rewards, _, greedy: formulas.remax(rewards, greedy),
        relative=False,
        shift=False,
        scale=None,
        zero_sum=False,
    ),
    GroupCase("length_weighted", lambda rewards, lengths, _: formulas.opo(rewards, lengths), scale="follows", zero_sum=False),
    GroupCase("success_rate", lambda rewards, *_: formulas.maxrl(rewards), shift=False, success=True),
    GroupCase("best_of_k", lambda rewards, *_: formulas.pass_at_k(rewards), scale="follows", zero_sum=False),
    *(
        GroupCase(
            "best_of_k",
            lambda rewards, *_, k=k: formulas.pass_at_k_of_sets(rewards, k),
            {"k": k},
            scale="follows",
            zero_sum=False,
        )
        for k in (2,)
    ),
    GroupCase("best_of_k", lambda rewards, *_: formulas.pass_at_k_analytic(rewards, 2), {"k": 2, "analytic": True}),
]
