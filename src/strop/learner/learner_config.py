"""What core knows of sections that extensions attach: a learner's (as ``dtensor_cfg``), and keys with methods for the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, cast

from strop import plugins
from strop.base_config import BaseConfig, fields_of, iter_sections, section_model
from strop.problems import Problem

if TYPE_CHECKING:
    from strop.learner.torch.companion import Companion, CompanionOptions
    from strop.models.network import Network


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


class Measure(Protocol):
    def __call__(self, find: Callable[[], Any]) -> Any:
        """Return ``find()``, which only a rank that has the model's weights calls."""
        ...


class PolicyExtension(BaseConfig):
    """Keys that change the policy: a section inside ``policy`` (``strop.sections``), or separate keys (``strop.keys``).

    The methods do nothing here. Keys of ``policy`` itself share one object: their methods call those of ``super()`` too.
    """

    @property
    def trains_draft(self) -> bool:
        """Whether a draft head is trained alongside the policy, which engines may draft with."""
        return False

    @property
    def fixes_order(self) -> bool:
        """Whether learner and engine add in one order, so that a token has the same bits in any batch (``Network.exact``)."""
        return False

    def change_policy(self, network: Network, tokenizer: Any, measure: Measure, seed: int) -> None:
        """Change the policy after it is loaded, with its adapters, before it is sharded. Raises ModelNotFound, ValueError."""

    def make_companion(self, network: Network, options: CompanionOptions) -> Companion | None:
        """Return what is trained alongside the policy in a torch learner. Raises ValueError."""
        return None

    def network_checks(self) -> Mapping[str, Callable[[Network], object]]:
        """Return what a dry run asks of the network without its weights, by key of ``policy``. A check raises ValueError."""
        return MappingProxyType({})

    def save_for_engines(self, network: Network, folder: Path) -> None:
        """Write what engines need to a folder that holds the configuration and the tokenizer of the policy."""

    def change_engine_model(self, model: Any, folder: Path) -> None:
        """Change the model of a torch engine in another process, which the learner sends weights. ``folder``: that of the policy."""


def policy_extensions(policy: BaseConfig) -> Iterator[PolicyExtension]:
    """Yield the keys of extensions in the section ``policy``."""
    return (section for _, section in iter_sections(policy) if isinstance(section, PolicyExtension))


def fixes_order(policy: BaseConfig) -> bool:
    """Whether an extension of ``policy`` makes learner and engine add in one order."""
    return any(each.fixes_order for each in policy_extensions(policy))
