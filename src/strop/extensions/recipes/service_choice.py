"""The services that a file of another library logs to, and the names that they get, in Strop's keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.trackers.trackers_config import SERVICES

# Of each service, what its runs and what a group of runs are called. TensorBoard has neither: it shows folders.
RUN_NAMES: Mapping[str, str] = {
    "wandb": "logger.wandb.name",
    "mlflow": "logger.mlflow.run_name",
    "swanlab": "logger.swanlab.name",
    "trackio": "logger.trackio.name",
}
PROJECTS: Mapping[str, str] = {
    "wandb": "logger.wandb.project",
    "mlflow": "logger.mlflow.experiment_name",
    "swanlab": "logger.swanlab.project",
    "trackio": "logger.trackio.project",
}
SERVICE_KEYS = (*(f"logger.{name}_enabled" for name in SERVICES), *RUN_NAMES.values(), *PROJECTS.values())


def enable_services(
    recipe: LibraryRecipe, key: str, asked: Iterable[Any], *, silent: Collection[str], same: Mapping[str, str]
) -> tuple[str, ...]:
    """Switch on the services that ``key`` names, and return them.

    ``silent`` are names that ask for what Strop does anyway, and ``same`` other names of services. What Strop lacks is said.
    """
    names = [str(name) for name in asked]
    services = tuple(name for name in SERVICES if name in [same.get(other, other) for other in names])
    for name in SERVICES:
        recipe.set(f"logger.{name}_enabled", name in services, because=key)
    if recipe.is_written(key):
        lacking = [name for name in names if same.get(name, name) not in SERVICES and name not in silent]
        enabled = " and ".join(f"logger.{name}_enabled=true" for name in services)
        if lacking:
            there_is = f"there is no tracker {', '.join(lacking)} here"
            recipe.note(key, Effect.UNUSED, f"{there_is}; {enabled} here" if enabled else there_is)
        else:
            recipe.note(
                key, Effect.RENAMED, f"{enabled} here" if enabled else "metrics.jsonl has every metric, and no service does"
            )
    return services


def name_in_services(recipe: LibraryRecipe, key: str, keys: Mapping[str, str], services: Iterable[str]) -> bool:
    """Carry the name that ``key`` gives to those of ``services`` that have one. Returns whether any does."""
    named = [keys[service] for service in services if service in keys]
    for to in named:
        recipe.carry(key, to, str(recipe.value(key)))
    return bool(named)
