"""The services that TRL's trainers report to."""

from __future__ import annotations

from collections.abc import Mapping

from strop import packages
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.service_choice import RUN_NAMES, SERVICE_KEYS, enable_services, name_in_services
from strop.monitoring.logger_config import SERVICES

OPTIONS_OF_SERVICES: Mapping[str, Mapping[str, str]] = {
    "trackio": {"project": "logger.trackio.project", "trackio_space_id": "logger.trackio.space_id"},
    "wandb": {
        "wandb_project": "logger.wandb.project", "wandb_entity": "logger.wandb.entity", "wandb_run_group": "logger.wandb.group",
    },  # of scripts around TRL, such as those of Open-R1
}  # fmt: skip


REPORT_ARGUMENTS = ("report_to", "run_name", *(key for options in OPTIONS_OF_SERVICES.values() for key in options))
REPORT_KEYS = (*SERVICE_KEYS, *(to for options in OPTIONS_OF_SERVICES.values() for to in options.values()))


def translate_reports(recipe: LibraryRecipe) -> None:
    """`all` are the services whose packages are installed. Only Trackio reads `project`; the others' projects are in the environment."""
    asked = recipe.value("report_to")
    names = [asked] if isinstance(asked, str) else list(asked or [])
    if "all" in names:
        names = [name for name in SERVICES if packages.is_here(name)]
    services = enable_services(recipe, "report_to", names, silent=("none",), same={})
    if recipe.value("run_name") and not name_in_services(recipe, "run_name", RUN_NAMES, services):
        recipe.unused("run_name", "it names runs in services")
    _translate_options_of_services(recipe, services)


def _translate_options_of_services(recipe: LibraryRecipe, services: tuple[str, ...]) -> None:
    for service, options in OPTIONS_OF_SERVICES.items():
        for key, to in options.items():
            if service not in services:
                recipe.unused(key, f"it is about {service}, which report_to does not name")
            elif recipe.value(key) is not None and not recipe.is_default(key):
                recipe.carry(key, to, recipe.value(key))
