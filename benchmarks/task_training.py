"""Does GRPO teach a tiny model terminal tasks? Five kinds of tasks, each solved by one command.

A Llama of three layers is taught by supervised fine-tuning to call the shell with one of the five commands: in two of five conversations
the right one, in the others any. Then GRPO rewards what passes the hidden tests of each task, in a second sandbox. What is measured, on
other tasks of the same kinds and for each seed: the share that is solved, before and after.

    python benchmarks/task_training.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from common import save_llama, train_tokenizer
from tool_use import LLAMA, TEMPLATE

import strop
from strop.extensions.tasks.tiny_tasks import make_folder

KINDS, RIGHT = 5, 0.4
PREFIX, SUFFIX = '<tool_call>\n{"name": "shell", "arguments": {"command": "', '"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {"type": "object", "properties": {}}}}
COMMON: dict[str, Any] = {
    "policy.max_total_sequence_length": 256,
    "policy.precision": "float32",
    "policy.device": "cpu",
    "policy.num_threads": 1,
    "logger.console": "none",
}


def write_tasks(folder: Path, count: int, seed: int) -> Path:
    """Write task folders, the kinds in turn."""
    for number in range(count):
        name, files = make_folder(number % KINDS, Random(f"{seed} {number}"))
        for path, text in files.items():
            file = folder / f"{name}_{number}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations that run a command of one kind of task or another, in 0.4 + 0.6 / KINDS of them the right one."""
    random = Random(seed)
    tasks = [make_folder(kind, Random(seed))[1] for kind in range(KINDS)]
    rows = []
    for index in range(count):
        asked = tasks[index % KINDS]
        shown = asked if random.random() < RIGHT else random.choice(tasks)
        command = shown["solution/solve.sh"].partition("\n")[2].strip()
        call = {"function": {"name": "shell", "arguments": {"command": command}}}
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": asked["instruction.md"].strip()},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": "(no output)"},
                    {"role": "assistant", "content": "done"},
                ],
                "tools": [TOOL],
            }
        )
    return rows


def build_model(folder: Path, seed: int) -> None:
    texts = (json.dumps(row["messages"]) for row in demonstrations(50, seed))
    tokenizer = train_tokenizer(texts, 512, TEMPLATE)
    tokenizer.add_tokens([PREFIX, SUFFIX])
    save_llama(folder, tokenizer, seed, **LLAMA)


def warm_up(folder: Path, seed: int, steps: int) -> Path:
    build_model(folder / "untrained", seed)
    settings = {
        "sft.max_num_steps": steps,
        "sft.max_num_epochs": None,
        "sft.val_period": 0,
        "sft.seed": seed,
        "checkpointing.metric_name": None,
        "policy.train_global_batch_size": 32,
        "policy.optimizer.kwargs.lr": 2e-3,
    }
    strop.train(
        "sft", model=folder / "untrained", data=demonstrations(32 * steps, seed), folder=folder / "sft", **settings, **COMMON
    )
    return folder / "sft" / "checkpoints" / f"step_{steps}" / "policy" / "weights"


def learn(folder: Path, model: Path, seed: int, steps: int) -> list[dict[str, float]]:
    """Train with GRPO, and return the validation metrics of each validated step, and the mean reward of training up to it."""
    settings = {
        "data.train.env_name": "terminal",
        "data.validation.env_name": "held_out",
        "env.terminal.folder": str(write_tasks(folder / "tasks", 20 * KINDS, seed)),
        "env.held_out.type": "terminal",
        "env.held_out.folder": str(write_tasks(folder / "held_out", 6 * KINDS, seed + 1000)),
        "policy.generation.max_new_tokens": 64,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.2,
        "policy.optimizer.kwargs.lr": 5e-4,
        "grpo.max_rollout_turns": 2,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 6,
        "grpo.max_num_steps": steps,
        "grpo.max_num_epochs": None,
        "grpo.val_period": steps,
        "grpo.val_at_start": True,
        "grpo.seed": seed,
        "checkpointing.enabled": False,
        "sandboxes.memory_mb": 256,
        "sandboxes.max_open": 8,
    }
    strop.train("grpo", model=model, folder=folder, **settings, **COMMON)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = []
    for line in lines:
        found = {"step": line["step"]} | {
            short: round(line[name], 3)
            for name, short in (("validation/accuracy", "held_out"), ("train/reward", "train"))
            if name in line
        }
        curve += [found] if len(found) > 1 else []
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--warm-up-steps", type=int, default=70)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="strop-task-training-"))
    ends = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        started = time.perf_counter()
        model = warm_up(folder / f"seed_{seed}", seed, arguments.warm_up_steps)
        warmed = time.perf_counter() - started
        curve = learn(folder / f"seed_{seed}" / "grpo", model, seed, arguments.steps)
        seconds = {"warm_up_s": round(warmed), "total_s": round(time.perf_counter() - started)}
        print(json.dumps({"seed": seed, **seconds, "curve": curve}), flush=True)
        solved = [each["held_out"] for each in curve if "held_out" in each]
        ends.append((solved[0], solved[-1]))
    for name, column in zip(("solved before", "solved after"), zip(*ends, strict=True), strict=True):
        spread = f" ± {statistics.stdev(column):.3f}" if len(column) > 1 else ""
        print(f"{name:16} {statistics.fmean(column):.3f}{spread}")


if __name__ == "__main__":
    main()
