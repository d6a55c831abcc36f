"""What extensions do with the policy of a run: keys with methods that are called as the policy is loaded and given to engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from strop.base_config import BaseConfig, iter_sections

if TYPE_CHECKING:
    from strop.learner.torch.companion import Companion, CompanionOptions
    from strop.models.network import Network


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
