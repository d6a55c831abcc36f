"""Whole runs with ``train_mb_tokens: auto``: the budget found changes nothing else, and a continued run keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop.free_memory_of_a_run import FreeMemory
from loop.killing import Kill
from loop.kinds import GRADED, assert_same_run, recorded_config, write_data
from loop.runs import Outcome, metrics_of, overrides, repeatable, strop, tiny_config
from strop.data.packing_config import LARGEST_TOKENS

pytestmark = pytest.mark.slow

KEY = "policy.sequence_packing.train_mb_tokens"
SETTINGS: dict[str, Any] = {
    "grpo.max_num_steps": 4,
    "grpo.num_prompts_per_step": 8,
    "grpo.val_period": 0,
    "checkpointing.metric_name": None,
    "checkpointing.keep_top_k": None,
    "logger.console": "plain",
    "policy.generation.torch_cfg.kv_cache_memory_gb": 0.001,
}
FREE, MORE = 5 << 19, 1 << 40  # bytes; the first makes several micro-batches of a step


def train(model: Path, folder: Path, budget: int | str, before: Callable[[], None] | None = None, **changes: Any) -> Outcome:
    settings = {**tiny_config(model), **GRADED, **SETTINGS, KEY: budget, **changes}
    return strop("grpo", *overrides(settings), folder=folder, before=before)


def found(folder: Path, step: int) -> int:
    """Return the budget that a checkpoint holds."""
    tokens: dict[str, int] = json.loads(
        (folder / "results" / f"step_{step}" / "token_budgets" / "token_budgets.json").read_text()
    )
    return tokens["policy"]


@pytest.fixture(scope="module")
def automatic(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("automatic")
    outcome = train(tiny, folder, "auto", FreeMemory(FREE))
    assert outcome.code == 0, outcome.err
    assert outcome.out.count(f"{KEY}: auto is {found(folder, 4)} tokens") == 1, outcome.out
    assert "a pass was measured to take" in outcome.out and "micro-batches as large as memory allows" not in outcome.err
    return folder


def test_a_run_with_the_budget_that_was_found_is_the_same_to_the_last_bit(tiny: Path, automatic: Path, tmp_path: Path) -> None:
    tokens = found(automatic, 4)
    assert 64 <= tokens < min(line["train/total_tokens"] for step, line in metrics_of(automatic / "logs").items() if step), (
        "it cuts a step"
    )
    assert train(tiny, tmp_path, tokens).code == 0
    assert not (tmp_path / "results" / "step_4" / "token_budgets").exists()
    assert_same_run(automatic, tmp_path)


@pytest.mark.exhaustive
def test_a_killed_run_continues_with_its_budget_although_more_memory_is_free(tiny: Path, automatic: Path, tmp_path: Path) -> None:
    assert train(tiny, tmp_path, "auto", FreeMemory(FREE, then=Kill("at the optimizer step", 4))).code == -9
    outcome = train(tiny, tmp_path, "auto", FreeMemory(MORE))
    assert outcome.code == 0, outcome.err
    assert f"{KEY}: auto is {found(automatic, 4)} tokens, as measured by the continued run" in outcome.out
    assert found(tmp_path, 4) == found(tmp_path, 2) == found(automatic, 4)
    assert_same_run(automatic, tmp_path)


@pytest.mark.exhaustive
def test_a_changed_key_ends_what_was_found(tiny: Path, tmp_path: Path) -> None:
    two = {"grpo.max_num_steps": 2}
    assert train(tiny, tmp_path, "auto", FreeMemory(FREE), **two).code == 0
    assert train(tiny, tmp_path, 256).code == 0
    assert not (tmp_path / "results" / "step_4" / "token_budgets").exists()
    assert train(tiny, tmp_path, "auto", FreeMemory(MORE), **{"grpo.max_num_steps": 6}).code == 0
    assert found(tmp_path, 6) == LARGEST_TOKENS


def test_a_machine_without_room_for_a_rollout_refuses_to_start(tiny: Path, tmp_path: Path) -> None:
    outcome = train(tiny, tmp_path, "auto", FreeMemory(3 << 18))
    assert outcome.code == 1 and f"error: {KEY}: found auto, but a micro-batch of one rollout" in outcome.err, outcome.err
    assert "Traceback" not in outcome.err


def test_recorded_data_is_cut_by_what_was_found(tiny: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = {**recorded_config("sft", tiny), "logger.console": "plain", KEY: "auto"}
    outcome = strop("sft", *overrides(settings), folder=tmp_path, before=FreeMemory(MORE))
    assert outcome.code == 0, outcome.err
    assert f"{KEY}: auto is {LARGEST_TOKENS} tokens" in outcome.out


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ranks_cut_by_what_the_smallest_found(tiny: Path, tmp_path: Path) -> None:
    """Each of two ranks may use half of the machine; a run with that number in the key is the same."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    folders = {"auto": tmp_path / "auto", "number": tmp_path / "number"}
    budget: int | str = "auto"
    for folder in folders.values():
        folder.mkdir()
        write_data(folder)
        ranks = {"cluster.backend": "ray", "cluster.gpus_per_node": 2, "checkpointing.keep_top_k": None}
        settings = {**recorded_config("sft", tiny), **ranks, "policy.train_global_batch_size": 8, KEY: budget}
        outcome = strop("sft", *overrides(settings), folder=folder, timeout=300)
        assert outcome.code == 0, outcome.err + outcome.out
        budget = found(folders["auto"], 6)
        assert outcome.out.count(f"{KEY}: auto is {budget} tokens") == (folder == folders["auto"])
    one, other = (repeatable(metrics_of(folder / "logs")) for folder in folders.values())
    assert one == other and len(one) >= 6
