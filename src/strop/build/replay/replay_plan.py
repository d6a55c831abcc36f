"""What a replay needs: the configuration of the run, the weights before the step, and what the step trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.algorithms.base import Algorithm
from strop.build.algorithm.run_algorithm import make_run_algorithm
from strop.build.replay.replay_error import ReplayError
from strop.checkpointing.saved_model import find_checkpoints
from strop.checkpointing.step_folders import list_steps
from strop.config import TRAINING_RUNS, RolloutRunConfig, TrainingRunConfig, load_config
from strop.config.source import yaml_text
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics

Weights = Literal["exact", "nearest"]
FIXED = (  # what a step was made with before it was trained on
    "policy.model_name", "policy.tokenizer", "policy.generation", "policy.max_total_sequence_length", "policy.dtensor_cfg.lora_cfg",
    "policy.megatron_cfg", "data", "env", "cluster", "logger", "checkpointing", "run_name", "sandbox",
)  # fmt: skip
FIXED_IN_SECTION = ("num_prompts_per_step", "num_generations_per_prompt", "max_rollout_turns", "seed")


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """A step that can be replayed."""

    folder: Path  # the log folder of the run
    step: int
    values: Mapping[str, object]  # of the run's configuration
    section: str
    checkpoint: Path | None  # None: the initial model
    exact: bool  # the weights are those that the step began with
    logged: Mapping[str, float]  # what the step logged
    previous: Mapping[str, float]  # what the step before logged

    @property
    def source(self) -> str:
        return "the initial model" if self.checkpoint is None else self.checkpoint.name

    def load(self, overrides: Sequence[str]) -> tuple[TrainingRunConfig, Algorithm]:
        """Return the configuration with overrides, and its algorithm. Raises ReplayError, ConfigError, ValueError."""
        fixed = (*FIXED, *(f"{self.section}.{name}" for name in FIXED_IN_SECTION))
        for override in overrides:
            key = override.partition("=")[0].lstrip("~+")
            if any(key == name or key.startswith(f"{name}.") for name in fixed):
                raise ReplayError(
                    f"{key}: the rollouts of a step, its model and its data are what they are, so this cannot be changed; a replay changes "
                    f"the algorithm and its parts, the loss (loss_fn), optimizer, schedule and clipping of the gradient"
                )
        root = TRAINING_RUNS[self.section]
        config: TrainingRunConfig = load_config(self.folder / "config.yaml", overrides, root=root, check=False).config
        return config, make_run_algorithm(config)


def plan_replay(folder: Path, step: int, weights: Weights = "exact") -> ReplayPlan:
    """Find what a replay of ``step`` needs. Raises ReplayError, which says which steps can be replayed."""
    try:
        values, _ = yaml_text.parse((folder / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ReplayError(f"there is no run in {folder}: it has no config.yaml; give its log folder (logger.log_dir)") from error
    section = next((kind for kind in TRAINING_RUNS if isinstance(values, Mapping) and kind in values), None)
    if section is None:
        raise ReplayError(f"{folder / 'config.yaml'} is not the configuration of a training run")
    metrics = {logged: dict(found) for logged, found in read_metrics(folder / METRICS_FILE)}
    if step not in metrics or step < 1:
        trained = sorted(logged for logged in metrics if logged > 0)
        raise ReplayError(f"the run has not trained step {step}; {_describe(trained, 'it trained')}")
    saved = find_checkpoints(folder, values)
    steps = list_steps(saved)
    checkpoint = _choose(folder, step, steps, weights, metrics, recorded=not issubclass(TRAINING_RUNS[section], RolloutRunConfig))
    return ReplayPlan(
        folder=folder,
        step=step,
        values=values,
        section=section,
        checkpoint=None if checkpoint == 0 else saved / f"step_{checkpoint}",
        exact=checkpoint == step - 1,
        logged=metrics[step],
        previous=metrics.get(step - 1, {}),
    )


def _choose(
    folder: Path, step: int, steps: Sequence[int], weights: Weights, metrics: Mapping[int, object], *, recorded: bool
) -> int:
    """Return the step of the checkpoint to begin with, 0 for the initial model. Raises ReplayError."""
    stored = RolloutStore(folder, "none").steps()
    exact = {each + 1 for each in (0, *steps) if each + 1 in metrics and (recorded or each + 1 in stored)}
    if not recorded and step not in stored:
        raise ReplayError(
            f"step {step} stored no rollouts (logger.rollouts), and they cannot be sampled again; {_describe(sorted(exact))}"
        )
    if step - 1 in (0, *steps):
        return step - 1
    earlier = max(each for each in (0, *steps) if each < step)
    if weights == "nearest" and not recorded:
        return earlier
    nearest = "" if recorded else f", or --weights nearest for those of step {earlier}, with which nothing is as it was"
    raise ReplayError(
        f"step {step} began with the weights of step {step - 1}, and there is no checkpoint of them (checkpointing.save_period, "
        f"checkpointing.keep_top_k); {_describe(sorted(exact))}{nearest}"
    )


def _describe(steps: Sequence[int], what: str = "steps that can be replayed exactly:") -> str:
    shown = ", ".join(map(str, steps[:12])) + (f", ... {steps[-1]}" if len(steps) > 12 else "")
    return f"{what} {shown or 'none'}"
