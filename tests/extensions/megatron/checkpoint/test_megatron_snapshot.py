"""A checkpoint of any layout continues in any other: the next step is the one that would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_on_ranks

pytest.importorskip("megatron.core")

Case = tuple[str, dict[str, Any], dict[str, Any]]
DENSE: list[Case] = [
    ("qwen3", {"tp": 2}, {"pp": 2}),
    ("qwen3", {"distributed": True}, {"pp": 2, "vp": 2, "distributed": True}),
    ("qwen2", {"pp": 2, "vp": 2}, {"context_parallel_size": 2, "distributed": True}),
    ("gemma2", {"distributed": True, "dtype": torch.bfloat16}, {"tp": 2, "dtype": torch.bfloat16}),
    ("qwen2", {"pp": 2, "dtype": torch.bfloat16}, {"distributed": True}),
    ("llama", {"head": "scalar", "pp": 2}, {"head": "scalar", "tp": 2, "sp": True, "distributed": True}),
]
MIXTURE: list[Case] = [
    ("qwen3_moe", {"ep": 2, "distributed": True}, {}),
    ("qwen3_moe", {"distributed": True}, {"ep": 2}),
    ("qwen3_moe", {"tp": 2, "etp": 2}, {"ep": 2, "pp": 1, "distributed": True}),
]

LARGE: list[Case] = [
    ("qwen3", {"tp": 2, "pp": 2}, {"tp": 4, "sp": True, "distributed": True}),
    ("qwen2", {"tp": 2, "sp": True, "distributed": True}, {"pp": 4}),
    ("qwen3_moe", {"ep": 2, "pp": 2, "distributed": True}, {"ep": 4}),
    ("deepseek_v3", {"ep": 2, "pp": 2}, {"ep": 2, "tp": 2, "etp": 1, "distributed": True}),
    ("qwen3_moe", {"ep": 2, "tp": 2, "etp": 2}, {"distributed": True, "context_parallel_size": 2}),
]


def continue_in(rank: int, root: str, cases: list[Case]) -> list[list[float]]:
    """Save after two steps in one layout; return how far the third step in both is from the third without a checkpoint."""
    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    from strop.extensions.megatron.checkpoint.megatron_snapshot import load_megatron_checkpoint
    from support.megatron_checkpoints import COUNTERS, train_stages

    distances = []
    for number, (family, saved, loaded) in enumerate(cases):
        folder = Path(root) / str(number)
        run = train_stages(family, steps=2, **saved)
        snapshot = run.snapshot()
        run.step(3)
        snapshot.save(folder)  # a copy: training has gone on
        wanted = run.weights()
        found = []
        for layout in (saved, loaded):
            run = train_stages(family, **layout)
            assert load_megatron_checkpoint(run.stages, run.optimizer, folder) == COUNTERS
            run.step(3)
            weights = run.weights()
            assert weights.keys() == wanted.keys()
            found.append(max((weights[name].float() - wanted[name].float()).abs().max().item() for name in wanted))
        distances.append(found)
    return distances


def check(found: list[list[float]], cases: list[Case]) -> None:
    for (family, saved, loaded), (same, other) in zip(cases, found, strict=True):
        assert same == 0.0, (family, saved)
        rounded = saved.get("dtype") == torch.bfloat16 and "dtype" not in loaded
        assert other == 0.0 or (rounded and other < 0.01), (family, saved, loaded, other)


def test_any_layout_continues_what_another_saved(tmp_path: Path) -> None:
    cases = [DENSE[2], MIXTURE[0]]
    check(run_on_ranks(2, continue_in, str(tmp_path), cases)[0], cases)


@pytest.mark.exhaustive
def test_every_kind_of_layout_continues_what_another_saved(tmp_path: Path) -> None:
    cases = DENSE + MIXTURE
    check(run_on_ranks(2, continue_in, str(tmp_path), cases)[0], cases)


@pytest.mark.exhaustive
def test_layouts_of_four_ranks_continue_what_others_saved(tmp_path: Path) -> None:
    check(run_on_ranks(4, continue_in, str(tmp_path), LARGE)[0], LARGE)
