"""Every family in every layout trains as the torch learner does in one process: three optimizer steps of GRPO over agents' branches."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.ranks import run_on_ranks

from support.megatron_families import FAMILIES
from support.megatron_parity import MegatronCase, case, compared_alone, train_cases_on_rank
from support.needs import needs_megatron
from support.parity import MEGATRON, Differences, compare, make_batch, train
from support.sweep import sweep

needs_megatron()
pytestmark = pytest.mark.slow

Sizes = dict[str, Any]
DENSE: dict[int, list[Sizes]] = {
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vp": 2}, {"cp": 2}],
    4: [{"tp": 2, "sp": True, "pp": 2}, {"tp": 4}, {"cp": 2, "tp": 2, "sp": True}],
}
MIXTURE: dict[int, list[Sizes]] = {
    2: [{"tp": 2, "sp": True, "etp": 2}, {"pp": 2}, {"pp": 2, "vp": 2}, {"cp": 2}, {"ep": 2}],
    4: [{"tp": 2, "sp": True, "ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {"pp": 2, "ep": 2}, {"cp": 2, "ep": 4}],
}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v3-yarn")
FLOAT64 = Differences(loss=2e-7, norm=2e-7, outputs=2e-7, weights=3e-8, metrics=3e-7)
ROUTED = Differences(loss=1e-6, norm=1e-6, outputs=1e-6, weights=3e-7, metrics=1e-6)  # weights of experts are float32


def measure(name: str, world: int) -> list[tuple[Sizes, Differences]]:
    """Return the differences of a family in each layout of ``world`` ranks."""
    no_decay = ("norm", "bias") if name.startswith("qwen2") else ("norm",)
    trained = case(family=MEGATRON + name, branches=True, packed=name != "nemotron", no_decay=no_decay)
    batch = make_batch(trained)
    single = compared_alone(train(trained, batch))
    layouts = (MIXTURE if name in MIXTURES else DENSE)[world]
    cases = {str(sizes): (MegatronCase(case=trained, world=world, sizes=sizes), batch) for sizes in layouts}
    ranks = run_on_ranks(world, train_cases_on_rank, cases)
    return [(sizes, compare([rank[str(sizes)] for rank in ranks], single, len(batch.target))) for sizes in layouts]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", sweep(FAMILIES))
def test_a_family_trains_in_every_layout(name: str, world: int) -> None:
    bound = ROUTED if name in MIXTURES else FLOAT64
    for sizes, found in measure(name, world):
        for part in ("loss", "norm", "outputs", "weights", "metrics"):
            assert getattr(found, part) <= getattr(bound, part), (part, sizes, found)
