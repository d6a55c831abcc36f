"""Metrics of a step's rollouts and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.algorithms.base import Outputs, TokenOutputs
from strop.algorithms.functional import varies
from strop.endings import Ending
from strop.types import Batch, Group


def group_metrics(
    kept: Sequence[Group], dropped: Sequence[tuple[Group, object]], staleness: Sequence[int], *, recorded: bool = False
) -> dict[str, float]:
    """Return means over the rollouts that are trained on, and the number of dropped groups by reason.

    For ``recorded`` groups, metrics of rewards, endings and staleness are left out.
    """
    unscored = sum(rollout.unscored for group in (*kept, *(group for group, _ in dropped)) for rollout in group.every_rollout)
    errors = sum(reason in ("error", "too_few") for _, reason in dropped)
    logged = {
        "train/groups_dropped": float(len(dropped)),
        "train/groups_dropped_for_errors": float(errors),
        "train/groups_dropped_by_filter": float(sum(reason == "filtered" for _, reason in dropped)),
        **({"train/unscored": float(unscored)} if unscored else {}),
        **failure_metrics((*kept, *(group for group, _ in dropped))),
        **({} if recorded else {"train/groups_dropped_stale": float(sum(reason == "stale" for _, reason in dropped))}),
    }
    if not kept or recorded:
        return {**logged, "train/examples": float(len(kept))} if kept else logged
    rollouts = [rollout for group in kept for rollout in group.rollouts]
    count = len(rollouts)
    sampled = [rollout.sampled_tokens for rollout in rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    for name in names:
        values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        logged[f"train/rewards/{name}"] = sum(values) / len(values)
    for role in sorted({rollout.role for rollout in rollouts} - {""}):
        earned = [rollout.reward for rollout in rollouts if rollout.role == role]
        logged[f"train/reward/{role}"] = sum(earned) / len(earned)
    for environment in sorted({group.environment for group in kept}):
        rewards = torch.cat([group.rewards for group in kept if group.environment == environment])
        logged[f"train/environments/{environment}/reward"] = float(rewards.mean())
    logged |= {f"train/{name}": value for name, value in environment_metrics(kept).items()}
    return {
        **logged,
        "train/reward": sum(rollout.reward for rollout in rollouts) / count,
        "train/reward_min": min(rollout.reward for rollout in rollouts),
        "train/reward_max": max(rollout.reward for rollout in rollouts),
        "train/reward_std_in_group": sum(float(group.rewards.std(correction=0)) for group in kept) / len(kept),
        "train/groups_without_signal": sum(not varies(group.rewards) for group in kept) / len(kept),
        "train/mean_gen_tokens_per_sample": sum(sampled) / count,
        "train/max_gen_tokens_per_sample": float(max(sampled)),
        "train/turns_per_sample": sum(len(rollout.policy_turns) for rollout in rollouts) / count,
        "train/truncated": sum(rollout.truncated for rollout in rollouts) / count,
        "train/ended_by_stop": sum(rollout.ending == Ending.STOP for rollout in rollouts) / count,
        "train/ended_by_turns": sum(rollout.ending == Ending.TURNS for rollout in rollouts) / count,
        "train/staleness": sum(staleness) / len(staleness),
        "train/staleness_max": float(max(staleness)),
    }


def failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``train/failures/CAUSE`` and ``train/environments/NAME/failures/CAUSE``: shares of all sampled rollouts, by ending."""
    shares: dict[str, float] = {}
    for where in ("train", *(f"train/environments/{name}" for name in sorted({group.environment for group in groups}))):
        chosen = [group for group in groups if where in ("train", f"train/environments/{group.environment}")]
        endings = [rollout.ending for group in chosen for rollout in group.every_rollout]
        failed = sorted({ending for ending in endings if ending is not None and ending.is_failure})
        shares |= {f"{where}/failures/{ending}": endings.count(ending) / len(endings) for ending in failed}
    return shares


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``environments/NAME/METRIC``: the mean of each metric that an environment set, over its rollouts that have it.

    ``curriculum/METRIC`` is a mean over all environments together.
    """
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.metrics.items() if rollout.error is None else ():
                where = "" if name.startswith("curriculum/") else f"environments/{group.environment}/"
                values.setdefault(f"{where}{name}", []).append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


def progress_metrics(
    previous: Mapping[str, float], trained: Mapping[str, float], groups: Sequence[Group], tasks_per_epoch: int | None
) -> dict[str, float]:
    """Return the progress of the run: tokens trained on and passes over the data so far. ``previous`` holds the last step's
    metrics.
    """
    logged = {"train/total_tokens": previous.get("train/total_tokens", 0.0) + trained["train/tokens_trained"]}
    if tasks_per_epoch is None:
        return logged
    epoch = (max(group.index for group in groups) + 1) / tasks_per_epoch
    return {**logged, "train/epoch": max(previous.get("train/epoch", 0.0), epoch)}


def batch_metrics(batch: Batch, old_outputs: Outputs, *, recorded: bool = False) -> dict[str, float]:
    """Return means over counted tokens of the policy's outputs from before this step's updates.

    ``strop.trainer.mismatch`` compares sampler and learner.
    """
    counted = (batch.mask > 0).nonzero().squeeze(1)
    logged = {"train/tokens_read": float(len(batch.tokens)), "train/tokens_trained": float(len(counted))}
    if not isinstance(old_outputs, TokenOutputs):
        return logged
    logged |= {"train/entropy": _mean(old_outputs.entropy, counted), "train/logprob": _mean(old_outputs.logprobs, counted)}
    return logged if recorded else {**logged, "train/advantages_abs": _mean(batch.advantages.abs(), counted)}


def _mean(values: Tensor, places: Tensor) -> float:
    return float(values.index_select(0, places).double().mean()) if len(places) else 0.0
