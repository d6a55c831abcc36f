"""The keys of ``data.curriculum``: the order in which an entry's tasks come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from strop.base_config import BaseConfig, changed_keys, subsection
from strop.data.task_order import TaskOrder
from strop.problems import Problem
from strop.user_code import suggest_names

NO_CURRICULUM = "none"
BUILT_IN = ("difficulty", "success_rate")


class DifficultyConfig(BaseConfig):
    """From easy tasks to hard ones, over a number of steps."""

    by: str | None = Field(
        None,
        description="Difficulty of a task: a column of numbers (dotted if nested), or file.py:name, a function that returns a number for "
        "a task.",
    )
    order: Literal["easy_to_hard", "hard_to_easy"] = Field("easy_to_hard", description="Which tasks come first.")
    pacing: Literal["linear", "root", "step"] = Field(
        "linear", description="How the window of tasks grows with the steps: evenly, with the square root, or in stages."
    )
    steps: int = Field(100, ge=1, description="When the window reaches the last task (steps).")
    start: float = Field(0.2, gt=0, le=1, description="Window of the first step, as a share of the entry's tasks.")
    stages: int = Field(5, ge=1, description="For pacing=step, how often the window grows (times).")
    window: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest window, as a share of the entry's tasks: earlier ones leave it at the other end; null keeps them all.",
    )


class SuccessRateConfig(BaseConfig):
    """Tasks that the policy solves sometimes, by its results on them."""

    decay: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Factor by which earlier results of a task count less with each new result, and with each epoch of draws without "
        "one, because the policy changes; 1 never forgets.",
    )
    repeats: float = Field(
        2.0,
        ge=1,
        description="Maximum number of times a task is drawn per epoch of draws, evenly spaced. Higher values learn faster if few tasks "
        "are learnable now, but risk learning those at the expense of others (times).",
    )
    threshold: float | None = Field(
        None, description="Score from which a rollout is a success; null is the score itself, between 0 and 1."
    )


class CurriculumKeys(TaskOrder):
    """The order of the training tasks of each entry; an entry's share of the stream is set by its weight."""

    name: str = Field(
        NO_CURRICULUM,
        description="none is the shuffled order; difficulty, success_rate, or file.py:Class, a subclass of "
        "strop.extensions.curriculum.base.Curriculum. With a curriculum, tasks are drawn with replacement, and an epoch has as many "
        "draws as there are tasks.",
        examples=[NO_CURRICULUM, *BUILT_IN],
    )
    reward: str | None = Field(
        None,
        description="Reward whose value is a rollout's score; null is the accuracy of the environment, else its whole reward.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options of a custom class.")
    difficulty: DifficultyConfig = subsection(DifficultyConfig)
    success_rate: SuccessRateConfig = subsection(SuccessRateConfig)

    @property
    def enabled(self) -> bool:
        return self.name != NO_CURRICULUM

    def describe(self) -> str:
        return f"the curriculum {self.name} draws them with replacement, and an epoch is as many draws as there are tasks"

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig

        if self.enabled and isinstance(config, TrainingRunConfig) and not isinstance(config, RolloutRunConfig):
            yield Problem(
                f"{key}.name",
                f"found {self.name}, but a curriculum chooses tasks to sample, and {config.section} reads recorded data",
                "Set it to none; data.shuffle=false keeps the order of the rows.",
            )

    def errors(self, key: str) -> Iterator[Problem]:
        if self.enabled and self.name not in BUILT_IN and ":" not in self.name:
            yield Problem(
                f"{key}.name",
                f"found {self.name!r}, which is no curriculum{suggest_names(self.name, (NO_CURRICULUM, *BUILT_IN))}",
                "Set it to one of these, or to a class as file.py:Class.",
            )
        if self.name == "difficulty" and self.difficulty.by is None:
            yield Problem(
                f"{key}.difficulty.by",
                "found null, so the difficulty of tasks is unknown",
                "Set it to a column of numbers, or to a function of a task as file.py:name.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        unused = [
            changed for name in BUILT_IN if name != self.name for changed in changed_keys(f"{key}.{name}", getattr(self, name))
        ]
        unused += [f"{key}.reward"] if self.reward is not None and self.name in (NO_CURRICULUM, "difficulty") else []
        unused += [f"{key}.kwargs"] if self.kwargs and self.name in (NO_CURRICULUM, *BUILT_IN) else []
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield Problem(unused[0], f"{', '.join(unused)} {verb} no effect: {key}.name is {self.name}")
