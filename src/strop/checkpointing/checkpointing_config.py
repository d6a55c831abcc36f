"""Section ``checkpointing``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop.base_config import BaseConfig, PathText
from strop.problems import Problem

# Values that metric_name may have after train:. A name with a slash is a metric of an environment or algorithm.
TRAIN_METRICS = (
    "reward",
    "loss",
    "grad_norm",
    "entropy",
    "kl_penalty",
    "token_mult_prob_error",
    "gen_kl_error",
    "mean_gen_tokens_per_sample",
)


def _read_true_or_false(value: object) -> object:
    """Read the values of earlier versions."""
    return {True: "auto", False: "never"}[value] if isinstance(value, bool) else value


Strings = Annotated[tuple[str, ...], Field(strict=False)]
Resume = Annotated[Literal["auto", "must", "never", "previous"], BeforeValidator(_read_true_or_false)]


class CheckpointingConfig(BaseConfig):
    """What to save and when, and which checkpoints to keep."""

    unrelated_keys: ClassVar[tuple[str, ...]] = (
        "enabled",
        "checkpoint_dir",
        "async_save",
        "save_on_sigterm_within",
        "checkpoint_must_save_by",
        "resume",
        "accept_changed",
    )

    validation_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "reward", "avg_length")

    enabled: bool = Field(True, description="Save checkpoints.")
    checkpoint_dir: PathText = Field("results/grpo", min_length=1, description="Folder of the step_N folders.")
    metric_name: str | None = Field(
        "val:accuracy", description="Metric that ranks checkpoints, train:NAME or val:NAME; null keeps the newest."
    )
    higher_is_better: bool = Field(True, description="Whether a larger metric is better.")
    keep_top_k: int | None = Field(3, ge=1, description="Checkpoints to keep besides the newest; null keeps all (checkpoints).")
    save_period: int = Field(10, ge=0, description="Save every this many steps; 0 turns saving off (steps).")
    save_optimizer: bool = Field(
        True, description="Save the optimizer and the schedule too; without them a run cannot resume exactly."
    )
    async_save: bool = Field(
        False,
        description="Write checkpoints in the background while training continues. Only on several ranks; a single process waits for the "
        "save.",
    )
    save_on_sigterm_within: float | None = Field(
        120,
        ge=0,
        description="After SIGTERM, finish the step in progress and save it if that takes no longer than this; null always "
        "waits, 0 exits at once (seconds).",
    )
    checkpoint_must_save_by: str | None = Field(
        None,
        pattern=r"^\d+:\d+:\d+:\d+$",
        examples=["00:04:00:00"],
        description="Once the run has lasted this long, save after the step in progress and exit; null is never (DD:HH:MM:SS).",
    )
    resume: Resume = Field(
        "auto",
        description="auto (or true): continue from the newest checkpoint in checkpoint_dir, if there is one; must: without one, end with "
        "an error; previous: move damaged checkpoints away and continue from the newest intact one; never (or false): start over, and "
        "move existing checkpoints to previous_N.",
    )
    accept_changed: Strings = Field(
        (),
        description="Keys whose value is unchanged but whose data, weights, tokenizer or prompts may have changed since the run began, "
        "such as data.train.dataset_name; all means every key. Otherwise a run is not resumed with changed contents.",
    )

    @property
    def save_deadline_seconds(self) -> float | None:
        """``checkpoint_must_save_by`` in seconds; None if it is not set."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def saving_enabled(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.enabled and self.save_period > 0

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_metric(key)
        yield from self._check_resume(key)

    def warnings(self, key: str) -> Iterator[Problem]:
        yield from self._warn_unused_deadline(key)

    def _check_metric(self, key: str) -> Iterator[Problem]:
        if not self.enabled or self.metric_name is None:
            return
        kind, _, metric = self.metric_name.partition(":")
        metrics = {"train": TRAIN_METRICS, "val": self.validation_metrics}
        if not metric or kind not in metrics or (metric not in metrics[kind] and "/" not in metric):
            choices = ", ".join(f"{kind}:{name}" for kind, names in metrics.items() for name in names)
            yield Problem(
                f"{key}.metric_name",
                f"found {self.metric_name!r}, which is not the name of a metric",
                f"Set null (keep the newest), train:group/name, val:group/name, or one of {choices}.",
            )

    def _warn_unused_deadline(self, key: str) -> Iterator[Problem]:
        if self.checkpoint_must_save_by is None or self.saving_enabled:
            return
        off = "enabled" if not self.enabled else "save_period"
        yield Problem(
            f"{key}.checkpoint_must_save_by",
            f"it has no effect: no checkpoints are saved: checkpointing.{off} is {getattr(self, off)}",
            f"Set it to null, or set checkpointing.{off} so that checkpoints are saved.",
        )

    def _check_resume(self, key: str) -> Iterator[Problem]:
        if self.resume in ("must", "previous") and not self.enabled:
            yield Problem(
                f"{key}.resume",
                f"found {self.resume}, but {key}.enabled is false, and without it a run neither saves nor reads checkpoints",
                f"Set {key}.enabled=true, or {key}.resume=auto.",
            )
