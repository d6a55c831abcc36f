"""The reward of grpo.yaml and eval.yaml. The first function is the one they name; put your own in its place."""

from strop import Rollout, Task


def correct(task: Task, rollout: Rollout) -> bool:
    """Whether the completion is the reference answer, but for case and a full stop."""
    return rollout.text.strip().rstrip(".").lower() == task.answer


def short(task: Task, rollout: Rollout) -> float:
    """1 for a word, 0 from ten on: for rewards of several functions, `rewards: [reward.py:correct, reward.py:short]`."""
    return max(0.0, 1 - (len(rollout.text.split()) - 1) / 9)
