"""What core knows of the section of a learner: ``dtensor_cfg``, or one that an extension attaches to models and teachers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, cast

from strop import plugins
from strop.base_config import BaseConfig, fields_of, section_model
from strop.problems import Problem

TORCH = "dtensor_cfg"  # the section of the torch learner

if TYPE_CHECKING:
    LearnerName: TypeAlias = str
else:
    LearnerName = Literal["auto", "torch", *(name for name in plugins.declared("learners") if name != "torch")]


class AdapterOptions(Protocol):
    """What core reads of the adapters that a learner trains."""

    @property
    def enabled(self) -> bool: ...

    @property
    def dim(self) -> int: ...

    @property
    def dropout(self) -> float: ...


class LearnerSection(BaseConfig):
    """Whether a learner trains a model, and how it divides it. Extensions attach theirs by ``strop.sections``."""

    backend: ClassVar[str]  # its name in ``strop.learners``, and the value of policy.backend
    title: ClassVar[str]  # what messages call it
    adapters_key: ClassVar[str]
    needs_ranks: ClassVar[bool] = True  # it trains in processes of Ray, also on one device
    trains_drafts: ClassVar[bool] = False  # a draft head, alongside a policy on ranks
    weights_follow_precision: ClassVar[bool] = False  # whatever weights_dtype says

    if TYPE_CHECKING:
        enabled: bool  # each declares the key, with its own default and description

    @property
    def adapters(self) -> AdapterOptions:
        raise NotImplementedError

    @property
    def largest_size(self) -> int:
        """The number of ranks of the dimension that cuts a model into most parts."""
        raise NotImplementedError

    def size_errors(self, key: str, devices: int, *, uses_ray: bool) -> Iterator[Problem]:
        """Yield the sizes that cannot work with ``devices`` training devices."""
        raise NotImplementedError


@cache
def _learner_keys(model: type[BaseConfig]) -> tuple[str, ...]:
    sections = {name: section_model(field) for name, field in fields_of(model).items()}
    return tuple(name for name, section in sections.items() if section is not None and issubclass(section, LearnerSection))


class WithLearner(BaseConfig):
    """A model or teacher: a section for each learner, of which one trains it or divides it."""

    @property
    def learner_sections(self) -> Mapping[str, LearnerSection]:
        return {name: getattr(self, name) for name in _learner_keys(cast("Any", type(self)))}

    @property
    def learner_key(self) -> str:
        """The name of the section whose learner trains it: the torch learner's, unless an extension's is enabled."""
        return next((name for name, section in self.learner_sections.items() if section.enabled and name != TORCH), TORCH)

    @property
    def learner(self) -> LearnerSection:
        return self.learner_sections[self.learner_key]

    @property
    def uses_torch(self) -> bool:
        """Whether the torch learner trains it."""
        return self.learner_key == TORCH
