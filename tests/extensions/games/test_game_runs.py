"""Whole runs of games: the sliding puzzle's script, GiGPO through kills and asynchronous training, and the policy against itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loop.runs import metrics_of, overrides, strop, tiny_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "examples" / "run_grpo_sliding_puzzle.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer knows the words of the games."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        benchmark = importlib.import_module("sliding_puzzle")
    conversations = [benchmark.play_poorly(Random(seed), 0.5) for seed in range(8)]
    folder: Path = benchmark.build_model(
        tmp_path_factory.mktemp("model") / "games", [message.content for messages in conversations for message in messages]
    )
    return folder


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    dropped = [key for key in tiny_config(model) if key.startswith(("data.", "env."))]
    return {
        **tiny_config(model),
        **dict.fromkeys(dropped, ...),
        "policy.max_total_sequence_length": 640,
        "policy.generation.max_new_tokens": 16,
        "policy.generation.stop_strings": [
            *"abcdefghijklmnopqrstuvwxyz0123456789 <>/"
        ],  # most tokens end a turn of a random model
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.2,
        "grpo.num_prompts_per_step": 2,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": 2,
        "grpo.max_rollout_turns": 4,
        "grpo.val_period": 0,
        "checkpointing.metric_name": None,
        "checkpointing.save_period": 1,
        **changes,
    }


def puzzle(model: Path, **changes: Any) -> list[str]:
    rules = {"env.sliding_puzzle_game.cfg.game_config.size": 2, "env.sliding_puzzle_game.cfg.max_moves": 3}
    return overrides(settings(model, **{**rules, "data.train.env_name": "sliding_puzzle_game", **changes}))


@pytest.mark.exhaustive
def test_the_script_of_the_sliding_puzzle_trains_over_several_turns(model: Path, tmp_path: Path) -> None:
    changes = {"policy.train_global_batch_size": 8, "policy.generation.top_k": None, "policy.generation.top_p": 1.0}
    arguments = puzzle(model, **changes, **{"env.sliding_puzzle_game.held_out_fraction": 0.0, "data.validation.size": 2})
    outcome = strop(SCRIPT, *arguments, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "train/rewards/won" in metrics_of(tmp_path / "logs")[2]
    records = list(RolloutStore(tmp_path / "logs").read_all())
    assert len(records) == 16 and max(sum(turn.sampled for turn in record.turns) for record in records) == 4


def test_the_policy_plays_itself_and_both_sides_are_trained(model: Path, tmp_path: Path) -> None:
    game = {"env.game.type": "two_player", "env.game.game": "nim", "env.game.opponent": "self", "env.game.max_illegal_moves": 1}
    arguments = overrides(settings(model, **game, **{"data.train.env_name": "game", "algorithm.name": "turn_returns"}))
    outcome = strop("grpo", *arguments, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")[2]
    assert "train/rewards/score" in logged and logged["train/rewards/illegal_moves"] > 0, "the model is random"
