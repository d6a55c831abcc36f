"""Adapters of Megatron Core's layers have the numbers of PEFT's on the torch learner, where those share A as Megatron Core's layers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.learner.megatron.megatron_peft_config import MegatronPeftConfig
from support.megatron_parity import MegatronCase, case, train_cases_on_rank
from support.needs import needs_megatron
from support.parity import Case, Differences, compare, make_batch, train

needs_megatron()
pytestmark = pytest.mark.slow

FLOAT64 = Differences(loss=3e-7, norm=3e-7, outputs=3e-7, weights=3e-8, metrics=3e-7)
FLOAT32 = Differences(loss=2e-6, norm=2e-6, outputs=2e-6, weights=1e-6, metrics=1e-5)
GEMMA = replace(FLOAT64, norm=1e-6, weights=3e-7)  # as without adapters: Transformers' norms of it are float32
SINGLE: dict[str, Any] = {"dtype": torch.float32, "steps": 1}
PEFT = MegatronPeftConfig(enabled=True, dim=4, alpha=4)


def adapted(**options: Any) -> Case:
    return case(lora=True, fused=True, **options)


def make(world: int, sizes: dict[str, Any], made: Case, **options: Any) -> MegatronCase:
    section = {"peft": PEFT, **options.pop("options", {})}
    return MegatronCase(case=made, world=world, sizes=sizes, options=section, **options)


CASES: dict[str, tuple[MegatronCase, Differences]] = {
    "tensor 2": (make(2, {"tp": 2}, adapted(family="qwen2")), FLOAT64),
    "tensor 2, sequence": (make(2, {"tp": 2, "sp": True}, adapted()), FLOAT64),
    "stages 2 x 2, recomputed": (
        make(2, {"pp": 2, "vp": 2}, adapted(family="qwen2_deep"), options={"activation_checkpointing": True}),
        FLOAT64,
    ),
    "context 2": (make(2, {"cp": 2}, adapted(algorithm="dpo")), FLOAT64),
    "experts 2, tensor 2": (make(2, {"ep": 2, "tp": 2, "sp": True}, adapted(family="qwen3_moe")), FLOAT64),
    "tensor 2, sequence, distributed": (
        make(2, {"tp": 2, "sp": True}, adapted(**SINGLE), distributed=True, overlap=True),
        FLOAT32,
    ),
    "tensor 2, post norms": (make(2, {"tp": 2}, adapted(family="gemma2")), GEMMA),
}


@cache
def train_together(names: tuple[str, ...]) -> Callable[[str], Differences]:
    """Train cases in one start of the ranks."""
    cases = {name: (CASES[name][0], make_batch(CASES[name][0].case)) for name in names}
    ranks = run_on_ranks(CASES[names[0]][0].world, train_cases_on_rank, cases)

    def differences(name: str) -> Differences:
        made, batch = cases[name]
        return compare([rank[name] for rank in ranks], replace(train(made.case, batch), tied=[]), len(batch.target))

    return differences


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_those_of_the_torch_learner(name: str) -> None:
    found, bound = train_together(tuple(CASES))(name), CASES[name][1]
    for kind, limit in vars(bound).items():
        assert getattr(found, kind) <= limit, f"{name}: {kind} differ by {getattr(found, kind):.1e}"
