"""Does a policy learn Gymnasium's FrozenLake through the adapter? Several seeds, each against the same run with a learning rate of zero.

    pip install -e '.[gymnasium]'
    python benchmarks/frozen_lake.py --output frozen_lake.json                # some minutes on two cores

A tiny model (two layers, untrained) first imitates games of random moves, ``strop sft``, so that it writes moves; then ``strop grpo``
plays. The policy reads the number of the field that it stands on and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.kinds import recorded_config, write_rows
from loop.runs import metrics_of, overrides, strop, tiny_config
from loop.tiny import build_tiny

LAKE = ["SFF", "FHF", "FFG"]  # the shortest ways have four moves
TURNS = 8
GAME = {"id": "FrozenLake-v1", "instruction": "", "kwargs": {"is_slippery": False, "desc": LAKE}}
LAST_STEPS = 10


def random_games(seed: int, count: int) -> list[dict[str, Any]]:
    """Return games of random moves as conversations."""
    import gymnasium

    moves, rows = random.Random(seed), []
    lake = gymnasium.make(GAME["id"], **GAME["kwargs"])
    for _ in range(count):
        field, over, messages = lake.reset()[0], False, []
        while not over and len(messages) < 2 * TURNS:
            move = moves.randrange(4)
            messages += [{"role": "user", "content": str(field)}, {"role": "assistant", "content": str(move)}]
            field, _, over, _, _ = lake.step(move)
        rows.append({"messages": messages})
    return rows


def imitate(folder: Path, seed: int, steps: int) -> Path:
    """Train a tiny model to write random moves, and return the folder of its weights."""
    write_rows(folder / "games.jsonl", random_games(seed, 256))
    changes = {
        "policy.max_total_sequence_length": 256,
        "policy.train_global_batch_size": 16,
        "sft.seed": seed,
        "sft.max_num_steps": steps,
        "sft.val_period": 0,
        "data.train.dataset_name": "games.jsonl",
        "data.validation.dataset_name": ...,
        "checkpointing.metric_name": None,
        "checkpointing.save_period": steps,
    }
    settings = {**recorded_config("sft", build_tiny(folder / "model", seed=seed)), **changes}
    outcome = strop("sft", *overrides(settings), folder=folder, timeout=600)
    assert outcome.code == 0, outcome.err
    return folder / "results" / f"step_{steps}" / "policy" / "weights"


def play(folder: Path, model: Path, seed: int, lr: float, steps: int) -> list[float]:
    """Train with GRPO and return the share of games won at each step."""
    settings = {name: value for name, value in tiny_config(model).items() if not name.startswith(("env.", "data.validation"))}
    settings |= {f"env.lake.{name}": value for name, value in GAME.items()} | {
        "env.lake.type": "gymnasium",
        "env.lake.invalid_reward": -0.1,
        "data.train.env_name": "lake",
        "policy.optimizer.kwargs.lr": lr,
        "policy.max_total_sequence_length": 256,
        "policy.train_micro_batch_size": 64,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.1,
        "grpo.max_rollout_turns": TURNS,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 16,
        "grpo.seed": seed,
        "grpo.max_num_steps": steps,
        "grpo.val_period": 0,
        "checkpointing.enabled": False,
        "checkpointing.metric_name": None,
    }
    outcome = strop("grpo", *overrides(settings), folder=folder, timeout=1800)
    assert outcome.code == 0, outcome.err
    return [line["train/rewards/solved"] for line in metrics_of(folder / "logs").values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    curves: dict[str, list[list[float]]] = {"trained": [], "control": []}
    with tempfile.TemporaryDirectory() as name:
        for seed in options.seeds:
            start = imitate(Path(name) / f"sft_{seed}", seed, options.sft_steps)
            for kind, lr in (("trained", options.lr), ("control", 0.0)):
                curve = play(Path(name) / f"{kind}_{seed}", start, seed, lr, options.steps)
                curves[kind].append(curve)
                first, last = statistics.mean(curve[:LAST_STEPS]), statistics.mean(curve[-LAST_STEPS:])
                print(
                    f"seed {seed} {kind}: games won, first {LAST_STEPS} steps {first:.3f}, last {LAST_STEPS} steps {last:.3f}",
                    flush=True,
                )
    if options.output:
        options.output.write_text(json.dumps({"lake": LAKE, "lr": options.lr, **curves}, indent=1))


if __name__ == "__main__":
    main()
