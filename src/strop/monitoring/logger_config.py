"""Section ``logger``: where metrics and rollouts go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig, subsection
from strop.problems import Problem


class WandbConfig(BaseConfig):
    """Weights & Biases."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    project: str = Field("strop", description="Project name.")
    entity: str | None = Field(None, description="Team or user that the project belongs to; null is the one that is logged in.")
    name: str | None = Field(None, description="Run name; null is run_name, and without one Weights & Biases chooses.")


class TensorboardConfig(BaseConfig):
    """TensorBoard."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    log_dir: str | None = Field(None, description="Folder of the event files; null is tensorboard in the run's log folder.")


class LoggerConfig(BaseConfig):
    """Where metrics and rollouts go."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    log_dir: str = Field("logs", min_length=1, description="Folder of the runs' log folders, each with a metrics.jsonl.")
    num_val_samples_to_print: int = Field(0, ge=0, description="Rollouts printed at each validation (rollouts).")
    console: Literal["auto", "live", "plain", "none"] = Field(
        "auto", description="live redraws, plain prints lines; auto is live in a terminal and plain elsewhere."
    )
    rollouts: Literal["parquet", "jsonl", "none"] = Field(
        "parquet", description="Format of the stored rollouts, those of every step."
    )
    token_columns: Literal["sampled", "all", "none"] = Field(
        "sampled",
        description="What the update says of each token, stored with the rollouts: of sampled ones, of all (recorded data is stored too), "
        "or none.",
    )
    wandb_enabled: bool = Field(False, description="Log to Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Log to TensorBoard.")
    metric_aliases: bool = Field(
        True, description="Log metrics to these two under the names of TRL and verl too, such as train/completions/mean_length."
    )
    wandb: WandbConfig = subsection(WandbConfig)
    tensorboard: TensorboardConfig = subsection(TensorboardConfig)

    def errors(self, key: str) -> Iterator[Problem]:
        for name in ("wandb", "tensorboard"):
            if getattr(self, f"{name}_enabled") and not packages.is_installed(name):
                yield Problem(
                    f"{key}.{name}_enabled",
                    f"found true, but the package {name} is not installed",
                    f"Run pip install 'strop[{name}]', or set {key}.{name}_enabled=false.",
                )
