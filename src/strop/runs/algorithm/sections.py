"""The kind of run (section of the configuration) that an algorithm belongs to, and whether it fits the run."""

from __future__ import annotations

from collections.abc import Mapping

from strop.algorithm_factory import find_algorithm
from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.critic import VALUES
from strop.algorithms.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS

SECTION_DESCRIPTIONS: Mapping[str, str] = {  # section -> what the algorithms of this kind of run learn from
    "grpo": "learns from the rewards of rollouts",
    "ppo": "learns from rollouts with a critic",
    "distillation": "learns from rollouts with a teacher",
    "sft": "learns from recorded conversations",
    "dpo": "learns from recorded preferences, paired or unpaired",
    "rm": "scores whole rollouts, as a reward model does",
}


def infer_section(algorithm: Algorithm) -> str:
    """Return the section of the configuration (the kind of run) that provides what an algorithm needs."""
    if algorithm.recorded_data:
        return "rm" if algorithm.predict == "last_token" else "sft" if algorithm.recorded_data == "conversations" else "dpo"
    if VALUES in algorithm.requires:
        return "ppo"
    return "distillation" if algorithm.requires & {TEACHER_LOGPROBS, TEACHER_CANDIDATES} else "grpo"


def find_section(name: str) -> str:
    """Return the section (the kind of run) of the algorithm ``name``, or of a kind of run. Raises ValueError for an unknown name."""
    if name in SECTION_DESCRIPTIONS:
        return name
    kind = find_algorithm(name)
    try:
        return infer_section(kind())
    except TypeError:  # it has options without a default
        return {"conversations": "sft", "preferences": "dpo", "judgements": "dpo"}.get(kind.recorded_data, "grpo")


def check_section(name: str, algorithm: Algorithm, section: str) -> None:
    """Raise ValueError if an algorithm belongs to another kind of run."""
    if (expected := infer_section(algorithm)) != section:
        raise ValueError(
            f"algorithm.name: {name} {SECTION_DESCRIPTIONS[expected]}, so it belongs to strop {expected}; an algorithm of strop {section} "
            f"{SECTION_DESCRIPTIONS[section]}. Choose another algorithm, or run strop {expected}"
        )


def check_algorithm(algorithm: Algorithm, plan: Plan) -> None:
    """Raise ValueError with every problem that the algorithm reports for the plan of the run."""
    if problems := list(algorithm.validate(plan)):
        raise ValueError("the algorithm does not fit the run:\n  " + "\n  ".join(problems))
