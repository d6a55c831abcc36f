"""Does a tiny model learn the 2x2 sliding puzzle, and does credit for turns (GiGPO) help?

A random Llama of 150 thousand weights is first trained on random play, in which ``--expert`` of the actions are right, so that it writes
well-formed actions. Then each algorithm trains it from there on the same puzzles with
each seed, and once with a learning rate of 0, which shows what is noise. Twenty minutes on one core.

    python benchmarks/sliding_puzzle.py --folder results/sliding_puzzle
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import save_llama, train_tokenizer

import strop
from strop.extensions.games.sliding_puzzle import Grid, PuzzleRules, PuzzleSize, SlidingPuzzle, make_move, solution
from strop.types import Message, Rollout, assistant, observation_turn

SHUFFLE, MOVES = 7, 6
RULES = PuzzleRules(game_config=PuzzleSize(size=2, shuffle_moves=SHUFFLE), max_moves=MOVES)
GAME = SlidingPuzzle(cfg=RULES, held_out_fraction=0.0)
ACTIONS = ("up", "down", "left", "right")
LENGTH = 640
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def play_poorly(random: Random, expert: float) -> list[Message]:
    """Return the conversation of an episode in which ``expert`` of the actions are the best ones, and the others random."""
    task = GAME.make_task(random)
    messages, rollout = list(GAME.prompt(task)), Rollout(task=task, sample=0, seed=0, messages=(), prompt=torch.zeros(0))
    while True:
        steps = GAME.play(task, rollout)
        best = find_best((steps[-1].state if steps else GAME.first_state(task)).grid)
        text = f"<action>{best if random.random() < expert else random.choice(ACTIONS)}</action>"
        messages.append(assistant(text))
        turn = observation_turn([0], text)
        rollout = rollout.with_turn(type(turn)(**{**vars(turn), "author": "policy"}))
        answer = asyncio.run(GAME.respond(task, rollout))
        if answer is None:
            return messages
        messages += answer


def find_distances() -> dict[Grid, int]:
    """Return the number of moves from each board to the solution."""
    distances, boards = {solution(2): 0}, [solution(2)]
    for board in boards:  # it grows
        for action in ACTIONS:
            after, _ = make_move(board, action)
            if after not in distances:
                distances[after] = distances[board] + 1
                boards.append(after)
    return distances


def find_best(board: Grid) -> str:
    return min(ACTIONS, key=lambda action: DISTANCES[make_move(board, action)[0]])


DISTANCES = find_distances()


def build_model(folder: Path, texts: list[str]) -> Path:
    """Save a random model whose tokenizer was trained on the game's own texts."""
    save_llama(
        folder, train_tokenizer(texts, 640, TEMPLATE), 0, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    return folder


COMMON: dict[str, Any] = {
    "policy.device": "cpu",
    "policy.num_threads": 1,
    "policy.precision": "float32",
    "policy.max_total_sequence_length": LENGTH,
    "logger.console": "none",
    "checkpointing.save_period": 100_000,
}


def warm_up(folder: Path, steps: int, expert: float) -> Path:
    """Train a random model on poor play. Return the folder of its weights."""
    random = Random(0)
    rows = [{"messages": [message.as_dict() for message in play_poorly(random, expert)]} for _ in range(512)]
    model = build_model(folder / "random", [message["content"] for row in rows[:64] for message in row["messages"]])
    settings = {
        **COMMON,
        "sft.max_num_steps": steps,
        "sft.max_num_epochs": 100,
        "sft.val_period": 0,
        "policy.train_global_batch_size": 16,
        "policy.optimizer.kwargs.lr": 3e-3,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "checkpointing.metric_name": None,
    }
    strop.train("sft", model=model, data=rows, folder=folder / "sft", **settings)
    return next((folder / "sft").rglob("weights"))


def learn(model: Path, folder: Path, algorithm: str, seed: int, steps: int, lr: float) -> list[float]:
    """Return the share of puzzles solved in each step."""
    if not folder.exists():
        settings = {
            **COMMON,
            "env.task.held_out_fraction": 0.0,
            "env.task.cfg.game_config.size": 2,
            "env.task.cfg.game_config.shuffle_moves": SHUFFLE,
            "env.task.cfg.max_moves": MOVES,
            "grpo.seed": seed,
            "grpo.max_num_steps": steps,
            "grpo.max_num_epochs": None,
            "grpo.max_rollout_turns": MOVES + 2,
            "grpo.num_prompts_per_step": 8,
            "grpo.num_generations_per_prompt": 8,
            "grpo.val_period": 0,
            "checkpointing.metric_name": None,
            "policy.optimizer.kwargs.lr": lr,
            "policy.optimizer.kwargs.weight_decay": 0.0,
            "policy.generation.max_new_tokens": 16,
            "policy.generation.torch_cfg.kv_cache_memory_gb": 0.5,
            "policy.sequence_packing.train_mb_tokens": 16384,
        }  # fmt: skip
        strop.train(algorithm, model=model, environment="sliding_puzzle", data={"size": 100_000}, folder=folder, **settings)
    metrics = sorted(
        (json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.open()), key=lambda row: row.get("step", 0)
    )
    return [row["train/rewards/won"] for row in metrics if "train/rewards/won" in row]


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results/sliding_puzzle"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=150)
    parser.add_argument("--expert", type=float, default=0.0)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "gigpo", "turn_returns"])
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    saved = next((folder / "sft").rglob("weights"), None)
    model = saved or warm_up(folder, arguments.warm_up, arguments.expert)
    runs = [(name, seed, arguments.lr) for seed in range(arguments.seeds) for name in arguments.algorithms]
    runs += [(arguments.algorithms[0], seed, 0.0) for seed in range(arguments.seeds)]
    tenth = max(arguments.steps // 6, 1)
    for name, seed, lr in runs:
        curve = learn(model, folder / f"{name}_{seed}_{lr:g}", name, seed, arguments.steps, lr)
        parts = " ".join(f"{mean(curve[start : start + tenth]):.2f}" for start in range(0, len(curve), tenth))
        print(f"{name:14s} seed {seed} lr {lr:<6g} solved, means of {tenth} steps: {parts}", flush=True)


if __name__ == "__main__":
    main()
