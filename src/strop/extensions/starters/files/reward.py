"""The rewards of grpo.yaml and eval.yaml. Replace them with your own."""

from strop import Rollout, Task

TEAMS = ("billing", "delivery", "account", "technical")


def correct(task: Task, rollout: Rollout) -> bool:
    """Whether the first team named by the completion is the right one."""
    named = [word for word in (word.strip(".,:;!*'\"").lower() for word in rollout.text.split()) if word in TEAMS]
    return named[:1] == [task.answer]


def brief(task: Task, rollout: Rollout) -> float:
    """1 for one word, less for each further word, 0 from eleven on."""
    return max(0.0, 1 - 0.1 * max(0, len(rollout.text.split()) - 1))
