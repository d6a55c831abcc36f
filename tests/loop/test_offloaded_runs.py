"""Runs whose learner leaves its device while the engine samples (``policy.offload``): the same numbers as without. A CPU stands for the
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loop.kinds import GRADED
from loop.runs import Environ, metrics_of, overrides, repeatable, start, tiny_config
from loop.test_cluster_runs import TWO, curves_agree
from loop.victims import MARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OFFLOAD = {"policy.offload": True}
SETTINGS = {
    "grpo.max_num_steps": 3,
    "grpo.val_period": 2,
    "checkpointing.save_period": 2,
    "checkpointing.keep_top_k": None,
    "loss_fn.reference_policy_kl_penalty": 0.1,
    "policy.ema.enabled": True,
}


def train(model: Path, folder: Path, **changes: Any) -> Any:
    settings = {**tiny_config(model), **GRADED, **SETTINGS, **changes}
    return start(["grpo", *overrides(settings)], folder, before=Environ({MARK: str(folder)}))


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    return repeatable(metrics_of(folder / "logs"))


def train_both(model: Path, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Train with and without offload; return the folders."""
    runs = [train(model, folder / name, **changes, **more) for name, more in (("stays", {}), ("leaves", OFFLOAD))]
    for run in runs:
        outcome = run.finish(300)
        assert outcome.code == 0, outcome.err + outcome.out
    assert all(line["timing/train/offload"] > 0 for step, line in metrics_of(folder / "leaves" / "logs").items() if step)
    return folder / "leaves", folder / "stays"


def test_what_trains_leaves_while_the_engine_runs_the_learner_s_module(tiny: Path, tmp_path: Path) -> None:
    leaves, stays = train_both(tiny, tmp_path)
    assert numbers(leaves) == numbers(stays)


@pytest.mark.exhaustive
def test_all_ranks_leave_while_engines_beside_them_sample(tiny: Path, tmp_path: Path) -> None:
    """What trains is the same to the bit; the engines batch requests as they arrive, which decides their rounding."""
    leaves, stays = train_both(tiny, tmp_path, **TWO)
    curves_agree(leaves, stays, steps=3)
    for name in ("train/loss", "train/grad_norm", "train/reward", "validation/accuracy"):
        assert [line.get(name) for line in numbers(leaves).values()] == [line.get(name) for line in numbers(stays).values()], name


@pytest.mark.exhaustive
def test_a_run_continues_from_a_checkpoint_that_was_saved_while_its_learner_was_away(tiny: Path, tmp_path: Path) -> None:
    whole, parts = train(tiny, tmp_path / "whole", **OFFLOAD), tmp_path / "parts"
    assert train(tiny, parts, **OFFLOAD, **{"grpo.max_num_steps": 2}).finish(300).code == 0
    assert train(tiny, parts, **OFFLOAD).finish(300).code == whole.finish(300).code == 0
    assert numbers(parts)[3] == numbers(tmp_path / "whole")[3]
