"""Section ``checkpointing``: what is saved, when, and what is kept."""

from __future__ import annotations

from pydantic import Field

from strop.config.model import Model


class CheckpointingConfig(Model):
    """What is saved, when, and what is kept."""

    enabled: bool = Field(True, description="Save checkpoints.")
    checkpoint_dir: str = Field("results/grpo", min_length=1, description="Folder of the step_N folders.")
    metric_name: str | None = Field(
        "val:accuracy", description="Metric that ranks checkpoints, train:NAME or val:NAME; null keeps the newest."
    )
    higher_is_better: bool = Field(True, description="Whether a larger metric is better.")
    keep_top_k: int | None = Field(3, ge=1, description="Checkpoints kept, besides the newest; null keeps all (checkpoints).")
    save_period: int = Field(10, ge=0, description="Save every so many steps; 0 turns it off (steps).")
    save_optimizer: bool = Field(
        True, description="Save optimizer and schedule too; without them a run cannot be resumed exactly."
    )
    async_save: bool = Field(
        False,
        description="Learners on several ranks put aside what is to be saved, and train on while it is written; one process saves first "
        "and then goes on.",
    )
    save_on_sigterm_within: float | None = Field(
        120,
        ge=0,
        description="After SIGTERM the step in progress is finished and saved, if that takes no longer; null waits, 0 ends at once "
        "(seconds).",
    )
    checkpoint_must_save_by: str | None = Field(
        None,
        pattern=r"^\d+:\d+:\d+:\d+$",
        description="Once the run has lasted so long, it saves after the step in progress and ends; null is never (DD:HH:MM:SS).",
    )
    resume: bool = Field(True, description="Continue from the newest checkpoint in checkpoint_dir, if there is one.")

    @property
    def must_save_after(self) -> float | None:
        """``checkpoint_must_save_by`` in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def saves(self) -> bool:
        """Whether anything is saved at all."""
        return self.enabled and self.save_period > 0


class RecordedCheckpointingConfig(CheckpointingConfig):
    """What is saved, when, and what is kept, where runs are measured by a loss."""

    checkpoint_dir: str = Field("results/recorded", min_length=1, description="Folder of the step_N folders.")
    metric_name: str | None = Field(
        "val:loss", description="Metric that ranks checkpoints, train:NAME or val:NAME; null keeps the newest."
    )
    higher_is_better: bool = Field(False, description="Whether a larger metric is better.")
