"""Small stored runs with one thing wrong in each, for the page of ``strop view``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from strop.monitoring.rollout_store.rollout_record import TurnRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.stored_steps import make_stored

STEPS = 30
Metrics = dict[str, float]


def _sound(step: int) -> Metrics:
    rise = 1 - math.exp(-step / 12)
    return {
        "train/reward": 0.1 + 0.7 * rise, "train/reward_min": 0.0, "train/reward_max": 1.0, "train/groups_without_signal": 0.2,
        "train/advantages_abs": 0.4, "train/grad_norm": 0.3 + 0.01 * (step % 3), "train/entropy": 1.2 - 0.4 * rise,
        "train/kl_penalty": 0.02 * rise, "train/truncated": 0.05,
        "train/rewards/correct": 0.1 + 0.7 * rise, "train/rewards/brief": 0.2 + 0.6 * rise,
        "answers/same": 0.2, "answers/same_expected": 0.2, "answers/right_unrewarded": 0.0, "timing/train/total_step_time": 1.0,
    }  # fmt: skip


# What is wrong from step 12 on, by the name of the finding; a word of what is said, and one of what to do.
FAULTS: dict[str, tuple[Callable[[int], Metrics], str, str]] = {
    "one_answer": (lambda step: {"answers/same": 0.97}, "gave the same final answer", "Start again from an earlier checkpoint"),
    "one_reward": (
        lambda step: {"train/rewards/correct": 0.1, "train/rewards/brief": min(1.0, step / 25)},
        "from one part alone: brief", "Lower that weight",
    ),
    "entropy_collapsed": (lambda step: {"train/entropy": 0.002}, "below 0.01 nats", "Lower policy.optimizer.kwargs.lr"),
    "all_truncated": (lambda step: {"train/truncated": 1.0}, "cut off by a length limit", "Raise policy.generation.max_new_tokens"),
    "no_signal": (
        lambda step: {"train/groups_without_signal": 1.0, "train/advantages_abs": 0.0}, "rewards that vary", "use_dynamic_sampling=true",
    ),
    "kl_exploded": (lambda step: {"train/kl_penalty": 0.3 * (step - 8)}, "away from the reference", "reference_policy_kl_penalty"),
    "right_unrewarded": (lambda step: {"answers/right_unrewarded": 1.0}, "grader is broken", "check the reward"),
}  # fmt: skip


def write_bad_run(folder: Path, fault: str | None) -> Path:
    """Write a run of 30 steps. ``fault``: a name of ``FAULTS``, or None. Return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("grpo: {seed: 1, max_num_steps: 30}\n", encoding="utf-8")
    changes = (lambda step: {}) if fault is None else FAULTS[fault][0]
    lines = [json.dumps({"step": step, **_sound(step), **(changes(step) if step >= 12 else {})}) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    store = RolloutStore(folder)
    for step in (1, 16, STEPS):
        records = []
        for group in range(4):
            for sample in range(4):
                said = "B" if fault == "one_answer" and step > 12 else "ABCD"[(group + sample * (step < 12)) % 4]
                turn = TurnRecord(
                    role="assistant", text=f"The answer is {said}.", start=0, end=2, sampled=True, versions=(step - 1,)
                )
                right = float(said == "ABCD"[group])
                rewards = {"correct": right, "brief": 1.0 - sample / 4}
                question = ({"role": "user", "content": f"Which of the four is number {group + 1}?"},)
                records.append(
                    make_stored(step, group, sample, task_id=f"rows.jsonl:{group}", completion=turn.text, turns=(turn,),
                                answer="ABCD"[group], reward=right, rewards=rewards, prompt_messages=question)
                )  # fmt: skip
        store.write(step, records)
    return folder
