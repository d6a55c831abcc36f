"""Resources of a run: what its environments, verifiers and tools share, such as a sandbox for programs.

An extension declares a resource in ``strop.resources``, under the key of its section in the configuration of a run (``strop.sections``),
as a function that opens it in this process and yields a note for the user. Environments and tool sets that cannot work without it name it
in ``needed_resources``. Every process that holds environments has the sections of the run; what opens the resource before its first use
is up to the extension.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from strop import plugins
from strop.base_config import BaseConfig, SectionT, validate_section
from strop.environments.handle import EnvironmentHandle

ResourceSections = Mapping[str, BaseConfig]
"""The sections of the resources of a run, by name."""

OpenResource = Callable[[], AbstractAsyncContextManager[str]]
"""Opens a resource for a run in this process. It raises InfrastructureError for one that does not work."""

_sections: ResourceSections = {}


def read_sections(config: BaseConfig) -> ResourceSections:
    """Return the section of each resource that extensions declare, from the configuration of a run or an evaluation."""
    found = {name: getattr(config, name, None) for name in plugins.declared("resources")}
    return {name: section for name, section in found.items() if section is not None}


def configure_resources(sections: ResourceSections) -> None:
    """Set the sections that ``find_section`` returns in this process."""
    global _sections
    _sections = sections


def find_section(model: type[SectionT]) -> SectionT:
    """Return the section of a resource in this process, or its defaults if no run has configured it."""
    return next((each for each in _sections.values() if isinstance(each, model)), None) or validate_section(model, {})


@asynccontextmanager
async def open_resources(
    environments: Iterable[EnvironmentHandle[Any]], note: Callable[[str], object], progress: Callable[[str], object] = str
) -> AsyncIterator[None]:
    """Open the resources that environments of this process need, and close them with the run. Raises InfrastructureError."""
    async with AsyncExitStack() as stack:
        for name in dict.fromkeys(name for each in environments for name in each.traits.needed_resources):
            progress(f"trying the {name}")
            open_resource: OpenResource = plugins.load("resources", name)
            note(await stack.enter_async_context(open_resource()))
        yield
