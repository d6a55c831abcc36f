"""What a replay needs: the configuration of the run, the weights before the step, and what the steps trained on."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.checkpointing.saved_model import find_checkpoints, list_steps
from strop.config import TRAINING_RUNS, RolloutRunConfig, TrainingRunConfig, load_config
from strop.config.source import yaml_text
from strop.config.source.keys import flatten
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import read_changes, read_first_config, read_run_starts
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.run_algorithm import make_run_algorithm


class ReplayError(ValueError):
    """A step cannot be replayed. The message says why, and which steps can."""


Configured = tuple[TrainingRunConfig, Algorithm]
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
    section: str
    checkpoint: Path | None  # to begin with; None: the initial model
    logged: Mapping[int, Mapping[str, float]]  # what each step logged

    @property
    def source(self) -> str:
        return "the initial model" if self.checkpoint is None else self.checkpoint.name

    def load(self, overrides: Sequence[str] = ()) -> Configured:
        """Return the configuration of the step with overrides, and its algorithm. Raises ReplayError, ConfigError, ValueError."""
        fixed = (*FIXED, *(f"{self.section}.{name}" for name in FIXED_IN_SECTION))
        for override in overrides:
            key = override.partition("=")[0].lstrip("~+")
            if any(key == name or key.startswith(f"{name}.") for name in fixed):
                raise ReplayError(
                    f"{key}: the rollouts of a step, its model and its data are what they are, so this cannot be changed; a replay changes "
                    f"the algorithm and its parts, the loss (loss_fn), optimizer, schedule and clipping of the gradient"
                )
        here = f"logger.log_dir={json.dumps(str(self.folder))}"  # which may have been written relative to another folder
        settings = [*find_earlier_settings(self.folder, self.step), *overrides, here]
        file, root = self.folder / "config.yaml", TRAINING_RUNS[self.section]
        config: TrainingRunConfig = load_config(file, settings, root=root, check=False).config
        return config, make_run_algorithm(config)


def plan_replay(folder: Path, step: int) -> ReplayPlan:
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
    sampled = issubclass(TRAINING_RUNS[section], RolloutRunConfig)
    readable = RolloutStore(folder, "none").steps() if sampled else sorted(metrics)
    _check_beginning(step, _find_exact(folder, values, list_steps(saved)), readable)
    return ReplayPlan(
        folder=folder,
        step=step,
        section=section,
        checkpoint=None if step == 1 else saved / f"step_{step - 1}",
        logged=metrics,
    )


def _find_exact(folder: Path, values: Mapping[str, Any], saved: Sequence[int]) -> frozenset[int]:
    """Return the steps after which the run can go on as it went: those saved whole and, of checkpoints without the state of the
    optimizer, those that the run itself went on from."""
    if values.get("checkpointing", {}).get("save_optimizer", True):
        return frozenset((0, *saved))
    return frozenset({0, *saved} & {0, *(start.after_step for start in read_run_starts(folder))})


def _check_beginning(step: int, exact: Collection[int], readable: Sequence[int]) -> None:
    """Raise ReplayError unless the weights before the step, and what it trained on, can be read. ``exact``: steps with such weights."""
    can = _describe([each for each in sorted(readable) if each - 1 in exact])
    if step not in readable:
        raise ReplayError(f"step {step} stored no rollouts (logger.rollouts), and they cannot be sampled again; {can}")
    if step - 1 not in exact:
        raise ReplayError(
            f"step {step} began with the weights of step {step - 1}, and there is no checkpoint of them, or none with the optimizer "
            f"(checkpointing.save_period, keep_top_k, save_optimizer); {can}"
        )


def _describe(steps: Sequence[int], what: str = "steps that can be replayed exactly:") -> str:
    shown = ", ".join(map(str, steps[:12])) + (f", ... {steps[-1]}" if len(steps) > 12 else "")
    return f"{what} {shown or 'none'}"


def find_earlier_settings(folder: Path, step: int) -> tuple[str, ...]:
    """Return the overrides that make the newest configuration in a log folder that of ``step``."""
    known = {key for key, _ in flatten(read_first_config(folder))}
    then: dict[str, object] = {}
    for first, changed in read_changes(folder):
        for key, (old, _) in changed.items() if first > step else ():
            then.setdefault(key, old)
    # A key that the first configuration lacks was added to a section that takes any key: it is removed, not set to null.
    return tuple(f"~{key}" if old is None and key not in known else f"{key}={json.dumps(old)}" for key, old in then.items())
