"""What a replay needs: the configuration of the run, the weights before the step, and what the steps trained on."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.algorithms.base import Algorithm
from strop.build.algorithm.run_algorithm import make_run_algorithm
from strop.build.replay.earlier_settings import find_earlier_settings, split_at_changes
from strop.build.replay.replay_error import ReplayError
from strop.checkpointing.saved_model import find_checkpoints
from strop.checkpointing.step_folders import list_steps
from strop.config import TRAINING_RUNS, RolloutRunConfig, TrainingRunConfig, load_config
from strop.config.source import yaml_text
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import read_run_starts
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics

Weights = Literal["exact", "nearest"]
Configured = tuple[TrainingRunConfig, Algorithm]
FIXED = (  # what a step was made with before it was trained on
    "policy.model_name", "policy.tokenizer", "policy.generation", "policy.max_total_sequence_length", "policy.dtensor_cfg.lora_cfg",
    "policy.megatron_cfg", "data", "env", "cluster", "logger", "checkpointing", "run_name", "sandbox",
)  # fmt: skip
FIXED_IN_SECTION = ("num_prompts_per_step", "num_generations_per_prompt", "max_rollout_turns", "seed")
TRAINING_PHASES = ("packing", "logprobs", "policy_training")  # of a step, that are run again


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """A step that can be replayed."""

    folder: Path  # the log folder of the run
    step: int
    section: str
    checkpoint: Path | None  # to begin with; None: the initial model
    between: range  # the steps that are trained again on the way from there, as they were
    exact: bool  # the weights after them are those that the step began with
    logged: Mapping[int, Mapping[str, float]]  # what each step logged
    ready: Sequence[int] = ()  # the steps whose weights are kept, so that none is trained again on the way

    @property
    def source(self) -> str:
        return "the initial model" if self.checkpoint is None else self.checkpoint.name

    @property
    def parts(self) -> Sequence[range]:
        """The steps to train again and the step itself, cut where the run was continued with other settings."""
        return split_at_changes(self.folder, range(self.between.start, self.step + 1))

    @property
    def expected_seconds(self) -> float:
        """How long the steps on the way took to train when they ran."""
        phases = [f"timing/train/{phase}" for phase in TRAINING_PHASES]
        return sum(self.logged.get(step, {}).get(phase, 0.0) for step in self.between for phase in phases)

    def load(self, step: int, overrides: Sequence[str] = ()) -> Configured:
        """Return the configuration of a step with overrides, and its algorithm. Raises ReplayError, ConfigError, ValueError."""
        fixed = (*FIXED, *(f"{self.section}.{name}" for name in FIXED_IN_SECTION))
        for override in overrides:
            key = override.partition("=")[0].lstrip("~+")
            if any(key == name or key.startswith(f"{name}.") for name in fixed):
                raise ReplayError(
                    f"{key}: the rollouts of a step, its model and its data are what they are, so this cannot be changed; a replay changes "
                    f"the algorithm and its parts, the loss (loss_fn), optimizer, schedule and clipping of the gradient"
                )
        here = f"logger.log_dir={json.dumps(str(self.folder))}"  # which may have been written relative to another folder
        settings = [*find_earlier_settings(self.folder, step), *overrides, here]
        file, root = self.folder / "config.yaml", TRAINING_RUNS[self.section]
        config: TrainingRunConfig = load_config(file, settings, root=root, check=False).config
        return config, make_run_algorithm(config)


def plan_replay(
    folder: Path, step: int, weights: Weights = "exact", *, retrain: int | None = None, damaged: Collection[Path] = ()
) -> ReplayPlan:
    """Find what a replay of ``step`` needs.

    ``retrain``: the most steps to train again on the way to it; None: any number. ``damaged``: checkpoints that cannot be begun with.
    Raises ReplayError, which says which steps can be replayed."""
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
    steps = [each for each in list_steps(saved) if saved / f"step_{each}" not in damaged]
    beginnings = _Beginnings(
        saved=(0, *steps),
        exact=_find_exact(folder, values, steps),
        readable=frozenset(RolloutStore(folder, "none").steps() if _samples(section) else metrics),
        retrain=retrain,
    )
    begin = beginnings.choose(step, weights, recorded=not _samples(section))
    return ReplayPlan(
        folder=folder,
        step=step,
        section=section,
        checkpoint=None if begin == 0 else saved / f"step_{begin}",
        between=range(step, step) if weights == "nearest" else range(begin + 1, step),
        exact=weights == "exact" or (begin == step - 1 and begin in beginnings.exact),
        logged=metrics,
        ready=[each + 1 for each in sorted(beginnings.exact) if each + 1 in beginnings.readable],
    )


def _samples(section: str) -> bool:
    return issubclass(TRAINING_RUNS[section], RolloutRunConfig)


def _find_exact(folder: Path, values: Mapping[str, Any], saved: Sequence[int]) -> frozenset[int]:
    """Return the steps after which the run can go on as it went: those saved whole and, of checkpoints without the state of the
    optimizer, those that the run itself went on from."""
    if values.get("checkpointing", {}).get("save_optimizer", True):
        return frozenset((0, *saved))
    return frozenset({0, *saved} & {0, *(start.after_step for start in read_run_starts(folder))})


@dataclass(frozen=True, kw_only=True)
class _Beginnings:
    """The weights that a replay may begin with, each named by the step before it; 0 is the initial model."""

    saved: Sequence[int]
    exact: Collection[int]  # of these, the ones with which training goes on as it did
    readable: Collection[int]  # steps whose rollouts, or data, can be read again
    retrain: int | None

    def choose(self, step: int, weights: Weights, *, recorded: bool) -> int:
        """Return the weights to begin with. Raises ReplayError."""
        if step not in self.readable:
            raise ReplayError(
                f"step {step} stored no rollouts (logger.rollouts), and they cannot be sampled again; {self._describe_replayable()}"
            )
        if weights == "nearest":
            if recorded and step - 1 not in self.saved:
                raise ReplayError(
                    f"--weights nearest: the run reads recorded data from the place that goes with its weights, and there is no checkpoint "
                    f"of step {step - 1}; leave it out, and the steps before are trained again"
                )
            return max(each for each in self.saved if each < step)
        begin = max(each for each in self.exact if each < step)
        between = range(begin + 1, step)
        closest = max(each for each in self.saved if each < step)
        offer = f", or --weights nearest begins with {_name(closest)}, with which nothing is as it was"
        nearest = "" if recorded else offer
        if missing := [each for each in between if each not in self.readable]:
            raise ReplayError(
                f"step {step} began with the weights of step {step - 1}, which are not kept (checkpointing.save_period, "
                f"checkpointing.keep_top_k) and cannot be trained again from {_name(begin)}: step {missing[0]} stored no rollouts "
                f"(logger.rollouts){_count_more(missing)}; {self._describe_replayable()}{nearest}"
            )
        if self.retrain is not None and len(between) > self.retrain:
            count = f"{len(between)} steps" if len(between) > 1 else "1 step"
            raise ReplayError(
                f"step {step} began with the weights of step {step - 1}, and there is no checkpoint of them (checkpointing.save_period, "
                f"checkpointing.keep_top_k): {count} would be trained again from {_name(begin)}, and --retrain "
                f"allows {self.retrain}; {self._describe_replayable()}{nearest}"
            )
        return begin

    def _describe_replayable(self) -> str:
        found: list[int] = []
        distance = 0  # from the newest exact weights, over steps that can all be trained again; -1: none
        for step in range(1, max(self.readable, default=0) + 1):
            distance = 0 if step - 1 in self.exact else distance
            can_train = step in self.readable and distance >= 0
            if can_train and (self.retrain is None or distance <= self.retrain):
                found.append(step)
            distance = distance + 1 if can_train else -1
        return _describe(found)


def _name(begin: int) -> str:
    return f"the checkpoint of step {begin}" if begin else "the initial model"


def _count_more(missing: Sequence[int]) -> str:
    return f", nor did {len(missing) - 1} more" if len(missing) > 1 else ""


def _describe(steps: Sequence[int], what: str = "steps that can be replayed exactly:") -> str:
    shown = ", ".join(map(str, steps[:12])) + (f", ... {steps[-1]}" if len(steps) > 12 else "")
    return f"{what} {shown or 'none'}"
