"""Token budgets derived from memory (``train_mb_tokens: auto``): measured when a run begins, and saved in its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import list_trained_models
from strop.learner.budget.memory_probe import FoundBudget, MemoryProbe, choose_budget, count_later, fits_twice, format_bytes
from strop.learner.client import LearnerClient
from strop.monitoring.trackers.base import Tracker
from strop.runs.local_device import resolve_device_name

TOKEN_BUDGETS = "token_budgets"  # folder of a checkpoint
_FILE = "token_budgets.json"


class TokenBudgets:
    """The token budgets of a run by learner, saved with it, so that a resumed run cuts its batches as before, regardless of free
    memory.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def stage(self, *, optimizer: bool = True) -> TokenBudgets:
        copy = TokenBudgets()
        copy.tokens = dict(self.tokens)
        return copy

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / _FILE).write_text(json.dumps(self.tokens), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the budgets. A checkpoint of a run with fixed budgets has none, and they are measured."""
        if (folder / _FILE).exists():
            self.tokens = json.loads((folder / _FILE).read_text(encoding="utf-8"))


def make_token_budgets(config: TrainingRunConfig) -> dict[str, TokenBudgets]:
    """Return the component that saves a run's budgets, by its folder; empty if none is measured."""
    return {TOKEN_BUDGETS: TokenBudgets()} if list_measured(config) else {}


def list_measured(config: TrainingRunConfig) -> dict[str, str]:
    """Return the key of each learner's budget that is measured."""
    return {
        name: f"{name}.{model.batching_key}.train_mb_tokens"
        for name, model in list_trained_models(config)
        if model.batching.train_mb_tokens == "auto"
    }


async def settle_token_budgets(
    config: TrainingRunConfig, learners: Mapping[str, LearnerClient], parts: Mapping[str, object], tracker: Tracker
) -> None:
    """Set each learner's budget: the checkpoint's, or one measured now. Call it after a checkpoint is loaded.

    Raises MemoryTooSmall, DeviceMemoryFull.
    """
    budgets, keys, longest = parts.get(TOKEN_BUDGETS), list_measured(config), config.policy.max_total_sequence_length
    if not isinstance(budgets, TokenBudgets):
        return
    known = {name: tokens for name, tokens in budgets.tokens.items() if name in keys and tokens >= longest}
    for name, tokens in known.items():
        tracker.note(f"{keys[name]}: auto is {tokens} tokens, as measured by the continued run")
    for name in budgets.tokens.keys() & keys.keys() - known.keys():
        tracker.note(
            f"{keys[name]}: the continued run had measured {budgets.tokens[name]} tokens, fewer than policy.max_total_sequence_length = "
            f"{longest} now: memory is measured again"
        )
    missing = {name: key for name, key in keys.items() if name not in known}
    found = await find_budgets({name: learners[name] for name in missing}, keys, longest, reserve_engine_memory(config))
    for name, budget in found.items():
        tracker.note(format_found(keys[name], budget))
    budgets.tokens = {**known, **{name: budget.tokens for name, budget in found.items()}}
    for name, tokens in budgets.tokens.items():
        await learners[name].set_train_tokens(tokens)


async def find_budgets(
    learners: Mapping[str, LearnerClient], keys: Mapping[str, str], longest: int, reserved_bytes: int
) -> dict[str, FoundBudget]:
    """Measure the passes of learners and return the budgets that fit. ``reserved_bytes``: memory that something else will use.
    Raises MemoryTooSmall.
    """
    small: dict[str, MemoryProbe] = {name: await learner.probe_memory(1, longest) for name, learner in learners.items()}
    found: dict[str, FoundBudget] = {}
    for name, learner in learners.items():
        later = count_later(name, small, reserved_bytes)
        probes = [small[name]]
        if fits_twice(small[name], later):
            probes.append(await learner.probe_memory(2, longest))
        found[name] = choose_budget(probes, longest=longest, later_bytes=later, key=keys[name])
    return found


def reserve_engine_memory(config: TrainingRunConfig) -> int:
    """Return the bytes that the embedded engine's cache will use on the learner's device."""
    if (
        not isinstance(config, RolloutRunConfig)
        or config.policy.generation.uses_engines
        or not config.policy.generation.colocated.enabled
    ):
        return 0
    device, total = resolve_device_name(config.policy.device), None
    if device != "cpu":
        import torch

        total = torch.get_device_module(device).get_device_properties(device).total_memory / 2**30
    return int(config.policy.generation.torch_cfg.cache_memory_gb(total) * 2**30)


def format_found(key: str, budget: FoundBudget) -> str:
    return (
        f"{key}: auto is {budget.tokens} tokens: a pass was measured to take {format_bytes(budget.bytes_per_token)} a token, and it may "
        f"use {format_bytes(budget.usable_bytes)} of the {format_bytes(budget.free_bytes)} that are free"
    )
