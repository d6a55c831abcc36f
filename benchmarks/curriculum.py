"""Does a curriculum raise the reward faster? Several seeds, each with and without one, by the accuracy on a fixed validation set.

    python benchmarks/curriculum.py --output curriculum.json                  # half an hour on two cores

A tiny model (two layers, untrained) first imitates noisy answers, ``strop sft``. Moderate: the digit that a letter asks for is right in
one of six, else any. Hard: four of five answers are digits that nothing asks for, the others any, so that one of fifty is right. Then
``strop grpo`` trains on 48 letters: 8 with a digit each to learn, 32 whose answer cannot be written, 8 that anything solves. Validation is
on the 8 that can be learnt. The area under its curve is the mean over the validations of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.kinds import recorded_config, write_rows
from loop.mixed_tasks import LETTERS, mixed_config
from loop.runs import metrics_of, overrides, strop
from loop.tiny import build_tiny

TESTS = Path(__file__).resolve().parents[1] / "tests"
ANSWERS = "31415926"
COMMON = "078"  # digits that nothing asks for
REGIMES = {"moderate": (1 / 6, 0.0), "hard": (0.0, 0.8)}  # of the imitated answers: right where there is one; common digits
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "success_rate": {"data.curriculum.name": "success_rate"},
    "difficulty": {
        "data.curriculum.name": "difficulty",
        "data.curriculum.difficulty.by": "level",
        "data.curriculum.difficulty.start": 1 / 3,
        "data.curriculum.difficulty.steps": 100,
    },
}


def imitate(folder: Path, seed: int, steps: int, right: float, common: float) -> Path:
    """Train a tiny model to answer letters with digits, and return the folder of its weights."""
    noise, rows = random.Random(seed), []
    for place in range(4800):
        letter, digit = LETTERS[place % 48], noise.choice(COMMON if noise.random() < common else "0123456789")
        known = ANSWERS[place % 48] if place % 48 < len(ANSWERS) and noise.random() < right else digit
        rows.append({"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": known}]})
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "letters.jsonl", rows)
    changes = {
        "policy.train_global_batch_size": 64,
        "policy.train_micro_batch_size": 64,
        "sft.seed": seed,
        "sft.max_num_steps": steps,
        "sft.val_period": 0,
        "data.train.dataset_name": "letters.jsonl",
        "data.validation.dataset_name": ...,
        "checkpointing.metric_name": None,
        "checkpointing.save_period": steps,
    }
    settings = {**recorded_config("sft", build_tiny(folder / "model", seed=seed)), **changes}
    outcome = strop("sft", *overrides(settings), folder=folder, timeout=600)
    assert outcome.code == 0, outcome.err
    return folder / "results" / f"step_{steps}" / "policy" / "weights"


def play(folder: Path, model: Path, seed: int, steps: int, lr: float, **changes: Any) -> dict[str, list[float]]:
    """Train with GRPO and return the accuracy of each validation, and of each step the share of groups with a signal."""
    own: dict[str, Any] = {
        "env.mixed.answers": ANSWERS,
        "env.mixed.any_answer": False,
        "policy.optimizer.kwargs.lr": lr,
        "logger.rollouts": "none",
    }
    outcome = strop("grpo", *overrides(mixed_config(model, seed, steps, **own, **changes)), folder=folder, timeout=1800)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(folder / "logs")
    return {
        "accuracy": [line["validation/accuracy"] for line in metrics.values() if "validation/accuracy" in line],
        "signal": [1 - line["train/groups_without_signal"] for step, line in metrics.items() if step],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    )  # the environment's module
    results = []
    for regime, seed in itertools.product(options.regimes, options.seeds):
        with tempfile.TemporaryDirectory() as name:
            start = imitate(Path(name) / "sft", seed, options.sft_steps, *REGIMES[regime])
            for arm in options.arms:
                result = play(Path(name) / arm, start, seed, options.steps, options.lr, **ARMS[arm])
                results.append({"regime": regime, "seed": seed, "arm": arm, **result})
                accuracy = result["accuracy"]
                reached = next((5 * place for place, value in enumerate(accuracy) if value >= 0.75), None)
                print(
                    f"{regime:8} seed {seed} {arm:12}: area {statistics.mean(accuracy):.3f}, accuracy {accuracy[0]:.3f} -> "
                    f"{accuracy[-1]:.3f}, 0.75 from step {reached} on, groups with a signal {statistics.mean(result['signal']):.3f}",
                    flush=True,
                )
    if options.output:
        options.output.write_text(json.dumps({"arms": ARMS, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
