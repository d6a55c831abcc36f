"""Recorded experts in Megatron Core give the numbers of the torch learner, whose routers are checked against ones written by hand.

Every stage, tensor, context and expert rank replays those of its own layers and tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from support.megatron_parity import MegatronCase, case, train_cases_on_rank
from support.parity import Differences, compare, make_batch, train
from support.sweep import sweep

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

FLOAT64 = Differences(loss=1e-6, norm=1e-6, outputs=1e-6, weights=1e-7, metrics=1e-6)  # as without replay
FLOAT32 = Differences(loss=2e-6, norm=2e-6, outputs=1e-6, weights=1e-6, metrics=5e-6)  # after one step
RECOMPUTED = {"activation_checkpointing": True}
ROUTERS = RECOMPUTED | {"recompute_granularity": "selective", "recompute_modules": ("moe",)}


def replayed(world: int = 2, family: str = "qwen3_moe", options: Any = None, **sizes: Any) -> MegatronCase:
    single = {"dtype": torch.float32, "steps": 1} if family == "deepseek_v3" else {}  # Megatron Core keeps its biases in float32
    return MegatronCase(case=case(family=family, replayed=True, **single), world=world, sizes=sizes, options=options or {})


CASES = {
    "experts 2, tensor 2": replayed(ep=2, tp=2, sp=True),
    "stages 2": replayed(pp=2),
    "stages 2, routers recomputed": replayed(pp=2, options=ROUTERS),
    "stages 2 x 2, recomputed": replayed(family="qwen3_moe_deep", pp=2, vp=2, options=RECOMPUTED),
    "stages 2 x 2, routers recomputed": replayed(family="mixtral_deep", pp=2, vp=2, options=ROUTERS),
    "experts 2, context 2": replayed(family="mixtral", ep=2, cp=2),
    "groups of experts": replayed(family="deepseek_v3", ep=2),
    "tensor 2, stages 2, experts 2": replayed(4, tp=2, sp=True, pp=2, ep=2),
    "context 2, stages 2": replayed(4, cp=2, pp=2),
}
KEPT = ("experts 2, tensor 2", "stages 2 x 2, routers recomputed")


@cache
def on_all(world: int, kept: bool) -> Callable[[str], Differences]:
    names = [name for name, made in CASES.items() if made.world == world and (name in KEPT) == kept]
    cases = {name: (CASES[name], make_batch(CASES[name].case)) for name in names}
    ranks = run_on_ranks(world, train_cases_on_rank, cases)

    def differences(name: str) -> Differences:
        made, batch = cases[name]
        first = next(rank[name].measured.metrics for rank in ranks if rank[name].measured.metrics is not None)
        assert first is not None and first["router_disagreement"].value > 0.1
        assert 0 < first["tokens_without_routes"].value < 0.3
        return compare([rank[name] for rank in ranks], train(made.case, batch), len(batch.target))

    return differences


@pytest.mark.parametrize("name", sweep(CASES))
def test_recorded_experts_give_the_numbers_of_the_torch_learner(name: str) -> None:
    found = on_all(CASES[name].world, name in KEPT)(name)
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(FLOAT64 if CASES[name].case.steps > 1 else FLOAT32, part), (part, found)
